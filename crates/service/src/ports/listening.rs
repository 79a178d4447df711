//! The ports on which something listens inside a sandbox.

use domain::UserIdentity;

use crate::{FileCaller, SandboxPorts, ServiceError};

/// How much of the kernel's table of sockets is read.
const MAX_TABLE_BYTES: usize = 256 << 10;
/// The state of a listening socket in that table.
const LISTENING_STATE: &str = "0A";

impl SandboxPorts<'_> {
    /// The ports on which something listens inside, lowest first.
    pub async fn listening_ports(self) -> Result<Vec<u16>, ServiceError> {
        let caller = FileCaller { identity: &UserIdentity::Default, isolated_session: None };
        let mut ports = Vec::new();
        for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let mut reader = self.0.files().read_file(caller, path, 0, None).await?;
            let mut table = Vec::new();
            while let Some(bytes) = reader.next().await? {
                let room = MAX_TABLE_BYTES - table.len();
                table.extend_from_slice(&bytes[..bytes.len().min(room)]);
                if table.len() >= MAX_TABLE_BYTES {
                    break;
                }
            }
            ports.extend(parse_listening_ports(&String::from_utf8_lossy(&table)));
        }
        ports.sort_unstable();
        ports.dedup();
        Ok(ports)
    }
}

/// Reads the ports of listening sockets from the kernel's table, in which addresses are `HEX:PORT`.
fn parse_listening_ports(table: &str) -> Vec<u16> {
    let ports = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, state) = (fields.next()?, fields.nth(1)?);
        let (_, port) = local.rsplit_once(':')?;
        (state == LISTENING_STATE).then(|| u16::from_str_radix(port, 16).ok())?
    });
    ports.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_ports_are_found() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
             0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n   \
             1: 0100007F:0050 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n   x\n";
        assert_eq!(parse_listening_ports(table), [8080]);
        assert!(parse_listening_ports("").is_empty());
    }
}

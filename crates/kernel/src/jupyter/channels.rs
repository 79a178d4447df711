//! The sockets to a Jupyter kernel.
//!
//! They are on the loopback of the sandbox, and each message is signed with a key that is known
//! to whoever can read the connection file, which is the user that runs the code.

use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result};
use jupyter_protocol::connection_info::{ConnectionInfo, Transport};
use jupyter_protocol::{ExecuteRequest, InterruptRequest, JupyterMessage, KernelInfoRequest};
use jupyter_zmq_client::{
    ClientControlConnection, Connection, DealerSendConnection, RawMessage, create_client_control_connection,
    create_client_iopub_connection, create_client_shell_connection_with_identity, peek_ports,
    peer_identity_for_session,
};
use tempfile::TempDir;
use tokio::sync::mpsc;
use zeromq::SocketRecv;

use super::message::Message;

/// How many messages may wait to be read; the kernel waits beyond that.
const MOST_WAITING: usize = 64;

/// Where a kernel is to listen, and the file that tells it so. The file goes with this.
#[derive(Debug)]
pub(super) struct Place {
    info: ConnectionInfo,
    session: String,
    directory: TempDir,
}

impl Place {
    pub(super) async fn choose(name: &str) -> Result<Self> {
        let private = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new().prefix("coracle-kernel-").permissions(private).tempdir()?;
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let ports = peek_ports(ip, 5).await.context("there are no ports on the loopback")?;
        let port = |place: usize| ports.get(place).copied().unwrap_or_default();
        let info = ConnectionInfo {
            ip: ip.to_string(),
            transport: Transport::TCP,
            shell_port: port(0),
            iopub_port: port(1),
            stdin_port: port(2),
            control_port: port(3),
            hb_port: port(4),
            key: random()?,
            signature_scheme: "hmac-sha256".to_owned(),
            kernel_name: Some(name.to_owned()),
        };
        let place = Self { info, session: random()?, directory };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(place.file())?;
        file.write_all(&serde_json::to_vec(&place.info)?)?;
        Ok(place)
    }

    pub(super) fn file(&self) -> PathBuf {
        self.directory.path().join("connection.json")
    }

    /// Connects to the kernel, which may take its time to listen.
    pub(super) async fn connect(&self) -> Result<Channels> {
        let identity = peer_identity_for_session(&self.session)?;
        let shell = create_client_shell_connection_with_identity(&self.info, &self.session, identity).await?;
        let output = create_client_iopub_connection(&self.info, "", &self.session).await?;
        let control = create_client_control_connection(&self.info, &self.session).await?;
        let (shell, replies) = shell.split();
        Ok(Channels { shell, control, replies: listen(replies), output: listen(output) })
    }
}

fn random() -> Result<String> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A kernel that listens.
pub(super) struct Channels {
    shell: DealerSendConnection,
    control: ClientControlConnection,
    /// Answers to requests.
    pub replies: mpsc::Receiver<Message>,
    /// Everything else that it says.
    pub output: mpsc::Receiver<Message>,
}

impl Channels {
    /// Asks for nothing in particular, to hear whether the kernel answers.
    pub(super) async fn greet(&mut self) -> Result<()> {
        Ok(self.shell.send(JupyterMessage::new(KernelInfoRequest {}, None)).await?)
    }

    /// Has code run; returns what messages about it will name.
    pub(super) async fn execute(&mut self, code: &str) -> Result<String> {
        let request = ExecuteRequest {
            code: code.to_owned(),
            silent: false,
            store_history: true,
            user_expressions: None,
            // There is nobody to ask.
            allow_stdin: false,
            stop_on_error: true,
        };
        let message = JupyterMessage::new(request, None);
        let id = message.header.msg_id.clone();
        self.shell.send(message).await?;
        Ok(id)
    }

    pub(super) async fn interrupt(&mut self) -> Result<()> {
        Ok(self.control.send(JupyterMessage::new(InterruptRequest {}, None)).await?)
    }
}

/// Reads a socket in a task of its own, so that waiting for several loses nothing.
fn listen<S: SocketRecv + Send + 'static>(mut connection: Connection<S>) -> mpsc::Receiver<Message> {
    let (sender, receiver) = mpsc::channel(MOST_WAITING);
    tokio::spawn(async move {
        while let Ok(parts) = connection.socket.recv().await {
            // What is not signed with our key, or is no message at all, is nobody's.
            let Ok(raw) = RawMessage::from_multipart(parts, &connection.mac) else { continue };
            let [header, parent, _metadata, content, ..] = raw.jparts.as_slice() else { continue };
            let Some(message) = Message::read(header, parent, content) else { continue };
            if sender.send(message).await.is_err() {
                return;
            }
        }
    });
    receiver
}

//! Watches the host's table of open files, which no control group divides among sandboxes.
//!
//! When the table is full, every process of the host without privileges fails to open files, this server and all agents
//! included. So the sandbox that has the most files is ended while there is still room. The reading is compared with
//! `ServiceConfig::open_files_percent`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use domain::{EndCause, SandboxId};
use tokio::time::MissedTickBehavior;

use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::DriverCommand;

/// How often the table is read. The time matters: a few hundred processes fill the last fifth of a small table within
/// a second.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// How long the backend may take to count the files of all sandboxes.
const COUNT_TIMEOUT: Duration = Duration::from_secs(30);

/// How many files of the host are open, and how many can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileTable {
    pub(crate) used: u64,
    pub(crate) max: u64,
}

impl FileTable {
    /// Reads the table of this host. See proc_sys_fs(5).
    fn of_host() -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/fs/file-nr")?;
        Self::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The text is the number of open files, that of unused entries, which is always 0, and the maximum.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
        Some(Self { used: numbers.next()??, max: numbers.nth(1)?? })
    }

    fn is_above(self, percent: u8) -> bool {
        u128::from(self.used) * 100 >= u128::from(self.max) * u128::from(percent)
    }
}

/// Ends the sandbox with the most open files whenever the table is too full, until the service stops.
pub(crate) async fn guard_file_table(core: Arc<Core>) {
    let mut ticks = tokio::time::interval(READ_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = core.tasks.cancelled() => return,
        }
        match FileTable::of_host() {
            Ok(table) => end_largest_holder(&core, table).await,
            Err(error) => {
                return tracing::warn!(%error, "failed to read the host's table of open files; it is not watched");
            }
        }
    }
}

/// Ends the sandbox that has the most open files if the table is too full.
pub(crate) async fn end_largest_holder(core: &Core, table: FileTable) {
    let percent = core.config().open_files_percent;
    if !table.is_above(percent) {
        return;
    }
    let FileTable { used, max } = table;
    let counted = tokio::time::timeout(COUNT_TIMEOUT, core.host.backend.open_files()).await;
    let holders = match counted {
        Ok(Ok(holders)) => holders,
        Ok(Err(error)) => {
            return tracing::error!(used, max, error = %error_chain(&error), "failed to count the open files of sandboxes while the host is about to run out of them");
        }
        Err(_elapsed) => {
            return tracing::error!(
                used,
                max,
                "open files of sandboxes were not counted in time while the host is about to run out of them"
            );
        }
    };
    let largest = holders_to_blame(used, holders)
        .into_iter()
        .find_map(|(id, files)| Some((core.lifecycle.registry.find(&id)?, files)));
    let Some((handle, files)) = largest else {
        return tracing::warn!(
            used,
            max,
            "host is about to run out of open files, and most of them are not of sandboxes; ending none"
        );
    };
    tracing::warn!(sandbox = %handle.id, files, used, max, "host is about to run out of open files; ending the sandbox that has the most");
    let ended =
        core.send_command(&handle, |answer| DriverCommand::Fail(EndCause::TooManyFiles, answer)).await;
    if let Err(error) = ended {
        tracing::error!(sandbox = %handle.id, error = %error_chain(&error), "failed to end a sandbox with too many open files; retrying");
    }
}

/// The sandboxes that have open files, the largest number first. None is to blame if most files are not of sandboxes.
///
/// There is no smallest share for one sandbox: many that are equally large fill the table as well as one does.
fn holders_to_blame(used: u64, mut holders: Vec<(SandboxId, u64)>) -> Vec<(SandboxId, u64)> {
    let sum = holders.iter().fold(0_u64, |sum, (_, files)| sum.saturating_add(*files));
    if sum < used / 2 {
        return Vec::new();
    }
    holders.retain(|(_, files)| *files > 0);
    holders.sort_by_key(|(_, files)| std::cmp::Reverse(*files));
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> SandboxId {
        SandboxId::from_entropy([number; 20])
    }

    #[test]
    fn table_is_read_as_the_kernel_writes_it() {
        assert_eq!(FileTable::parse("1728\t0\t2465780\n"), Some(FileTable { used: 1728, max: 2_465_780 }));
        assert_eq!(FileTable::parse("1728 0"), None);
        assert!(FileTable::of_host().is_ok_and(|table| table.used > 0 && table.used < table.max));
    }

    #[test]
    fn threshold_is_a_part_of_the_table() {
        let table = FileTable { used: 80, max: 100 };
        assert!(table.is_above(80) && !table.is_above(81));
        assert!(!FileTable { used: 1 << 40, max: i64::MAX.cast_unsigned() }.is_above(1));
    }

    #[test]
    fn sandboxes_are_blamed_only_for_files_that_are_theirs() {
        let holders = vec![(id(1), 10), (id(2), 30), (id(3), 20)];
        assert_eq!(holders_to_blame(100, holders.clone()), [(id(2), 30), (id(3), 20), (id(1), 10)]);
        assert_eq!(holders_to_blame(200, holders), []);
        assert_eq!(holders_to_blame(200, Vec::new()), []);
    }
}

//! Watches the host's table of open files, which no control group divides among sandboxes.
//!
//! When the table is full, every process of the host without privileges fails to open files, this server and all agents
//! included. So the largest sandbox of the owner with the most is ended in time. The reading is compared with
//! `ServiceConfig::open_files_percent`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use domain::{EndCause, Owner, Phase, SandboxId};
use tokio::time::MissedTickBehavior;

use crate::ServiceError;
use crate::core::Core;
use crate::error::error_chain;
use crate::sandboxes::driver::DriverCommand;
use crate::sandboxes::registry::SandboxHandle;

/// How often the table is read. The time matters: a few hundred processes fill the last fifth of a small table within
/// a second.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// How long the backend may take to count the files of all sandboxes.
const COUNT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a sandbox may take to end before another one is ended as well.
const END_TIMEOUT: Duration = Duration::from_secs(5);

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
    if !are_mostly_of_sandboxes(used, &holders) {
        return tracing::warn!(
            used,
            max,
            "host is about to run out of open files, but sandboxes hold less than half of them; ending none"
        );
    }
    let found = holders.into_iter().filter_map(|(id, files)| {
        let sandbox = core.lifecycle.registry.find(&id)?;
        Some(FileHolder { owner: sandbox.owner.clone(), sandbox, files })
    });
    for FileHolder { sandbox, files, .. } in order_by_blame(found.collect()) {
        tracing::warn!(sandbox = %sandbox.id, files, used, max, "host is about to run out of open files; ending the largest sandbox of the owner with the most");
        if end_sandbox(core, &sandbox).await {
            return;
        }
    }
}

/// Ends a sandbox; `false` if that failed, so that another one must be ended.
async fn end_sandbox(core: &Core, sandbox: &SandboxHandle) -> bool {
    if sandbox.phase() == Phase::Starting {
        // Its driver may be busy with the hook before the entrypoint and not read its mailbox.
        sandbox.abandoned.cancel();
    }
    let fail = core.send_command(sandbox, |answer| DriverCommand::Fail(EndCause::TooManyFiles, answer));
    match tokio::time::timeout(END_TIMEOUT, fail).await {
        // A sandbox that is gone has closed its files.
        Ok(Ok(_) | Err(ServiceError::NoSandbox(_))) => true,
        Ok(Err(error)) => {
            tracing::error!(sandbox = %sandbox.id, error = %error_chain(&error), "failed to end a sandbox with too many open files; trying the next");
            false
        }
        Err(_elapsed) => {
            tracing::error!(sandbox = %sandbox.id, "sandbox with too many open files did not end in time; trying the next");
            false
        }
    }
}

/// A sandbox with its number of open files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileHolder<S> {
    sandbox: S,
    owner: Owner,
    files: u64,
}

/// Whether sandboxes have half of all open files or more. Otherwise ending one would not help.
fn are_mostly_of_sandboxes(used: u64, holders: &[(SandboxId, u64)]) -> bool {
    let sum = holders.iter().fold(0_u64, |sum, (_, files)| sum.saturating_add(*files));
    sum > 0 && sum >= used / 2
}

/// The sandboxes in the order in which they are ended: those of the owner with the most open files first, and of one
/// owner the largest number first.
///
/// An owner who spreads files over many small sandboxes is blamed for their sum, and not another owner whose single
/// sandbox is larger than each of them. There is no smallest share: many that are equally large fill the table as well.
fn order_by_blame<S>(mut holders: Vec<FileHolder<S>>) -> Vec<FileHolder<S>> {
    let mut sums: BTreeMap<Owner, u64> = BTreeMap::new();
    for holder in &holders {
        let sum = sums.entry(holder.owner.clone()).or_default();
        *sum = sum.saturating_add(holder.files);
    }
    holders.retain(|holder| holder.files > 0);
    holders.sort_by_key(|holder| Reverse((sums[&holder.owner], holder.owner.clone(), holder.files)));
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
    fn sandboxes_are_blamed_only_if_they_have_half_of_the_files() {
        let holders = [(id(1), 10), (id(2), 30), (id(3), 20)];
        assert!(are_mostly_of_sandboxes(100, &holders) && are_mostly_of_sandboxes(120, &holders));
        assert!(!are_mostly_of_sandboxes(200, &holders) && !are_mostly_of_sandboxes(1, &[]));
    }

    #[test]
    fn owner_of_many_small_sandboxes_is_blamed_before_one_with_a_large_sandbox() {
        let holder = |sandbox: u8, owner: &str, files: u64| FileHolder {
            sandbox,
            owner: Owner::parse(owner).expect("a valid name"),
            files,
        };
        let holders = vec![
            holder(1, "one", 50),
            holder(2, "many", 30),
            holder(3, "many", 40),
            holder(4, "many", 0),
            holder(5, "none", 0),
        ];
        let order: Vec<u8> = order_by_blame(holders).into_iter().map(|holder| holder.sandbox).collect();
        assert_eq!(order, [3, 2, 1]);
    }
}

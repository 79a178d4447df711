//! Runs an attempt in a child process, so that it leaves no changes behind.

use std::fmt::Display;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use linux::namespaces::{self, IdMapExtent, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, SingleThread};
use rustix::process::Signal;

/// The time limit for one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum length of the child's report in bytes.
const MAX_REPORT_LENGTH: u64 = 4096;

/// Runs `work` in a child and returns its result or its error.
pub(super) fn run_in_child(work: impl FnOnce() -> Result<String, String>) -> Result<String, String> {
    let (mut ours, mut theirs) = UnixStream::pair().during("make a socket")?;
    let thread = SingleThread::prove().during("fork")?;
    match thread.fork(NamespaceSet::NONE, None).during("fork")? {
        ForkResult::Child => {
            drop(ours);
            let (mark, text) = match work() {
                Ok(text) => ('+', text),
                Err(text) => ('-', text),
            };
            let sent = theirs.write_all(format!("{mark}{text}").as_bytes());
            spawn::exit_now(i32::from(sent.is_err()))
        }
        ForkResult::Parent { pidfd, .. } => {
            drop(theirs);
            let mut report = String::new();
            let received = ours
                .set_read_timeout(Some(ATTEMPT_TIMEOUT))
                .and_then(|()| (&mut ours).take(MAX_REPORT_LENGTH).read_to_string(&mut report));
            if received.is_err() {
                rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).during("kill the child")?;
            }
            spawn::wait_for_child(pidfd.as_fd()).during("wait for a child")?;
            received.during("read the child's report in time")?;
            match report.split_at_checked(1) {
                Some(("+", text)) => Ok(text.to_owned()),
                Some((_, text)) => Err(text.to_owned()),
                None => Err("the child died without a report".to_owned()),
            }
        }
    }
}

/// Moves this process into a new user namespace in which it is root, and into `others`.
pub(super) fn become_root_of(others: NamespaceSet) -> Result<(), String> {
    let own = |outside: u32| [IdMapExtent { inside: 0, outside, count: 1 }];
    let users = own(rustix::process::geteuid().as_raw());
    let groups = own(rustix::process::getegid().as_raw());
    namespaces::unshare_namespaces(NamespaceSet::USER.and(others)).during("make namespaces")?;
    namespaces::write_id_maps(rustix::process::getpid(), &users, &groups, SetgroupsPolicy::Deny)
        .during("map ids")
}

/// Adds the attempted action to an error.
pub(super) trait ProbeErrorContext<T> {
    fn during(self, action: &str) -> Result<T, String>;
}

impl<T, E: Display> ProbeErrorContext<T> for Result<T, E> {
    fn during(self, action: &str) -> Result<T, String> {
        self.map_err(|error| format!("could not {action}: {error}"))
    }
}

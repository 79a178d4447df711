//! The share of one sandbox in resources of the host that no control group counts: open files, and inotify
//! instances and watches of an ordinary user.

use std::fs;
use std::sync::OnceLock;

use rustix::process::Rlimit;

/// The smallest hard limit on open files, which ordinary programs expect.
const MIN_OPEN_FILES: u64 = 1024;

/// The part of an ordinary user's inotify instances and watches that one sandbox may use.
const INOTIFY_SHARE: u64 = 4;
/// The smallest number of inotify instances, so that a few watching programs can run.
const MIN_INOTIFY_INSTANCES: u64 = 8;

/// The consequence of a missing CAP_SYS_RESOURCE.
pub(crate) const RESETTABLE_OOM_SCORE: &str =
    "oom score can be reset: a program inside can make the kernel spare it when the host runs out of memory";

/// The number of pseudo-terminals of one sandbox, and of one isolated session: the `max` of their devpts.
pub(crate) const MAX_TERMINALS: u64 = 32;

/// The directory with the limits of a user namespace.
const USER_LIMITS_DIRECTORY: &str = "/proc/sys/user";

/// Limits of a user namespace: names of files in [`USER_LIMITS_DIRECTORY`], and their content.
pub(crate) type UserNamespaceLimits = Vec<(&'static str, u64)>;

/// Returns the limit on open files of each process inside: all of them together, at the limit on
/// processes, may open half of the files that the host can have open.
///
/// It never exceeds the host's own limit, which programs inside would have got otherwise.
pub(crate) fn open_file_limit(host: Rlimit, pids: u32) -> Rlimit {
    static FILE_MAX: OnceLock<u64> = OnceLock::new();
    let file_max = *FILE_MAX.get_or_init(|| read_number("/proc/sys/fs/file-max").unwrap_or(u64::MAX));
    share_open_files(host, pids, file_max)
}

fn share_open_files(host: Rlimit, pids: u32, file_max: u64) -> Rlimit {
    let share = (file_max / (2 * u64::from(pids.max(1)))).max(MIN_OPEN_FILES);
    let bound = |limit: Option<u64>| Some(limit.map_or(share, |limit| limit.min(share)));
    Rlimit { current: bound(host.current), maximum: bound(host.maximum) }
}

/// Returns the limits of the user namespace of an ordinary user's sandbox. The kernel counts inotify for
/// each user, and all sandboxes of an ordinary user are that user, so one of them gets only a part. Each
/// sandbox of root has uids of its own.
pub(crate) fn inotify_limits() -> UserNamespaceLimits {
    let share = |name: &'static str, least: u64| {
        let own = read_number(&format!("{USER_LIMITS_DIRECTORY}/{name}"))?;
        Some((name, (own / INOTIFY_SHARE).max(least)))
    };
    let shares = [
        share("max_inotify_instances", MIN_INOTIFY_INSTANCES),
        share("max_inotify_watches", MIN_INOTIFY_INSTANCES),
    ];
    // A kernel without inotify has no such files.
    shares.into_iter().flatten().collect()
}

fn read_number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(current: Option<u64>, maximum: Option<u64>) -> Rlimit {
        Rlimit { current, maximum }
    }

    #[test]
    fn all_processes_together_open_half_of_the_hosts_files() {
        let host = limit(Some(1024), Some(20_000));
        assert_eq!(share_open_files(host, 512, 2_465_780), limit(Some(1024), Some(2407)));
        assert_eq!(share_open_files(host, 16, 2_465_780), host);
        assert_eq!(share_open_files(limit(None, None), 512, 2_465_780), limit(Some(2407), Some(2407)));
    }

    #[test]
    fn limit_on_open_files_stays_between_its_least_and_the_hosts() {
        let host = limit(Some(4096), Some(4096));
        assert_eq!(share_open_files(host, 4096, 200_000), limit(Some(1024), Some(1024)));
        assert_eq!(share_open_files(limit(Some(256), Some(256)), 4096, 200_000), limit(Some(256), Some(256)));
        assert_eq!(share_open_files(host, 0, u64::MAX), host);
    }
}

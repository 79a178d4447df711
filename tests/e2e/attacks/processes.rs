//! Other processes: the agent, those of the host, and those of a neighbour.

use std::fs;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;

use crate::call::{call, constant, pointer, pointer_mut, text};
use crate::files;
use crate::verdict::{Attempt, Verdict, decide, first_success, refusal};

/// Attaches to another process with ptrace.
pub(crate) fn trace(pid: &str) -> Attempt {
    let pid = number(pid)?;
    first_success([
        ("PTRACE_SEIZE".to_owned(), call(libc::SYS_ptrace, &[constant(0x4206), pid, 0, 0])),
        ("PTRACE_ATTACH".to_owned(), call(libc::SYS_ptrace, &[constant(16), pid, 0, 0])),
    ])
}

/// Reads another process's memory, through its file and by system call.
pub(crate) fn read_memory(pid: &str) -> Attempt {
    let process = number(pid)?;
    let mut buffer = [0_u8; 16];
    let mapped = OpenOptions::new().read(true).open(format!("/proc/{pid}/mem"));
    let here = [pointer_mut(&mut buffer), 16];
    let there = [first_mapping(pid).unwrap_or(0x40_0000), 16];
    let read = call(libc::SYS_process_vm_readv, &[process, pointer(&here), 1, pointer(&there), 1, 0]);
    first_success([
        ("process_vm_readv".to_owned(), read.map(drop)),
        ("open mem".to_owned(), mapped.map(drop)),
    ])
}

/// Copies a descriptor out of another process.
pub(crate) fn steal_descriptor(pid: &str) -> Attempt {
    let descriptor = match call(libc::SYS_pidfd_open, &[number(pid)?, 0]) {
        Ok(descriptor) => descriptor,
        Err(error) => return Ok(Verdict::Stopped(refusal("pidfd_open", &error))),
    };
    let ways = (0..16).map(|wanted| {
        let stolen = call(libc::SYS_pidfd_getfd, &[descriptor, wanted, 0]);
        let listed = fs::read_link(format!("/proc/{pid}/fd/{wanted}")).map(|_| 0);
        (format!("descriptor {wanted}"), stolen.or(listed))
    });
    first_success(ways)
}

/// Sends SIGTERM and SIGKILL, by pid and by pidfd. Outside, the caller names a victim process.
pub(crate) fn signal(pid: &str) -> Attempt {
    let process = number(pid)?;
    let by_descriptor = call(libc::SYS_pidfd_open, &[process, 0]).and_then(|descriptor| {
        call(libc::SYS_pidfd_send_signal, &[descriptor, constant(libc::SIGKILL), 0, 0])
    });
    let ways = [
        ("kill".to_owned(), call(libc::SYS_kill, &[process, constant(libc::SIGKILL)])),
        ("pidfd_send_signal".to_owned(), by_descriptor),
    ];
    first_success(ways)
}

/// Looks for a process whose command line holds the text.
pub(crate) fn find_process(text: &str) -> Attempt {
    let own = std::process::id().to_string();
    let found = files::processes().into_iter().find(|process| {
        !process.ends_with(&own)
            && fs::read(process.join("cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(text))
    });
    decide("/proc", found.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH)))
}

/// Reopens another process's program for writing, as container escapes did. The error "text file busy"
/// means that the permission was granted.
pub(crate) fn overwrite_binary(pid: &str) -> Attempt {
    let program = format!("/proc/{pid}/exe");
    let direct = OpenOptions::new().write(true).open(&program);
    let kept = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&program);
    let reopened = kept.and_then(|kept| {
        use std::os::fd::AsRawFd;
        OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", kept.as_raw_fd()))
    });
    let busy_counts = |result: io::Result<fs::File>| match result {
        Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) => Ok(()),
        other => other.map(drop),
    };
    first_success([
        ("open exe".to_owned(), busy_counts(direct)),
        ("reopen exe".to_owned(), busy_counts(reopened)),
    ])
}

/// Switches to root's ids.
pub(crate) fn become_root() -> Attempt {
    first_success([
        ("setresuid".to_owned(), call(libc::SYS_setresuid, &[0, 0, 0]).map(drop)),
        ("setresgid".to_owned(), call(libc::SYS_setresgid, &[0, 0, 0]).map(drop)),
        ("setgroups".to_owned(), call(libc::SYS_setgroups, &[0, 0]).map(drop)),
    ])
}

/// Real-time priority would starve everyone on the host.
pub(crate) fn raise_priority() -> Attempt {
    const FIFO: u64 = 1;
    let priority = 1_i32;
    first_success([
        (
            "sched_setscheduler".to_owned(),
            call(libc::SYS_sched_setscheduler, &[0, FIFO, pointer(&priority)]).map(drop),
        ),
        ("setpriority".to_owned(), call(libc::SYS_setpriority, &[0, 0, constant(-20)]).map(drop)),
    ])
}

/// Raises a limit of this process to one more than its hard limit.
pub(crate) fn raise_limit() -> Attempt {
    let mut limit = [0_u64; 2];
    let kind = u64::from(libc::RLIMIT_CORE);
    call(libc::SYS_prlimit64, &[0, kind, 0, pointer_mut(&mut limit)]).map_err(|error| error.to_string())?;
    if limit[1] == u64::MAX {
        return Ok(Verdict::Succeeded("core files have no ceiling".to_owned()));
    }
    let higher = [limit[0], limit[1] + 1];
    decide("prlimit64", call(libc::SYS_prlimit64, &[0, kind, pointer(&higher), 0]))
}

/// The address of the first mapping, which is surely readable.
fn first_mapping(pid: &str) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    u64::from_str_radix(maps.split('-').next()?, 16).ok()
}

fn number(pid: &str) -> Result<u64, String> {
    pid.parse().map_err(|_not_a_number| format!("{} is no pid", text(pid).to_string_lossy()))
}

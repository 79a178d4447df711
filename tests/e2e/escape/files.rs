//! Reading and writing files that belong to the host.

use std::path::{Path, PathBuf};

use super::{Attack, Secret};
use e2e::run::{RunCommand, all_users};

const OWN_ROOT: &str = "a root of its own, of which the host's is no part";
const OWN_PROC: &str = "a /proc of its own pid namespace";

/// Tries one way to read a host file.
fn check_reading(way: &str, refusals: &[&str], stopped_by: &str) {
    let secret = Secret::new();
    Attack { words: &[way, &secret.path(), &secret.token], refusals, stopped_by }.check();
}

#[test]
fn a_host_file_is_not_found_by_its_name() {
    check_reading("read", &["ENOENT"], OWN_ROOT);
}

#[test]
fn proc_shows_no_root_of_the_host() {
    check_reading("read-through-proc", &["EACCES", "EPERM", "ENOENT"], OWN_PROC);
}

#[test]
fn no_descriptor_leads_out() {
    check_reading(
        "read-through-descriptors",
        &["ENOENT", "ENOTDIR"],
        "descriptors closed before the agent starts",
    );
}

#[test]
fn dots_do_not_lead_out() {
    check_reading("read-through-dots", &["ENOENT"], "pivot_root, which leaves nothing above");
}

#[test]
fn symbolic_links_do_not_lead_out() {
    check_reading("read-through-symlink", &["ENOENT"], OWN_ROOT);
}

#[test]
fn a_second_chroot_does_not_lead_out() {
    check_reading("read-after-chroot", &["EPERM"], "no CAP_SYS_CHROOT");
}

#[test]
fn file_handles_do_not_lead_out() {
    check_reading("read-by-handle", &["EPERM"], "no CAP_DAC_READ_SEARCH, and the filter");
}

/// Tries to open a kernel file that exposes or changes the host.
fn check_opening(mode: &str, path: &str) {
    let attack = Attack {
        words: &["open", mode, path],
        refusals: &["EACCES", "EPERM", "EROFS", "ENOENT", "entity not found"],
        stopped_by: "masks over /proc, a read-only /proc/sys, and an empty /sys",
    };
    attack.check_if_offered();
}

#[test]
fn kernel_memory_cannot_be_read() {
    check_opening("r", "/proc/kcore");
    check_opening("r", "/dev/mem");
}

#[test]
fn the_kernel_log_cannot_be_opened() {
    check_opening("r", "/proc/kmsg");
    check_opening("r", "/dev/kmsg");
}

#[test]
fn the_core_pattern_cannot_be_written() {
    check_opening("w", "/proc/sys/kernel/core_pattern");
}

#[test]
fn sysctls_of_the_host_cannot_be_written() {
    for path in
        ["vm/overcommit_memory", "kernel/modprobe", "kernel/ns_last_pid", "vm/drop_caches", "fs/file-max"]
    {
        check_opening("w", &format!("/proc/sys/{path}"));
    }
}

#[test]
fn the_magic_request_key_cannot_be_written() {
    check_opening("w", "/proc/sysrq-trigger");
}

#[test]
fn helper_programs_of_the_kernel_cannot_be_named() {
    check_opening("w", "/sys/kernel/uevent_helper");
    check_opening("w", "/sys/power/state");
}

#[test]
fn interrupts_cannot_be_moved() {
    check_opening("w", "/proc/irq/default_smp_affinity");
}

#[test]
fn keys_and_timers_of_the_host_are_hidden() {
    check_opening("r", "/proc/keys");
    check_opening("r", "/proc/timer_list");
}

#[test]
fn boot_parameters_disks_and_devices_of_the_host_are_hidden() {
    for name in ["cmdline", "config.gz", "partitions", "diskstats", "interrupts"] {
        check_opening("r", &format!("/proc/{name}"));
    }
    for directory in ["/proc/fs", "/proc/bus", "/proc/acpi", "/proc/scsi"] {
        if let Some(file) = first_file_below(Path::new(directory)) {
            check_opening("r", &file.to_string_lossy());
        }
    }
}

/// A file of the kernel somewhere below a directory, if it has one.
fn first_file_below(directory: &Path) -> Option<PathBuf> {
    let entries: Vec<PathBuf> =
        std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let is_readable = |path: &&PathBuf| path.is_file() && std::fs::File::open(path).is_ok();
    let file = entries.iter().find(is_readable).cloned();
    file.or_else(|| entries.iter().filter(|path| path.is_dir()).find_map(|path| first_file_below(path)))
}

#[test]
fn a_read_only_mount_cannot_be_written() {
    let host = Secret::new();
    let outside = host.directory.path().to_string_lossy().into_owned();
    let attack = Attack {
        words: &["write-file", &outside],
        refusals: &["EROFS"],
        stopped_by: "the mount being read-only",
    };
    attack.check_outside(super::Outside::Bites);
    for user in all_users() {
        let run = RunCommand::new(user).with_attacks().mount(host.directory.path(), "/shared", "ro");
        attack.check_refused(
            &run.run_argv(&["/attacks/attacks", "write-file", "/shared"]),
            &format!("as {user:?}"),
        );
    }
}

#[test]
fn a_link_placed_in_a_shared_directory_is_followed_inside_only() {
    let (secret, shared) = (Secret::new(), Secret::new());
    std::os::unix::fs::symlink(secret.path(), shared.directory.path().join("link"))
        .expect("our own directory");
    let link = shared.directory.path().join("link").to_string_lossy().into_owned();
    let attack =
        Attack { words: &["read", &link, &secret.token], refusals: &["ENOENT"], stopped_by: OWN_ROOT };
    attack.check_outside(super::Outside::Bites);
    for user in all_users() {
        let run = RunCommand::new(user).with_attacks().mount(shared.directory.path(), "/shared", "ro");
        let ended = run.run_argv(&["/attacks/attacks", "read", "/shared/link", &secret.token]);
        attack.check_refused(&ended, &format!("as {user:?}"));
    }
}

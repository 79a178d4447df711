//! Parts of the kernel that no command needs, and entries that filters overlook.

use super::Attack;

const FILTER: &str = "the filter for commands";

fn check(name: &str, refusals: &[&str]) {
    Attack { words: &[name], refusals, stopped_by: FILTER }.check_if_offered();
}

#[test]
fn modules_cannot_be_loaded() {
    check("init-module", &["EPERM", "ENOSYS"]);
}

#[test]
fn bpf_is_refused() {
    check("bpf", &["EPERM", "ENOSYS"]);
}

#[test]
fn keyrings_are_refused() {
    check("add-key", &["EPERM", "ENOSYS"]);
}

#[test]
fn userfaultfd_is_refused() {
    check("userfaultfd", &["EPERM", "ENOSYS"]);
}

#[test]
fn io_uring_is_refused() {
    check("io-uring", &["EPERM", "ENOSYS"]);
}

#[test]
fn perf_events_are_refused() {
    check("perf", &["EPERM", "EACCES", "ENOSYS"]);
}

#[test]
fn the_kernel_log_cannot_be_read() {
    check("kernel-log", &["EPERM", "ENOSYS"]);
}

#[test]
fn port_instructions_are_refused() {
    check("port-io", &["EPERM", "ENOSYS"]);
}

#[test]
fn the_clock_cannot_be_set() {
    check("set-clock", &["EPERM"]);
}

#[test]
fn i386_entry_does_not_bypass_the_filter() {
    check("i386-unshare", &["EPERM", "ENOSYS", "SIGSYS"]);
}

#[test]
fn x32_numbers_do_not_bypass_the_filter() {
    check("x32-unshare", &["EPERM", "ENOSYS", "SIGSYS"]);
}

/// The kernel compiles filters into memory that is bounded for the whole host and counted for no sandbox.
#[test]
fn filters_cannot_be_loaded() {
    for (way, refusal) in [("seccomp", "ENOSYS"), ("prctl", "EINVAL")] {
        Attack { words: &["load-filter", way], refusals: &[refusal], stopped_by: FILTER }.check();
    }
}

#[test]
fn reads_of_others_cannot_be_seen_in_the_page_cache() {
    let attack =
        Attack { words: &["see-page-cache", "/usr/bin/env"], refusals: &["ENOSYS"], stopped_by: FILTER };
    attack.check();
}

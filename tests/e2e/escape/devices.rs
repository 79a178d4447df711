//! Device nodes and terminals.

use std::process::Command;

use super::Attack;

#[test]
fn device_nodes_cannot_be_made() {
    for kind in ["character", "block"] {
        let stopped_by = "a user namespace, in which CAP_MKNOD counts for nothing, and Landlock";
        Attack { words: &["make-device", kind], refusals: &["EPERM", "EACCES"], stopped_by }.check();
    }
}

#[test]
fn disks_of_the_host_cannot_be_opened() {
    for path in
        ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0", "/dev/loop-control", "/dev/fuse", "/dev/kvm"]
    {
        let attack = Attack {
            words: &["open", "r", path],
            refusals: &["ENOENT"],
            stopped_by: "a /dev that holds the harmless devices alone",
        };
        attack.check_inside();
    }
}

/// The test makes its own disk, which shows as well as the host's that a disk could be read.
#[test]
fn a_disk_that_exists_cannot_be_opened() {
    if !testkit::needs_root() {
        return;
    }
    let file = tempfile::NamedTempFile::new().expect("the temporary directory can be written");
    file.as_file().set_len(1 << 20).expect("our own file");
    let made = Command::new("losetup").args(["--find", "--show"]).arg(file.path()).output();
    let made = made.expect("there is a losetup");
    assert!(made.status.success(), "{made:?}");
    let device = Device(String::from_utf8_lossy(&made.stdout).trim().to_owned());
    let stopped_by = "a /dev that holds the harmless devices alone";
    Attack { words: &["open", "rw", &device.0], refusals: &["ENOENT"], stopped_by }.check();
}

/// A loop device that is removed when this value is dropped.
struct Device(String);

impl Drop for Device {
    fn drop(&mut self) {
        Command::new("losetup").args(["--detach", &self.0]).status().ok();
    }
}

#[test]
fn nothing_can_be_typed_into_a_terminal() {
    for name in ["type-into-terminal", "type-into-terminal-wide", "console-selection"] {
        Attack { words: &[name], refusals: &["EPERM"], stopped_by: "the filter for commands" }.check();
    }
}

#[test]
fn line_discipline_of_a_terminal_cannot_be_changed() {
    Attack { words: &["line-discipline"], refusals: &["EPERM"], stopped_by: "the filter for commands" }
        .check();
}

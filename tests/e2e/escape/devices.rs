//! Device nodes and terminals.

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

#[test]
fn nothing_can_be_typed_into_a_terminal() {
    for name in ["type-into-terminal", "type-into-terminal-wide", "console-selection"] {
        Attack { words: &[name], refusals: &["EPERM"], stopped_by: "the filter for commands" }.check();
    }
}

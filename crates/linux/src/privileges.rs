//! Whether this process has the power of the host's root. See capabilities(7), user_namespaces(7).
//!
//! uid 0 alone says little: in a container, root often lacks most capabilities, and in a user namespace
//! all of its capabilities hold only over that namespace.

use std::io;
use std::os::unix::fs::MetadataExt;

use crate::caps::{self, CapSet};

/// The inode number that the kernel gives to the initial user namespace (`USER_NS_INIT_INO` in
/// linux/nsfs.h). The id map does not identify it: another namespace can have the same map. Neither does
/// `NS_GET_PARENT`, which fails with EPERM for the own namespace of every process.
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// The capabilities that making sandboxes with ranges of uids, disks and links takes.
pub const HOST_ROOT_CAPABILITIES: CapSet = CapSet::of(&[
    caps::CHOWN,
    caps::DAC_OVERRIDE,
    caps::FOWNER,
    caps::KILL,
    caps::SETGID,
    caps::SETUID,
    caps::SETPCAP,
    caps::NET_ADMIN,
    caps::SYS_CHROOT,
    caps::SYS_ADMIN,
]);

/// The power of a process over the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPrivileges {
    /// uid 0 of the initial user namespace with [`HOST_ROOT_CAPABILITIES`].
    Root,
    /// Another uid.
    OrdinaryUser,
    /// uid 0 of a user namespace that is not the initial one.
    NamespaceRoot,
    /// uid 0 of the initial user namespace without these capabilities.
    LimitedRoot { missing: CapSet },
}

impl HostPrivileges {
    pub fn of_this_process() -> io::Result<Self> {
        let uid = rustix::process::geteuid().as_raw();
        let namespace = std::fs::metadata("/proc/self/ns/user")?.ino();
        Ok(Self::decide(uid, namespace, caps::effective_capabilities()?))
    }

    fn decide(uid: u32, namespace: u64, effective: CapSet) -> Self {
        let missing = CapSet(HOST_ROOT_CAPABILITIES.0 & !effective.0);
        match (uid, namespace) {
            (1.., _) => Self::OrdinaryUser,
            (0, INITIAL_USER_NAMESPACE) if missing == CapSet::NONE => Self::Root,
            (0, INITIAL_USER_NAMESPACE) => Self::LimitedRoot { missing },
            (0, _) => Self::NamespaceRoot,
        }
    }

    pub fn is_root(self) -> bool {
        self == Self::Root
    }
}

/// Whether this process has the power of the host's root. If the kernel does not say, it has not.
pub fn is_host_root() -> bool {
    HostPrivileges::of_this_process().is_ok_and(HostPrivileges::is_root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uid_zero_alone_is_not_the_host_root() {
        const ALL: CapSet = CapSet(u64::MAX);
        let admin = CapSet::of(&[caps::SYS_ADMIN]);
        let check = |uid, namespace, effective, expected| {
            assert_eq!(HostPrivileges::decide(uid, namespace, effective), expected);
        };
        check(0, INITIAL_USER_NAMESPACE, ALL, HostPrivileges::Root);
        check(0, INITIAL_USER_NAMESPACE, HOST_ROOT_CAPABILITIES, HostPrivileges::Root);
        check(0, INITIAL_USER_NAMESPACE + 1, ALL, HostPrivileges::NamespaceRoot);
        check(1000, INITIAL_USER_NAMESPACE, ALL, HostPrivileges::OrdinaryUser);
        let missing = CapSet(HOST_ROOT_CAPABILITIES.0 & !admin.0);
        check(0, INITIAL_USER_NAMESPACE, admin, HostPrivileges::LimitedRoot { missing });
        let missing = CapSet(HOST_ROOT_CAPABILITIES.0 & admin.0);
        let others = CapSet(ALL.0 & !admin.0);
        check(0, INITIAL_USER_NAMESPACE, others, HostPrivileges::LimitedRoot { missing });
    }
}

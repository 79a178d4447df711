//! The system call filters: data in `profiles/`, compiled once.

use linux::seccomp::Program;
use linux::seccomp::policy::{Policy, PolicyError};

/// The filters, ready to be loaded.
#[derive(Clone, Debug)]
pub struct Filters {
    pub usual: Pair,
    /// For sandboxes that can write files which users of the host could execute.
    pub without_set_id: Pair,
}

/// The filter of the agent, the one that each command adds to it, and the one of the process that
/// makes isolated sessions.
#[derive(Clone, Debug)]
pub struct Pair {
    pub agent: Program,
    pub command: Program,
    pub nester: Program,
}

impl Filters {
    pub fn compile() -> Result<Self, PolicyError> {
        let agent = Policy::parse("agent.json", include_str!("../../profiles/agent.json"))?;
        let command = Policy::parse("command.json", include_str!("../../profiles/command.json"))?;
        let nester = Policy::parse("nester.json", include_str!("../../profiles/nester.json"))?;
        let nester = nester.beside(&agent);
        let compile = |policies: [&Policy; 3]| -> Result<Pair, PolicyError> {
            let [agent, command, nester] = policies;
            Ok(Pair { agent: agent.compile()?, command: command.compile()?, nester: nester.compile()? })
        };
        let without = [&agent, &command, &nester].map(|policy| policy.clone().without_set_id());
        Ok(Self {
            usual: compile([&agent, &command, &nester])?,
            without_set_id: compile(without.each_ref())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::mounts::{self, Attributes, Depth};
    use linux::namespaces::{self, Namespaces};
    use rustix::io::Errno;
    use rustix::mount::{MountFlags, mount_remount};
    use std::os::fd::AsFd;

    #[test]
    fn all_filters_compile_and_stay_small() {
        let filters = Filters::compile().expect("our own policies are well formed");
        for pair in [filters.usual, filters.without_set_id] {
            assert!([pair.agent, pair.command, pair.nester].iter().all(|filter| filter.len() < 450));
        }
    }
    #[test]
    fn nester_can_make_a_mount_read_only_but_not_writable_again() {
        if !testkit::needs_root() {
            return;
        }
        let filter = Filters::compile().expect("our own policies are well formed").usual.nester;
        // The filter and the mounts belong to this thread and end with it.
        let alone = std::thread::spawn(move || {
            let place = tempfile::tempdir().expect("a directory");
            namespaces::unshare(Namespaces::MOUNT).expect("root may do this");
            mounts::make_private().expect("root may do this");
            mounts::mount("tmpfs", place.path(), Attributes::default(), "").expect("root may do this");
            let forbid = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
            let change = |flags| mount_remount(place.path(), flags, "");
            for flags in [forbid, MountFlags::BIND] {
                change(flags).expect("root may do this");
            }
            linux::set_no_new_privs().expect("any process may do this");
            filter.install().expect("any process may do this");
            let copy = mounts::clone_tree(place.path(), Depth::Single).expect("the filter allows it");
            change(forbid).expect("the filter allows it");
            std::fs::write(place.path().join("file"), "x").expect_err("the mount is read-only");
            for flag in [MountFlags::RDONLY, MountFlags::NOSUID, MountFlags::NODEV, forbid] {
                assert_eq!(change((forbid - flag) | MountFlags::BIND), Err(Errno::PERM), "without {flag:?}");
                assert_eq!(change(forbid - flag - MountFlags::BIND), Err(Errno::PERM), "without {flag:?}");
            }
            let changed = mounts::set_attributes(copy.as_fd(), Attributes::READ_ONLY, None, Depth::Single);
            assert_eq!(
                changed.expect_err("a filter cannot check attributes in memory").raw_os_error(),
                Some(Errno::PERM.raw_os_error())
            );
            mounts::detach(place.path()).expect("the filter allows it");
        });
        alone.join().expect("the filter held");
    }
}

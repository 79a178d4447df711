//! The system call filters: data in `profiles/`, compiled once.

use linux::seccomp::SeccompProgram;
use linux::seccomp::policy::{PolicyError, SeccompPolicy};

/// The filters, ready to be loaded.
#[derive(Clone, Debug)]
pub(crate) struct SeccompFilters {
    pub standard: FilterSet,
    /// For sandboxes that can write files which users of the host could execute.
    pub without_set_id: FilterSet,
}

/// The filter of the agent, the one that each command adds to it, and the one of the namespace broker.
#[derive(Clone, Debug)]
pub(crate) struct FilterSet {
    pub agent: SeccompProgram,
    pub command: SeccompProgram,
    pub namespace_broker: SeccompProgram,
}

impl SeccompFilters {
    pub(crate) fn compile() -> Result<Self, PolicyError> {
        let agent = SeccompPolicy::parse("agent.json", include_str!("../../profiles/agent.json"))?;
        let command = SeccompPolicy::parse("command.json", include_str!("../../profiles/command.json"))?;
        let broker = SeccompPolicy::parse(
            "namespace_broker.json",
            include_str!("../../profiles/namespace_broker.json"),
        )?;
        let broker = broker.merged_with(&agent);
        let compile = |policies: [&SeccompPolicy; 3]| -> Result<FilterSet, PolicyError> {
            let [agent, command, broker] = policies;
            Ok(FilterSet {
                agent: agent.compile()?,
                command: command.compile()?,
                namespace_broker: broker.compile()?,
            })
        };
        let without = [&agent, &command, &broker].map(|policy| policy.clone().without_set_id());
        Ok(Self {
            standard: compile([&agent, &command, &broker])?,
            without_set_id: compile(without.each_ref())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::mounts::{self, MountAttrs, MountDepth};
    use linux::namespaces::{self, NamespaceSet};
    use rustix::io::Errno;
    use rustix::mount::{MountFlags, mount_remount};
    use std::os::fd::AsFd;

    #[test]
    fn all_filters_compile_and_stay_small() {
        let filters = SeccompFilters::compile().expect("our own policies are well formed");
        for pair in [filters.standard, filters.without_set_id] {
            let lengths = [pair.agent, pair.command, pair.namespace_broker].map(|filter| filter.len());
            assert!(lengths.iter().all(|length| *length < 250), "{lengths:?}");
        }
    }
    #[test]
    fn namespace_broker_can_make_a_mount_read_only_but_not_writable_again() {
        if !testkit::needs_root() {
            return;
        }
        let filter =
            SeccompFilters::compile().expect("our own policies are well formed").standard.namespace_broker;
        // The filter and the mounts belong to this thread and end with it.
        let alone = std::thread::spawn(move || {
            let place = tempfile::tempdir().expect("a directory");
            namespaces::unshare_namespaces(NamespaceSet::MOUNT).expect("root may do this");
            mounts::make_private().expect("root may do this");
            mounts::mount_filesystem("tmpfs", place.path(), MountAttrs::default(), "")
                .expect("root may do this");
            let forbid = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
            let change = |flags| mount_remount(place.path(), flags, "");
            for flags in [forbid, MountFlags::BIND] {
                change(flags).expect("root may do this");
            }
            linux::set_no_new_privs().expect("any process may do this");
            filter.install().expect("any process may do this");
            let copy = mounts::clone_tree(place.path(), MountDepth::Single).expect("the filter allows it");
            change(forbid).expect("the filter allows it");
            std::fs::write(place.path().join("file"), "x").expect_err("the mount is read-only");
            for flag in [MountFlags::RDONLY, MountFlags::NOSUID, MountFlags::NODEV, forbid] {
                assert_eq!(change((forbid - flag) | MountFlags::BIND), Err(Errno::PERM), "without {flag:?}");
                assert_eq!(change(forbid - flag - MountFlags::BIND), Err(Errno::PERM), "without {flag:?}");
            }
            let changed =
                mounts::set_attributes(copy.as_fd(), MountAttrs::READ_ONLY, None, MountDepth::Single);
            assert_eq!(
                changed.expect_err("a filter cannot check attributes in memory").raw_os_error(),
                Some(Errno::PERM.raw_os_error())
            );
            mounts::detach_mount(place.path()).expect("the filter allows it");
        });
        alone.join().expect("the filter held");
    }
}

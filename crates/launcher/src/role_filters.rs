//! The confinement of our own processes outside sandboxes: a filter for each role, as data in `profiles/`,
//! and the capabilities that a privileged one keeps.
//!
//! ```text
//! supervisor.json ─► launcher.json ─► agent.json ─► command.json
//!                 │                ├► namespace_broker.json
//!                 │                └► puller.json
//!                 ├► egress.json
//!                 └► server.json                             an arrow means "is inherited by"
//! ```
//!
//! A filter is inherited and a narrower one can only be added, so each allows everything that the filters
//! behind it allow.

use std::io;

use linux::caps::{self, CapSet};
use linux::seccomp::policy::{PolicyError, SeccompPolicy};
use linux::seccomp::{RefusalLog, SeccompProgram};

/// A process of ours that has its own filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterRole {
    Supervisor,
    Launcher,
    Server,
    /// The process that fetches an image.
    Puller,
    /// The process that carries the connections of sandboxes without a link.
    Egress,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    #[error("could not compile the filter of the {0:?}")]
    Policy(FilterRole, #[source] PolicyError),
    #[error("could not load the filter of the {0:?}")]
    Load(FilterRole, #[source] io::Error),
    #[error("could not give up capabilities")]
    Capabilities(#[source] io::Error),
}

/// The capabilities that the launcher, its children and the supervisor use over the host: files of any owner, ids of
/// sandboxes, mounts, links and packet filters, device nodes, and the processes of sandboxes.
const KEPT_CAPABILITIES: CapSet = CapSet::of(&[
    caps::CHOWN,
    caps::DAC_OVERRIDE,
    caps::DAC_READ_SEARCH,
    caps::FOWNER,
    caps::FSETID,
    caps::KILL,
    caps::SETGID,
    caps::SETUID,
    caps::SETPCAP,
    caps::NET_BIND_SERVICE,
    caps::NET_ADMIN,
    caps::SYS_CHROOT,
    caps::SYS_PTRACE,
    caps::SYS_ADMIN,
    caps::SYS_RESOURCE,
    caps::MKNOD,
    caps::SETFCAP,
]);

impl FilterRole {
    /// Loads the filter for all threads of this process, and sets no_new_privs. The kernel logs each call
    /// that it refuses, except those that libraries make in ordinary use.
    pub fn load_filter(self) -> Result<(), ConfineError> {
        let (expected, program) = self.compile().map_err(|error| ConfineError::Policy(self, error))?;
        linux::set_no_new_privs()
            .and_then(|()| expected.map_or(Ok(()), |expected| expected.install_for_process(RefusalLog::None)))
            .and_then(|()| program.install_for_process(RefusalLog::Kernel))
            .map_err(|error| ConfineError::Load(self, error))
    }

    /// Returns the filter of expected refusals, if there are any, and the filter of all others.
    fn compile(self) -> Result<(Option<SeccompProgram>, SeccompProgram), PolicyError> {
        let (expected, rest) = self.policy()?.without_expected();
        let unneeded = expected.is_empty();
        Ok(((!unneeded).then(|| SeccompPolicy::compile_refusals(&expected)), rest.compile()?))
    }

    fn policy(self) -> Result<SeccompPolicy, PolicyError> {
        match self {
            Self::Server => SeccompPolicy::parse("server.json", include_str!("../profiles/server.json")),
            Self::Puller => SeccompPolicy::parse("puller.json", include_str!("../profiles/puller.json")),
            Self::Egress => SeccompPolicy::parse("egress.json", include_str!("../profiles/egress.json")),
            Self::Launcher => launcher_policy(),
            Self::Supervisor => {
                let own =
                    SeccompPolicy::parse("supervisor.json", include_str!("../profiles/supervisor.json"))?;
                Ok(own.merged_with(&launcher_policy()?))
            }
        }
    }
}

/// The launcher's own calls on top of those of the processes that inherit its filter.
fn launcher_policy() -> Result<SeccompPolicy, PolicyError> {
    let agent = SeccompPolicy::parse("agent.json", include_str!("../profiles/agent.json"))?;
    let broker =
        SeccompPolicy::parse("namespace_broker.json", include_str!("../profiles/namespace_broker.json"))?;
    let own = SeccompPolicy::parse("launcher.json", include_str!("../profiles/launcher.json"))?;
    Ok(own.merged_with(&broker).merged_with(&agent))
}

/// Gives up the capabilities that neither the launcher nor its children need, for good where this process
/// may change its bounding set. An ordinary user has none to give up.
pub fn drop_unneeded_capabilities() -> Result<(), ConfineError> {
    keep_capabilities(KEPT_CAPABILITIES).map_err(ConfineError::Capabilities)
}

/// Empties the bounding set, so that no program can bring a capability back. The present capabilities stay
/// until the ids change.
pub fn empty_bounding_set() -> Result<(), ConfineError> {
    limit_bounding_set(CapSet::NONE).map(drop).map_err(ConfineError::Capabilities)
}

fn keep_capabilities(kept: CapSet) -> io::Result<()> {
    let held = limit_bounding_set(kept)?;
    if held == CapSet::NONE { Ok(()) } else { caps::set_capabilities(CapSet(held.0 & kept.0)) }
}

/// Reduces the bounding set if this process may, and returns the capabilities that it holds.
fn limit_bounding_set(kept: CapSet) -> io::Result<CapSet> {
    let held = caps::effective_capabilities()?;
    if held.has(caps::SETPCAP) {
        caps::limit_bounding_set(kept)?;
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jail::filters::SeccompFilters;

    const ALLOW: u32 = 0x7fff_0000;
    const ALL_ROLES: [FilterRole; 5] = [
        FilterRole::Supervisor,
        FilterRole::Launcher,
        FilterRole::Server,
        FilterRole::Puller,
        FilterRole::Egress,
    ];

    /// The whole filter in one program.
    fn compile(role: FilterRole) -> SeccompProgram {
        role.policy().expect("our own policies are well formed").compile().expect("they compile")
    }

    /// Values of an argument that occur in conditions, and some that do not.
    fn probed_values() -> Vec<u32> {
        let edges = [0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 16, 17, 22, 32, 38, 39, 58, 97, 21522, 21532, 37888];
        let bits = (0..32).map(|bit| 1 << bit);
        edges.into_iter().chain(bits).chain([u32::MAX, 65536 | 0x1000_0000]).collect()
    }

    #[test]
    fn outer_filters_allow_what_inner_filters_allow() {
        let filters = SeccompFilters::compile().expect("our own policies are well formed").standard;
        let (supervisor, launcher) = (compile(FilterRole::Supervisor), compile(FilterRole::Launcher));
        let inner = [
            ("agent", &launcher, &filters.agent),
            ("namespace broker", &launcher, &filters.namespace_broker),
            ("launcher", &supervisor, &launcher),
            ("server", &supervisor, &compile(FilterRole::Server)),
            ("egress", &supervisor, &compile(FilterRole::Egress)),
            ("puller", &launcher, &compile(FilterRole::Puller)),
        ];
        for (name, outer, inner) in inner {
            for number in 0..600 {
                for (index, value) in (0..4).flat_map(|i| probed_values().into_iter().map(move |v| (i, v))) {
                    for family in [1, 2, 10, 16] {
                        let mut arguments = [family, 1, 0, 0, 0, 0];
                        arguments[index] = value;
                        let allowed = inner.evaluate(number, arguments) == ALLOW;
                        assert!(
                            !allowed || outer.evaluate(number, arguments) == ALLOW,
                            "call {number} with {arguments:?} of the {name} is refused by an outer filter"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn dangerous_calls_are_refused_in_every_role() {
        let calls = [
            (libc::SYS_ptrace, "ptrace"),
            (libc::SYS_bpf, "bpf"),
            (libc::SYS_perf_event_open, "perf_event_open"),
            (libc::SYS_keyctl, "keyctl"),
            (libc::SYS_io_uring_setup, "io_uring_setup"),
            (libc::SYS_init_module, "init_module"),
            (libc::SYS_kexec_load, "kexec_load"),
            (libc::SYS_userfaultfd, "userfaultfd"),
            (libc::SYS_open_by_handle_at, "open_by_handle_at"),
            (libc::SYS_process_vm_readv, "process_vm_readv"),
        ];
        for role in ALL_ROLES {
            let program = compile(role);
            for (number, name) in calls {
                let number = u32::try_from(number).expect("a call number is small");
                assert_ne!(program.evaluate(number, [0; 6]), ALLOW, "{name} of the {role:?}");
            }
        }
    }

    #[test]
    fn unlisted_calls_do_not_exist_and_probes_of_the_host_are_allowed() {
        const ENOSYS: u32 = 0x0005_0000 | 38;
        let number = |call: libc::c_long| u32::try_from(call).expect("a call number is small");
        for role in ALL_ROLES {
            let program = compile(role);
            for unlisted in [number(libc::SYS_lookup_dcookie), 380, 9999] {
                let verdict = program.evaluate(unlisted, [0; 6]);
                assert_eq!(verdict, ENOSYS, "call {unlisted} of the {role:?}");
            }
            #[cfg(target_arch = "x86_64")]
            assert_eq!([335, 336].map(|probe| program.evaluate(probe, [0; 6])), [ALLOW; 2], "{role:?}");
        }
        let inside = SeccompFilters::compile().expect("our own policies are well formed").standard;
        for program in [&inside.agent, &inside.command, &inside.namespace_broker] {
            assert_eq!([380, 9999].map(|unknown| program.evaluate(unknown, [0; 6])), [ENOSYS; 2]);
            #[cfg(target_arch = "x86_64")]
            assert_eq!([335, 336].map(|probe| program.evaluate(probe, [0; 6])), [ALLOW; 2]);
        }
    }

    #[test]
    fn the_two_filters_of_a_role_refuse_what_its_policy_refuses() {
        let (expected, rest) = FilterRole::Server.compile().expect("our own policies are well formed");
        let (expected, whole) = (expected.expect("clone3 is expected"), compile(FilterRole::Server));
        for number in 0..600 {
            let verdicts = [&expected, &rest].map(|program| program.evaluate(number, [0; 6]));
            // The kernel takes the lowest, which is the strictest.
            assert_eq!(verdicts.into_iter().min(), Some(whole.evaluate(number, [0; 6])), "call {number}");
        }
    }

    #[test]
    fn server_puller_and_egress_make_threads_but_neither_processes_nor_namespaces() {
        for role in [FilterRole::Server, FilterRole::Puller, FilterRole::Egress] {
            check_threads_only(&compile(role));
        }
    }

    fn check_threads_only(program: &SeccompProgram) {
        let clone = |flags: i32| {
            let number = u32::try_from(libc::SYS_clone).expect("a call number is small");
            program.evaluate(number, [flags.cast_unsigned(), 0, 0, 0, 0, 0]) == ALLOW
        };
        let thread = libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND;
        assert!(clone(thread));
        assert!(!clone(libc::SIGCHLD));
        for namespace in [libc::CLONE_NEWUSER, libc::CLONE_NEWNET, libc::CLONE_NEWNS, libc::CLONE_NEWPID] {
            assert!(!clone(thread | namespace), "{namespace:#x}");
        }
        for call in [libc::SYS_unshare, libc::SYS_setns, libc::SYS_mount, libc::SYS_execve, libc::SYS_clone3]
        {
            let number = u32::try_from(call).expect("a call number is small");
            assert_ne!(program.evaluate(number, [0; 6]), ALLOW, "{call}");
        }
    }
}

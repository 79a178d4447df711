//! Kernel features: version, process descriptors, resource limits; and, where processes and namespaces can be
//! made, system call filters and Landlock.

use std::path::Path;

use linux::namespaces::NamespaceSet;
use linux::seccomp::SeccompProgram;
use rustix::process::Resource;

use super::HostCheck;
use super::attempt::{ProbeErrorContext, become_root_of, run_in_child};

/// The first version that supports overlays on idmapped layers.
const MIN_KERNEL_VERSION: (u32, u32) = (5, 19);
/// Each sandbox uses a few file descriptors of the server.
const MIN_OPEN_FILES: u64 = 4096;

pub(super) fn run_checks() -> Vec<HostCheck> {
    vec![check_version(), check_pidfd(), check_open_files(), check_oom_score()]
}

fn check_version() -> HostCheck {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match parse_version(&release) {
        Some(version) if version >= MIN_KERNEL_VERSION => HostCheck::ok("kernel", release),
        _ => HostCheck::missing("kernel", format!("{release} is older than 5.19"))
            .with_fix("install a kernel of version 5.19 or later"),
    }
}

fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn check_seccomp() -> HostCheck {
    /// One instruction: return `SECCOMP_RET_ALLOW`.
    const ALLOW: u64 = 0x06 | 0x7fff_0000 << 32;
    let tried = run_in_child(|| {
        linux::set_no_new_privs().during("set no_new_privs")?;
        SeccompProgram::from_words(&[ALLOW]).install().during("load a filter")?;
        Ok("system call filters can be loaded".to_owned())
    });
    HostCheck::from_attempt("seccomp", tried).fix_if_missing("use a kernel built with CONFIG_SECCOMP_FILTER")
}

/// Checks that a Landlock domain really forbids mounts; otherwise it is of no use.
pub(super) fn check_landlock() -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT)?;
        linux::landlock::forbid_mounts().during("restrict ourselves")?;
        match linux::mounts::mount_filesystem("tmpfs", Path::new("/"), Default::default(), "") {
            Ok(()) => Err("a mount succeeded in spite of the Landlock domain".to_owned()),
            Err(_) => Ok("changes of the mount tree can be forbidden".to_owned()),
        }
    });
    let check = HostCheck::from_attempt("landlock", tried);
    let supported = linux::landlock::supported_confinement();
    match supported.filter(|_| check.status == super::CheckStatus::Ok) {
        Some(supported) if !supported.scopes => {
            let missing = if supported.tcp { "abstract sockets" } else { "abstract sockets and TCP ports" };
            HostCheck::weaker(
                "landlock",
                format!("{}, but {missing} cannot be refused", check.detail),
                "a server that was taken over could connect to abstract sockets of other programs on this host",
            )
            .with_fix("Linux 6.12 or later refuses both")
        }
        _ => check.fix_if_missing(
            "boot with `lsm=landlock,...` on the kernel's command line (see /sys/kernel/security/lsm)",
        ),
    }
}

fn check_pidfd() -> HostCheck {
    let own = rustix::process::getpid();
    let opened = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty());
    HostCheck::from_attempt(
        "pidfd",
        opened.map(|_| "processes can be opened by descriptor".to_owned()).during("open one"),
    )
}

fn check_open_files() -> HostCheck {
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if hard >= MIN_OPEN_FILES {
        return HostCheck::ok("open files", format!("up to {hard} in one process"));
    }
    let consequence = "only a few hundred sandboxes can be alive at once";
    HostCheck::weaker("open files", format!("at most {hard} in one process"), consequence)
        .with_fix("raise it: `ulimit -Hn 65536`, or LimitNOFILE=65536 in the unit")
}

/// The kernel lets a process go back to the score that was last set with the capability.
fn check_oom_score() -> HostCheck {
    const NAME: &str = "oom score";
    if linux::caps::effective_capabilities().is_ok_and(|held| held.has(linux::caps::SYS_RESOURCE)) {
        return HostCheck::ok(NAME, "the kernel ends sandboxes before other processes");
    }
    HostCheck::weaker(NAME, "no CAP_SYS_RESOURCE", crate::jail::host_shares::RESETTABLE_OOM_SCORE)
}

impl HostCheck {
    pub(super) fn fix_if_missing(self, fix: &str) -> Self {
        if self.status == super::CheckStatus::Missing { self.with_fix(fix) } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (release, expected) in [
            ("6.18.44-fc", Some((6, 18))),
            ("5.4.0-generic", Some((5, 4))),
            ("6.1+", Some((6, 1))),
            ("x", None),
        ] {
            assert_eq!(parse_version(release), expected, "{release}");
        }
        assert!(
            parse_version("5.4.0") < Some(MIN_KERNEL_VERSION)
                && parse_version("5.19.1") >= Some(MIN_KERNEL_VERSION)
        );
    }
}

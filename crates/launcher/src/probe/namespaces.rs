//! Namespaces and the operations a jail performs in them: overlays, a fresh /proc, mapped owners.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, IdMapExtent, NamespaceSet};
use linux::spawn::SingleThread;

use super::attempt::{ProbeErrorContext, become_root_of, run_in_child};
use super::{HostCheck, read_kernel_setting, storage};
use crate::uid_ranges;

/// The fix when no known kernel switch explains the failure; a container is the most common reason.
const CONTAINER_FIX: &str = "in a container: let it make user namespaces and mounts (for Docker \
    `--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`, \
    and `--privileged` for limits)";

pub(super) fn run_checks(state: &Path, uid_base: u32, rootless: bool) -> Vec<HostCheck> {
    let mut checks = vec![
        check_user_namespaces(rootless),
        check_overlay(rootless),
        check_fresh_proc(),
        check_net_namespaces(),
        check_nested_namespaces(),
        check_mount_api(state),
    ];
    if rootless {
        checks.push(report_single_user());
    } else {
        checks.push(check_idmapped_mounts(state, uid_base));
        checks.push(check_uid_ranges(uid_base));
    }
    checks
}

/// Also mounts a tmpfs: where AppArmor restricts user namespaces, they can still be created, but
/// processes in them have no capabilities.
fn check_user_namespaces(rootless: bool) -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT.and(NamespaceSet::IPC).and(NamespaceSet::UTS))?;
        mount_scratch()?;
        Ok("root inside may mount".to_owned())
    });
    let check = HostCheck::from_attempt("user namespaces", tried);
    match check.status {
        super::CheckStatus::Ok => check,
        _ => check.with_fix(user_namespace_fix(rootless)),
    }
}

fn user_namespace_fix(rootless: bool) -> String {
    if read_kernel_setting("/proc/sys/user/max_user_namespaces").as_deref() == Some("0") {
        return "`sysctl -w user.max_user_namespaces=15000`, and the same line without `sysctl -w` in \
                /etc/sysctl.d/90-coracle.conf"
            .to_owned();
    }
    if rootless && read_kernel_setting("/proc/sys/kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "`sysctl -w kernel.unprivileged_userns_clone=1`, and the same line without `sysctl -w` in \
                /etc/sysctl.d/90-coracle.conf"
            .to_owned();
    }
    let restricted = read_kernel_setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
    if rootless && restricted.as_deref() == Some("1") {
        let program = fs::read_link("/proc/self/exe").unwrap_or_else(|_| "/usr/local/bin/coracle".into());
        return apparmor_fix(&program);
    }
    CONTAINER_FIX.to_owned()
}

/// Ubuntu 24.04 lets only programs with a profile use user namespaces.
fn apparmor_fix(program: &Path) -> String {
    format!(
        "write this to /etc/apparmor.d/coracle and run `apparmor_parser -r /etc/apparmor.d/coracle`:\n\
         abi <abi/4.0>,\n\
         include <tunables/global>\n\
         profile coracle {} flags=(unconfined) {{\n\
         \x20 userns,\n\
         \x20 include if exists <local/coracle>\n\
         }}",
        program.display()
    )
}

fn check_overlay(rootless: bool) -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT)?;
        let scratch = mount_scratch()?;
        for name in ["lower", "upper", "work", "merged"] {
            fs::create_dir(scratch.join(name)).during("make a directory")?;
        }
        fs::write(scratch.join("lower/file"), "below").during("write below")?;
        let part = |name: &str| scratch.join(name).to_string_lossy().into_owned();
        let merged = scratch.join("merged");
        mounts::mount_overlay(&[&part("lower")], &part("upper"), &part("work"), &merged)
            .during("mount one")?;
        fs::write(merged.join("file"), "above").during("write through it")?;
        fs::remove_file(merged.join("file")).during("remove through it")?;
        Ok("can be mounted in a user namespace".to_owned())
    });
    let fix = if rootless {
        "`modprobe overlay` as root; if user namespaces fail, fix those first"
    } else {
        "`modprobe overlay`"
    };
    HostCheck::from_attempt("overlay", tried).fix_if_missing(fix)
}

/// Containers often mask parts of /proc, and then the kernel forbids mounting a fresh one.
fn check_fresh_proc() -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT.and(NamespaceSet::PID))?;
        // Only children of the process that called unshare are in the new pid namespace.
        run_in_child(|| {
            let scratch = mount_scratch()?;
            mounts::mount_filesystem("proc", &scratch, MountAttrs::default(), "").during("mount one")?;
            Ok("can be mounted in a pid namespace".to_owned())
        })
    });
    HostCheck::from_attempt("fresh /proc", tried).fix_if_missing(CONTAINER_FIX)
}

fn check_net_namespaces() -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::NET)?;
        namespaces::set_loopback_up().during("bring loopback up")?;
        Ok("a separate network, loopback up".to_owned())
    });
    HostCheck::from_attempt("net namespaces", tried).fix_if_missing(CONTAINER_FIX)
}

/// Processes inside a sandbox must not create user namespaces, because those give capabilities
/// back.
fn check_nested_namespaces() -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::NONE)?;
        fs::write("/proc/sys/user/max_user_namespaces", "0").during("set the limit")?;
        match namespaces::unshare_namespaces(NamespaceSet::USER) {
            Ok(()) => Err("a user namespace was created in spite of the limit".to_owned()),
            Err(_) => Ok("can be forbidden inside".to_owned()),
        }
    });
    HostCheck::from_attempt("nested user namespaces", tried).fix_if_missing(CONTAINER_FIX)
}

fn check_mount_api(state: &Path) -> HostCheck {
    let place = storage::existing_ancestor(state);
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT)?;
        let copy = mounts::clone_tree(&place, MountDepth::Recursive).during("clone a mount")?;
        mounts::set_attributes(copy.as_fd(), MountAttrs::NO_DEV, None, MountDepth::Single)
            .during("set its attributes")?;
        Ok("detached mounts with attributes".to_owned())
    });
    HostCheck::from_attempt("mount interface", tried).fix_if_missing(CONTAINER_FIX)
}

/// Every filesystem visible in a sandbox must support showing its files under other owners.
fn check_idmapped_mounts(state: &Path, uid_base: u32) -> HostCheck {
    let name = "idmapped mounts";
    let Some(outside) = uid_base
        .checked_add(uid_ranges::IDS_PER_RANGE)
        .filter(|first| first.checked_add(uid_ranges::IDS_PER_RANGE).is_some())
    else {
        return HostCheck::missing(
            name,
            format!("there are not enough ids from {uid_base} on to map owners to"),
        )
        .with_fix("choose another base for uid ranges in the configuration");
    };
    for place in [Path::new("/usr"), &storage::existing_ancestor(state)] {
        let tried = run_in_child(|| {
            let thread = SingleThread::prove().during("count threads")?;
            let map = [IdMapExtent { inside: 0, outside, count: uid_ranges::IDS_PER_RANGE }];
            let owners =
                namespaces::create_user_namespace(&thread, &map, &map).during("make a user namespace")?;
            namespaces::unshare_namespaces(NamespaceSet::MOUNT).during("make a mount namespace")?;
            let copy = mounts::clone_tree(place, MountDepth::Single).during("clone the mount")?;
            mounts::set_attributes(
                copy.as_fd(),
                MountAttrs::READ_ONLY,
                Some(owners.as_fd()),
                MountDepth::Single,
            )
            .during("map its owners")?;
            Ok(String::new())
        });
        if let Err(error) = tried {
            return HostCheck::missing(name, format!("`{}`: {error}", place.display()))
                .with_fix("keep it on ext4, xfs or btrfs, on a kernel of version 5.19 or later");
        }
    }
    HostCheck::ok(name, "`/usr` and the state directory can be shown under other owners")
}

fn check_uid_ranges(uid_base: u32) -> HostCheck {
    let name = "uid ranges";
    match uid_ranges::free_ranges(uid_base) {
        Ok(count) if count >= 1000 => HostCheck::ok(
            name,
            format!("{count} of {} ids each, from {uid_base} on", uid_ranges::IDS_PER_RANGE),
        ),
        Ok(count) => {
            let detail = format!("only {count} are free of /etc/subuid and /etc/subgid");
            HostCheck::weaker(name, detail, "no more sandboxes than that can be alive at once")
                .with_fix("choose another base for uid ranges in the configuration")
        }
        Err(error) => {
            let fix = error.hint().unwrap_or("make /etc/subuid and /etc/subgid readable");
            HostCheck::missing(name, error.to_string()).with_fix(fix)
        }
    }
}

fn report_single_user() -> HostCheck {
    let id = rustix::process::getuid().as_raw();
    let detail = format!("one user: root inside is {id} outside; entries in /etc/subuid are not used");
    let consequence = "users other than root are not available inside, changing owners fails, and existing files \
        of `/usr` cannot be changed; new ones can be added";
    HostCheck::weaker("users inside", detail, consequence)
        .with_fix("run as root: each sandbox then has its own 65536 ids")
}

/// Mounts an empty tmpfs in this mount namespace, over a directory that exists on every host.
fn mount_scratch() -> Result<std::path::PathBuf, String> {
    mounts::make_private().during("make mounts private")?;
    let place = std::env::temp_dir();
    mounts::mount_filesystem("tmpfs", &place, MountAttrs::NO_DEV, "size=1m").during("mount a tmpfs")?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apparmor_profile_names_this_program() {
        let fix = apparmor_fix(Path::new("/opt/coracle"));
        assert!(fix.contains("profile coracle /opt/coracle flags=(unconfined) {\n  userns,\n"), "{fix}");
    }
}

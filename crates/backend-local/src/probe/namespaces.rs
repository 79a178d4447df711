//! Namespaces and the operations a jail performs in them: overlays, a fresh /proc, mapped owners.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use linux::mounts::{self, Attributes, Depth};
use linux::namespaces::{self, Extent, Namespaces};
use linux::spawn::SingleThread;

use super::attempt::{During, become_root_of, in_child};
use super::{Check, setting, storage};
use crate::range;

/// The fix when no known kernel switch explains the failure; a container is the most common reason.
const IN_A_CONTAINER: &str = "in a container: let it make user namespaces and mounts (for Docker \
    `--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`, \
    and `--privileged` for limits)";

pub(super) fn checks(state: &Path, uid_base: u32, rootless: bool) -> Vec<Check> {
    let mut checks =
        vec![user_namespaces(rootless), overlay(rootless), fresh_proc(), net(), nested(), mount_api(state)];
    if rootless {
        checks.push(one_user());
    } else {
        checks.push(idmapped(state, uid_base));
        checks.push(ranges(uid_base));
    }
    checks
}

/// Also mounts a tmpfs: where AppArmor restricts user namespaces, they can still be created, but
/// processes in them have no capabilities.
fn user_namespaces(rootless: bool) -> Check {
    let tried = in_child(|| {
        become_root_of(Namespaces::MOUNT.and(Namespaces::IPC).and(Namespaces::UTS))?;
        scratch()?;
        Ok("root inside may mount".to_owned())
    });
    let check = Check::required("user namespaces", tried);
    match check.status {
        super::Status::Ok => check,
        _ => check.fix(user_namespace_fix(rootless)),
    }
}

fn user_namespace_fix(rootless: bool) -> String {
    if setting("/proc/sys/user/max_user_namespaces").as_deref() == Some("0") {
        return "`sysctl -w user.max_user_namespaces=15000`, and the same line without `sysctl -w` in \
                /etc/sysctl.d/90-coracle.conf"
            .to_owned();
    }
    if rootless && setting("/proc/sys/kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "`sysctl -w kernel.unprivileged_userns_clone=1`, and the same line without `sysctl -w` in \
                /etc/sysctl.d/90-coracle.conf"
            .to_owned();
    }
    let restricted = setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
    if rootless && restricted.as_deref() == Some("1") {
        let program = fs::read_link("/proc/self/exe").unwrap_or_else(|_| "/usr/local/bin/coracle".into());
        return apparmor_fix(&program);
    }
    IN_A_CONTAINER.to_owned()
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

fn overlay(rootless: bool) -> Check {
    let tried = in_child(|| {
        become_root_of(Namespaces::MOUNT)?;
        let scratch = scratch()?;
        for name in ["lower", "upper", "work", "merged"] {
            fs::create_dir(scratch.join(name)).during("make a directory")?;
        }
        fs::write(scratch.join("lower/file"), "below").during("write below")?;
        let part = |name: &str| scratch.join(name).to_string_lossy().into_owned();
        let merged = scratch.join("merged");
        mounts::overlay(&[&part("lower")], &part("upper"), &part("work"), &merged).during("mount one")?;
        fs::write(merged.join("file"), "above").during("write through it")?;
        fs::remove_file(merged.join("file")).during("remove through it")?;
        Ok("can be mounted in a user namespace".to_owned())
    });
    let fix = if rootless {
        "`modprobe overlay` as root; if user namespaces fail, fix those first"
    } else {
        "`modprobe overlay`"
    };
    Check::required("overlay", tried).fix_if_missing(fix)
}

/// Containers often mask parts of /proc, and then the kernel forbids mounting a fresh one.
fn fresh_proc() -> Check {
    let tried = in_child(|| {
        become_root_of(Namespaces::MOUNT.and(Namespaces::PID))?;
        // Only children of the process that called unshare are in the new pid namespace.
        in_child(|| {
            let scratch = scratch()?;
            mounts::mount("proc", &scratch, Attributes::default(), "").during("mount one")?;
            Ok("can be mounted in a pid namespace".to_owned())
        })
    });
    Check::required("fresh /proc", tried).fix_if_missing(IN_A_CONTAINER)
}

fn net() -> Check {
    let tried = in_child(|| {
        become_root_of(Namespaces::NET)?;
        namespaces::raise_loopback().during("bring loopback up")?;
        Ok("a separate network, loopback up".to_owned())
    });
    Check::required("net namespaces", tried).fix_if_missing(IN_A_CONTAINER)
}

/// Processes inside a sandbox must not create user namespaces, because those give capabilities
/// back.
fn nested() -> Check {
    let tried = in_child(|| {
        become_root_of(Namespaces::NONE)?;
        fs::write("/proc/sys/user/max_user_namespaces", "0").during("set the limit")?;
        match namespaces::unshare(Namespaces::USER) {
            Ok(()) => Err("a user namespace was created in spite of the limit".to_owned()),
            Err(_) => Ok("can be forbidden inside".to_owned()),
        }
    });
    Check::required("nested user namespaces", tried).fix_if_missing(IN_A_CONTAINER)
}

fn mount_api(state: &Path) -> Check {
    let place = storage::existing(state);
    let tried = in_child(|| {
        become_root_of(Namespaces::MOUNT)?;
        let copy = mounts::clone_tree(&place, Depth::Recursive).during("clone a mount")?;
        mounts::set_attributes(copy.as_fd(), Attributes::NO_DEV, None, Depth::Single)
            .during("set its attributes")?;
        Ok("detached mounts with attributes".to_owned())
    });
    Check::required("mount interface", tried).fix_if_missing(IN_A_CONTAINER)
}

/// Every filesystem visible in a sandbox must support showing its files under other owners.
fn idmapped(state: &Path, uid_base: u32) -> Check {
    let name = "idmapped mounts";
    let Some(outside) =
        uid_base.checked_add(range::WIDTH).filter(|first| first.checked_add(range::WIDTH).is_some())
    else {
        return Check::missing(name, format!("there are not enough ids from {uid_base} on to map owners to"))
            .fix("choose another base for uid ranges in the configuration");
    };
    for place in [Path::new("/usr"), &storage::existing(state)] {
        let tried = in_child(|| {
            let thread = SingleThread::prove().during("count threads")?;
            let map = [Extent { inside: 0, outside, count: range::WIDTH }];
            let owners =
                namespaces::empty_user_namespace(&thread, &map, &map).during("make a user namespace")?;
            namespaces::unshare(Namespaces::MOUNT).during("make a mount namespace")?;
            let copy = mounts::clone_tree(place, Depth::Single).during("clone the mount")?;
            mounts::set_attributes(copy.as_fd(), Attributes::READ_ONLY, Some(owners.as_fd()), Depth::Single)
                .during("map its owners")?;
            Ok(String::new())
        });
        if let Err(error) = tried {
            return Check::missing(name, format!("`{}`: {error}", place.display()))
                .fix("keep it on ext4, xfs or btrfs, on a kernel of version 5.19 or later");
        }
    }
    Check::ok(name, "`/usr` and the state directory can be shown under other owners")
}

fn ranges(uid_base: u32) -> Check {
    let name = "uid ranges";
    match range::free_ranges(uid_base) {
        Ok(count) if count >= 1000 => {
            Check::ok(name, format!("{count} of {} ids each, from {uid_base} on", range::WIDTH))
        }
        Ok(count) => {
            let detail = format!("only {count} are free of /etc/subuid and /etc/subgid");
            Check::weaker(name, detail, "no more sandboxes than that can be alive at once")
                .fix("choose another base for uid ranges in the configuration")
        }
        Err(error) => {
            let fix = error.hint().unwrap_or("make /etc/subuid and /etc/subgid readable");
            Check::missing(name, error.to_string()).fix(fix)
        }
    }
}

fn one_user() -> Check {
    let id = rustix::process::getuid().as_raw();
    let detail = format!("one user: root inside is {id} outside; entries in /etc/subuid are not used");
    let consequence = "users other than root are not available inside, changing owners fails, and existing files \
        of `/usr` cannot be changed; new ones can be added";
    Check::weaker("users inside", detail, consequence)
        .fix("run as root: each sandbox then has its own 65536 ids")
}

/// Mounts an empty tmpfs in this mount namespace, over a directory that exists on every host.
fn scratch() -> Result<std::path::PathBuf, String> {
    mounts::make_private().during("make mounts private")?;
    let place = std::env::temp_dir();
    mounts::mount("tmpfs", &place, Attributes::NO_DEV, "size=1m").during("mount a tmpfs")?;
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

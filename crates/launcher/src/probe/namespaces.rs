//! Namespaces and the operations a jail performs in them: overlays, a fresh /proc, mapped owners.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use linux::mounts::{self, MountAttrs, MountDepth};
use linux::namespaces::{self, IdMapExtent, NamespaceSet};
use linux::spawn::SingleThread;

use super::attempt::{ProbeErrorContext, become_root_of, run_in_child};
use super::container_facts::{ContainerFacts, ContainerNeed};
use super::{CheckStatus, HostCheck, kernel, read_kernel_setting, storage};
use crate::images::HostPrograms;
use crate::uid_ranges;

/// The fix when no known kernel switch explains the failure; a container is the most common reason.
const CONTAINER_FIX: &str = "in a container: let it make user namespaces and mounts (for Docker \
    `--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined`, \
    and `--privileged` for limits)";

const HIDDEN_PROC_FIX: &str = "something is mounted over a part of /proc, so the kernel refuses to show all of it: in a \
    container, start it with `--security-opt systempaths=unconfined`";

const MAP_ROOT_FIX: &str = "uid 0 can be mapped into a user namespace only with CAP_SETFCAP: run coracle as another user \
    (in a container `--user 1000`), or give it that capability (`--cap-add SETFCAP`)";

/// The filesystems that a privileged server's image `host` and state directory can be on.
const MAPPABLE_FILESYSTEMS: &str = "ext4, xfs or btrfs";

const OTHER_IMAGE_FIX: &str = "use another image: `coracle image pull docker.io/library/debian:12` or `coracle image import NAME \
    ARCHIVE`, then `coracle run --image NAME`; for the image `host`, mount /usr from a disk with ext4, xfs or btrfs";

const USER_NAMESPACES: &str = "user namespaces";
/// The checks that need user namespaces.
const DEPENDENT_CHECKS: [&str; 6] =
    ["landlock", "overlay", "fresh /proc", "net namespaces", "nested user namespaces", "mount interface"];

/// Runs the checks in the order in which one depends on another, so that one cause is reported once.
pub(super) fn run_checks(
    state: &Path,
    uid_base: u32,
    rootless: bool,
    facts: &ContainerFacts,
) -> Vec<HostCheck> {
    if let Some(blocked) = facts.check_blocked_calls() {
        let dependent = ["seccomp", USER_NAMESPACES].into_iter().chain(DEPENDENT_CHECKS);
        let untried = dependent.map(|name| HostCheck::untried(name, &blocked.name)).collect::<Vec<_>>();
        return std::iter::once(blocked).chain(untried).collect();
    }
    let namespaces = check_user_namespaces(rootless, facts);
    if namespaces.status != CheckStatus::Ok {
        let untried = DEPENDENT_CHECKS.map(|name| HostCheck::untried(name, USER_NAMESPACES));
        return [kernel::check_seccomp(), namespaces].into_iter().chain(untried).collect();
    }
    let mut checks = vec![
        kernel::check_seccomp(),
        namespaces,
        kernel::check_landlock(),
        check_overlay(rootless),
        check_net_namespaces(),
        check_mount_api(state),
    ];
    checks.extend(check_proc());
    if rootless {
        checks.extend([report_single_user(), check_host_image(lower_usr)]);
    } else {
        let place = storage::existing_ancestor(state);
        checks.push(check_idmapped_state(&place, uid_base));
        checks.push(check_uid_ranges(uid_base));
        checks.push(check_host_image(|| map_owners(Path::new("/usr"), uid_base)));
    }
    checks
}

/// Also mounts a tmpfs: where AppArmor restricts user namespaces, they can still be created, but
/// processes in them have no capabilities.
fn check_user_namespaces(rootless: bool, facts: &ContainerFacts) -> HostCheck {
    let tried = run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT.and(NamespaceSet::IPC).and(NamespaceSet::UTS))?;
        mount_scratch()?;
        Ok("root inside may mount".to_owned())
    });
    let check = HostCheck::from_attempt(USER_NAMESPACES, tried);
    match check.status {
        CheckStatus::Ok => check,
        _ if !facts.can_map_own_id => check.with_fix(MAP_ROOT_FIX).with_needs(&facts.hidden_needs()),
        _ => {
            let mut needs = vec![ContainerNeed::SystemCalls];
            needs.extend(facts.hidden_needs());
            let fix = user_namespace_fix(rootless).unwrap_or_else(|| CONTAINER_FIX.to_owned());
            check.with_fix(fix).with_needs(&needs)
        }
    }
}

/// Returns how to allow user namespaces, if a setting of the kernel forbids or restricts them.
pub(crate) fn user_namespace_fix(rootless: bool) -> Option<String> {
    let is = |path, value| read_kernel_setting(path).as_deref() == Some(value);
    let set = |setting| {
        format!(
            "`sysctl -w {setting}`, and the same line without `sysctl -w` in /etc/sysctl.d/90-coracle.conf"
        )
    };
    if is("/proc/sys/user/max_user_namespaces", "0") {
        return Some(set("user.max_user_namespaces=15000"));
    }
    if rootless && is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        return Some(set("kernel.unprivileged_userns_clone=1"));
    }
    if rootless && is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        let program = fs::read_link("/proc/self/exe").unwrap_or_else(|_| "/usr/local/bin/coracle".into());
        return Some(apparmor_fix(&program));
    }
    None
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

/// A container that hides parts of /proc also shows its settings read-only, so the second check would fail
/// for the same cause.
fn check_proc() -> [HostCheck; 2] {
    let fresh = check_fresh_proc();
    let nested = if fresh.status == CheckStatus::Ok {
        check_nested_namespaces()
    } else {
        HostCheck::untried("nested user namespaces", &fresh.name)
    };
    [fresh, nested]
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
    match tried {
        Ok(detail) => HostCheck::ok("fresh /proc", detail),
        Err(detail) => HostCheck::missing("fresh /proc", detail)
            .with_fix(HIDDEN_PROC_FIX)
            .with_needs(&[ContainerNeed::WholeProc]),
    }
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

/// The disks of sandboxes and the layers of images are shown to sandboxes under other owners.
fn check_idmapped_state(place: &Path, uid_base: u32) -> HostCheck {
    let name = "idmapped mounts";
    match map_owners(place, uid_base) {
        Ok(_) => HostCheck::ok(name, "files of the state directory can be shown under other owners"),
        Err(error) => HostCheck::missing(name, format!("`{}`: {error}", place.display()))
            .with_fix(format!(
                "keep the state directory on {MAPPABLE_FILESYSTEMS}, on a kernel of version 5.19 or later; in a \
                 container, mount a volume at /var/lib/coracle"
            ))
            .with_needs(&[ContainerNeed::StateVolume]),
    }
}

/// Tries to show the files of `place` under the owners of a sandbox.
fn map_owners(place: &Path, uid_base: u32) -> Result<String, String> {
    let outside = uid_base
        .checked_add(uid_ranges::IDS_PER_RANGE)
        .filter(|first| first.checked_add(uid_ranges::IDS_PER_RANGE).is_some())
        .ok_or_else(|| format!("there are not enough ids from {uid_base} on to map owners to"))?;
    run_in_child(|| {
        let thread = SingleThread::prove().during("count threads")?;
        let map = [IdMapExtent { inside: 0, outside, count: uid_ranges::IDS_PER_RANGE }];
        let owners =
            namespaces::create_user_namespace(&thread, &map, &map).during("make a user namespace")?;
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).during("make a mount namespace")?;
        let copy = mounts::clone_tree(place, MountDepth::Single).during("clone the mount")?;
        mounts::set_attributes(copy.as_fd(), MountAttrs::READ_ONLY, Some(owners.as_fd()), MountDepth::Single)
            .during("map its owners")?;
        Ok(String::new())
    })
}

/// The image `host` shows the /usr of this host. Other images are in the state directory.
fn check_host_image(attempt: impl FnOnce() -> Result<String, String>) -> HostCheck {
    let name = "image host";
    match attempt() {
        Ok(_) => HostCheck::ok(name, HostPrograms::of_this_host().read_software().summary()),
        Err(error) => {
            let detail = format!("/usr is on {}: {error}", storage::filesystem_name(Path::new("/usr")));
            let consequence = "only the image `host` is unavailable; imported and pulled images work";
            HostCheck::weaker(name, detail, consequence).with_fix(OTHER_IMAGE_FIX)
        }
    }
}

/// Tries to use /usr as the lower layer of an overlay, as the sandboxes of an ordinary user do.
fn lower_usr() -> Result<String, String> {
    run_in_child(|| {
        become_root_of(NamespaceSet::MOUNT)?;
        let usr = mounts::clone_tree(Path::new("/usr"), MountDepth::Single).during("clone the mount")?;
        let attributes = MountAttrs::READ_ONLY.and(MountAttrs::NO_DEV);
        mounts::set_attributes(usr.as_fd(), attributes, None, MountDepth::Single)
            .during("set its attributes")?;
        let scratch = mount_scratch()?;
        for name in ["lower", "upper", "work", "merged"] {
            fs::create_dir(scratch.join(name)).during("make a directory")?;
        }
        mounts::attach_mount(usr.as_fd(), &scratch.join("lower")).during("attach the mount")?;
        let part = |name: &str| scratch.join(name).to_string_lossy().into_owned();
        mounts::mount_overlay(&[&part("lower")], &part("upper"), &part("work"), &scratch.join("merged"))
            .during("mount an overlay on it")?;
        Ok(String::new())
    })
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

//! Control groups: which limits are enforced, and whether commands can be frozen and killed as a
//! tree.

use std::path::Path;

use super::attempt::ProbeErrorContext;
use super::container_facts::ContainerNeed;
use super::{EnforcedLimit, HostCheck};
use crate::cgroups::{self, CgroupHierarchies};
use crate::jail::plan::{JailLimits, LimitName};

/// The support for control groups on this host.
pub(super) struct CgroupSupport {
    pub(super) checks: Vec<HostCheck>,
    pub(super) enforced: Vec<EnforcedLimit>,
}

const CONTROLLER_LIMITS: [(&str, LimitName); 3] =
    [("memory", LimitName::Memory), ("cpu", LimitName::Cpus), ("pids", LimitName::Pids)];

const MOUNT_FIX: &str = "mount the v2 hierarchy: `mount -t cgroup2 none /sys/fs/cgroup/unified` beside v1, or boot \
    with `systemd.unified_cgroup_hierarchy=1`; in a container, make /sys/fs/cgroup writable";

/// How an unprivileged user gets a group, and how root delegates all controllers to all users.
const DELEGATE_FIX: &str = "start coracle in a control group of its own:\n\
    systemd-run --user --scope -p Delegate=yes coracle serve\n\
    or in a user unit with `Delegate=yes`. For all controllers root writes this to \
    /etc/systemd/system/user@.service.d/delegate.conf and runs `systemctl daemon-reload`:\n\
    [Service]\n\
    Delegate=cpu memory pids";

/// On a host where cgroup v1 holds the controllers, none of them can be delegated.
const UNIFY_FIX: &str = "boot with `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` on the kernel's command line: \
    controllers of cgroup v1 cannot be delegated; then start coracle with \
    `systemd-run --user --scope -p Delegate=yes coracle serve`";

const CONTAINER_FIX: &str = "engines give writable control groups only to privileged containers: start it with \
    `--privileged`; the container's own limits hold for all sandboxes together in any case";

fn delegation_fix(in_container: bool) -> &'static str {
    if in_container {
        return CONTAINER_FIX;
    }
    if cgroups::has_legacy_controllers() { UNIFY_FIX } else { DELEGATE_FIX }
}

pub(super) fn probe_cgroups(state: &Path, rootless: bool, in_container: bool) -> CgroupSupport {
    let instance = format!("doctor{}", rustix::process::getpid().as_raw_nonzero());
    let found = if rootless {
        CgroupHierarchies::find_delegated(&instance, state)
    } else {
        CgroupHierarchies::find_for_root(&instance)
    };
    let mut found = match found.during("find them") {
        Ok(found) if found.can_make() => found,
        Ok(found) => {
            let reason = found.unenforced_reason().unwrap_or("no control group was delegated to us");
            return without_cgroups(reason, in_container);
        }
        Err(error) if rootless => return without_cgroups(&error, in_container),
        Err(error) => {
            let check = HostCheck::missing("control groups", error).with_fix(MOUNT_FIX);
            let checks = vec![check.with_needs(&[ContainerNeed::Privileges])];
            return CgroupSupport { checks, enforced: Vec::new() };
        }
    };
    let tried = try_groups(&mut found);
    if let (true, Err(error)) = (rootless, &tried) {
        return without_cgroups(error, in_container);
    }
    let mut checks = vec![match tried {
        Ok(detail) => HostCheck::ok("control groups", detail),
        Err(detail) => HostCheck::missing("control groups", detail)
            .with_fix(MOUNT_FIX)
            .with_needs(&[ContainerNeed::Privileges]),
    }];
    checks.extend(
        CONTROLLER_LIMITS
            .iter()
            .map(|(name, limit)| check_controller(&found, name, *limit, rootless, in_container)),
    );
    let mut enforced: Vec<EnforcedLimit> =
        CONTROLLER_LIMITS.iter().map(|(name, limit)| limit_enforcement(Some(&found), name, *limit)).collect();
    enforced.push(enforced_by("kill", Some("cgroup.kill")));
    enforced.push(enforced_by("pause", Some("cgroup.freeze")));
    CgroupSupport { checks, enforced }
}

/// Creates groups as for a sandbox, freezes them, kills them, and removes everything again.
fn try_groups(found: &mut CgroupHierarchies) -> Result<String, String> {
    let id = &super::probe_id();
    let limits = JailLimits { memory: 64 << 20, cpus: 500, pids: 64, disk: 0 };
    let tried = found.open().during("make our own group").and_then(|()| {
        let owner = rustix::process::geteuid().as_raw();
        let made =
            found.make_for_sandbox(id, &limits, owner).during("make a sandbox's groups").and_then(|groups| {
                drop(groups);
                found.set_frozen(id, true).during("freeze")?;
                found.set_frozen(id, false).during("thaw")?;
                found.kill_processes(id).during("kill")
            });
        // Groups that were only partly created must be removed as well.
        found.remove(id).during("remove a sandbox's groups").and(made)
    });
    found.close().during("remove our own group").and(tried)?;
    Ok("groups can be made, frozen and killed".to_owned())
}

fn check_controller(
    found: &CgroupHierarchies,
    name: &str,
    limit: LimitName,
    rootless: bool,
    in_container: bool,
) -> HostCheck {
    let title = format!("{name} controller");
    if found.enforces(limit) {
        return HostCheck::ok(&title, found.version_label(limit));
    }
    let consequence = match limit {
        LimitName::Pids if rootless => "RLIMIT_NPROC limits processes instead".to_owned(),
        LimitName::Pids => {
            "only RLIMIT_NPROC limits processes; creating a sandbox with an explicit limit fails".to_owned()
        }
        _ => format!("limits on {name} are not enforced; creating a sandbox with one fails"),
    };
    if rootless {
        let detail = found.unenforced_reason().unwrap_or("not delegated to our control group");
        return HostCheck::weaker(&title, detail, &consequence).with_fix(delegation_fix(in_container));
    }
    HostCheck::weaker(&title, "in neither hierarchy", &consequence)
        .with_fix(format!("remove `cgroup_disable={name}` from the kernel's command line and boot again"))
}

fn limit_enforcement(found: Option<&CgroupHierarchies>, name: &str, limit: LimitName) -> EnforcedLimit {
    let by_group = found.filter(|found| found.enforces(limit)).map(|found| found.version_label(limit));
    let by_rlimit = (limit == LimitName::Pids).then_some("RLIMIT_NPROC");
    enforced_by(name, by_group.or(by_rlimit))
}

/// The result for an unprivileged user without a delegated group; cgroup v1 cannot be delegated at
/// all.
fn without_cgroups(reason: &str, in_container: bool) -> CgroupSupport {
    let consequence = "memory and cpu limits are not enforced and creating a sandbox with one fails, RLIMIT_NPROC \
        limits processes, commands cannot be paused, and killing one may miss processes that keep forking";
    let check = HostCheck::weaker("control groups", reason, consequence)
        .with_fix(delegation_fix(in_container))
        .with_needs(&[ContainerNeed::Privileges]);
    let mut enforced: Vec<EnforcedLimit> =
        CONTROLLER_LIMITS.iter().map(|(name, limit)| limit_enforcement(None, name, *limit)).collect();
    enforced.push(enforced_by("kill", Some("a subreaping runner")));
    enforced.push(enforced_by("pause", None));
    CgroupSupport { checks: vec![check], enforced }
}

fn enforced_by(what: &str, means: Option<&str>) -> EnforcedLimit {
    EnforcedLimit { what: what.to_owned(), by: means.map(str::to_owned) }
}

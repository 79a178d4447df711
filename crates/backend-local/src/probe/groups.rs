//! Control groups: which limits are enforced, and whether commands can be frozen and killed as a
//! tree.

use std::path::Path;

use super::attempt::During;
use super::{Check, Enforced};
use crate::cgroups::{self, Hierarchies};
use crate::jail::plan::{LimitName, Limits};

/// The support for control groups on this host.
pub(super) struct Groups {
    pub(super) checks: Vec<Check>,
    pub(super) enforced: Vec<Enforced>,
}

const LIMITS: [(&str, LimitName); 3] =
    [("memory", LimitName::Memory), ("cpu", LimitName::Cpus), ("pids", LimitName::Pids)];

const MOUNT: &str = "mount the v2 hierarchy: `mount -t cgroup2 none /sys/fs/cgroup/unified` beside v1, or boot \
    with `systemd.unified_cgroup_hierarchy=1`; in a container, make /sys/fs/cgroup writable";

/// How an unprivileged user gets a group, and how root delegates all controllers to all users.
const DELEGATE: &str = "start coracle in a control group of its own:\n\
    systemd-run --user --scope -p Delegate=yes coracle serve\n\
    or in a user unit with `Delegate=yes`. For all controllers root writes this to \
    /etc/systemd/system/user@.service.d/delegate.conf and runs `systemctl daemon-reload`:\n\
    [Service]\n\
    Delegate=cpu memory pids";

/// On a host where cgroup v1 holds the controllers, none of them can be delegated.
const UNIFY: &str = "boot with `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` on the kernel's command line: \
    controllers of cgroup v1 cannot be delegated; then start coracle with \
    `systemd-run --user --scope -p Delegate=yes coracle serve`";

fn delegation_fix() -> &'static str {
    if cgroups::has_legacy_controllers() { UNIFY } else { DELEGATE }
}

pub(super) fn look(state: &Path, rootless: bool) -> Groups {
    let instance = format!("doctor{}", rustix::process::getpid().as_raw_nonzero());
    let found =
        if rootless { Hierarchies::delegated(&instance, state) } else { Hierarchies::find(&instance) };
    let mut found = match found.during("find them") {
        Ok(found) if found.can_make() => found,
        Ok(found) => return without(found.shortfall().unwrap_or("no control group was delegated to us")),
        Err(error) if rootless => return without(&error),
        Err(error) => {
            let checks = vec![Check::missing("control groups", error).fix(MOUNT)];
            return Groups { checks, enforced: Vec::new() };
        }
    };
    let tried = exercise(&mut found);
    if let (true, Err(error)) = (rootless, &tried) {
        return without(error);
    }
    let mut checks = vec![Check::required("control groups", tried).fix_if_missing(MOUNT)];
    checks.extend(LIMITS.iter().map(|(name, limit)| controller(&found, name, *limit, rootless)));
    let mut enforced: Vec<Enforced> =
        LIMITS.iter().map(|(name, limit)| bound(Some(&found), name, *limit)).collect();
    enforced.push(by("kill", Some("cgroup.kill")));
    enforced.push(by("pause", Some("cgroup.freeze")));
    Groups { checks, enforced }
}

/// Creates groups as for a sandbox, freezes them, kills them, and removes everything again.
fn exercise(found: &mut Hierarchies) -> Result<String, String> {
    const ID: &str = "doctor";
    let limits = Limits { memory: 64 << 20, cpus: 500, pids: 64, disk: 0 };
    let tried = found.open().during("make our own group").and_then(|()| {
        let owner = rustix::process::geteuid().as_raw();
        let made = found.make(ID, &limits, owner).during("make a sandbox's groups").and_then(|groups| {
            drop(groups);
            found.freeze(ID, true).during("freeze")?;
            found.freeze(ID, false).during("thaw")?;
            found.kill(ID).during("kill")
        });
        // Groups that were only partly created must be removed as well.
        found.remove(ID).during("remove a sandbox's groups").and(made)
    });
    found.close().during("remove our own group").and(tried)?;
    Ok("groups can be made, frozen and killed".to_owned())
}

fn controller(found: &Hierarchies, name: &str, limit: LimitName, rootless: bool) -> Check {
    let title = format!("{name} controller");
    if found.enforces(limit) {
        return Check::ok(&title, found.version(limit));
    }
    let consequence = match limit {
        LimitName::Pids if rootless => "RLIMIT_NPROC limits processes instead".to_owned(),
        LimitName::Pids => {
            "only RLIMIT_NPROC limits processes; creating a sandbox with an explicit limit fails".to_owned()
        }
        _ => format!("limits on {name} are not enforced; creating a sandbox with one fails"),
    };
    if rootless {
        let detail = found.shortfall().unwrap_or("not delegated to our control group");
        return Check::weaker(&title, detail, &consequence).fix(delegation_fix());
    }
    Check::weaker(&title, "in neither hierarchy", &consequence)
        .fix(format!("remove `cgroup_disable={name}` from the kernel's command line and boot again"))
}

fn bound(found: Option<&Hierarchies>, name: &str, limit: LimitName) -> Enforced {
    let by_group = found.filter(|found| found.enforces(limit)).map(|found| found.version(limit));
    let by_rlimit = (limit == LimitName::Pids).then_some("RLIMIT_NPROC");
    by(name, by_group.or(by_rlimit))
}

/// The result for an unprivileged user without a delegated group; cgroup v1 cannot be delegated at
/// all.
fn without(reason: &str) -> Groups {
    let consequence = "memory and cpu limits are not enforced and creating a sandbox with one fails, RLIMIT_NPROC \
        limits processes, commands cannot be paused, and killing one may miss processes that keep forking";
    let check = Check::weaker("control groups", reason, consequence).fix(delegation_fix());
    let mut enforced: Vec<Enforced> = LIMITS.iter().map(|(name, limit)| bound(None, name, *limit)).collect();
    enforced.push(by("kill", Some("a subreaping runner")));
    enforced.push(by("pause", None));
    Groups { checks: vec![check], enforced }
}

fn by(what: &str, means: Option<&str>) -> Enforced {
    Enforced { what: what.to_owned(), by: means.map(str::to_owned) }
}

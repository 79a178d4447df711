//! Control groups: which limits hold, whether commands can be frozen and killed as a tree.

use super::attempt::During;
use super::{Check, Enforced};
use crate::cgroups::Hierarchies;
use crate::jail::plan::{LimitName, Limits};

/// What control groups do for sandboxes here.
pub(super) struct Groups {
    pub(super) checks: Vec<Check>,
    pub(super) enforced: Vec<Enforced>,
}

const LIMITS: [(&str, LimitName); 3] =
    [("memory", LimitName::Memory), ("cpu", LimitName::Cpus), ("pids", LimitName::Pids)];

const DELEGATE: &str = "mount the v2 hierarchy: `mount -t cgroup2 none /sys/fs/cgroup/unified` beside v1, or boot \
    with `systemd.unified_cgroup_hierarchy=1`; in a container, make /sys/fs/cgroup writable";

pub(super) fn look(rootless: bool) -> Groups {
    if rootless {
        return without();
    }
    let instance = format!("doctor{}", rustix::process::getpid().as_raw_nonzero());
    let found = match Hierarchies::find(&instance).during("find them") {
        Ok(found) => found,
        Err(error) => {
            let checks = vec![Check::missing("control groups", error).fix(DELEGATE)];
            return Groups { checks, enforced: Vec::new() };
        }
    };
    let tried = exercise(&found);
    let mut checks = vec![Check::required("control groups", tried).fix_if_missing(DELEGATE)];
    checks.extend(LIMITS.iter().map(|(name, limit)| controller(&found, name, *limit)));
    let mut enforced: Vec<Enforced> =
        LIMITS.iter().map(|(name, limit)| bound(&found, name, *limit)).collect();
    enforced.push(by("kill", Some("cgroup.kill")));
    enforced.push(by("pause", Some("cgroup.freeze")));
    Groups { checks, enforced }
}

/// Makes groups as for a sandbox, freezes them, kills them, and takes all away again.
fn exercise(found: &Hierarchies) -> Result<String, String> {
    const ID: &str = "doctor";
    let limits = Limits { memory: 64 << 20, cpus: 500, pids: 64, disk: 0 };
    let tried = found.open().during("make our own group").and_then(|()| {
        let made = found.make(ID, &limits, 0).during("make a sandbox's groups").and_then(|groups| {
            drop(groups);
            found.freeze(ID, true).during("freeze")?;
            found.freeze(ID, false).during("thaw")?;
            found.kill(ID).during("kill")
        });
        // Also what was made in part has to go.
        found.remove(ID).during("remove a sandbox's groups").and(made)
    });
    found.close().during("remove our own group").and(tried)?;
    Ok("groups can be made, frozen and killed".to_owned())
}

fn controller(found: &Hierarchies, name: &str, limit: LimitName) -> Check {
    let title = format!("{name} controller");
    if found.enforces(limit) {
        return Check::ok(&title, found.version(limit));
    }
    let consequence = format!("no limit on {name} holds; creates that name one are refused");
    Check::weaker(&title, "in neither hierarchy", &consequence)
        .fix(format!("remove `cgroup_disable={name}` from the kernel's command line and boot again"))
}

fn bound(found: &Hierarchies, name: &str, limit: LimitName) -> Enforced {
    by(name, found.enforces(limit).then(|| found.version(limit)))
}

/// As an ordinary user: groups belong to root, and v1 cannot be delegated at all.
fn without() -> Groups {
    let consequence = "no limit on memory or cpu holds, RLIMIT_NPROC alone bounds processes, commands cannot \
        be paused, and killing one may miss processes that keep forking";
    let check = Check::weaker("control groups", "not used for an ordinary user", consequence)
        .fix("run as root: control groups are used only then");
    let mut enforced: Vec<Enforced> = LIMITS.iter().map(|(name, _)| by(name, None)).collect();
    enforced.push(by("kill", Some("a subreaping runner")));
    enforced.push(by("pause", None));
    Groups { checks: vec![check], enforced }
}

fn by(what: &str, means: Option<&str>) -> Enforced {
    Enforced { what: what.to_owned(), by: means.map(str::to_owned) }
}

//! Checks the mounts of a plan and opens their sources.
//!
//! A compromised server can name any path. It gets only paths below the directories that the operator
//! listed; that list comes from the supervisor and not from the server.

use std::path::{Component, Path, PathBuf};

use domain::volume::{is_beneath, is_target};

use super::protocol::{MountFault, Refusal};
use super::{Launcher, Rights};
use crate::jail::enter::EntryMount;
use crate::jail::owners;
use crate::jail::plan::{JailPlan, MountPlan, SourcePlan};
use crate::jail::sources::{Ids, Opened, Place, Site, SourceError};
use crate::settings::{Allowed, MountRule};

/// The largest number of mounts: more than any sandbox needs, and few enough that their descriptors fit
/// into one message.
const MOST: usize = 64;

/// The mounts of one plan, opened.
pub(super) struct Gathered {
    pub entries: Vec<EntryMount>,
    pub opened: Vec<Opened>,
    /// A description of each mount for users.
    pub measures: Vec<(String, String)>,
}

impl Launcher {
    /// Checks and opens the sources. Targets that may contain other targets come first.
    pub(super) fn gather_mounts(&self, plans: &[MountPlan]) -> Result<Gathered, Refusal> {
        if plans.len() > MOST {
            let message = format!("{} mounts are more than one sandbox may have ({MOST})", plans.len());
            return Err(Refusal::amount(message, "leave some of them out".to_owned()));
        }
        let mut plans: Vec<&MountPlan> = plans.iter().collect();
        plans.sort_by_key(|plan| plan.target.split('/').filter(|word| !word.is_empty()).count());
        let mut gathered = Gathered { entries: Vec::new(), opened: Vec::new(), measures: Vec::new() };
        for plan in plans {
            let site = self.site(plan)?;
            let opened = site.open(&self.thread).map_err(|error| refuse_source(&error))?;
            self.check_owner(&opened)?;
            gathered.opened.push(opened);
            gathered.measures.push((format!("mount {}", plan.target), describe(plan)));
            let (target, read_only) = (plan.target.clone(), plan.read_only);
            gathered.entries.push(EntryMount { site, target, read_only });
        }
        Ok(gathered)
    }

    fn site(&self, plan: &MountPlan) -> Result<Site, Refusal> {
        let trusted = self.settings.mounts == MountRule::Allow;
        if !trusted && !is_target(&plan.target) {
            let message = format!("mount target `{}` is not allowed", plan.target);
            return Err(Refusal::mount(
                MountFault::Target,
                message,
                Some("name an absolute path without `..`"),
            ));
        }
        if let Some(sub_path) = plan.sub_path.as_ref().filter(|sub_path| !is_beneath(sub_path)) {
            let message = format!("sub path `{sub_path}` is not a plain relative path");
            return Err(Refusal::mount(MountFault::SubPath, message, None));
        }
        let place = match &plan.source {
            SourcePlan::Host(path) => self.host_place(path)?,
            SourcePlan::Volume(id) => self.volume_place(id)?,
        };
        Ok(Site { place, sub_path: plan.sub_path.as_ref().map(PathBuf::from) })
    }

    /// Returns the location of a host path, if it may be mounted.
    fn host_place(&self, path: &Path) -> Result<Place, Refusal> {
        let MountRule::Below(prefixes) = &self.settings.mounts else {
            return Ok(Place::Named(path.to_owned()));
        };
        beneath(prefixes, path).ok_or_else(|| {
            let message = if prefixes.is_empty() {
                "this server mounts no host directories".to_owned()
            } else {
                format!("`{}` is not below a directory that this server may mount", path.display())
            };
            let hint = "the operator lists them as `host_paths` under `[volumes]`";
            Refusal::mount(MountFault::NotAllowed, message, Some(hint))
        })
    }

    fn volume_place(&self, id: &str) -> Result<Place, Refusal> {
        let data = match &self.rights {
            Rights::Root(root) => root.volumes.named_data(id),
            Rights::User { .. } => None,
        };
        let missing = || Refusal::mount(MountFault::NoVolume, format!("volume `{id}` does not exist"), None);
        data.map(Place::Volume).ok_or_else(missing)
    }

    /// Refuses a directory that belongs to an id of a sandbox: it cannot be mapped into another sandbox.
    fn check_owner(&self, opened: &Opened) -> Result<(), Refusal> {
        match (&self.rights, opened.ids) {
            (Rights::Root(_), Ids::Host { uid, gid }) if uid >= owners::IDS || gid >= owners::IDS => {
                let message = "the directory does not belong to root or an ordinary user of this host";
                let hint = "mount a directory that belongs to root or an ordinary user";
                Err(Refusal::mount(MountFault::NotAllowed, message, Some(hint)))
            }
            _ => Ok(()),
        }
    }

    /// Whether a sandbox may write files that users of the host could execute. If host directories may
    /// be attached later, that is true for every sandbox.
    pub(super) fn refuses_set_id(&self, plan: &JailPlan) -> bool {
        let later = matches!(&self.settings.mounts, MountRule::Below(prefixes) if !prefixes.is_empty());
        plan.keep || later || plan.mounts.iter().any(writes_outside)
    }
}

/// Returns the location of `path` below the innermost allowed directory that contains it, in either
/// spelling. This follows no links: the operator's own links were resolved at startup.
fn beneath(allowed: &[Allowed], path: &Path) -> Option<Place> {
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.components().all(plain) {
        return None;
    }
    let spellings = allowed.iter().flat_map(|one| [(&one.written, &one.real), (&one.real, &one.real)]);
    let found = spellings.filter_map(|(named, real)| Some((named, real, path.strip_prefix(named).ok()?)));
    let (_, real, rest) = found.max_by_key(|(named, _, _)| named.components().count())?;
    Some(Place::Beneath { prefix: real.clone(), path: rest.to_owned() })
}

/// Whether a mount lets a sandbox write to a directory of the host.
pub(super) fn writes_outside(plan: &MountPlan) -> bool {
    !plan.read_only && matches!(plan.source, SourcePlan::Host(_))
}

/// Describes a mount, without its path on the host, which clients and code inside must not learn.
fn describe(plan: &MountPlan) -> String {
    let kind = match plan.source {
        SourcePlan::Host(_) => "directory of the host",
        SourcePlan::Volume(_) => "volume",
    };
    let access = if plan.read_only { "read-only" } else { "read-write" };
    format!("{kind}, {access}, nosuid, nodev")
}

fn refuse_source(error: &SourceError) -> Refusal {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    let fault = match error {
        SourceError::Missing(..) => MountFault::NotFound,
        SourceError::NotMade(..) => MountFault::NotMade,
        SourceError::SubPath(..) => MountFault::SubPath,
        SourceError::Io(..) => MountFault::Failed,
    };
    let hint = match error {
        SourceError::Missing(..) | SourceError::Io(..) => {
            "the source must be a directory, and its path must not contain links"
        }
        SourceError::NotMade(..) => {
            "the directory is made as the owner of its parent directory, who needs write access there"
        }
        SourceError::SubPath(..) => {
            "the sub path must be a directory below its source, and must not contain links"
        }
    };
    Refusal::mount(fault, format!("{error}{cause}"), Some(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, expected: Option<(&str, &str)>) {
        let pair = |written: &str, real: &str| Allowed { written: written.into(), real: real.into() };
        let allowed = [pair("/srv", "/srv"), pair("/srv/link", "/disk/models"), pair("/data/", "/disk")];
        let found = beneath(&allowed, Path::new(path)).map(|place| match place {
            Place::Beneath { prefix, path } => (prefix, path),
            other => panic!("{other:?} is not beneath anything"),
        });
        assert_eq!(found, expected.map(|(prefix, path)| (prefix.into(), path.into())), "{path}");
    }

    #[test]
    fn listed_directory_may_be_named_as_written_and_as_resolved() {
        check("/data/x", Some(("/disk", "x")));
        check("/disk/x", Some(("/disk", "x")));
        check("/data", Some(("/disk", "")));
        check("/srv/other", Some(("/srv", "other")));
        check("/srv/link/x/y", Some(("/disk/models", "x/y")));
        check("/disk/models/x", Some(("/disk/models", "x")));
    }

    #[test]
    fn paths_outside_of_listed_directories_are_refused() {
        for path in ["/data-not/x", "/disk2", "/", "/data/../etc", "data/x", "/srv/link/../../etc"] {
            check(path, None);
        }
    }
}

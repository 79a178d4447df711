//! Which mounts a plan may have, and where they come from.
//!
//! A server that was taken over can name any path. It gets what lies below the directories that
//! the operator listed, which the supervisor told us and not the server.

use std::path::{Component, Path, PathBuf};

use domain::volume::{is_beneath, is_target};

use super::protocol::{MountFault, Refusal};
use super::{Launcher, Rights};
use crate::jail::enter::EntryMount;
use crate::jail::owners;
use crate::jail::plan::{JailPlan, MountPlan, SourcePlan};
use crate::jail::sources::{Ids, Opened, Place, Site, SourceError};
use crate::settings::{Allowed, MountRule};

/// More than anybody needs, and few enough that their descriptors fit into one message.
const MOST: usize = 64;

/// The mounts of one plan, opened.
pub(super) struct Gathered {
    pub entries: Vec<EntryMount>,
    pub opened: Vec<Opened>,
    /// What each of them is, for people.
    pub measures: Vec<(String, String)>,
}

impl Launcher {
    /// Checks and opens the sources, those first whose targets may hold other targets.
    pub(super) fn gather_mounts(&self, plans: &[MountPlan]) -> Result<Gathered, Refusal> {
        if plans.len() > MOST {
            let message =
                format!("{} mounts are more than the {MOST} that one sandbox may have", plans.len());
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
            let message = format!("nothing can be mounted at `{}`", plan.target);
            return Err(Refusal::mount(
                MountFault::Target,
                message,
                Some("name an absolute path without `..`"),
            ));
        }
        if let Some(sub_path) = plan.sub_path.as_ref().filter(|sub_path| !is_beneath(sub_path)) {
            let message = format!("the sub path `{sub_path}` is not a plain relative path");
            return Err(Refusal::mount(MountFault::SubPath, message, None));
        }
        let place = match &plan.source {
            SourcePlan::Host(path) => self.host_place(path)?,
            SourcePlan::Volume(id) => self.volume_place(id)?,
        };
        Ok(Site { place, sub_path: plan.sub_path.as_ref().map(PathBuf::from) })
    }

    /// The place of a host path, if it may be mounted at all.
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
        let missing = || Refusal::mount(MountFault::NoVolume, format!("there is no volume `{id}`"), None);
        data.map(Place::Volume).ok_or_else(missing)
    }

    /// A directory that belongs to an id of some sandbox has no place in the map of another.
    fn check_owner(&self, opened: &Opened) -> Result<(), Refusal> {
        match (&self.rights, opened.ids) {
            (Rights::Root(_), Ids::Host { uid, gid }) if uid >= owners::IDS || gid >= owners::IDS => {
                let message = "the directory belongs to no ordinary user of this host";
                let hint = "mount a directory that belongs to root or an ordinary user";
                Err(Refusal::mount(MountFault::NotAllowed, message, Some(hint)))
            }
            _ => Ok(()),
        }
    }

    /// Whether what a sandbox writes may come to lie where users of the host can run it. Where
    /// host directories may be attached later, that holds for every sandbox.
    pub(super) fn refuses_set_id(&self, plan: &JailPlan) -> bool {
        let later = matches!(&self.settings.mounts, MountRule::Below(prefixes) if !prefixes.is_empty());
        plan.keep || later || plan.mounts.iter().any(writes_outside)
    }
}

/// The place of `path` beneath the innermost of the allowed directories that it names, in either
/// spelling. No link is followed for it: where the operator's own links lead was found out before.
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

/// What a mount is, without the path on the host, which is nobody's business inside.
fn describe(plan: &MountPlan) -> String {
    let what = match plan.source {
        SourcePlan::Host(_) => "directory of the host",
        SourcePlan::Volume(_) => "volume",
    };
    let access = if plan.read_only { "read-only" } else { "read-write" };
    format!("{what}, {access}, nosuid, nodev")
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
            "it must be a directory, with no link on the way to it"
        }
        SourceError::NotMade(..) => "it is made as the owner of the directory around it, who must be able to",
        SourceError::SubPath(..) => {
            "it must be a directory beneath its source, with no link on the way to it"
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
    fn a_listed_directory_may_be_named_as_it_is_written_and_as_it_is() {
        check("/data/x", Some(("/disk", "x")));
        check("/disk/x", Some(("/disk", "x")));
        check("/data", Some(("/disk", "")));
        check("/srv/other", Some(("/srv", "other")));
        check("/srv/link/x/y", Some(("/disk/models", "x/y")));
        check("/disk/models/x", Some(("/disk/models", "x")));
    }

    #[test]
    fn no_spelling_leads_beside_what_is_listed() {
        for path in ["/data-not/x", "/disk2", "/", "/data/../etc", "data/x", "/srv/link/../../etc"] {
            check(path, None);
        }
    }
}

//! Checks the mounts of a plan and opens their sources.
//!
//! A compromised server can name any path. It gets only paths below the directories that the operator
//! listed; that list comes from the supervisor and not from the server.

use std::path::{Component, Path, PathBuf};

use backend::enforced::MountKind;
use backend::{EnforcedMeasures, Measure};
use domain::volume::{is_mount_target, is_path_beneath};
use domain::{MountAccess, VolumeId};
use linux::spawn::SingleThread;

use super::LauncherRights;
use crate::jail::enter::EntryMount;
use crate::jail::id_maps;
use crate::jail::plan::{JailPlan, MountPlan, MountSourcePlan};
use crate::jail::sources::{
    HostSharing, MountOrigin, MountSourceError, OpenedSource, SourceIds, SourceLocation,
};
use crate::protocol::{MountFault, OpError};
use crate::settings::{AllowedDirectory, MountRule};

/// The largest number of mounts: more than any sandbox needs, and few enough that their descriptors fit
/// into one message.
const MAX_MOUNTS: usize = 64;

/// The mounts of one plan, opened.
pub(super) struct OpenedMounts {
    pub entries: Vec<EntryMount>,
    pub opened: Vec<OpenedSource>,
    pub measures: EnforcedMeasures,
}

/// Opens the sources of mounts that the operator allows.
pub(super) struct MountOpener<'a> {
    pub(super) thread: &'a SingleThread,
    pub(super) rights: &'a LauncherRights,
    pub(super) rule: &'a MountRule,
}

impl MountOpener<'_> {
    /// Checks and opens the sources. Targets that may contain other targets come first.
    pub(super) fn open_mounts(&self, plans: &[MountPlan]) -> Result<OpenedMounts, OpError> {
        if plans.len() > MAX_MOUNTS {
            let message = format!("{} mounts are more than one sandbox may have ({MAX_MOUNTS})", plans.len());
            return Err(OpError::amount(message, "leave some of them out".to_owned()));
        }
        let mut plans: Vec<&MountPlan> = plans.iter().collect();
        plans.sort_by_key(|plan| plan.target.split('/').filter(|word| !word.is_empty()).count());
        let mut gathered = OpenedMounts { entries: Vec::new(), opened: Vec::new(), measures: Vec::new() };
        let mut located = Vec::new();
        for plan in plans {
            let site = self.resolve_source_location(plan)?;
            let existing = self.open_if_existing(&site)?;
            located.push((plan, site, existing));
        }
        // Directories are made only if no other mount is refused.
        for (plan, site, existing) in located {
            let opened = match existing {
                Some(opened) => opened,
                None => site.open(self.thread).map_err(|error| mount_op_error(&error))?,
            };
            self.rights.check_source_owner(&opened)?;
            gathered.opened.push(opened);
            gathered.measures.push(mount_measure(plan));
            let (target, read_only) = (plan.target.clone(), plan.read_only);
            gathered.entries.push(EntryMount { location: site, target, read_only });
        }
        Ok(gathered)
    }

    /// Opens a source; `None` if it is missing and may be made.
    fn open_if_existing(&self, site: &SourceLocation) -> Result<Option<OpenedSource>, OpError> {
        match site.open_existing() {
            Ok(opened) => {
                self.rights.check_source_owner(&opened)?;
                Ok(Some(opened))
            }
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(mount_op_error(&error)),
        }
    }

    fn resolve_source_location(&self, plan: &MountPlan) -> Result<SourceLocation, OpError> {
        let trusted = *self.rule == MountRule::Allow;
        if !trusted && !is_mount_target(&plan.target) {
            let message = format!("mount target `{}` is not allowed", plan.target);
            return Err(OpError::mount(
                MountFault::Target,
                message,
                Some("name an absolute path without `..`"),
            ));
        }
        if let Some(sub_path) = plan.sub_path.as_ref().filter(|sub_path| !is_path_beneath(sub_path)) {
            let message = format!("sub path `{sub_path}` is not a plain relative path");
            return Err(OpError::mount(MountFault::SubPath, message, None));
        }
        let place = match &plan.source {
            MountSourcePlan::Host(path) => self.host_mount_origin(path, None, HostSharing::Listed)?,
            MountSourcePlan::Reserved { purpose, path } => {
                let sharing = HostSharing::Reserved { writable: !plan.read_only };
                self.host_mount_origin(path, Some(purpose), sharing)?
            }
            MountSourcePlan::Volume(id) => self.rights.volume_mount_origin(id)?,
        };
        Ok(SourceLocation { origin: place, sub_path: plan.sub_path.as_ref().map(PathBuf::from) })
    }

    /// Returns the location of a host path, if it may be mounted for this purpose.
    fn host_mount_origin(
        &self,
        path: &Path,
        purpose: Option<&str>,
        sharing: HostSharing,
    ) -> Result<MountOrigin, OpError> {
        let MountRule::Below(prefixes) = self.rule else {
            return Ok(MountOrigin::Named(path.to_owned()));
        };
        find_allowed_origin(prefixes, path, purpose, sharing).ok_or_else(|| {
            let message = if prefixes.iter().all(|prefix| prefix.purpose.is_some()) {
                "this server mounts no host directories".to_owned()
            } else {
                format!("`{}` is not below a directory that this server may mount", path.display())
            };
            let hint = "the operator lists them as `host_paths` under `[volumes]`";
            OpError::mount(MountFault::NotAllowed, message, Some(hint))
        })
    }
}

impl LauncherRights {
    fn volume_mount_origin(&self, id: &VolumeId) -> Result<MountOrigin, OpError> {
        let data = match self {
            Self::Root(root) => root.volumes.named_data(id),
            Self::User { .. } => None,
        };
        let missing = || OpError::mount(MountFault::NoVolume, format!("volume `{id}` does not exist"), None);
        data.map(MountOrigin::Volume).ok_or_else(missing)
    }

    /// Refuses a directory that belongs to an id of a sandbox: it cannot be mapped into another sandbox.
    fn check_source_owner(&self, opened: &OpenedSource) -> Result<(), OpError> {
        match (self, opened.ids) {
            (Self::Root(_), SourceIds::Host { uid, gid } | SourceIds::Reserved { uid, gid })
                if uid >= id_maps::IDS_PER_SANDBOX || gid >= id_maps::IDS_PER_SANDBOX =>
            {
                let message = "the directory does not belong to root or an ordinary user of this host";
                let hint = "mount a directory that belongs to root or an ordinary user";
                Err(OpError::mount(MountFault::NotAllowed, message, Some(hint)))
            }
            _ => Ok(()),
        }
    }
}

impl MountRule {
    /// Whether a sandbox may write files that users of the host could execute. If host directories may
    /// be attached later, that is true for every sandbox.
    pub(super) fn refuses_set_id(&self, plan: &JailPlan) -> bool {
        let later = matches!(self, Self::Below(prefixes) if !prefixes.is_empty());
        plan.keep || later || plan.mounts.iter().any(writes_to_host)
    }
}

/// Returns the location of `path` below the innermost allowed directory that contains it, in either
/// spelling. This follows no links: the operator's own links were resolved at startup. A directory that is reserved for
/// a purpose contains only the mounts for that purpose.
fn find_allowed_origin(
    allowed: &[AllowedDirectory],
    path: &Path,
    purpose: Option<&str>,
    sharing: HostSharing,
) -> Option<MountOrigin> {
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.components().all(plain) {
        return None;
    }
    let spellings = allowed.iter().flat_map(|one| [(&one.written, one), (&one.real, one)]);
    let found = spellings.filter_map(|(named, one)| Some((named, one, path.strip_prefix(named).ok()?)));
    let (_, one, rest) = found.max_by_key(|(named, _, _)| named.components().count())?;
    let is_allowed = one.purpose.as_deref() == purpose;
    is_allowed.then(|| MountOrigin::Beneath { prefix: one.real.clone(), path: rest.to_owned(), sharing })
}

/// Whether a mount lets a sandbox write to a directory of the host.
pub(super) fn writes_to_host(plan: &MountPlan) -> bool {
    !plan.read_only && matches!(plan.source, MountSourcePlan::Host(_) | MountSourcePlan::Reserved { .. })
}

fn mount_measure(plan: &MountPlan) -> Measure {
    Measure::Mount {
        target: plan.target.clone(),
        source: match plan.source {
            MountSourcePlan::Host(_) | MountSourcePlan::Reserved { .. } => MountKind::HostDirectory,
            MountSourcePlan::Volume(_) => MountKind::Volume,
        },
        access: if plan.read_only { MountAccess::ReadOnly } else { MountAccess::ReadWrite },
    }
}

fn mount_op_error(error: &MountSourceError) -> OpError {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    let fault = match error {
        MountSourceError::Missing(..) => MountFault::NotFound,
        MountSourceError::NotMade(..) => MountFault::NotMade,
        MountSourceError::SubPath(..) => MountFault::SubPath,
        MountSourceError::Io(..) => MountFault::Failed,
    };
    let hint = match error {
        MountSourceError::Missing(..) | MountSourceError::Io(..) => {
            "the source must be a directory, and its path must not contain links"
        }
        MountSourceError::NotMade(..) => {
            "the directory is made as the owner of its parent directory, who needs write access there"
        }
        MountSourceError::SubPath(..) => {
            "the sub path must be a directory below its source, and must not contain links"
        }
    };
    OpError::mount(fault, format!("{error}{cause}"), Some(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, expected: Option<(&str, &str)>) {
        check_purpose(path, None, expected);
    }

    fn check_purpose(path: &str, purpose: Option<&str>, expected: Option<(&str, &str)>) {
        let pair = |written: &str, real: &str| AllowedDirectory {
            written: written.into(),
            real: real.into(),
            purpose: None,
        };
        let reserved = AllowedDirectory { purpose: Some("flow".to_owned()), ..pair("/flow", "/srv/flow") };
        let allowed =
            [pair("/srv", "/srv"), pair("/srv/link", "/disk/models"), pair("/data/", "/disk"), reserved];
        let found = find_allowed_origin(&allowed, Path::new(path), purpose, HostSharing::Listed);
        let found = found.map(|place| match place {
            MountOrigin::Beneath { prefix, path, .. } => (prefix, path),
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
    fn reserved_directory_is_mounted_for_its_purpose_only() {
        for (path, rest) in [("/flow/x", "x"), ("/srv/flow/x", "x"), ("/srv/flow", "")] {
            check_purpose(path, Some("flow"), Some(("/srv/flow", rest)));
            check_purpose(path, None, None);
            check_purpose(path, Some("other"), None);
        }
        for path in ["/srv/other", "/data/x", "/flow/../srv/flow"] {
            check_purpose(path, Some("flow"), None);
        }
    }

    #[test]
    fn paths_outside_of_listed_directories_are_refused() {
        for path in ["/data-not/x", "/disk2", "/", "/data/../etc", "data/x", "/srv/link/../../etc"] {
            check(path, None);
        }
    }
}

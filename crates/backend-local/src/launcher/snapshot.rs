//! Taking snapshots of sandboxes, and making sandboxes from them.
//!
//! ```text
//!  launcher                                an errand
//!  draft, freeze ── fork ────────────────► wait until frozen, copy the disk, thaw, record
//!  thaw, remove the draft ◄── finished ──┘
//! ```
//!
//! The commands of a sandbox are frozen while its disk is flushed and copied. They are always thawed,
//! whatever happens to the errand or to the launcher: the launcher thaws them again when the errand has
//! finished, and if the launcher is killed, the next one finds the draft and thaws them.

use std::fs::File;
use std::io;
use std::path::Component::ParentDir;
use std::path::{Path, PathBuf};

use domain::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::create::refuse_image;
use super::errand::{Errand, Errands};
use super::kept::{Draft, KeptRecord, KeptRecords};
use super::protocol::{FoundKept, Holds, KeptBox, Refusal, RefusalKind};
use super::record::{MadeOf, TreeRecord};
use super::{Launcher, LauncherError, Rights, Root, make_directory};
use crate::cgroups::Hierarchies;
use crate::images::{self, Below, HOST, ImageError, Resolved, Source, Tree, UpperTree};
use crate::jail::plan::JailPlan;
use crate::settings::Settings;
use crate::volumes::{Copying, Kind, Prepared, VolumeError, Volumes, tree_name, upper_name};

/// How many seconds freezing the commands may take. A command that is reading from a slow disk cannot be
/// frozen before the read returns.
const STAND_STILL: i64 = 20;

/// The snapshots of one state directory.
pub(super) struct Snapshots {
    pub(super) records: KeptRecords,
    errands: Errands,
    /// The sandboxes that are frozen for a snapshot, and whether a client had paused them before.
    still: Vec<(String, bool)>,
    /// A restored disk, and the id of the sandbox that will get it.
    restored: Option<(String, Prepared)>,
}

/// A snapshot that is being taken. When its errand has finished, [`Launcher::conclude_snapshot`] returns
/// the outcome.
pub struct Taking {
    pub id: String,
    pub snapshot: String,
    pub errand: Errand,
    copying: Copying,
}

/// The result of a request for a snapshot: it exists already, or it is being taken.
pub enum Wished {
    Known(KeptRecord),
    Taking(Taking),
}

/// A disk that is being copied for a new sandbox. When its errand has finished,
/// [`Launcher::conclude_restore`] makes it ready.
pub struct Restoring {
    pub plan: Box<JailPlan>,
    pub errand: Errand,
    disk: Prepared,
}

impl Snapshots {
    /// Opens the snapshots. Thaws sandboxes that a killed launcher left frozen, and removes its
    /// incomplete snapshots.
    pub(super) fn open(
        settings: &Settings,
        groups: &Hierarchies,
        volumes: &mut Volumes,
    ) -> Result<Self, LauncherError> {
        let records = KeptRecords::at(&settings.state_dir);
        let path = records.directory().to_owned();
        let failed = |source| LauncherError::Io { action: "tidy up", path: path.clone(), source };
        make_directory(&path, 0o700).map_err(failed)?;
        let drafts = records.drafts().map_err(failed)?;
        let drafted: Vec<Draft> = drafts.iter().filter_map(|id| records.draft(id)).collect();
        let errands = Errands::open(&settings.state_dir).map_err(failed)?;
        // Sandboxes are thawed at once, to keep them frozen as briefly as possible, and again when no
        // former errand can freeze anything any more.
        go_on(&drafted, groups, volumes, &failed)?;
        errands.wait_for_former().map_err(failed)?;
        go_on(&drafted, groups, volumes, &failed)?;
        remove_halves(&records, volumes, &failed)?;
        for id in &drafts {
            records.end(id).map_err(failed)?;
        }
        Ok(Self { records, errands, still: Vec::new(), restored: None })
    }

    /// Whether a client had paused the sandbox, if it is frozen for a snapshot.
    pub(super) fn paused_before(&self, id: &str) -> Option<bool> {
        self.still.iter().find(|(still, _)| still == id).map(|(_, paused)| *paused)
    }
}

/// Thaws the sandboxes of drafts.
fn go_on(
    drafts: &[Draft],
    groups: &Hierarchies,
    volumes: &Volumes,
    failed: &impl Fn(io::Error) -> LauncherError,
) -> Result<(), LauncherError> {
    for draft in drafts {
        if !draft.paused {
            thaw(groups, &draft.sandbox).map_err(failed)?;
        }
        volumes.thaw(&draft.sandbox)?;
    }
    Ok(())
}

/// Removes copies without a record, which were never finished, and records without a copy.
fn remove_halves(
    records: &KeptRecords,
    volumes: &mut Volumes,
    failed: &impl Fn(io::Error) -> LauncherError,
) -> Result<(), LauncherError> {
    let whole = records.list().map_err(failed)?;
    let copies = volumes.snapshots()?;
    for copy in copies.iter().filter(|copy| !whole.contains(*copy)) {
        volumes.forget(copy)?;
    }
    for record in whole.iter().filter(|record| !copies.contains(record)) {
        tracing::warn!(snapshot = record, "files of snapshot are gone; removing its record");
        records.remove(record).map_err(failed)?;
    }
    Ok(())
}

fn thaw(groups: &Hierarchies, id: &str) -> io::Result<()> {
    match groups.freeze(id, false) {
        // The sandbox is gone or being removed, with everything that could be frozen.
        Err(error) if error.kind() == io::ErrorKind::NotFound || is_dying(&error) => Ok(()),
        other => other.map(drop),
    }
}

/// Whether a group is being removed: access to its files then fails with ENODEV.
fn is_dying(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

impl Launcher {
    /// Whether snapshots can be taken here.
    pub fn can_keep(&self) -> bool {
        matches!(&self.rights, Rights::Root(root) if root.volumes.can_keep())
    }

    /// Begins a snapshot, unless it exists already.
    pub fn begin_snapshot(&mut self, id: &str, snapshot: &str) -> Result<Wished, Refusal> {
        let Rights::Root(root) = &mut self.rights else { return Err(only_memory()) };
        if let Some(record) = root.snapshots.records.read(snapshot) {
            return Ok(Wished::Known(record));
        }
        let record = self.records.read(id).ok_or_else(Refusal::gone)?;
        let alive = record.pidfd().is_some();
        if !alive && !root.volumes.has(id) {
            return Err(Refusal::gone());
        }
        let made_of = record.made_of.ok_or_else(|| {
            let message = "sandbox was made by an older server, which did not record its image";
            Refusal::unsupported(message, None)
        })?;
        let copying = root.volumes.keep(id, snapshot).map_err(|error| disk_refusal(&error))?;
        let disk = record.limits.disk;
        let kept = KeptRecord { sandbox: id.to_owned(), made_of, size: 0, disk };
        let errand = root.send_for_snapshot(&self.thread, snapshot, kept, copying.clone(), alive);
        let errand = errand.map_err(|error| super::serve::failed("snapshot", &error))?;
        Ok(Wished::Taking(Taking { id: id.to_owned(), snapshot: snapshot.to_owned(), errand, copying }))
    }

    /// Returns the outcome of a snapshot whose errand has finished. The commands are thawed in any case.
    pub fn conclude_snapshot(&mut self, taking: Taking) -> Result<KeptRecord, Refusal> {
        let Rights::Root(root) = &mut self.rights else { return Err(only_memory()) };
        let Taking { id, snapshot, errand, .. } = taking;
        let taken = errand.outcome();
        let ended = root.end_snapshot(&id, &snapshot, taken.is_ok());
        match (taken.and(ended), root.snapshots.records.read(&snapshot)) {
            (Ok(()), Some(record)) => Ok(record),
            (Ok(()), None) => Err(super::serve::failed("snapshot", &io::ErrorKind::NotFound.into())),
            (Err(error), _) => Err(super::serve::failed("snapshot", &error)),
        }
    }

    /// Removes a snapshot. It is not an error if it does not exist.
    pub fn forget_snapshot(&mut self, snapshot: &str) -> io::Result<()> {
        let Rights::Root(root) = &mut self.rights else { return Ok(()) };
        // The record is removed last: a record without files is removed at the next start.
        root.volumes.forget(snapshot).map_err(io::Error::other)?;
        root.snapshots.records.remove(snapshot)
    }

    /// Returns all complete snapshots.
    pub fn snapshots(&self) -> io::Result<Vec<FoundKept>> {
        let Rights::Root(root) = &self.rights else { return Ok(Vec::new()) };
        let records = &root.snapshots.records;
        let found = records.list()?.into_iter();
        Ok(found
            .filter_map(|id| Some(FoundKept { kept: Some(records.read(&id)?.into()), copied: None, id }))
            .collect())
    }

    /// Begins to copy the disk for a sandbox that starts from a snapshot.
    pub fn begin_restore(&mut self, plan: Box<JailPlan>) -> Result<Restoring, Refusal> {
        let Rights::Root(root) = &mut self.rights else { return Err(only_memory()) };
        let snapshot = plan.snapshot.as_deref().unwrap_or_default();
        root.snapshots.records.read(snapshot).ok_or_else(|| no_snapshot(snapshot))?;
        let (disk, copying) = root.volumes.restore(snapshot).map_err(|error| disk_refusal(&error))?;
        match root.snapshots.errands.send(&self.thread, move || copying.run()) {
            Ok(errand) => Ok(Restoring { plan, errand, disk }),
            Err(error) => {
                root.discard(disk);
                Err(super::serve::failed("restore", &error))
            }
        }
    }

    /// Reserves the copied disk, whose errand has finished, for the new sandbox.
    pub fn conclude_restore(&mut self, restoring: Restoring) -> Result<Box<JailPlan>, Refusal> {
        let Rights::Root(root) = &mut self.rights else { return Err(only_memory()) };
        let Restoring { plan, errand, disk } = restoring;
        let copied = errand.outcome().map_err(|error| super::serve::failed("restore", &error));
        let ready = copied.and_then(|()| root.volumes.restored(&disk).map_err(|error| disk_refusal(&error)));
        match ready {
            Ok(()) => {
                root.snapshots.restored = Some((plan.id.clone(), disk));
                Ok(plan)
            }
            Err(refusal) => {
                root.discard(disk);
                Err(refusal)
            }
        }
    }

    /// Returns the source for an image of this snapshot: its disk, and the image below it.
    pub(super) fn source_of_commit(&self, snapshot: &str) -> Result<(Source, Below), ImageError> {
        let failed = |message: String| ImageError::Malformed(message);
        let Rights::Root(root) = &self.rights else { return Err(failed(only_memory().message)) };
        let record = root.snapshots.records.read(snapshot);
        let made_of = record.ok_or_else(|| failed(no_snapshot(snapshot).message))?.made_of;
        let tree = |tree: TreeRecord| UpperTree {
            directory: upper_name(&tree_name(&tree.mount_point)),
            mount_point: tree.mount_point,
        };
        let trees: Vec<UpperTree> = made_of.trees.into_iter().map(tree).collect();
        let disk = root.volumes.open_snapshot(snapshot).map_err(|error| failed(error.to_string()))?;
        let below = match made_of.record {
            Some(record) => Below::Image(record),
            None => Below::Host,
        };
        Ok((Source::Uppers { disk, trees }, below))
    }

    /// Removes a restored disk that its sandbox did not use.
    pub fn discard_restored(&mut self) {
        if let Rights::Root(root) = &mut self.rights
            && let Some((_, disk)) = root.snapshots.restored.take()
        {
            root.discard(disk);
        }
    }

    /// Adds a measure with the files that a sandbox starts with, and whether they count against its disk
    /// limit.
    pub(super) fn tell_of_snapshot(&self, plan: &JailPlan, restored: u64, holds: &mut Holds) {
        let (Some(snapshot), Rights::Root(root)) = (&plan.snapshot, &self.rights) else { return };
        let counted = if root.volumes.counts_restored() { "within" } else { "beside" };
        let by = if root.volumes.kind() == Kind::Ext4 { "copied" } else { "shared" };
        let files = format!("{} of {snapshot}, {by}, {counted} the limit on disk", Bytes(restored));
        holds.measures.push(("snapshot".to_owned(), files));
    }

    /// Returns the image below a snapshot and the size of the snapshot. The image is unchanged, except
    /// for the host's, which is used in its current state.
    pub(super) fn image_below(&self, snapshot: &str) -> Result<(Resolved, u64), Refusal> {
        let Rights::Root(root) = &self.rights else { return Err(only_memory()) };
        let record = root.snapshots.records.read(snapshot).ok_or_else(|| no_snapshot(snapshot))?;
        Ok((self.image_again(record.made_of)?, record.size))
    }

    /// Returns the image below existing files. It is unchanged, except for the host's, which is used in
    /// its current state.
    pub(super) fn image_again(&self, made_of: MadeOf) -> Result<Resolved, Refusal> {
        if made_of.image == HOST {
            return self.resolve(HOST);
        }
        // By digest if known: the recorded paths may be outdated.
        let trees: Vec<Tree> = match &made_of.record {
            Some(record) => {
                images::trees_of(&self.settings.image_state, &self.host, record).map_err(refuse_image)?
            }
            None => made_of.trees.into_iter().map(Tree::from).collect(),
        };
        if made_of.record.is_none() && !are_of_store(&self.settings.image_state, &trees) {
            let message =
                format!("the record of image `{}` names layers outside of the image store", made_of.image);
            let hint = Some("import the image again under the same name".to_owned());
            return Err(Refusal { kind: RefusalKind::NoImage, message, hint });
        }
        if let Some(gone) = trees.iter().flat_map(|tree| &tree.lowers).find(|lower| !lower.is_dir()) {
            tracing::warn!(image = made_of.image, layer = %gone.display(), "layer of an image is gone; refusing to use the files above it");
            let hint = Some("import the image again under the same name".to_owned());
            let message = format!("image `{}`, which the files are based on, lacks a layer", made_of.image);
            return Err(Refusal { kind: RefusalKind::NoImage, message, hint });
        }
        let (name, env, record) = (made_of.image, made_of.env, made_of.record);
        Ok(Resolved { name, trees, env, record, stand_in: None })
    }
}

impl Root {
    /// Records the intention, freezes the commands, and starts a process that copies the disk.
    fn send_for_snapshot(
        &mut self,
        thread: &linux::spawn::SingleThread,
        snapshot: &str,
        mut kept: KeptRecord,
        copying: Copying,
        alive: bool,
    ) -> io::Result<Errand> {
        let id = kept.sandbox.clone();
        let paused = self.groups.is_frozen(&id);
        let records = self.snapshots.records.clone();
        records.begin(snapshot, &Draft { sandbox: id.clone(), paused })?;
        // A dead sandbox has nothing to freeze, and may have no groups any more.
        let still = if alive { self.groups.freeze(&id, true).map(drop) } else { Ok(()) };
        let sent = still.and_then(|()| {
            let (events, groups, volumes) = (self.groups.events_file(&id), &self.groups, &self.volumes);
            self.snapshots.errands.send(thread, || {
                if alive {
                    wait_until_still(&events)?;
                }
                copying.run()?;
                if alive && !paused {
                    // As early as possible: the next steps wait for the disk again.
                    groups.freeze(&id, false)?;
                }
                // Only flushed data is counted, so this comes after the copy.
                let used = volumes.usage(&id).map_err(io::Error::other)?.used.0;
                kept.size = if volumes.counts_restored() { used } else { used + kept.made_of.restored };
                records.keep(snapshot, &kept)
            })
        });
        self.snapshots.still.push((id.clone(), paused));
        sent.or_else(|error| self.end_snapshot(&id, snapshot, false).and(Err(error)))
    }

    /// Thaws the commands, and removes an incomplete snapshot.
    fn end_snapshot(&mut self, id: &str, snapshot: &str, taken: bool) -> io::Result<()> {
        let paused = self.snapshots.paused_before(id).unwrap_or(false);
        self.snapshots.still.retain(|(still, _)| still != id);
        let thawed = if paused { Ok(()) } else { thaw(&self.groups, id) };
        let written = self.volumes.thaw(id).map_err(io::Error::other);
        let tidied = if taken { Ok(()) } else { self.volumes.forget(snapshot).map_err(io::Error::other) };
        // The draft is kept if its sandbox may still be frozen.
        thawed.and(written).and(tidied).and_then(|()| self.snapshots.records.end(snapshot))
    }

    /// Takes the disk that was restored for this sandbox.
    pub(super) fn take_restored(&mut self, id: &str) -> Option<Prepared> {
        let (_, disk) = self.snapshots.restored.take_if(|(whose, _)| whose == id)?;
        Some(disk)
    }

    fn discard(&mut self, disk: Prepared) {
        if let Err(error) = self.volumes.discard(disk) {
            tracing::warn!(%error, "failed to remove restored disk; the next start removes it");
        }
    }
}

/// Whether trees that a record names by path are in the image store. A record may come from a backup,
/// and a sandbox must not see other directories of the host. Missing layers are accepted here: they
/// give access to nothing.
fn are_of_store(state: &Path, trees: &[Tree]) -> bool {
    let store = state.join("images");
    let Ok(root) = linux::fs::Root::open(&store) else { return false };
    let of_store = |lower: &PathBuf| {
        let opened = lower.strip_prefix(&store).ok().map(|path| root.directory(path));
        match opened {
            Some(Err(error)) => error.kind() == io::ErrorKind::NotFound,
            Some(Ok(_)) => true,
            None => !lower.exists(),
        }
    };
    let is_plain = |path: &Path| path.is_absolute() && !path.components().any(|part| part == ParentDir);
    trees.iter().all(|tree| is_plain(Path::new(&tree.mount_point)) && tree.lowers.iter().all(of_store))
}

/// Waits until the kernel has frozen all commands of a group.
fn wait_until_still(events: &PathBuf) -> io::Result<()> {
    let events = File::open(events)?;
    let timeout = Timespec { tv_sec: STAND_STILL, tv_nsec: 0 };
    loop {
        let mut buffer = [0; 256];
        let length = rustix::io::pread(&events, &mut buffer, 0)?;
        if String::from_utf8_lossy(&buffer[..length]).contains("frozen 1") {
            return Ok(());
        }
        let mut watched = [PollFd::new(&events, PollFlags::PRI)];
        if rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))? == 0 {
            return Err(io::Error::other(format!("commands could not be frozen within {STAND_STILL} s")));
        }
    }
}

impl Taking {
    /// Returns the number of copied bytes and the total, if bytes are copied.
    pub fn progress(&self) -> Option<(u64, u64)> {
        self.copying.progress().map(|(Bytes(done), Bytes(total))| (done, total))
    }
}

impl From<KeptRecord> for KeptBox {
    fn from(record: KeptRecord) -> Self {
        Self { image: record.made_of.image, size: record.size, disk: record.disk }
    }
}

fn only_memory() -> Refusal {
    let hint = "run the server as root: an ordinary user's disks are in memory and end with their sandbox";
    Refusal::unsupported("snapshots need disks that outlive a sandbox", Some(hint))
}

fn no_snapshot(snapshot: &str) -> Refusal {
    let message = format!("snapshot `{snapshot}` does not exist");
    Refusal { kind: RefusalKind::NoImage, message, hint: None }
}

fn disk_refusal(error: &VolumeError) -> Refusal {
    let hint = error.hint().map(str::to_owned);
    let (kind, message) = match error {
        VolumeError::NoRoom { .. } => (RefusalKind::Exhausted, error.to_string()),
        VolumeError::OtherSize { .. } => (RefusalKind::TooMuch, error.to_string()),
        VolumeError::OnlyMemory => return only_memory(),
        VolumeError::Io { source, .. } => {
            (RefusalKind::Step("volume".to_owned()), format!("{error}: {source}"))
        }
        _ => (RefusalKind::Step("volume".to_owned()), error.to_string()),
    };
    Refusal { kind, message, hint }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::*;

    #[test]
    fn trees_outside_of_the_image_store_are_refused() {
        let state = tempfile::TempDir::new().unwrap();
        let layer = state.path().join("images/layers/0/tree");
        std::fs::create_dir_all(&layer).unwrap();
        std::os::unix::fs::symlink("/etc", layer.join("link")).unwrap();
        let accepts = |mount_point: &str, lower: PathBuf| {
            are_of_store(state.path(), &[Tree { mount_point: mount_point.to_owned(), lowers: vec![lower] }])
        };
        assert!(accepts("/", layer.clone()));
        assert!(accepts("/", "/no/such/place".into()));
        for lower in ["/".into(), "/etc".into(), layer.join("link"), layer.join("../../../..")] {
            assert!(!accepts("/", lower.clone()), "{}", lower.display());
        }
        assert!(!accepts("/../up", layer));
    }
}

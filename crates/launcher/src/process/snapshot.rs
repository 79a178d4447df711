//! Taking snapshots of sandboxes, and making sandboxes from them.
//!
//! ```text
//!  launcher                                a disk task
//!  draft, freeze ── fork ────────────────► wait until frozen, copy the disk, thaw, record
//!  thaw, remove the draft ◄── finished ──┘
//! ```
//!
//! The commands of a sandbox are frozen while its disk is flushed and copied. They are always thawed,
//! whatever happens to the disk task or to the launcher: the launcher thaws them again when the task has
//! finished, and if the launcher is killed, the next one finds the draft and thaws them.

mod spare_disk;

use std::fs::File;
use std::io;
use std::path::Component::ParentDir;
use std::path::{Path, PathBuf};

use backend::Measure;
use backend::enforced::RestoredFiles;
use domain::{Bytes, SandboxId, SnapshotId};
use linux::spawn::SingleThread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::spare_disk::{SnapshotCopy, SpareDisk};
use super::disk_task::{DiskTask, DiskTaskRunner};
use super::images::{LauncherImages, image_op_error};
use super::record::{SandboxOrigin, TreeRecord};
use super::snapshot_record::{SnapshotDraft, SnapshotRecord, SnapshotRecords};
use super::{Launcher, LauncherError, LauncherRights, RootState, make_directory};
use crate::cgroups::CgroupHierarchies;
use crate::images::{
    self, FoundImage, HOST_IMAGE, ImageError, ImageTree, ImportBase, ImportSource, UpperTree,
};
use crate::jail::plan::JailPlan;
use crate::protocol::{EnforcedPlan, OpError, OpErrorKind, SnapshotListing, StoredSnapshot};
use crate::settings::LauncherSettings;
use crate::volumes::{
    PreparedVolume, VolumeCopy, VolumeError, VolumeKind, VolumeStore, tree_name, upper_name,
};

/// How many seconds freezing the commands may take. A command that is reading from a slow disk cannot be
/// frozen before the read returns.
const FREEZE_TIMEOUT_SECONDS: i64 = 20;

/// The snapshots of one state directory.
pub(super) struct SnapshotStore {
    pub(super) records: SnapshotRecords,
    pub(super) disk_task_runner: DiskTaskRunner,
    /// The sandboxes that are frozen for a snapshot, and whether a client had paused them before.
    frozen: Vec<(SandboxId, bool)>,
    /// A restored disk, and the id of the sandbox that will get it.
    restored: Option<(SandboxId, PreparedVolume)>,
    pub(super) spare: SpareDisk,
}

/// A snapshot that is being taken. When its disk task has finished, [`LauncherRights::conclude_snapshot`] returns
/// the outcome.
pub struct PendingSnapshot {
    pub id: SandboxId,
    pub snapshot: SnapshotId,
    pub disk_task: DiskTask,
    copying: VolumeCopy,
}

/// The result of a request for a snapshot: it exists already, or it is being taken.
pub enum SnapshotStart {
    Known(SnapshotRecord),
    Taking(PendingSnapshot),
}

/// A disk that is being copied for a new sandbox. When its disk task has finished,
/// [`LauncherRights::conclude_restore`] makes it ready.
pub(super) struct PendingRestore {
    pub plan: Box<JailPlan>,
    pub disk_task: DiskTask,
    disk: PreparedVolume,
}

/// The result of a request for a sandbox from a snapshot: its disk is ready, or it is being copied.
pub(super) enum RestoreStart {
    Ready(Box<JailPlan>),
    Copying(PendingRestore),
}

impl SnapshotStore {
    /// Opens the snapshots. Thaws sandboxes that a killed launcher left frozen, and removes its
    /// incomplete snapshots.
    pub(super) fn open(
        settings: &LauncherSettings,
        groups: &CgroupHierarchies,
        volumes: &mut VolumeStore,
    ) -> Result<Self, LauncherError> {
        let records = SnapshotRecords::in_state_dir(&settings.state_dir);
        let path = records.directory().to_owned();
        let failed = |source| LauncherError::Io { action: "tidy up", path: path.clone(), source };
        make_directory(&path, 0o700).map_err(failed)?;
        let drafts = records.list_drafts().map_err(failed)?;
        let drafted: Vec<SnapshotDraft> = drafts.iter().filter_map(|id| records.read_draft(id)).collect();
        let runner = DiskTaskRunner::open(&settings.state_dir).map_err(failed)?;
        // Sandboxes are thawed at once, to keep them frozen as briefly as possible, and again when no
        // former disk task can freeze anything any more.
        thaw_drafted_sandboxes(&drafted, groups, volumes, &failed)?;
        runner.wait_for_former().map_err(failed)?;
        thaw_drafted_sandboxes(&drafted, groups, volumes, &failed)?;
        remove_incomplete_snapshots(&records, volumes, &failed)?;
        for id in &drafts {
            records.remove_draft(id).map_err(failed)?;
        }
        Ok(Self {
            records,
            disk_task_runner: runner,
            frozen: Vec::new(),
            restored: None,
            spare: SpareDisk::default(),
        })
    }

    /// Whether a client had paused the sandbox, if it is frozen for a snapshot.
    pub(super) fn paused_before(&self, id: &SandboxId) -> Option<bool> {
        self.frozen.iter().find(|(still, _)| still == id).map(|(_, paused)| *paused)
    }
}

/// Thaws the sandboxes of drafts.
fn thaw_drafted_sandboxes(
    drafts: &[SnapshotDraft],
    groups: &CgroupHierarchies,
    volumes: &VolumeStore,
    failed: &impl Fn(io::Error) -> LauncherError,
) -> Result<(), LauncherError> {
    for draft in drafts {
        if !draft.paused {
            thaw_commands(groups, &draft.sandbox).map_err(failed)?;
        }
        volumes.thaw_disk(&draft.sandbox)?;
    }
    Ok(())
}

/// Removes copies without a record, which were never finished, and records without a copy.
fn remove_incomplete_snapshots(
    records: &SnapshotRecords,
    volumes: &mut VolumeStore,
    failed: &impl Fn(io::Error) -> LauncherError,
) -> Result<(), LauncherError> {
    let whole = records.list().map_err(failed)?;
    let copies = volumes.list_snapshots()?;
    for copy in copies.iter().filter(|copy| !whole.contains(*copy)) {
        volumes.remove_snapshot(copy)?;
    }
    for record in whole.iter().filter(|record| !copies.contains(record)) {
        tracing::warn!(snapshot = %record, "files of snapshot are gone; removing its record");
        records.remove(record).map_err(failed)?;
    }
    Ok(())
}

fn thaw_commands(groups: &CgroupHierarchies, id: &SandboxId) -> io::Result<()> {
    match groups.set_frozen(id, false) {
        // The sandbox is gone or being removed, with everything that could be frozen.
        Err(error) if error.kind() == io::ErrorKind::NotFound || is_group_dying(&error) => Ok(()),
        other => other.map(drop),
    }
}

/// Whether a group is being removed: access to its files then fails with ENODEV.
fn is_group_dying(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

impl Launcher {
    /// Begins a snapshot, unless it exists already.
    pub fn begin_snapshot(
        &mut self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotStart, OpError> {
        let LauncherRights::Root(root) = &mut self.rights else { return Err(snapshots_unsupported_error()) };
        if let Some(record) = root.snapshots.records.read(snapshot) {
            return Ok(SnapshotStart::Known(record));
        }
        let record = self.records.read(id).ok_or_else(OpError::gone)?;
        let alive = record.pidfd().is_some();
        if !alive && !root.volumes.has_volume(id) {
            return Err(OpError::gone());
        }
        let made_of = record.made_of.ok_or_else(|| {
            let message = "sandbox was made by an older server, which did not record its image";
            OpError::unsupported(message, None)
        })?;
        let copying = root.volumes.plan_snapshot(id, snapshot).map_err(|error| disk_op_error(&error))?;
        let disk = record.limits.disk;
        let kept = SnapshotRecord { sandbox: id.clone(), made_of, size: 0, disk };
        let disk_task = root.start_snapshot_task(&self.thread, snapshot, kept, copying.clone(), alive);
        let disk_task = disk_task.map_err(|error| super::serve::step_error("snapshot", &error))?;
        Ok(SnapshotStart::Taking(PendingSnapshot {
            id: id.clone(),
            snapshot: snapshot.clone(),
            disk_task,
            copying,
        }))
    }

    /// Returns the image below a snapshot and the size of the snapshot. The image is unchanged, except
    /// for the host's, which is used in its current state.
    pub(super) fn image_below_snapshot(&self, snapshot: &SnapshotId) -> Result<(FoundImage, u64), OpError> {
        let LauncherRights::Root(root) = &self.rights else { return Err(snapshots_unsupported_error()) };
        let record =
            root.snapshots.records.read(snapshot).ok_or_else(|| snapshot_not_found_error(snapshot))?;
        Ok((self.images.image_below_files(record.made_of)?, record.size))
    }
}

impl LauncherRights {
    /// Whether snapshots can be taken here.
    pub(super) fn can_take_snapshots(&self) -> bool {
        matches!(self, Self::Root(root) if root.volumes.supports_snapshots())
    }

    /// Returns the outcome of a snapshot whose disk task has finished. The commands are thawed in any case.
    pub(super) fn conclude_snapshot(&mut self, taking: PendingSnapshot) -> Result<SnapshotRecord, OpError> {
        let Self::Root(root) = self else { return Err(snapshots_unsupported_error()) };
        let PendingSnapshot { id, snapshot, disk_task, .. } = taking;
        let taken = disk_task.wait_outcome();
        let ended = root.end_snapshot(&id, &snapshot, taken.is_ok());
        match (taken.and(ended), root.snapshots.records.read(&snapshot)) {
            (Ok(()), Some(record)) => Ok(record),
            (Ok(()), None) => Err(super::serve::step_error("snapshot", &io::ErrorKind::NotFound.into())),
            (Err(error), _) => Err(super::serve::step_error("snapshot", &error)),
        }
    }

    /// Removes a snapshot. It is not an error if it does not exist.
    pub(super) fn forget_snapshot(&mut self, snapshot: &SnapshotId) -> io::Result<()> {
        let Self::Root(root) = self else { return Ok(()) };
        root.forget_spare_disk(snapshot);
        // The record is removed last: a record without files is removed at the next start.
        root.volumes.remove_snapshot(snapshot).map_err(io::Error::other)?;
        root.snapshots.records.remove(snapshot)
    }

    /// Returns all complete snapshots.
    pub(super) fn list_snapshots(&self) -> io::Result<Vec<SnapshotListing>> {
        let Self::Root(root) = self else { return Ok(Vec::new()) };
        let records = &root.snapshots.records;
        let found = records.list()?.into_iter();
        Ok(found
            .filter_map(|id| {
                Some(SnapshotListing { kept: Some(records.read(&id)?.into()), copied: None, id })
            })
            .collect())
    }

    /// Reserves a disk for a sandbox that starts from a snapshot: one that was copied in advance, or a new copy.
    pub(super) fn begin_restore(
        &mut self,
        thread: &SingleThread,
        plan: Box<JailPlan>,
    ) -> Result<RestoreStart, OpError> {
        let Self::Root(root) = self else { return Err(snapshots_unsupported_error()) };
        let Some(snapshot) = plan.snapshot.as_ref() else {
            return Err(OpError::unsupported("the plan names no snapshot", None));
        };
        root.snapshots.records.read(snapshot).ok_or_else(|| snapshot_not_found_error(snapshot))?;
        match root.take_spare_disk(snapshot) {
            Some(SnapshotCopy { disk, disk_task: None, .. }) => {
                root.snapshots.restored = Some((plan.id.clone(), disk));
                return Ok(RestoreStart::Ready(plan));
            }
            Some(SnapshotCopy { disk, disk_task: Some(disk_task), .. }) => {
                return Ok(RestoreStart::Copying(PendingRestore { plan, disk_task, disk }));
            }
            None => {}
        }
        let (disk, copying) = root.volumes.plan_restore(snapshot).map_err(|error| disk_op_error(&error))?;
        match root.snapshots.disk_task_runner.start(thread, move || copying.run()) {
            Ok(disk_task) => Ok(RestoreStart::Copying(PendingRestore { plan, disk_task, disk })),
            Err(error) => {
                root.discard_disk(disk);
                Err(super::serve::step_error("restore", &error))
            }
        }
    }

    /// Reserves the copied disk, whose disk task has finished, for the new sandbox.
    pub(super) fn conclude_restore(&mut self, restoring: PendingRestore) -> Result<Box<JailPlan>, OpError> {
        let Self::Root(root) = self else { return Err(snapshots_unsupported_error()) };
        let PendingRestore { plan, disk_task, disk } = restoring;
        let copied = disk_task.wait_outcome().map_err(|error| super::serve::step_error("restore", &error));
        let ready =
            copied.and_then(|()| root.volumes.finish_restore(&disk).map_err(|error| disk_op_error(&error)));
        match ready {
            Ok(()) => {
                root.snapshots.restored = Some((plan.id.clone(), disk));
                Ok(plan)
            }
            Err(refusal) => {
                root.discard_disk(disk);
                Err(refusal)
            }
        }
    }

    /// Returns the source for an image of this snapshot: its disk, and the image below it.
    pub(super) fn commit_source(
        &self,
        snapshot: &SnapshotId,
    ) -> Result<(ImportSource, ImportBase), ImageError> {
        let failed = |message: String| ImageError::Malformed(message);
        let Self::Root(root) = self else {
            return Err(failed(snapshots_unsupported_error().message));
        };
        let record = root.snapshots.records.read(snapshot);
        let made_of = record.ok_or_else(|| failed(snapshot_not_found_error(snapshot).message))?.made_of;
        let tree = |tree: TreeRecord| UpperTree {
            directory: upper_name(&tree_name(&tree.mount_point)),
            mount_point: tree.mount_point,
        };
        let trees: Vec<UpperTree> = made_of.trees.into_iter().map(tree).collect();
        let disk = root.volumes.open_snapshot(snapshot).map_err(|error| failed(error.to_string()))?;
        let below = match made_of.record {
            Some(record) => ImportBase::Image(record),
            None => ImportBase::Host,
        };
        Ok((ImportSource::Uppers { disk, trees }, below))
    }

    /// Removes a restored disk that its sandbox did not use.
    pub(super) fn discard_restored_disk(&mut self) {
        if let Self::Root(root) = self
            && let Some((_, disk)) = root.snapshots.restored.take()
        {
            root.discard_disk(disk);
        }
    }

    /// Adds a measure with the files that a sandbox starts with, and whether they count against its disk
    /// limit.
    pub(super) fn add_snapshot_measure(&self, plan: &JailPlan, restored: u64, enforced: &mut EnforcedPlan) {
        let (Some(snapshot), Self::Root(root)) = (&plan.snapshot, self) else { return };
        enforced.measures.push(Measure::Snapshot(RestoredFiles {
            snapshot: snapshot.clone(),
            size: Bytes(restored),
            copied: root.volumes.kind() == VolumeKind::Ext4,
            counted: root.volumes.counts_restored(),
        }));
    }
}

impl LauncherImages {
    /// Returns the image below existing files. It is unchanged, except for the host's, which is used in
    /// its current state.
    pub(super) fn image_below_files(&self, made_of: SandboxOrigin) -> Result<FoundImage, OpError> {
        if made_of.image == HOST_IMAGE {
            return self.resolve(HOST_IMAGE);
        }
        // By digest if known: the recorded paths may be outdated.
        let trees: Vec<ImageTree> = match &made_of.record {
            Some(record) => images::trees_of(&self.state_dir, &self.host, record).map_err(image_op_error)?,
            None => made_of.trees.into_iter().map(ImageTree::from).collect(),
        };
        if made_of.record.is_none() && !are_in_image_store(&self.state_dir, &trees) {
            let message =
                format!("the record of image `{}` names layers outside of the image store", made_of.image);
            let hint = Some("import the image again under the same name".to_owned());
            return Err(OpError { kind: OpErrorKind::NoImage, message, hint });
        }
        if let Some(gone) = trees.iter().flat_map(|tree| &tree.lowers).find(|lower| !lower.is_dir()) {
            tracing::warn!(image = made_of.image, layer = %gone.display(), "layer of an image is gone; refusing to use the files above it");
            let hint = Some("import the image again under the same name".to_owned());
            let message = format!("image `{}`, which the files are based on, lacks a layer", made_of.image);
            return Err(OpError { kind: OpErrorKind::NoImage, message, hint });
        }
        let (name, env, record) = (made_of.image, made_of.env, made_of.record);
        Ok(FoundImage { name, trees, env, record })
    }
}

impl RootState {
    /// Records the intention, freezes the commands, and starts a process that copies the disk.
    fn start_snapshot_task(
        &mut self,
        thread: &SingleThread,
        snapshot: &SnapshotId,
        mut kept: SnapshotRecord,
        copying: VolumeCopy,
        alive: bool,
    ) -> io::Result<DiskTask> {
        let id = kept.sandbox.clone();
        let paused = self.groups.is_frozen(&id);
        let records = self.snapshots.records.clone();
        records.write_draft(snapshot, &SnapshotDraft { sandbox: id.clone(), paused })?;
        // A dead sandbox has nothing to freeze, and may have no groups any more.
        let still = if alive { self.groups.set_frozen(&id, true).map(drop) } else { Ok(()) };
        let sent = still.and_then(|()| {
            let (events, groups, volumes) = (self.groups.events_file(&id), &self.groups, &self.volumes);
            self.snapshots.disk_task_runner.start(thread, || {
                if alive {
                    wait_until_frozen(&events)?;
                }
                copying.run()?;
                if alive && !paused {
                    // As early as possible: the next steps wait for the disk again.
                    groups.set_frozen(&id, false)?;
                }
                // Only flushed data is counted, so this comes after the copy.
                let used = volumes.usage(&id).map_err(io::Error::other)?.used.0;
                kept.size = if volumes.counts_restored() { used } else { used + kept.made_of.restored };
                records.write(snapshot, &kept)
            })
        });
        self.snapshots.frozen.push((id.clone(), paused));
        sent.or_else(|error| self.end_snapshot(&id, snapshot, false).and(Err(error)))
    }

    /// Thaws the commands, and removes an incomplete snapshot.
    fn end_snapshot(&mut self, id: &SandboxId, snapshot: &SnapshotId, taken: bool) -> io::Result<()> {
        let paused = self.snapshots.paused_before(id).unwrap_or(false);
        self.snapshots.frozen.retain(|(still, _)| still != id);
        let thawed = if paused { Ok(()) } else { thaw_commands(&self.groups, id) };
        let written = self.volumes.thaw_disk(id).map_err(io::Error::other);
        let tidied =
            if taken { Ok(()) } else { self.volumes.remove_snapshot(snapshot).map_err(io::Error::other) };
        // The draft is kept if its sandbox may still be frozen.
        thawed.and(written).and(tidied).and_then(|()| self.snapshots.records.remove_draft(snapshot))
    }

    /// Takes the disk that was restored for this sandbox.
    pub(super) fn take_restored_disk(&mut self, id: &SandboxId) -> Option<PreparedVolume> {
        let (_, disk) = self.snapshots.restored.take_if(|(whose, _)| whose == id)?;
        Some(disk)
    }

    pub(super) fn discard_disk(&mut self, disk: PreparedVolume) {
        if let Err(error) = self.volumes.discard(disk) {
            tracing::warn!(%error, "failed to remove copy of a snapshot; the next start removes it");
        }
    }
}

/// Whether trees that a record names by path are in the image store. A record may come from a backup,
/// and a sandbox must not see other directories of the host. Missing layers are accepted here: they
/// give access to nothing.
fn are_in_image_store(state: &Path, trees: &[ImageTree]) -> bool {
    let store = state.join("images");
    let Ok(root) = linux::fs::RootDirectory::open(&store) else { return false };
    let of_store = |lower: &PathBuf| {
        let opened = lower.strip_prefix(&store).ok().map(|path| root.open_subdirectory(path));
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
fn wait_until_frozen(events: &PathBuf) -> io::Result<()> {
    let events = File::open(events)?;
    let timeout = Timespec { tv_sec: FREEZE_TIMEOUT_SECONDS, tv_nsec: 0 };
    loop {
        let mut buffer = [0; 256];
        let length = rustix::io::pread(&events, &mut buffer, 0)?;
        if String::from_utf8_lossy(&buffer[..length]).contains("frozen 1") {
            return Ok(());
        }
        let mut watched = [PollFd::new(&events, PollFlags::PRI)];
        if rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))? == 0 {
            return Err(io::Error::other(format!(
                "commands could not be frozen within {FREEZE_TIMEOUT_SECONDS} s"
            )));
        }
    }
}

impl PendingSnapshot {
    /// Returns the number of copied bytes and the total, if bytes are copied.
    pub fn progress(&self) -> Option<(u64, u64)> {
        self.copying.progress().map(|(Bytes(done), Bytes(total))| (done, total))
    }
}

impl From<SnapshotRecord> for StoredSnapshot {
    fn from(record: SnapshotRecord) -> Self {
        Self { image: record.made_of.image, size: record.size, disk: record.disk }
    }
}

fn snapshots_unsupported_error() -> OpError {
    let hint = "run the server as root: an ordinary user's disks are in memory and end with their sandbox";
    OpError::unsupported("snapshots need disks that outlive a sandbox", Some(hint))
}

fn snapshot_not_found_error(snapshot: &SnapshotId) -> OpError {
    let message = format!("snapshot `{snapshot}` does not exist");
    OpError { kind: OpErrorKind::NoImage, message, hint: None }
}

fn disk_op_error(error: &VolumeError) -> OpError {
    let hint = error.hint().map(str::to_owned);
    let (kind, message) = match error {
        VolumeError::NoRoom { .. } => (OpErrorKind::Exhausted, error.to_string()),
        VolumeError::OtherSize { .. } => (OpErrorKind::TooMuch, error.to_string()),
        VolumeError::OnlyMemory => return snapshots_unsupported_error(),
        VolumeError::Io { source, .. } => {
            (OpErrorKind::Step("volume".to_owned()), format!("{error}: {source}"))
        }
        _ => (OpErrorKind::Step("volume".to_owned()), error.to_string()),
    };
    OpError { kind, message, hint }
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
            are_in_image_store(
                state.path(),
                &[ImageTree { mount_point: mount_point.to_owned(), lowers: vec![lower] }],
            )
        };
        assert!(accepts("/", layer.clone()));
        assert!(accepts("/", "/no/such/place".into()));
        for lower in ["/".into(), "/etc".into(), layer.join("link"), layer.join("../../../..")] {
            assert!(!accepts("/", lower.clone()), "{}", lower.display());
        }
        assert!(!accepts("/../up", layer));
    }
}

//! Taking snapshots of sandboxes, and making sandboxes from them.
//!
//! ```text
//!  launcher                                an errand
//!  draft, freeze ── fork ────────────────► wait until frozen, copy the disk, thaw, record
//!  thaw, drop the draft ◄── it is over ──┘
//! ```
//!
//! The commands of a sandbox stand still while its disk is flushed and copied. Whatever happens
//! to the errand or to us, they go on: the launcher thaws them again when the errand is over, and
//! one that was killed leaves the draft, by which the next one thaws them.

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

/// How long commands may take to stand still. One in the middle of a read from a slow disk
/// cannot be stopped before it returns.
const STAND_STILL: i64 = 20;

/// The snapshots of one state directory.
pub(super) struct Snapshots {
    pub(super) records: KeptRecords,
    errands: Errands,
    /// The sandboxes that stand still because of us, and whether somebody had paused them.
    still: Vec<(String, bool)>,
    /// The disk that the next sandbox is to get, and which that is.
    restored: Option<(String, Prepared)>,
}

/// A snapshot on its way. When its errand is over, [`Launcher::conclude_snapshot`] says what
/// became of it.
pub struct Taking {
    pub id: String,
    pub snapshot: String,
    pub errand: Errand,
    copying: Copying,
}

/// What became of the wish for a snapshot.
pub enum Wished {
    Known(KeptRecord),
    Taking(Taking),
}

/// The disk of a sandbox on its way. When its errand is over, [`Launcher::conclude_restore`]
/// makes it ready.
pub struct Restoring {
    pub plan: Box<JailPlan>,
    pub errand: Errand,
    disk: Prepared,
}

impl Snapshots {
    /// Lets go on what a killed launcher left standing still, and removes what it left half made.
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
        // At once, since nobody should stand still for a moment too long, and again when no former
        // errand can stop anything any more.
        go_on(&drafted, groups, volumes, &failed)?;
        errands.wait_for_former().map_err(failed)?;
        go_on(&drafted, groups, volumes, &failed)?;
        remove_halves(&records, volumes, &failed)?;
        for id in &drafts {
            records.end(id).map_err(failed)?;
        }
        Ok(Self { records, errands, still: Vec::new(), restored: None })
    }

    /// Whether the sandbox was paused by somebody, if it stands still because of us.
    pub(super) fn paused_before(&self, id: &str) -> Option<bool> {
        self.still.iter().find(|(still, _)| still == id).map(|(_, paused)| *paused)
    }
}

/// Lets the sandboxes of drafts go on.
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

/// A copy without a record was never finished, and a record without its copy is of no use.
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
        tracing::warn!(snapshot = record, "its files are gone");
        records.remove(record).map_err(failed)?;
    }
    Ok(())
}

fn thaw(groups: &Hierarchies, id: &str) -> io::Result<()> {
    match groups.freeze(id, false) {
        // The sandbox is gone or going, and with it everything that could stand still.
        Err(error) if error.kind() == io::ErrorKind::NotFound || is_dying(&error) => Ok(()),
        other => other.map(drop),
    }
}

/// Whether a group is being removed: its files then answer with ENODEV.
fn is_dying(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

impl Launcher {
    /// Whether snapshots can be taken here.
    pub fn can_keep(&self) -> bool {
        matches!(&self.rights, Rights::Root(root) if root.volumes.can_keep())
    }

    /// Begins a snapshot, unless there is one of this name already.
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
            Refusal::unsupported("this sandbox was made by an older server, which did not note of what", None)
        })?;
        let copying = root.volumes.keep(id, snapshot).map_err(|error| disk_refusal(&error))?;
        let disk = record.limits.disk;
        let kept = KeptRecord { sandbox: id.to_owned(), made_of, size: 0, disk };
        let errand = root.send_for_snapshot(&self.thread, snapshot, kept, copying.clone(), alive);
        let errand = errand.map_err(|error| super::serve::failed("snapshot", &error))?;
        Ok(Wished::Taking(Taking { id: id.to_owned(), snapshot: snapshot.to_owned(), errand, copying }))
    }

    /// What became of a snapshot whose errand is over. The commands go on in any case.
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

    /// Drops a snapshot. One that is gone already is no error.
    pub fn forget_snapshot(&mut self, snapshot: &str) -> io::Result<()> {
        let Rights::Root(root) = &mut self.rights else { return Ok(()) };
        // The record goes last: without the files it is removed at the next start.
        root.volumes.forget(snapshot).map_err(io::Error::other)?;
        root.snapshots.records.remove(snapshot)
    }

    /// All snapshots that are whole.
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

    /// Has the next sandbox get the disk whose errand is over.
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

    /// What an image of this snapshot would be made of: its disk, and what that lies on.
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

    /// Drops a restored disk that its sandbox did not come to use.
    pub fn discard_restored(&mut self) {
        if let Rights::Root(root) = &mut self.rights
            && let Some((_, disk)) = root.snapshots.restored.take()
        {
            root.discard(disk);
        }
    }

    /// Adds what a sandbox begins with, and whether that counts in its disk.
    pub(super) fn tell_of_snapshot(&self, plan: &JailPlan, restored: u64, holds: &mut Holds) {
        let (Some(snapshot), Rights::Root(root)) = (&plan.snapshot, &self.rights) else { return };
        let counted = if root.volumes.counts_restored() { "within" } else { "beside" };
        let by = if root.volumes.kind() == Kind::Ext4 { "copied" } else { "shared" };
        let files = format!("{} of {snapshot}, {by}, {counted} the limit on disk", Bytes(restored));
        holds.measures.push(("snapshot".to_owned(), files));
    }

    /// The image below a snapshot, as it was, but for the host's own, which is as it is now.
    pub(super) fn image_below(&self, snapshot: &str) -> Result<(Resolved, u64), Refusal> {
        let Rights::Root(root) = &self.rights else { return Err(only_memory()) };
        let record = root.snapshots.records.read(snapshot).ok_or_else(|| no_snapshot(snapshot))?;
        Ok((self.image_again(record.made_of)?, record.size))
    }

    /// The image that files were written on, as it was, but for the host's own, which is as it is
    /// now.
    pub(super) fn image_again(&self, made_of: MadeOf) -> Result<Resolved, Refusal> {
        if made_of.image == HOST {
            return self.resolve(HOST);
        }
        // By its digests where they are known: the paths may be those of a former place.
        let trees: Vec<Tree> = match &made_of.record {
            Some(record) => {
                images::trees_of(&self.settings.image_state, &self.host, record).map_err(refuse_image)?
            }
            None => made_of.trees.into_iter().map(Tree::from).collect(),
        };
        if made_of.record.is_none() && !are_of_store(&self.settings.image_state, &trees) {
            let message =
                format!("the record of image `{}` names layers that are not images' here", made_of.image);
            let hint = Some("import the image again under the same name".to_owned());
            return Err(Refusal { kind: RefusalKind::NoImage, message, hint });
        }
        if let Some(gone) = trees.iter().flat_map(|tree| &tree.lowers).find(|lower| !lower.is_dir()) {
            tracing::warn!(image = made_of.image, layer = %gone.display(), "a layer of an image is gone");
            let hint = Some("import the image again under the same name".to_owned());
            let message = format!("a layer of image `{}`, below the files, is gone", made_of.image);
            return Err(Refusal { kind: RefusalKind::NoImage, message, hint });
        }
        let (name, env, record) = (made_of.image, made_of.env, made_of.record);
        Ok(Resolved { name, trees, env, record, stand_in: None })
    }
}

impl Root {
    /// Notes the intention, stops the commands, and sends somebody to copy the disk.
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
        // Of a dead one nothing has to stand still, and it may have no groups any more.
        let still = if alive { self.groups.freeze(&id, true).map(drop) } else { Ok(()) };
        let sent = still.and_then(|()| {
            let (events, groups, volumes) = (self.groups.events_file(&id), &self.groups, &self.volumes);
            self.snapshots.errands.send(thread, || {
                if alive {
                    wait_until_still(&events)?;
                }
                copying.run()?;
                if alive && !paused {
                    // As early as possible; what follows waits for the disk once more.
                    groups.freeze(&id, false)?;
                }
                // Only what was flushed is counted, so this comes after the copy.
                let used = volumes.usage(&id).map_err(io::Error::other)?.used.0;
                kept.size = if volumes.counts_restored() { used } else { used + kept.made_of.restored };
                records.keep(snapshot, &kept)
            })
        });
        self.snapshots.still.push((id.clone(), paused));
        sent.or_else(|error| self.end_snapshot(&id, snapshot, false).and(Err(error)))
    }

    /// Lets the commands go on, and removes what is half made.
    fn end_snapshot(&mut self, id: &str, snapshot: &str, taken: bool) -> io::Result<()> {
        let paused = self.snapshots.paused_before(id).unwrap_or(false);
        self.snapshots.still.retain(|(still, _)| still != id);
        let thawed = if paused { Ok(()) } else { thaw(&self.groups, id) };
        let written = self.volumes.thaw(id).map_err(io::Error::other);
        let tidied = if taken { Ok(()) } else { self.volumes.forget(snapshot).map_err(io::Error::other) };
        // The draft stays if its sandbox may still stand.
        thawed.and(written).and(tidied).and_then(|()| self.snapshots.records.end(snapshot))
    }

    /// The disk that was restored for this sandbox.
    pub(super) fn take_restored(&mut self, id: &str) -> Option<Prepared> {
        let (_, disk) = self.snapshots.restored.take_if(|(whose, _)| whose == id)?;
        Some(disk)
    }

    fn discard(&mut self, disk: Prepared) {
        if let Err(error) = self.volumes.discard(disk) {
            tracing::warn!(%error, "a restored disk is removed at the next start");
        }
    }
}

/// Whether trees that a record names by their paths lie in the store of images. A record may have
/// come with a backup, and a sandbox must not be shown another directory of the host. Layers that
/// are gone pass here: they show nothing.
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

/// Waits until the kernel has stopped every command of a group.
fn wait_until_still(events: &PathBuf) -> io::Result<()> {
    let events = File::open(events)?;
    let patience = Timespec { tv_sec: STAND_STILL, tv_nsec: 0 };
    loop {
        let mut buffer = [0; 256];
        let length = rustix::io::pread(&events, &mut buffer, 0)?;
        if String::from_utf8_lossy(&buffer[..length]).contains("frozen 1") {
            return Ok(());
        }
        let mut watched = [PollFd::new(&events, PollFlags::PRI)];
        if rustix::io::retry_on_intr(|| poll(&mut watched, Some(&patience)))? == 0 {
            return Err(io::Error::other(format!("its commands did not stand still within {STAND_STILL} s")));
        }
    }
}

impl Taking {
    /// How far it has come, as bytes of bytes, where they are copied.
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
    let message = format!("there is no snapshot `{snapshot}` here");
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
    fn trees_outside_of_the_store_are_refused() {
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

//! The record of a sandbox, written before the sandbox is made and updated while it exists, so that a
//! later launcher can adopt it: `<state>/boxes/<id>`.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use domain::SandboxId;
use egress_protocol::ServeMode;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::identity::ServerIdentity;
use crate::images::{self, FoundImage, ImageTree};
use crate::jail::plan::JailLimits;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LauncherRecord {
    pub boot: String,
    pub limits: JailLimits,
    /// Absent in records of older servers.
    #[serde(default)]
    pub made_of: Option<SandboxOrigin>,
    /// The uid and gid that its commands start with.
    #[serde(default)]
    pub user: (u32, u32),
    /// Whether its filters refuse set-id bits; otherwise it may not write to directories of the host.
    #[serde(default)]
    pub without_set_id: bool,
    /// Absent until the first process exists.
    pub process: Option<ProcessIdentity>,
    /// Whether it has a network, from the beginning or added later.
    #[serde(default)]
    pub connected: bool,
    /// Set if egress carries its connections, because its network is filtered or it has no link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filtered: Option<FilteredRecord>,
    /// Whether its processes ended and everything was removed except its disk.
    #[serde(default)]
    pub stopped: bool,
    /// The identity of the state directory in which its process was started. Absent in records of
    /// older versions.
    #[serde(default)]
    pub instance: Option<String>,
    /// Whether the process belongs to another server, because the state directory is a copy. Such a
    /// process is never watched, killed or reaped.
    #[serde(skip)]
    pub foreign: bool,
}

/// How egress serves a sandbox. A new supervisor has to be told, with new sockets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilteredRecord {
    pub mode: ServeMode,
    /// The addresses of the sandbox itself.
    pub own: Vec<IpAddr>,
}

/// The image and snapshot that a sandbox was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxOrigin {
    /// The image after aliases.
    pub image: String,
    pub trees: Vec<TreeRecord>,
    pub env: Vec<(String, String)>,
    /// The image's record in the image store. Its layers must not be removed while this exists.
    #[serde(default)]
    pub record: Option<images::ImageRecord>,
    /// The number of bytes that came from a snapshot.
    #[serde(default)]
    pub restored: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    pub mount_point: String,
    pub lowers: Vec<PathBuf>,
}

/// Identifies the first process. A pid alone can be reused; together with the start time and the pid
/// namespace it is unique.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: i32,
    pub started: u64,
    pub namespace: u64,
}

/// The end of the name of a record whose sandbox has ended. No id contains a dot.
pub(crate) const ENDED_SUFFIX: &str = ".ended";

/// The records of one state directory.
#[derive(Clone, Debug)]
pub struct LauncherRecords {
    directory: PathBuf,
    identity: ServerIdentity,
}

impl LauncherRecords {
    /// Opens the records of a state directory, which signs them with its identity.
    pub fn open(state_dir: &Path, identity: ServerIdentity) -> io::Result<Self> {
        let directory = state_dir.join("boxes");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, identity })
    }

    /// Records the intention to make a sandbox; fails if the id already has a record.
    pub fn begin_create(
        &self,
        id: &SandboxId,
        limits: JailLimits,
        made_of: SandboxOrigin,
    ) -> io::Result<LauncherRecord> {
        let record = LauncherRecord {
            boot: boot_id()?.to_owned(),
            limits,
            made_of: Some(made_of),
            user: (0, 0),
            without_set_id: false,
            process: None,
            connected: false,
            filtered: None,
            stopped: false,
            instance: Some(self.identity.instance.clone()),
            foreign: false,
        };
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.path(id))?;
        file.write_all(&serde_json::to_vec(&record)?)?;
        Ok(record)
    }

    /// Records that a sandbox is restarted on its disk. A sandbox without a readable record gets a new
    /// one.
    pub fn begin_restart(
        &self,
        id: &SandboxId,
        limits: JailLimits,
        made_of: SandboxOrigin,
    ) -> io::Result<LauncherRecord> {
        let Some(former) = self.read(id) else {
            self.remove(id)?;
            return self.begin_create(id, limits, made_of);
        };
        let record = LauncherRecord {
            boot: boot_id()?.to_owned(),
            limits,
            made_of: Some(made_of),
            process: None,
            connected: false,
            filtered: None,
            stopped: false,
            instance: Some(self.identity.instance.clone()),
            foreign: false,
            ..former
        };
        self.replace(id, &record)?;
        Ok(record)
    }

    /// Records that only the disk of a sandbox is left.
    pub fn mark_stopped(&self, id: &SandboxId) -> io::Result<()> {
        match self.read(id) {
            Some(record) if record.stopped => Ok(()),
            Some(record) => {
                let record = LauncherRecord {
                    process: None,
                    connected: false,
                    filtered: None,
                    stopped: true,
                    ..record
                };
                self.replace(id, &record)
            }
            // The record was torn by a power loss or never written: the disk alone shows that the
            // sandbox exists.
            None => self.remove(id),
        }
    }

    /// Adds the first process to a record. A reader that finds a torn record treats the sandbox as
    /// incomplete, which it is at that moment.
    pub fn add_process(&self, id: &SandboxId, record: &mut LauncherRecord, pid: Pid) -> io::Result<()> {
        record.process = Some(ProcessIdentity::of(pid)?);
        record.instance = Some(self.identity.instance.clone());
        record.foreign = false;
        // The intention is overwritten, which is shorter unless it is that of a restart: truncating it
        // first would make some filesystems flush the file at once.
        self.replace(id, record)
    }

    /// Overwrites an existing record in one write: a process that is killed has written all of it or
    /// nothing. Blanks overwrite the rest of a longer record.
    pub fn replace(&self, id: &SandboxId, record: &LauncherRecord) -> io::Result<()> {
        let path = self.path(id);
        let former = usize::try_from(fs::metadata(&path)?.len()).unwrap_or(0);
        let mut json = serde_json::to_vec(record)?;
        json.resize(json.len().max(former), b' ');
        fs::OpenOptions::new().write(true).open(path)?.write_all(&json)
    }

    /// Returns the record of `id`, if it has a complete one.
    pub fn read(&self, id: &SandboxId) -> Option<LauncherRecord> {
        let mut record: LauncherRecord = serde_json::from_slice(&fs::read(self.path(id)).ok()?).ok()?;
        record.foreign = !self.is_own_record(&record);
        Some(record)
    }

    /// Whether the process in a record was started by a server of this state directory, and not of the
    /// one that it was copied from.
    fn is_own_record(&self, record: &LauncherRecord) -> bool {
        match &record.instance {
            Some(instance) => *instance == self.identity.instance,
            None => self.identity.owns_unsigned_records,
        }
    }

    /// Records that the processes of a sandbox have ended and that nothing of it is kept: its record gets another
    /// name, under which it is neither listed nor read. Returns `false` if it has no record.
    pub(crate) fn mark_ended(&self, id: &SandboxId) -> io::Result<bool> {
        match fs::rename(self.path(id), self.ended_path(id)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(self.is_ended(id)),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn is_ended(&self, id: &SandboxId) -> bool {
        self.ended_path(id).exists()
    }

    /// Returns the ids of all sandboxes that were marked as ended and not removed.
    pub(crate) fn list_ended(&self) -> io::Result<Vec<SandboxId>> {
        self.list_names(ENDED_SUFFIX)
    }

    pub fn remove(&self, id: &SandboxId) -> io::Result<()> {
        for path in [self.path(id), self.ended_path(id)] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the ids of all sandboxes that have a record.
    pub fn list(&self) -> io::Result<Vec<SandboxId>> {
        self.list_names("")
    }

    /// Returns the ids of the files whose names consist of an id and `suffix`.
    fn list_names(&self, suffix: &str) -> io::Result<Vec<SandboxId>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(suffix));
            found.extend(id.and_then(|id| SandboxId::parse(id).ok()));
        }
        Ok(found)
    }

    fn ended_path(&self, id: &SandboxId) -> PathBuf {
        self.directory.join(format!("{id}{ENDED_SUFFIX}"))
    }

    /// Returns a descriptor that becomes readable when the sandbox ends, if it is running.
    pub fn pidfd(&self, id: &SandboxId) -> Option<OwnedFd> {
        self.read(id)?.pidfd()
    }

    /// Whether any sandbox is running.
    pub(super) fn any_sandbox_runs(&self) -> io::Result<bool> {
        Ok(self.list()?.iter().any(|id| self.pidfd(id).is_some()))
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.directory.join(id.as_str())
    }
}

impl LauncherRecord {
    /// Returns a descriptor of the first process, if exactly that process is still running.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        let process = self.process.as_ref().filter(|_| !self.foreign)?;
        if self.boot != boot_id().ok()? {
            return None;
        }
        process.open_pidfd()
    }
}

impl LauncherRecord {
    /// Returns a descriptor of the first process if it has ended and was not reaped yet.
    pub fn unreaped_pidfd(&self) -> Option<OwnedFd> {
        let here = !self.foreign && boot_id().is_ok_and(|boot| boot == self.boot);
        let process = self.process.as_ref().filter(|_| here)?;
        let pid = Pid::from_raw(process.pid)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The namespaces of an ended process are gone, but its start time is still known.
        (read_start_time(process.pid).ok()? == process.started && has_ended(&pidfd)).then_some(pidfd)
    }
}

impl SandboxOrigin {
    pub fn of_image(image: &FoundImage, restored: u64) -> Self {
        let tree = |tree: &ImageTree| TreeRecord {
            mount_point: tree.mount_point.clone(),
            lowers: tree.lowers.clone(),
        };
        let trees = image.trees.iter().map(tree).collect();
        let (name, env, record) = (image.name.clone(), image.env.clone(), image.record.clone());
        Self { image: name, trees, env, record, restored }
    }
}

impl From<TreeRecord> for ImageTree {
    fn from(record: TreeRecord) -> Self {
        Self { mount_point: record.mount_point, lowers: record.lowers }
    }
}

impl ProcessIdentity {
    /// Returns a descriptor of this process, if it is still running in this boot.
    pub fn open_pidfd(&self) -> Option<OwnedFd> {
        // The pidfd is opened before the comparison: while it is open, the pid refers to this process.
        let pid = Pid::from_raw(self.pid)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        (Self::of(pid).ok()? == *self && !has_ended(&pidfd)).then_some(pidfd)
    }

    fn of(pid: Pid) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let pid = pid.as_raw_pid();
        let started = read_start_time(pid)?;
        let namespace = fs::metadata(format!("/proc/{pid}/ns/pid")).map_or(0, |metadata| metadata.ino());
        Ok(Self { pid, started, namespace })
    }
}

/// Identifies the process that started this one, for as long as the host is up. A launcher's parent is the
/// supervisor of its server.
pub(crate) fn parent_identity() -> String {
    let parent = rustix::process::getppid().and_then(|pid| ProcessIdentity::of(pid).ok());
    let boot = boot_id().unwrap_or_default();
    match parent {
        Some(ProcessIdentity { pid, started, .. }) => format!("{pid} {started} {boot}"),
        // The parent is in another pid namespace: this process stands for it.
        None => format!("child {} {boot}", std::process::id()),
    }
}

/// Returns when a process was started, in ticks since the boot of the host.
fn read_start_time(pid: i32) -> io::Result<u64> {
    // One read is enough: the kernel returns the whole line, which is shorter than this.
    const MAX_STAT_BYTES: usize = 2048;
    let mut stat = [0; MAX_STAT_BYTES];
    let length = io::Read::read(&mut fs::File::open(format!("/proc/{pid}/stat"))?, &mut stat)?;
    let stat = String::from_utf8_lossy(&stat[..length]);
    // The name in parentheses may contain anything; the start time is the 20th word after it.
    let behind = stat.rsplit_once(')').map(|(_, behind)| behind).unwrap_or_default();
    let started = behind.split_whitespace().nth(19).and_then(|word| word.parse().ok());
    started.ok_or_else(|| io::Error::other(format!("could not parse the start time of process {pid}")))
}

/// Whether the process behind a pidfd has ended.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut watched = [PollFd::new(pidfd, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut watched, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

/// Returns the id of this boot of the host, which is read once.
pub(crate) fn boot_id() -> io::Result<&'static str> {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    if let Some(known) = BOOT_ID.get() {
        return Ok(known);
    }
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT_ID.get_or_init(|| read.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::test_id;

    #[test]
    fn record_finds_its_own_process_and_no_other() {
        let own = rustix::process::getpid();
        let limits = JailLimits { memory: 1, cpus: 1, pids: 1, disk: 1 };
        let mut record = LauncherRecord {
            boot: boot_id().expect("linux").to_owned(),
            limits,
            made_of: None,
            user: (0, 0),
            without_set_id: false,
            process: ProcessIdentity::of(own).ok(),
            connected: false,
            filtered: None,
            stopped: false,
            instance: None,
            foreign: false,
        };
        assert!(record.pidfd().is_some());
        let process = record.process.as_mut().expect("the record has a process");
        process.started += 1;
        assert!(record.pidfd().is_none(), "another process with this pid");
        set_another_boot(&mut record);
        assert!(record.pidfd().is_none(), "another boot");
    }

    #[test]
    fn ended_sandbox_is_not_listed_but_found_by_the_next_launcher() {
        let state = tempfile::tempdir().expect("a directory");
        let identity =
            ServerIdentity { instance: "i".to_owned(), owns_unsigned_records: true, auto_without_link: true };
        let records = LauncherRecords::open(state.path(), identity).expect("a directory");
        let (id, limits) = (test_id("a"), JailLimits { memory: 1, cpus: 1, pids: 1, disk: 1 });
        assert!(!records.mark_ended(&id).expect("a missing record is no error"));
        records.begin_create(&id, limits, made_of()).expect("there is no record yet");
        for _ in 0..2 {
            assert!(records.mark_ended(&id).expect("marking twice is no error"));
        }
        assert_eq!(records.list().expect("a directory"), []);
        assert!(records.read(&id).is_none());
        assert_eq!(records.list_ended().expect("a directory"), std::slice::from_ref(&id));
        records.remove(&id).expect("the record is there");
        assert_eq!(records.list_ended().expect("a directory"), []);
    }

    #[test]
    fn record_in_a_copied_directory_refers_to_no_process() {
        let state = tempfile::tempdir().expect("a directory");
        let limits = JailLimits { memory: 1, cpus: 1, pids: 1, disk: 1 };
        let open = |instance: &str, owns_unsigned_records| {
            let identity = ServerIdentity {
                instance: instance.to_owned(),
                owns_unsigned_records,
                auto_without_link: true,
            };
            LauncherRecords::open(state.path(), identity).expect("the directory is writable")
        };
        let original = open("one", false);
        let mut record =
            original.begin_create(&test_id("a"), limits, made_of()).expect("there is no record yet");
        original
            .add_process(&test_id("a"), &mut record, rustix::process::getpid())
            .expect("the process is running");
        let pidfd =
            |records: &LauncherRecords| records.read(&test_id("a")).expect("the record is complete").pidfd();
        assert!(pidfd(&original).is_some());
        assert!(pidfd(&open("two", false)).is_none(), "the copy has another identity");
        assert!(pidfd(&open("two", true)).is_none(), "a signed record is not taken for an older one");
        record.instance = None;
        original.replace(&test_id("a"), &record).expect("the record exists");
        assert!(pidfd(&open("two", true)).is_some(), "an upgraded directory owns older records");
        assert!(pidfd(&open("two", false)).is_none());
    }

    #[test]
    fn shorter_record_replaces_a_longer_one() {
        let state = tempfile::tempdir().expect("a directory");
        let identity = ServerIdentity {
            instance: "i".to_owned(),
            owns_unsigned_records: false,
            auto_without_link: true,
        };
        let records = LauncherRecords::open(state.path(), identity).expect("the directory is writable");
        let long = JailLimits { memory: u64::MAX, cpus: 1000, pids: 1000, disk: u64::MAX };
        let mut record =
            records.begin_create(&test_id("a"), long, made_of()).expect("there is no record yet");
        record.limits = JailLimits { memory: 1, cpus: 2, pids: 3, disk: 4 };
        records.replace(&test_id("a"), &record).expect("the record exists");
        assert_eq!(records.read(&test_id("a")).expect("the record is complete").limits, record.limits);
        assert!(records.replace(&test_id("b"), &record).is_err(), "there is none to replace");
    }

    #[test]
    fn stopped_sandbox_keeps_its_record_and_can_be_restarted() {
        let state = tempfile::tempdir().expect("a directory");
        let identity = ServerIdentity {
            instance: "i".to_owned(),
            owns_unsigned_records: false,
            auto_without_link: true,
        };
        let records = LauncherRecords::open(state.path(), identity).expect("the directory is writable");
        let limits = JailLimits { memory: 1, cpus: 2, pids: 3, disk: 4 };
        let mut record =
            records.begin_create(&test_id("a"), limits, made_of()).expect("there is no record yet");
        records
            .add_process(&test_id("a"), &mut record, rustix::process::getpid())
            .expect("the process is running");
        records.mark_stopped(&test_id("a")).expect("the record can be written");
        let stopped = records.read(&test_id("a")).expect("the record is complete");
        assert!(stopped.stopped && stopped.pidfd().is_none());
        let again =
            records.begin_restart(&test_id("a"), limits, made_of()).expect("the record can be written");
        assert!(!again.stopped && again.process.is_none());
        // An unreadable record does not prevent a restart.
        fs::write(state.path().join("boxes").join(test_id("b").as_str()), "{")
            .expect("the directory is writable");
        records.mark_stopped(&test_id("b")).expect("the record can be removed");
        assert_eq!(records.list().expect("the records can be listed"), [test_id("a")]);
        records.begin_restart(&test_id("b"), limits, made_of()).expect("there is no record yet");
    }

    fn made_of() -> SandboxOrigin {
        SandboxOrigin {
            image: "host".to_owned(),
            trees: Vec::new(),
            env: Vec::new(),
            record: None,
            restored: 0,
        }
    }

    fn set_another_boot(record: &mut LauncherRecord) {
        record.process = ProcessIdentity::of(rustix::process::getpid()).ok();
        record.boot = "another".to_owned();
    }
}

//! The record of a sandbox, written before the sandbox is made and updated while it exists, so that a
//! later launcher can adopt it: `<state>/boxes/<id>`.

use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use domain::SandboxId;
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
            boot: boot_id()?,
            limits,
            made_of: Some(made_of),
            user: (0, 0),
            without_set_id: false,
            process: None,
            connected: false,
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
            boot: boot_id()?,
            limits,
            made_of: Some(made_of),
            process: None,
            connected: false,
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
                let record = LauncherRecord { process: None, connected: false, stopped: true, ..record };
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

    pub fn remove(&self, id: &SandboxId) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Returns the ids of all sandboxes that have a record.
    pub fn list(&self) -> io::Result<Vec<SandboxId>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            found.extend(entry?.file_name().to_str().and_then(|name| SandboxId::parse(name).ok()));
        }
        Ok(found)
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

/// Returns when a process was started, in ticks since the boot of the host.
fn read_start_time(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
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

pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
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
            boot: boot_id().expect("linux"),
            limits,
            made_of: None,
            user: (0, 0),
            without_set_id: false,
            process: ProcessIdentity::of(own).ok(),
            connected: false,
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
    fn record_in_a_copied_directory_refers_to_no_process() {
        let state = tempfile::tempdir().expect("a directory");
        let limits = JailLimits { memory: 1, cpus: 1, pids: 1, disk: 1 };
        let open = |instance: &str, owns_unsigned_records| {
            let identity = ServerIdentity { instance: instance.to_owned(), owns_unsigned_records };
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
        let identity = ServerIdentity { instance: "i".to_owned(), owns_unsigned_records: false };
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
        let identity = ServerIdentity { instance: "i".to_owned(), owns_unsigned_records: false };
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

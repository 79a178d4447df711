//! What is written about a sandbox before and while it exists, so that a later launcher knows
//! it again: `<state>/boxes/<id>`.

use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::identity::ServerIdentity;
use crate::images::{self, Resolved, Tree};
use crate::jail::plan::Limits;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    pub boot: String,
    pub limits: Limits,
    /// Absent in records of older servers.
    #[serde(default)]
    pub made_of: Option<MadeOf>,
    /// As whom its commands start.
    #[serde(default)]
    pub user: (u32, u32),
    /// Whether its filters refuse set-id bits, without which it writes to no directory of the host.
    #[serde(default)]
    pub without_set_id: bool,
    /// Absent until the first process exists.
    pub process: Option<Process>,
    /// Whether it has a network, from the beginning or given to it later.
    #[serde(default)]
    pub connected: bool,
    /// Whether its processes ended and all was given back but its disk.
    #[serde(default)]
    pub stopped: bool,
    /// The identity of the state directory in which its process was started. Absent in records of
    /// older versions.
    #[serde(default)]
    pub instance: Option<String>,
    /// Whether the process belongs to another server, because this is a record in a copied state
    /// directory. Such a process is never watched, ended or collected.
    #[serde(skip)]
    pub foreign: bool,
}

/// What a sandbox's files were before it wrote any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeOf {
    /// The image after aliases.
    pub image: String,
    pub trees: Vec<TreeRecord>,
    pub env: Vec<(String, String)>,
    /// What the store of images knew of it. The layers it names must stay as long as this.
    #[serde(default)]
    pub record: Option<images::Record>,
    /// How many bytes it was given by a snapshot.
    #[serde(default)]
    pub restored: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    pub mount_point: String,
    pub lowers: Vec<PathBuf>,
}

/// Who the first process is. A pid alone is used again; with its start time and its pid
/// namespace it is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: i32,
    pub started: u64,
    pub namespace: u64,
}

/// The records of one state directory.
#[derive(Clone, Debug)]
pub struct Records {
    directory: PathBuf,
    identity: ServerIdentity,
}

impl Records {
    /// Opens the records of a state directory, which signs them with its identity.
    pub fn open(state_dir: &Path, identity: ServerIdentity) -> io::Result<Self> {
        let directory = state_dir.join("boxes");
        fs::create_dir_all(&directory)?;
        Ok(Self { directory, identity })
    }

    /// Writes down the intention; an id that has a record already is refused.
    pub fn begin(&self, id: &str, limits: Limits, made_of: MadeOf) -> io::Result<Record> {
        let record = Record {
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

    /// Writes down that a sandbox is begun again on the disk it had. One without a readable record
    /// gets a new one.
    pub fn begin_again(&self, id: &str, limits: Limits, made_of: MadeOf) -> io::Result<Record> {
        let Some(former) = self.read(id) else {
            self.remove(id)?;
            return self.begin(id, limits, made_of);
        };
        let record = Record {
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

    /// Writes down that only the disk is left of a sandbox.
    pub fn note_stopped(&self, id: &str) -> io::Result<()> {
        match self.read(id) {
            Some(record) if record.stopped => Ok(()),
            Some(record) => {
                let record = Record { process: None, connected: false, stopped: true, ..record };
                self.replace(id, &record)
            }
            // Torn by a power loss, or never written: the disk alone says that there is one.
            None => self.remove(id),
        }
    }

    /// Adds who the first process is. A reader that finds a torn record takes the sandbox for
    /// half made, which at that moment it is.
    pub fn add_process(&self, id: &str, record: &mut Record, pid: Pid) -> io::Result<()> {
        record.process = Some(Process::of(pid)?);
        record.instance = Some(self.identity.instance.clone());
        record.foreign = false;
        // Written over the intention, which is shorter unless it is that of a restart: truncating
        // first would make some filesystems write the file out at once.
        self.replace(id, record)
    }

    /// Writes a record over one that is there, in one piece: who is killed meanwhile has written
    /// all or nothing. Blanks cover what is left of a longer one.
    pub fn replace(&self, id: &str, record: &Record) -> io::Result<()> {
        let path = self.path(id);
        let former = usize::try_from(fs::metadata(&path)?.len()).unwrap_or(0);
        let mut json = serde_json::to_vec(record)?;
        json.resize(json.len().max(former), b' ');
        fs::OpenOptions::new().write(true).open(path)?.write_all(&json)
    }

    /// The record of `id`, if it has a complete one.
    pub fn read(&self, id: &str) -> Option<Record> {
        let mut record: Record = serde_json::from_slice(&fs::read(self.path(id)).ok()?).ok()?;
        record.foreign = !self.signed(&record);
        Some(record)
    }

    /// Whether the process in a record was started by this state directory and not by another that
    /// it was copied from.
    fn signed(&self, record: &Record) -> bool {
        match &record.instance {
            Some(instance) => *instance == self.identity.instance,
            None => self.identity.owns_unsigned_records,
        }
    }

    pub fn remove(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    pub fn list(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.directory)?;
        entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned())).collect()
    }

    fn path(&self, id: &str) -> PathBuf {
        self.directory.join(id)
    }
}

impl Record {
    /// A descriptor of the first process, if that very process still lives.
    pub fn pidfd(&self) -> Option<OwnedFd> {
        let process = self.process.as_ref().filter(|_| !self.foreign)?;
        if self.boot != boot_id().ok()? {
            return None;
        }
        process.open()
    }
}

impl Record {
    /// A descriptor of the first process if it has ended and nobody has collected it.
    pub fn remains(&self) -> Option<OwnedFd> {
        let here = !self.foreign && boot_id().is_ok_and(|boot| boot == self.boot);
        let process = self.process.as_ref().filter(|_| here)?;
        let pid = Pid::from_raw(process.pid)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Its namespaces are gone, but not the moment when it began.
        (started(process.pid).ok()? == process.started && ended(&pidfd)).then_some(pidfd)
    }
}

impl MadeOf {
    pub fn of(image: &Resolved, restored: u64) -> Self {
        let tree =
            |tree: &Tree| TreeRecord { mount_point: tree.mount_point.clone(), lowers: tree.lowers.clone() };
        let trees = image.trees.iter().map(tree).collect();
        let (name, env, record) = (image.name.clone(), image.env.clone(), image.record.clone());
        Self { image: name, trees, env, record, restored }
    }
}

impl From<TreeRecord> for Tree {
    fn from(record: TreeRecord) -> Self {
        Self { mount_point: record.mount_point, lowers: record.lowers }
    }
}

impl Process {
    /// A descriptor of this very process, if it still lives in this boot.
    pub fn open(&self) -> Option<OwnedFd> {
        // Opened first and compared afterwards: from here on the number means this process.
        let pid = Pid::from_raw(self.pid)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        (Self::of(pid).ok()? == *self && !ended(&pidfd)).then_some(pidfd)
    }

    fn of(pid: Pid) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let pid = pid.as_raw_pid();
        let started = started(pid)?;
        let namespace = fs::metadata(format!("/proc/{pid}/ns/pid")).map_or(0, |metadata| metadata.ino());
        Ok(Self { pid, started, namespace })
    }
}

/// When a process began, in ticks since the host did.
fn started(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything; the start time is the 20th word behind it.
    let behind = stat.rsplit_once(')').map(|(_, behind)| behind).unwrap_or_default();
    let started = behind.split_whitespace().nth(19).and_then(|word| word.parse().ok());
    started.ok_or_else(|| io::Error::other("the kernel shows no start time"))
}

/// Whether the process behind a pidfd has ended.
pub fn ended(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut watched = [PollFd::new(pidfd, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut watched, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_knows_its_process_again_and_no_other() {
        let own = rustix::process::getpid();
        let limits = Limits { memory: 1, cpus: 1, pids: 1, disk: 1 };
        let mut record = Record {
            boot: boot_id().expect("linux"),
            limits,
            made_of: None,
            user: (0, 0),
            without_set_id: false,
            process: Process::of(own).ok(),
            connected: false,
            stopped: false,
            instance: None,
            foreign: false,
        };
        assert!(record.pidfd().is_some());
        let process = record.process.as_mut().expect("it has one");
        process.started += 1;
        assert!(record.pidfd().is_none(), "another process with this pid");
        process_boot(&mut record);
        assert!(record.pidfd().is_none(), "another boot");
    }

    #[test]
    fn record_of_a_copied_directory_leads_to_no_process() {
        let state = tempfile::tempdir().expect("a directory");
        let limits = Limits { memory: 1, cpus: 1, pids: 1, disk: 1 };
        let open = |instance: &str, owns_unsigned_records| {
            let identity = ServerIdentity { instance: instance.to_owned(), owns_unsigned_records };
            Records::open(state.path(), identity).expect("it is ours")
        };
        let original = open("one", false);
        let mut record = original.begin("a", limits, made_of()).expect("nobody has it");
        original.add_process("a", &mut record, rustix::process::getpid()).expect("it lives");
        let pidfd = |records: &Records| records.read("a").expect("it is whole").pidfd();
        assert!(pidfd(&original).is_some());
        assert!(pidfd(&open("two", false)).is_none(), "the copy has another identity");
        assert!(pidfd(&open("two", true)).is_none(), "a signed record is not taken for an older one");
        record.instance = None;
        original.replace("a", &record).expect("it is there");
        assert!(pidfd(&open("two", true)).is_some(), "an upgraded directory owns older records");
        assert!(pidfd(&open("two", false)).is_none());
    }

    #[test]
    fn a_shorter_record_takes_the_place_of_a_longer_one() {
        let state = tempfile::tempdir().expect("a directory");
        let identity = ServerIdentity { instance: "i".to_owned(), owns_unsigned_records: false };
        let records = Records::open(state.path(), identity).expect("it is ours");
        let long = Limits { memory: u64::MAX, cpus: 1000, pids: 1000, disk: u64::MAX };
        let mut record = records.begin("a", long, made_of()).expect("nobody has it");
        record.limits = Limits { memory: 1, cpus: 2, pids: 3, disk: 4 };
        records.replace("a", &record).expect("it is there");
        assert_eq!(records.read("a").expect("it is whole").limits, record.limits);
        assert!(records.replace("b", &record).is_err(), "there is none to replace");
    }

    #[test]
    fn a_stopped_sandbox_keeps_its_record_and_is_begun_again() {
        let state = tempfile::tempdir().expect("a directory");
        let identity = ServerIdentity { instance: "i".to_owned(), owns_unsigned_records: false };
        let records = Records::open(state.path(), identity).expect("it is ours");
        let limits = Limits { memory: 1, cpus: 2, pids: 3, disk: 4 };
        let mut record = records.begin("a", limits, made_of()).expect("nobody has it");
        records.add_process("a", &mut record, rustix::process::getpid()).expect("it lives");
        records.note_stopped("a").expect("it can be written");
        let stopped = records.read("a").expect("it is whole");
        assert!(stopped.stopped && stopped.pidfd().is_none());
        let again = records.begin_again("a", limits, made_of()).expect("it can be written");
        assert!(!again.stopped && again.process.is_none());
        // One that nobody can read is not in the way.
        fs::write(state.path().join("boxes/b"), "{").expect("it is ours");
        records.note_stopped("b").expect("it can be removed");
        assert_eq!(records.list().expect("it can be read"), ["a"]);
        records.begin_again("b", limits, made_of()).expect("there is none");
    }

    fn made_of() -> MadeOf {
        MadeOf { image: "host".to_owned(), trees: Vec::new(), env: Vec::new(), record: None, restored: 0 }
    }

    fn process_boot(record: &mut Record) {
        record.process = Process::of(rustix::process::getpid()).ok();
        record.boot = "another".to_owned();
    }
}

//! Programs that sandboxes execute from outside their image: the agent, and the program that runs kernels.
//!
//! Both are copies in the state directory, made once. A process inside that reaches one through
//! `/proc/PID/exe` can neither change nor replace it, and never reaches the host's own program:
//!
//! - As root, a copy belongs to root and has mode 0111. Processes inside cannot read it, and the kernel
//!   makes a process untraceable if it executes a program that it cannot read.
//! - An ordinary user's sandboxes have the uid of their owner, to whom the copy belongs. They execute it
//!   from a read-only mount that each makes for itself, so that even its mode cannot be changed.
//!
//! Launchers of several versions can share the directory, as `coracle run` before and after an upgrade does. A
//! launcher holds a shared lock for each copy that it uses, and removes only copies whose lock it can take exclusively. The
//! lock is a file of its own, `NAME.lock`: processes of an ordinary user's sandbox could lock the copy itself.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::jail::enter::EntryProgram;

/// Where the content of a program comes from.
#[derive(Clone, Copy, Debug)]
pub enum ProgramSource {
    /// The running program, whose `main` must know the arguments it is started with.
    ThisProgram,
    /// A program that the running one contains.
    Embedded(&'static [u8]),
}

/// The programs that a launcher offers to its sandboxes.
#[derive(Clone, Copy, Debug)]
pub struct SandboxPrograms {
    pub agent: ProgramSource,
    /// `None` if no sandbox of this launcher starts a kernel of ours.
    pub kernels: Option<ProgramSource>,
}

/// The copies of these programs.
pub(in crate::process) struct ProgramCopies {
    agent: ProgramCopy,
    kernels: Option<ProgramCopy>,
    /// Whether sandboxes have the uid that the copies belong to.
    owned_inside: bool,
}

struct ProgramCopy {
    path: PathBuf,
    file: OwnedFd,
    /// Holds the shared lock.
    _lock: File,
}

/// How often a copy or its lock is made again that another launcher removed.
const MAX_OPEN_ATTEMPTS: u32 = 100;
/// The end of the names of locks.
const LOCK_SUFFIX: &str = ".lock";

impl ProgramCopies {
    /// Makes those copies in `bin` that do not exist yet, and removes those of other versions that no launcher
    /// uses. Sandboxes that run an old copy keep the file, although its name is removed.
    pub(in crate::process) fn open(
        bin: &Path,
        programs: SandboxPrograms,
        owned_inside: bool,
    ) -> io::Result<Self> {
        let own = fs::metadata("/proc/self/exe")?;
        let times = own.mtime_nsec() ^ own.mtime();
        let version = format!("{:x}-{:x}-{:x}-{times:x}", own.dev(), own.ino(), own.size());
        let agent_name = format!("agent-{version}");
        let kernels_name = format!("kernels-{version}");
        for old in fs::read_dir(bin)? {
            let name = old?.file_name().to_string_lossy().into_owned();
            let copy = name.strip_suffix(LOCK_SUFFIX).unwrap_or(&name);
            if copy != agent_name && copy != kernels_name {
                remove_unused(&bin.join(copy))?;
            }
        }
        let mode = if owned_inside { 0o555 } else { 0o111 };
        let copy = |name: &str, source| ProgramCopy::open(bin, name, source, mode);
        Ok(Self {
            agent: copy(&agent_name, programs.agent)?,
            kernels: programs.kernels.map(|source| copy(&kernels_name, source)).transpose()?,
            owned_inside,
        })
    }

    /// Returns the agent's program for one more sandbox.
    pub(in crate::process) fn agent(&self) -> io::Result<EntryProgram> {
        self.entry(&self.agent)
    }

    /// Returns the program that runs kernels for one more sandbox.
    pub(in crate::process) fn kernels(&self) -> io::Result<Option<EntryProgram>> {
        self.kernels.as_ref().map(|copy| self.entry(copy)).transpose()
    }

    fn entry(&self, copy: &ProgramCopy) -> io::Result<EntryProgram> {
        if self.owned_inside {
            Ok(EntryProgram::Path(copy.path.clone()))
        } else {
            Ok(EntryProgram::Opened(copy.file.try_clone()?))
        }
    }
}

impl ProgramCopy {
    fn open(bin: &Path, name: &str, source: ProgramSource, mode: u32) -> io::Result<Self> {
        let path = bin.join(name);
        let lock = lock_shared(&path)?;
        for _ in 0..MAX_OPEN_ATTEMPTS {
            match rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(file) => return Ok(Self { path, file, _lock: lock }),
                Err(rustix::io::Errno::NOENT) => make_copy(bin, &path, source, mode)?,
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!("another process keeps removing `{}`", path.display())))
    }
}

/// Makes a copy under its final name. A copy that another launcher has made meanwhile is as good, and may be in
/// use, so it is not replaced.
fn make_copy(bin: &Path, path: &Path, source: ProgramSource, mode: u32) -> io::Result<()> {
    // A random name, because launchers in different containers may have the same pid.
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let fresh = bin.join(format!("new-{:016x}", u64::from_ne_bytes(random)));
    let mut file = File::create_new(&fresh)?;
    match source {
        ProgramSource::ThisProgram => {
            io::copy(&mut File::open("/proc/self/exe")?, &mut file)?;
        }
        ProgramSource::Embedded(bytes) => file.write_all(bytes)?,
    }
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    // A name must never lead to a part of a program, not even after a power loss.
    file.sync_all()?;
    // A program that is open for writing cannot be executed.
    drop(file);
    match fs::hard_link(&fresh, path) {
        // Another launcher may have removed the new file as unused: the caller tries again.
        Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound) => {}
        linked => linked?,
    }
    remove_name(&fresh)
}

/// Locks a copy, which may not exist yet, against removal.
fn lock_shared(copy: &Path) -> io::Result<File> {
    for _ in 0..MAX_OPEN_ATTEMPTS {
        let lock = open_lock(copy)?;
        // Another launcher holds it only while it removes the copy.
        lock.lock_shared()?;
        if is_named(&lock, &lock_path(copy))? {
            return Ok(lock);
        }
    }
    Err(io::Error::other(format!("another process keeps removing the lock of `{}`", copy.display())))
}

/// Removes a copy and its lock unless a launcher uses it.
fn remove_unused(copy: &Path) -> io::Result<()> {
    let lock = open_lock(copy)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    if is_named(&lock, &lock_path(copy))? {
        remove_name(copy)?;
        remove_name(&lock_path(copy))?;
    }
    Ok(())
}

fn lock_path(copy: &Path) -> PathBuf {
    let mut path = copy.as_os_str().to_owned();
    path.push(LOCK_SUFFIX);
    path.into()
}

fn open_lock(copy: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(lock_path(copy))
}

/// Whether a path still leads to an open file. Another launcher may have removed its name before it was locked.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((opened.dev(), opened.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes a file that another launcher may have removed already.
fn remove_name(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAMS: SandboxPrograms =
        SandboxPrograms { agent: ProgramSource::Embedded(b"agent"), kernels: None };

    fn names_in(bin: &Path) -> Vec<String> {
        let entries = fs::read_dir(bin).expect("the directory exists");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn copy_that_another_launcher_uses_is_kept() {
        let bin = tempfile::tempdir().expect("a directory");
        let old = bin.path().join("agent-of-another-version");
        fs::write(&old, "old").expect("it is written");
        let used = lock_shared(&old).expect("it is locked");
        let copies = ProgramCopies::open(bin.path(), PROGRAMS, true).expect("copies are made");
        assert!(old.exists() && copies.agent.path.exists());
        drop(used);
        let second = ProgramCopies::open(bin.path(), PROGRAMS, true).expect("copies are found");
        assert!(!old.exists());
        assert_eq!(second.agent.path, copies.agent.path);
        assert_eq!(names_in(bin.path()).len(), 2, "the copy and its lock: {:?}", names_in(bin.path()));
    }

    #[test]
    fn own_copy_is_neither_removed_nor_replaced_while_in_use() {
        let bin = tempfile::tempdir().expect("a directory");
        let copies = ProgramCopies::open(bin.path(), PROGRAMS, true).expect("copies are made");
        let path = &copies.agent.path;
        let inode = fs::metadata(path).expect("it exists").ino();
        remove_unused(path).expect("it is left");
        make_copy(bin.path(), path, PROGRAMS.agent, 0o555).expect("the copy that exists is kept");
        assert_eq!(fs::metadata(path).expect("it exists").ino(), inode);
        let path = path.clone();
        drop(copies);
        remove_unused(&path).expect("it is removed");
        assert_eq!(names_in(bin.path()), [""; 0]);
    }
}

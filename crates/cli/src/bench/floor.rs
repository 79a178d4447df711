//! The floor: the time that the kernel itself takes for the same work, without any of our code.
//!
//! It clones, which only a process with one thread may do; so it runs in processes of its own, `coracle
//! __floor`, which do one run per word on standard input and answer with its time.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use linux::mounts;
use linux::namespaces::{self, IdMapExtent, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};

/// The argument that makes this binary a floor process; not for people.
pub(crate) const FLOOR_ROLE: &str = "__floor";

/// The tasks of a floor process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FloorTask {
    /// Clone with the namespaces of a sandbox, mount an overlay, pivot, exec `true`.
    Sandbox,
    /// Spawn `true`.
    Spawn,
}

impl FloorTask {
    fn word(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Spawn => "spawn",
        }
    }
}

/// A running floor process.
pub(crate) struct FloorProcess {
    process: Child,
    tasks: Option<ChildStdin>,
    times: BufReader<ChildStdout>,
}

impl FloorProcess {
    /// Starts one that works below `directory`.
    pub(crate) fn start(directory: &Path) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(FLOOR_ROLE)
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("could not start the floor process")?;
        let tasks = process.stdin.take();
        let times = BufReader::new(process.stdout.take().context("no standard output")?);
        Ok(Self { process, tasks, times })
    }

    /// Does one run and returns its time.
    pub(crate) fn run(&mut self, task: FloorTask) -> Result<Duration> {
        self.begin(task)?;
        self.end()
    }

    /// Begins a run without waiting for its end.
    pub(crate) fn begin(&mut self, task: FloorTask) -> Result<()> {
        let tasks = self.tasks.as_mut().context("the floor process was told to end")?;
        writeln!(tasks, "{}", task.word()).context("the floor process has gone")
    }

    pub(crate) fn end(&mut self) -> Result<Duration> {
        let mut line = String::new();
        self.times.read_line(&mut line)?;
        match line.trim().parse() {
            Ok(nanoseconds) => Ok(Duration::from_nanos(nanoseconds)),
            Err(_not_a_number) => bail!("the floor cannot be measured here: {}", line.trim()),
        }
    }
}

impl Drop for FloorProcess {
    fn drop(&mut self) {
        // The process ends when its input ends.
        self.tasks = None;
        self.process.wait().ok();
    }
}

/// The floor process: answers each word with nanoseconds, or with the error.
pub(crate) fn run_floor(arguments: &[String]) -> Result<ExitCode> {
    let directory = Path::new(arguments.first().context("the floor process needs a directory")?);
    let words = io::stdin().lock();
    for (number, word) in words.lines().enumerate() {
        let place = directory.join(format!("floor-{}-{number}", std::process::id()));
        let time = match word?.as_str() {
            "sandbox" => time_bare_sandbox(&place),
            _ => time_spawn(),
        };
        let answer = time.map_or_else(|error| format!("{error:#}"), |time| time.as_nanos().to_string());
        writeln!(io::stdout(), "{answer}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn time_spawn() -> Result<Duration> {
    let began = Instant::now();
    let status = Command::new("true").status()?;
    let time = began.elapsed();
    if status.success() { Ok(time) } else { bail!("`true` failed") }
}

/// One run. Its directories are made within the measured time, as any runtime would have to, and removed
/// afterwards.
fn time_bare_sandbox(place: &Path) -> Result<Duration> {
    let began = Instant::now();
    let layers = OverlayDirs::create(place)?;
    let (start_signal, start_wait) = UnixStream::pair()?;
    let every = [
        NamespaceSet::MOUNT,
        NamespaceSet::PID,
        NamespaceSet::IPC,
        NamespaceSet::UTS,
        NamespaceSet::CGROUP,
        NamespaceSet::NET,
    ]
    .into_iter()
    .fold(NamespaceSet::USER, NamespaceSet::and);
    let ended = match SingleThread::prove()?.fork(every, None)? {
        ForkResult::Child => {
            drop(start_signal);
            let error = exec_in_overlay(start_wait, &layers);
            writeln!(io::stderr(), "floor: {error:#}").ok();
            spawn::exit_now(1)
        }
        ForkResult::Parent { pid, pidfd } => {
            drop(start_wait);
            let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
            let own = |outside| [IdMapExtent { inside: 0, outside, count: 1 }];
            namespaces::write_id_maps(pid, &own(uid), &own(gid), SetgroupsPolicy::Deny)?;
            drop(start_signal);
            spawn::wait_for_child(pidfd.as_fd())?
        }
    };
    let time = began.elapsed();
    layers.remove()?;
    if ended == ProcessExit::Code(0) { Ok(time) } else { bail!("the bare clone failed") }
}

struct OverlayDirs {
    upper: PathBuf,
    work: PathBuf,
    root: PathBuf,
}

impl OverlayDirs {
    fn create(place: &Path) -> Result<Self> {
        let layers = Self { upper: place.join("upper"), work: place.join("work"), root: place.join("root") };
        fs::create_dir(place)?;
        for directory in [&layers.upper, &layers.work, &layers.root] {
            fs::create_dir(directory)?;
        }
        Ok(layers)
    }

    /// The kernel leaves a directory without any permissions in `work`, which only root may enter.
    fn remove(&self) -> Result<()> {
        let kernels = self.work.join("work");
        if kernels.exists() {
            fs::set_permissions(kernels, Permissions::from_mode(0o700))?;
        }
        let place = self.root.parent().context("the layers lie in one directory")?;
        fs::remove_dir_all(place).context("could not remove what a run left")
    }
}

/// The part of the child. Returns only on failure.
fn exec_in_overlay(start_wait: UnixStream, layers: &OverlayDirs) -> anyhow::Error {
    match change_root(start_wait, layers) {
        Ok(()) => Command::new("/bin/true").exec().into(),
        Err(error) => error,
    }
}

/// Makes an overlay over `/usr` the root; it has its own `bin`, `lib` and `lib64`.
fn change_root(mut start_wait: UnixStream, layers: &OverlayDirs) -> Result<()> {
    // The stream ends when the maps are written.
    start_wait.read_to_end(&mut Vec::new())?;
    mounts::make_private().context("could not make mounts private")?;
    let (upper, work) = (layers.upper.to_string_lossy(), layers.work.to_string_lossy());
    mounts::mount_overlay(&["/usr"], &upper, &work, &layers.root).context("could not mount an overlay")?;
    mounts::pivot_root(&layers.root).context("could not change the root")
}

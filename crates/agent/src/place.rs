//! What the agent was given when it was started: the configuration and its descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};

use linux::caps::{self, CapSet};
use linux::descriptors::{self, Inherited};
use linux::seccomp::Program;
use linux::signals;
use linux::spawn::SingleThread;
use rustix::fs::{Mode, OFlags};
use rustix::net::SocketFlags;
use rustix::process::{DumpableBehavior, Pid, Rlimit};
use wire::AgentConfig;
use wire::config::CONFIG_FD;

use crate::limit_view::LimitView;
use crate::{AgentError, nester};

/// The largest configuration; the filter is most of it.
const LARGEST_CONFIG: usize = 4 << 20;

/// Numbers from here on are out of the way of those that commands find or choose themselves.
pub(crate) const HIGH: RawFd = 200;

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 128;

/// All that does not change while the agent runs, but for the environment that its owner adds.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) thread: SingleThread,
    pub(crate) config: AgentConfig,
    pub(crate) listener: OwnedFd,
    pub(crate) journals: OwnedFd,
    pub(crate) commands: Option<OwnedFd>,
    pub(crate) tasks: Vec<OwnedFd>,
    shares: Vec<OwnedFd>,
    pub(crate) oom: Option<OwnedFd>,
    /// Shows the sandbox its limits, where groups hold some.
    pub(crate) limit_view: Option<LimitView>,
    pub(crate) filter: Program,
    pub(crate) capabilities: CapSet,
    pub(crate) own_capabilities: CapSet,
    /// What commands get. The agent itself takes all it may have: connections, pipes and
    /// journals add up to more than the usual limit.
    pub(crate) open_files: Rlimit,
    pub(crate) null: OwnedFd,
    /// The program that we are ourselves, out of the way of what lies at fixed numbers in commands.
    pub(crate) own: OwnedFd,
    /// The filter that the agent has, where it is not inherited by what its nester starts.
    late_filter: Option<Program>,
    /// Where the nester takes orders, if nests can be made here.
    pub(crate) nester: Option<(OwnedFd, Pid)>,
}

/// Gives the step of starting a name when it fails.
trait During<T> {
    fn during(self, step: &'static str) -> Result<T, AgentError>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, AgentError> {
        self.map_err(|error| AgentError { step, source: error.into() })
    }
}

impl Place {
    /// Shuts the agent off from what is inside, takes over what it was given, listens, and
    /// says so.
    pub(crate) fn take() -> Result<Self, AgentError> {
        shut_off()?;
        let already = || io::Error::other("it already runs in this process");
        let mut inherited = Inherited::claim().ok_or_else(already).during("start")?;
        let config = inherited.take(CONFIG_FD).during("take the configuration")?;
        let config = read_config(&config).during("read the configuration")?;
        let thread = SingleThread::prove().during("count threads")?;
        let mut take = |number: i32| inherited.take(number).during("take a descriptor");
        let ours = caps::effective().during("read its capabilities")?;
        let ready = take(config.ready_fd)?;
        let begun = Self::begin(config, thread, ours, take);
        // One byte, or why there is none.
        let word = begun.as_ref().map_or_else(AgentError::told, |_| b"1".to_vec());
        rustix::io::write(&ready, &word).during("say that it listens")?;
        begun
    }

    fn begin(
        config: AgentConfig,
        thread: SingleThread,
        ours: CapSet,
        mut take: impl FnMut(i32) -> Result<OwnedFd, AgentError>,
    ) -> Result<Self, AgentError> {
        let disk = config.nesting.as_ref().and_then(|nesting| nesting.disk_fd).map(&mut take).transpose()?;
        let mut place = Self {
            thread,
            listener: take(config.listen_fd)?,
            journals: take(config.journal_fd)?,
            commands: config.commands_fd.map(&mut take).transpose()?,
            tasks: config.tasks_fds.iter().map(|number| take(*number)).collect::<Result<_, _>>()?,
            shares: config.shares_fds.iter().map(|number| take(*number)).collect::<Result<_, _>>()?,
            oom: config.oom_fd.map(&mut take).transpose()?,
            limit_view: {
                let view = config.limit_view.as_ref();
                view.map(|view| LimitView::take(view, &mut take)).transpose()?
            },
            filter: Program::from_words(&config.command_filter),
            // Nobody can give more than they have.
            capabilities: CapSet(config.command_capabilities & ours.0),
            own_capabilities: ours,
            open_files: descriptors::raise_limit().during("raise its limit of open files")?,
            null: open_null().during("open /dev/null")?,
            own: open_own().during("open its own program")?,
            late_filter: config.nesting.as_ref().map(|nesting| Program::from_words(&nesting.agent_filter)),
            nester: None,
            config,
        };
        crate::journal::empty(place.journals.as_fd()).during("empty the journals")?;
        place.divide(disk)?;
        place.listen().during("listen")?;
        Ok(place)
    }

    /// Where nests are wanted, forks who makes them, and gives up what only that one needs. Nobody
    /// has been heard so far, so nobody could have used it.
    fn divide(&mut self, disk: Option<OwnedFd>) -> Result<(), AgentError> {
        let Some(nesting) = self.config.nesting.take() else { return Ok(()) };
        let filter = Program::from_words(&nesting.nester_filter);
        self.nester = Some(nester::start(self, disk, &filter).during("fork the nester")?);
        let keep = CapSet(nesting.agent_capabilities & self.own_capabilities.0);
        caps::bound_to(keep).during("cut its bounding set")?;
        caps::set(keep).during("drop capabilities")?;
        self.own_capabilities = keep;
        linux::landlock::forbid_mounts().during("forbid mounts")?;
        // From here on it is inherited by all that the agent starts.
        let filter = self.late_filter.take();
        filter.map_or(Ok(()), |filter| filter.install()).during("load its filter")
    }

    /// Gives up, in a nest, what the jail has left to whoever makes nests.
    pub(crate) fn confine_late(&self) -> io::Result<()> {
        let Some(filter) = &self.late_filter else { return Ok(()) };
        linux::landlock::forbid_mounts_among_own()?;
        filter.install()
    }

    /// The one who listens is named as the peer of every connection, so the agent does it
    /// itself although the socket was bound for it.
    fn listen(&self) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&self.listener, true)?;
        Ok(rustix::net::listen(&self.listener, BACKLOG)?)
    }

    /// How many shares of the processor commands can be spread over.
    pub(crate) fn command_shares(&self) -> usize {
        self.shares.len().saturating_sub(1)
    }

    /// The group of one of these shares; none where commands have groups of their own anyway.
    pub(crate) fn command_share(&self, share: usize) -> Option<&OwnedFd> {
        self.shares.get(share)
    }

    pub(crate) fn all_shares(&self) -> &[OwnedFd] {
        &self.shares
    }

    /// The group of the share that no command has.
    pub(crate) fn worker_share(&self) -> Option<&OwnedFd> {
        self.shares.last()
    }

    pub(crate) fn accept(&self) -> rustix::io::Result<OwnedFd> {
        rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }
}

/// No signal from inside, no tracer and no forgotten descriptor reaches the agent; orphans do.
fn shut_off() -> Result<(), AgentError> {
    descriptors::fill_standard().during("open the standard descriptors")?;
    descriptors::close_on_exec_from(3).during("keep descriptors from commands")?;
    signals::block_all().during("block signals")?;
    signals::reset_actions().during("reset signal actions")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).during("forbid tracing")?;
    let pid = rustix::process::getpid();
    if !pid.is_init() {
        rustix::process::set_child_subreaper(Some(pid)).during("become the reaper of orphans")?;
    }
    Ok(())
}

fn read_config(file: &OwnedFd) -> io::Result<AgentConfig> {
    let mut json = vec![0; LARGEST_CONFIG];
    let mut length = 0;
    // Whoever wrote the file left the position behind the text, so it is not relied on.
    while length < json.len() {
        match rustix::io::pread(file, &mut json[length..], length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    let config: AgentConfig = serde_json::from_slice(&json[..length])?;
    match config.version {
        wire::VERSION => Ok(config),
        other => Err(io::Error::other(format!("version {other} is not known here"))),
    }
}

fn open_own() -> rustix::io::Result<OwnedFd> {
    let own = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::fcntl_dupfd_cloexec(&own, HIGH)
}

fn open_null() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

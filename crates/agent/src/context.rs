//! Everything the agent is given when it starts: the configuration and its descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};

use linux::caps::{self, CapSet};
use linux::descriptors::{self, InheritedDescriptors};
use linux::process_status::ProcessStatus;
use linux::seccomp::SeccompProgram;
use linux::signals;
use linux::spawn::SingleThread;
use rustix::fs::{Mode, OFlags};
use rustix::net::SocketFlags;
use rustix::process::{DumpableBehavior, Rlimit};
use serde::{Deserialize, Serialize};
use wire::AgentConfig;
use wire::config::CONFIG_FD;

use crate::AgentFatalError;
use crate::event_loop::handles::GroupId;
use crate::isolation::broker_client::BrokerClient;
use crate::isolation::limit_view::LimitView;
use crate::isolation::namespace_broker;
use crate::process::ring_memory::RingMemoryBudget;
use crate::process::tree;

/// The largest configuration; most of it is the filter.
const MAX_CONFIG_BYTES: usize = 4 << 20;

/// Descriptors from this number on do not collide with those that commands get or choose
/// themselves.
pub(crate) const MIN_PRIVATE_FD: RawFd = 200;

/// How many connections may wait to be accepted.
const LISTEN_BACKLOG: i32 = 128;

/// One of the groups that divide the processor time of commands, where these are separate from the
/// commands' own groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CpuShare(usize);

/// All state that does not change while the agent runs, except for the environment that an owner
/// adds.
#[derive(Debug)]
pub(crate) struct AgentContext {
    pub(crate) thread: SingleThread,
    pub(crate) config: AgentConfig,
    pub(crate) listener: OwnedFd,
    pub(crate) journals: OwnedFd,
    /// Memory for journals of processes that print much.
    pub(crate) ring_memory: RingMemoryBudget,
    pub(crate) commands: Option<OwnedFd>,
    pub(crate) tasks: Vec<OwnedFd>,
    shares: Vec<OwnedFd>,
    pub(crate) oom: Option<OwnedFd>,
    /// How many processes the agent itself has killed for lack of memory.
    pub(crate) memory_kills: u64,
    /// The files that show the sandbox its limits, if groups enforce any.
    pub(crate) limit_view: Option<LimitView>,
    pub(crate) filter: SeccompProgram,
    pub(crate) capabilities: CapSet,
    pub(crate) own_capabilities: CapSet,
    /// The bounding set of this process, which everything it forks inherits.
    pub(crate) bounding_set: CapSet,
    /// The limit for commands. The agent raises its own limit to the maximum: connections, pipes
    /// and journals add up to more than the usual limit.
    pub(crate) open_files: Rlimit,
    pub(crate) null: OwnedFd,
    /// The program that runs kernels, at a number that does not collide with the fixed descriptors of
    /// commands.
    pub(crate) kernels_executable: OwnedFd,
    /// The agent's own filter, in processes that do not inherit it because the broker started them.
    late_filter: Option<SeccompProgram>,
    /// The namespace broker, if this sandbox supports isolated sessions.
    pub(crate) broker: BrokerClient,
}

/// Adds the failed step of starting to an error.
trait StartErrorContext<T> {
    fn during(self, step: &'static str) -> Result<T, AgentFatalError>;
}

impl<T, E: Into<io::Error>> StartErrorContext<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, AgentFatalError> {
        self.map_err(|error| AgentFatalError { step, source: error.into() })
    }
}

impl AgentContext {
    /// Isolates the agent from the sandbox, takes over its descriptors, listens, and reports that.
    pub(crate) fn initialize() -> Result<Self, AgentFatalError> {
        let status = isolate_process()?;
        let already = || io::Error::other("an agent already runs in this process");
        let mut inherited = InheritedDescriptors::claim().ok_or_else(already).during("start")?;
        let config = inherited.take(CONFIG_FD).during("take the configuration")?;
        let config = read_config(&config).during("read the configuration")?;
        let thread = SingleThread::prove().during("count threads")?;
        let mut take = |number: i32| inherited.take(number).during("take a descriptor");
        let ready = take(config.ready_fd)?;
        let begun = Self::from_config(config, thread, status, take);
        // One byte, or the reason why the agent could not start.
        let word = begun.as_ref().map_or_else(AgentFatalError::to_launcher_json, |_| b"1".to_vec());
        rustix::io::write(&ready, &word).during("report that it listens")?;
        begun
    }

    fn from_config(
        config: AgentConfig,
        thread: SingleThread,
        status: ProcessStatus,
        mut take: impl FnMut(i32) -> Result<OwnedFd, AgentFatalError>,
    ) -> Result<Self, AgentFatalError> {
        let disk =
            config.namespace_broker.as_ref().and_then(|broker| broker.disk_fd).map(&mut take).transpose()?;
        let mut context = Self {
            thread,
            listener: take(config.listen_fd)?,
            journals: take(config.journal_fd)?,
            ring_memory: ring_memory(&config),
            commands: config.commands_fd.map(&mut take).transpose()?,
            tasks: config.tasks_fds.iter().map(|number| take(*number)).collect::<Result<_, _>>()?,
            shares: config.shares_fds.iter().map(|number| take(*number)).collect::<Result<_, _>>()?,
            oom: config.oom_fd.map(&mut take).transpose()?,
            memory_kills: 0,
            limit_view: {
                let view = config.limit_view.as_ref();
                view.map(|view| LimitView::from_config(view, &mut take)).transpose()?
            },
            filter: SeccompProgram::from_words(&config.command_filter),
            // The agent cannot grant more than it has.
            capabilities: CapSet(config.command_capabilities & status.effective.0),
            own_capabilities: status.effective,
            bounding_set: status.bounding,
            open_files: descriptors::raise_open_file_limit().during("raise its limit of open files")?,
            null: open_null().during("open /dev/null")?,
            kernels_executable: {
                let given = config.kernels_fd.map(&mut take).transpose()?;
                open_kernels_executable(given).during("open the program for kernels")?
            },
            late_filter: config
                .namespace_broker
                .as_ref()
                .map(|broker| SeccompProgram::from_words(&broker.agent_filter)),
            broker: BrokerClient::default(),
            config,
        };
        crate::process::journal::remove_old_journals(context.journals.as_fd())
            .during("empty the journals")?;
        context.fork_broker(disk)?;
        context.start_listening().during("listen")?;
        Ok(context)
    }

    /// If sessions can be isolated, forks the namespace broker and gives up the privileges that
    /// only the broker needs. No request has been read so far, so no one could have abused them.
    fn fork_broker(&mut self, disk: Option<OwnedFd>) -> Result<(), AgentFatalError> {
        let Some(broker_config) = self.config.namespace_broker.take() else { return Ok(()) };
        let filter = SeccompProgram::from_words(&broker_config.broker_filter);
        self.broker =
            namespace_broker::start_broker(self, disk, &filter).during("fork the namespace broker")?;
        let keep = CapSet(broker_config.agent_capabilities & self.own_capabilities.0);
        caps::limit_bounding_set_from(self.bounding_set, keep).during("reduce its bounding set")?;
        caps::set_capabilities(keep).during("drop capabilities")?;
        self.own_capabilities = keep;
        self.bounding_set = CapSet(self.bounding_set.0 & keep.0);
        linux::landlock::forbid_mounts().during("forbid mounts")?;
        // From here on everything that the agent starts inherits the filter.
        let filter = self.late_filter.take();
        filter.map_or(Ok(()), |filter| filter.install()).during("load its filter")
    }

    /// Gives up, in a process that the namespace broker cloned, the privileges that only the broker
    /// needs.
    pub(crate) fn drop_broker_privileges(&self) -> io::Result<()> {
        let Some(filter) = &self.late_filter else { return Ok(()) };
        linux::landlock::forbid_mounts_allow_signals()?;
        filter.install()
    }

    /// The process that calls listen(2) is reported as the peer of every connection, so the agent
    /// does it itself although the socket was bound for it.
    fn start_listening(&self) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&self.listener, true)?;
        Ok(rustix::net::listen(&self.listener, LISTEN_BACKLOG)?)
    }

    /// The processor shares that commands can be spread over.
    pub(crate) fn command_shares(&self) -> impl Iterator<Item = CpuShare> {
        (0..self.shares.len().saturating_sub(1)).map(CpuShare)
    }

    /// The group of one of these shares; `None` if commands have groups of their own.
    pub(crate) fn command_share(&self, share: CpuShare) -> Option<&OwnedFd> {
        self.shares.get(share.0)
    }

    pub(crate) fn all_shares(&self) -> &[OwnedFd] {
        &self.shares
    }

    /// The group of the share that is reserved for workers.
    pub(crate) fn worker_share(&self) -> Option<&OwnedFd> {
        self.shares.last()
    }

    /// Removes the group of a command that could not be started.
    pub(crate) fn remove_unused_group(&self, group: GroupId) {
        if let Some(commands) = &self.commands {
            tree::remove_group(commands, group);
        }
    }

    /// How many processes of the sandbox have been killed for lack of memory so far.
    pub(crate) fn oom_kills(&self) -> u64 {
        self.oom.as_ref().and_then(read_oom_kills).unwrap_or(0) + self.memory_kills
    }

    pub(crate) fn accept_connection(&self) -> rustix::io::Result<OwnedFd> {
        rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }
}

/// Protects the agent from signals from inside, tracers and leaked descriptors, and makes it the
/// parent of orphans. Returns what the kernel reports about the agent.
fn isolate_process() -> Result<ProcessStatus, AgentFatalError> {
    descriptors::fill_standard_descriptors().during("open the standard descriptors")?;
    descriptors::close_on_exec_from(3).during("keep descriptors from commands")?;
    signals::block_all().during("block signals")?;
    let status = ProcessStatus::of_this_thread().during("read its status")?;
    signals::reset_actions(status.changed_signals).during("reset signal actions")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).during("forbid tracing")?;
    let pid = rustix::process::getpid();
    if !pid.is_init() {
        rustix::process::set_child_subreaper(Some(pid)).during("become a subreaper")?;
    }
    Ok(status)
}

fn read_config(file: &OwnedFd) -> io::Result<AgentConfig> {
    let mut json = vec![0; MAX_CONFIG_BYTES];
    let mut length = 0;
    // The writer left the file position after the text, so reads give their offset.
    while length < json.len() {
        match rustix::io::pread(file, &mut json[length..], length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    let config: AgentConfig = serde_json::from_slice(&json[..length])?;
    match config.version {
        wire::VERSION => Ok(config),
        other => Err(io::Error::other(format!("unknown configuration version {other}"))),
    }
}

/// Memory for journals must be counted somewhere, so there is none without control groups.
fn ring_memory(config: &AgentConfig) -> RingMemoryBudget {
    if config.commands_fd.is_some() || !config.tasks_fds.is_empty() {
        RingMemoryBudget::default()
    } else {
        RingMemoryBudget::empty()
    }
}

/// Without a program of its own for kernels, the agent's own program runs them.
fn open_kernels_executable(given: Option<OwnedFd>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let program = given.map_or_else(|| rustix::fs::open("/proc/self/exe", flags, Mode::empty()), Ok)?;
    rustix::io::fcntl_dupfd_cloexec(&program, MIN_PRIVATE_FD)
}

fn open_null() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

fn read_oom_kills(file: &OwnedFd) -> Option<u64> {
    let mut buffer = [0; 1024];
    let count = rustix::io::pread(file, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..count]).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

//! The namespace broker: the one process in a sandbox that may create namespaces.
//!
//! ```text
//! agent ── request ─► broker ── clone ──► namespace init ──┐
//!   ◄── pid ────────┘   └───── clone ──► shell, command, worker in the namespaces
//!   all are children of the agent ◄──────────────────────┘
//! ```
//! It is forked before the agent has received a single byte, keeps the privileges that the agent
//! then gives up, and does five things: create the namespaces of a session, start a program in
//! them, perform a file operation in them, signal a program in them, and discard the changes made
//! in them. Every process it clones gives up those privileges before it handles any input, and
//! becomes the agent's child, so that the agent tracks it like any other child. The broker takes
//! requests from the agent alone and answers each at once; the work is done by the processes it
//! clones.

mod namespace_init;
mod protocol;
mod remove;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use linux::mounts::{self, MountDepth};
use linux::namespaces::{self, NamespaceSet};
use linux::seccomp::SeccompProgram as Filter;
use linux::spawn::{self, ForkResult};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal};
use wire::FrameDecoder;
use wire::files::FileRequest;
use wire::isolated_session::IsolatedSessionSpec;
use wire::process::UserIdentity;

use self::namespace_init::NamespaceInitTask;
pub(crate) use self::protocol::{
    BrokerReply, BrokerRequest, ConfigUpdate, SessionProgram, StartProgramRequest, send_request,
};
use crate::context::{AgentContext, CpuShare, MIN_PRIVATE_FD};
use crate::files::worker::{self, WorkerTask};
use crate::identity::ResolvedUser;
use crate::isolation::broker_client::BrokerClient;
use crate::process::child::{self, ChildStdio};
use crate::process::command::{self, ExecEnvironment, PreparedCommand};
use crate::process::tree;
use crate::session::shell::{ReportedState, ShellDialect};

/// Where the disk for changes is mounted, in a mount namespace that contains no process.
const DISK_MOUNT_POINT: &str = "/dev/shm";

/// Forks the broker.
pub(crate) fn start_broker(
    context: &AgentContext,
    disk: Option<OwnedFd>,
    filter: &Filter,
) -> io::Result<BrokerClient> {
    let (ours, theirs) = protocol::create_channel()?;
    match context.thread.fork(NamespaceSet::NONE, None)? {
        ForkResult::Parent { pid, .. } => Ok(BrokerClient::new(ours, pid)),
        ForkResult::Child => {
            drop(ours);
            let begun = NamespaceBroker::new(context, theirs, disk, filter);
            // The agent learns from the closed channel that no session can be isolated.
            let Ok(broker) = begun else { spawn::exit_now(1) };
            broker.run()
        }
    }
}

struct NamespaceBroker<'a> {
    context: &'a AgentContext,
    channel: OwnedFd,
    /// The pid namespace of the sandbox, to return to.
    sandbox_pid_namespace: OwnedFd,
    stores: ChangeStorage,
    sessions: HashMap<String, IsolatedSession>,
    /// The store of the session that was isolated last.
    last_store: ChangeStoreId,
}

/// An isolated session that was created.
struct IsolatedSession {
    /// The channel on which its namespace init sends the namespaces before it reports that it is
    /// ready.
    channel: OwnedFd,
    namespaces: Option<NamespaceFds>,
    share_network: bool,
    /// Its directory on the disk.
    store: ChangeStoreId,
}

/// The namespaces of a session.
struct NamespaceFds {
    pid: OwnedFd,
    mount: OwnedFd,
    ipc: OwnedFd,
    net: OwnedFd,
}

impl IsolatedSession {
    fn receive_namespaces(&mut self) -> io::Result<&NamespaceFds> {
        if self.namespaces.is_none() {
            let given = protocol::receive_descriptors(&self.channel, RecvFlags::DONTWAIT)?;
            let [pid, mount, ipc, net] = expect_descriptors(given.unwrap_or_default())?;
            self.namespaces = Some(NamespaceFds { pid, mount, ipc, net });
        }
        self.namespaces.as_ref().ok_or_else(|| Errno::SRCH.into())
    }
}

impl NamespaceFds {
    /// Enters all but the pid namespace.
    fn enter_except_pid(&self, share_network: bool) -> io::Result<()> {
        namespaces::enter_namespace(self.ipc.as_fd(), NamespaceSet::IPC)?;
        if !share_network {
            namespaces::enter_namespace(self.net.as_fd(), NamespaceSet::NET)?;
        }
        namespaces::enter_namespace(self.mount.as_fd(), NamespaceSet::MOUNT)
    }
}

/// The storage for changes that are not kept in memory: a directory on the sandbox's disk, mounted
/// in a separate namespace, so that no command ever sees it.
struct ChangeStorage {
    disk_namespace: Option<OwnedFd>,
}

/// The directory with the changes of one session. Its number is never used again.
#[derive(Clone, Copy, Debug)]
struct ChangeStoreId(u64);

impl ChangeStoreId {
    fn next(self) -> Self {
        Self(self.0 + 1)
    }

    fn directory_name(self) -> String {
        self.0.to_string()
    }
}

impl ChangeStorage {
    fn new(disk: Option<OwnedFd>) -> io::Result<Self> {
        let Some(disk) = disk else { return Ok(Self { disk_namespace: None }) };
        let home = open_namespace("mnt")?;
        namespaces::unshare_namespaces(NamespaceSet::MOUNT)?;
        mounts::attach_mount(disk.as_fd(), Path::new(DISK_MOUNT_POINT))?;
        let aside = open_namespace("mnt")?;
        namespaces::enter_namespace(home.as_fd(), NamespaceSet::MOUNT)?;
        Ok(Self { disk_namespace: Some(aside) })
    }

    fn has_disk(&self) -> bool {
        self.disk_namespace.is_some()
    }

    /// Mounts the disk directory of one session in the current mount namespace.
    fn mount_disk(&self, target: &Path, store: ChangeStoreId) -> io::Result<()> {
        let Some(aside) = &self.disk_namespace else { return Ok(()) };
        let here = open_namespace("mnt")?;
        namespaces::enter_namespace(aside.as_fd(), NamespaceSet::MOUNT)?;
        let own = Path::new(DISK_MOUNT_POINT).join(store.directory_name());
        std::fs::create_dir(&own)?;
        let tree = mounts::clone_tree(&own, MountDepth::Single)?;
        namespaces::enter_namespace(here.as_fd(), NamespaceSet::MOUNT)?;
        std::fs::create_dir(target)?;
        mounts::attach_mount(tree.as_fd(), target)
    }

    /// Removes the stored changes of a session that is gone. Files that cannot be removed stay on
    /// the disk of the sandbox and count against its limit, but conflict with nothing.
    fn remove_changes(&self, store: ChangeStoreId) -> io::Result<()> {
        let Some(aside) = &self.disk_namespace else { return Ok(()) };
        namespaces::enter_namespace(aside.as_fd(), NamespaceSet::MOUNT)?;
        remove::remove_tree(Path::new(DISK_MOUNT_POINT), &store.directory_name())
    }
}

fn open_namespace(kind: &str) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/ns/{kind}");
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

impl<'a> NamespaceBroker<'a> {
    fn new(
        context: &'a AgentContext,
        channel: OwnedFd,
        disk: Option<OwnedFd>,
        filter: &Filter,
    ) -> io::Result<Self> {
        let stores = ChangeStorage::new(disk)?;
        let home = open_namespace("pid")?;
        // No descriptor through which the agent's data could be read or its connections answered
        // stays open here. The program is needed by searches in the files of a session.
        let kept = context.commands.iter().chain(&context.tasks).chain(context.all_shares());
        let own = [&channel, &home, &context.null, &context.kernels_executable];
        let own = own.into_iter().chain(stores.disk_namespace.as_ref());
        linux::descriptors::close_all_except_these(kept.chain(own).map(AsFd::as_fd))?;
        filter.install()?;
        Ok(Self {
            context,
            channel,
            sandbox_pid_namespace: home,
            stores,
            sessions: HashMap::new(),
            last_store: ChangeStoreId(0),
        })
    }

    fn run(mut self) -> ! {
        while let Ok(Some(heard)) = protocol::receive_request(&self.channel) {
            let done =
                protocol::parse_request(heard).and_then(|(request, with)| self.handle_request(request, with));
            let answer = BrokerReply(done.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)));
            if protocol::send_reply(&self.channel, answer).is_err() {
                break;
            }
        }
        spawn::exit_now(0)
    }

    fn handle_request(&mut self, request: BrokerRequest, with: Vec<OwnedFd>) -> io::Result<Option<Pid>> {
        match request {
            BrokerRequest::Make { session, spec, identity, share } => {
                self.create_session(session, &spec, &identity, share, expect_descriptors(with)?).map(Some)
            }
            BrokerRequest::Start(begin) => self.start_program(*begin, with).map(Some),
            BrokerRequest::Work { session, request, rest, config } => {
                self.start_file_worker(&session, request, rest, config, with).map(Some)
            }
            BrokerRequest::Signal { group, signal } => {
                let group =
                    Some(group).filter(|group| *group > 1).and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
                let signal = Signal::from_named_raw(signal).ok_or(Errno::INVAL)?;
                rustix::process::kill_process_group(group, signal)?;
                Ok(None)
            }
            BrokerRequest::Forget { session } => self.forget_session(&session),
        }
    }

    fn create_session(
        &mut self,
        session: String,
        spec: &IsolatedSessionSpec,
        identity: &UserIdentity,
        share: CpuShare,
        [report, group]: [OwnedFd; 2],
    ) -> io::Result<Pid> {
        let who = fault_to_io_error(ResolvedUser::find(&self.context.config, identity))?;
        let own = NamespaceSet::MOUNT.and(NamespaceSet::PID).and(NamespaceSet::IPC);
        let own = if spec.share_network { own } else { own.and(NamespaceSet::NET) };
        let (channel, theirs) = protocol::create_channel()?;
        self.last_store = self.last_store.next();
        let store = self.last_store;
        let (forked, join) = self.clone_into_group(own, &group)?;
        match forked {
            ForkResult::Child => {
                let task =
                    NamespaceInitTask { store, spec, user: &who, stores: &self.stores, channel: &theirs };
                let join = [join.as_ref(), self.context.command_share(share)];
                namespace_init::init_main(self.context, &task, join, report)
            }
            ForkResult::Parent { pid, .. } => {
                let isolated =
                    IsolatedSession { channel, namespaces: None, share_network: spec.share_network, store };
                self.sessions.insert(session, isolated);
                Ok(pid)
            }
        }
    }

    fn start_program(&mut self, begin: StartProgramRequest, with: Vec<OwnedFd>) -> io::Result<Pid> {
        let session = self.sessions.get_mut(&begin.session).ok_or(Errno::SRCH)?;
        let share_network = session.share_network;
        session.receive_namespaces()?;
        let spaces = self
            .sessions
            .get(&begin.session)
            .and_then(|session| session.namespaces.as_ref())
            .ok_or(Errno::SRCH)?;
        let mut with = with.into_iter();
        let mut next = || with.next().ok_or(Errno::INVAL);
        let stdio = ChildStdio { stdin: next()?, stdout: next()?, stderr: next()?, terminal: begin.terminal };
        let (report, group) = (next()?, next()?);
        let private = with.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, MIN_PRIVATE_FD));
        let command =
            fault_to_io_error(prepare_command(self.context, &begin, private.collect::<Result<_, _>>()?))?;
        namespaces::enter_namespace(spaces.pid.as_fd(), NamespaceSet::PID)?;
        let cloned = self.clone_into_group(NamespaceSet::NONE, &group);
        match cloned {
            Ok((ForkResult::Child, join)) => {
                let entered = spaces.enter_except_pid(share_network);
                let join = [join.as_ref(), self.context.command_share(begin.share)];
                match entered {
                    Ok(()) => child::exec_or_report(self.context, &command, &stdio, join, report.as_fd()),
                    Err(error) => child::report_and_exit(&error, report.as_fd()),
                }
            }
            cloned => {
                // If this process could not return, it would start everything in that namespace
                // from now on.
                if namespaces::enter_namespace(self.sandbox_pid_namespace.as_fd(), NamespaceSet::PID).is_err()
                {
                    spawn::exit_now(1);
                }
                match cloned?.0 {
                    ForkResult::Parent { pid, .. } => Ok(pid),
                    ForkResult::Child => spawn::exit_now(1),
                }
            }
        }
    }

    fn start_file_worker(
        &mut self,
        session: &str,
        request: FileRequest,
        rest: Vec<u8>,
        given: ConfigUpdate,
        with: Vec<OwnedFd>,
    ) -> io::Result<Pid> {
        let mut with = with.into_iter();
        let connection = with.next().ok_or(Errno::INVAL)?;
        let history = with.next().map(Ok);
        self.sessions.get_mut(session).ok_or(Errno::SRCH)?.receive_namespaces()?;
        let spaces =
            self.sessions.get(session).and_then(|session| session.namespaces.as_ref()).ok_or(Errno::SRCH)?;
        let commands = self.context.commands.as_ref().ok_or(Errno::NOTSUP)?;
        let group = worker::open_worker_group(commands)?;
        let (forked, join) = self.clone_into_group(NamespaceSet::NONE, &group)?;
        match forked {
            ForkResult::Parent { pid, .. } => Ok(pid),
            ForkResult::Child => {
                let mut decoder = FrameDecoder::new();
                decoder.feed(&rest);
                let config = with_config_update(self.context, given);
                let enter = || namespaces::enter_namespace(spaces.mount.as_fd(), NamespaceSet::MOUNT);
                let task = WorkerTask { connection, decoder, request, join, history };
                worker::worker_main(self.context, &config, task, Some(&enter))
            }
        }
    }

    /// The stored changes are removed by a separate process, which may take as long as it needs.
    fn forget_session(&mut self, session: &str) -> io::Result<Option<Pid>> {
        let Some(isolated) = self.sessions.remove(session).filter(|_| self.stores.has_disk()) else {
            return Ok(None);
        };
        let commands = self.context.commands.as_ref().ok_or(Errno::NOTSUP)?;
        let group = worker::open_worker_group(commands)?;
        match self.clone_into_group(NamespaceSet::NONE, &group)?.0 {
            ForkResult::Parent { .. } => Ok(None),
            ForkResult::Child => {
                spawn::exit_now(i32::from(self.stores.remove_changes(isolated.store).is_err()))
            }
        }
    }

    /// Clones a child for the agent into a group. As in the agent, a full group is no obstacle: the
    /// child gets the descriptor by which it moves there.
    fn clone_into_group(
        &self,
        own: NamespaceSet,
        group: &OwnedFd,
    ) -> io::Result<(ForkResult, Option<OwnedFd>)> {
        match self.context.thread.fork_sibling(own, Some(group.as_fd())) {
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => {
                let join = tree::open_members(group)?;
                Ok((self.context.thread.fork_sibling(own, None)?, Some(join)))
            }
            forked => Ok((forked?, None)),
        }
    }
}

fn expect_descriptors<const COUNT: usize>(with: Vec<OwnedFd>) -> io::Result<[OwnedFd; COUNT]> {
    with.try_into().map_err(|_wrong_number: Vec<OwnedFd>| Errno::INVAL.into())
}

/// A missing account is reported as an error number; an answer has no space for more.
fn fault_to_io_error<T>(result: Result<T, wire::Fault>) -> io::Result<T> {
    result.map_err(|fault| fault.errno.map_or(Errno::INVAL.into(), io::Error::from_raw_os_error))
}

fn with_config_update(context: &AgentContext, given: ConfigUpdate) -> wire::AgentConfig {
    let ConfigUpdate { env, env_file } = given;
    wire::AgentConfig { env, env_file, ..context.config.clone() }
}

fn prepare_command(
    context: &AgentContext,
    begin: &StartProgramRequest,
    private: Vec<OwnedFd>,
) -> Result<PreparedCommand, wire::Fault> {
    let config = with_config_update(context, begin.config.clone());
    let mut environment =
        ExecEnvironment::new(&config, &begin.identity, &begin.env, begin.directory.as_ref())?;
    environment.filter_variables(&begin.screen)?;
    match &begin.program {
        SessionProgram::Text(text) => PreparedCommand::from_shell(environment, text, false),
        SessionProgram::Shell => {
            use std::os::fd::AsRawFd;
            let path = command::shell_path();
            let number = |index: usize| private.get(index).map_or(-1, AsRawFd::as_raw_fd);
            let dialect = ShellDialect::from_path(path);
            let words = dialect.start_arguments(path, [number(0), number(1)], ReportedState::Exports);
            PreparedCommand::from_words(environment, &words, private)
        }
    }
}

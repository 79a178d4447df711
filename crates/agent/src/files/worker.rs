//! Workers: each file operation runs in a forked process that owns the connection.
//!
//! A slow disk, a large file or a server that does not read therefore delays nothing else, and the
//! operation runs with the requested identity, which the kernel checks.
//!
//! A worker belongs to the groups of the commands, not to the agent's: data that it writes to a
//! tmpfs or leaves in the page cache is charged to the sandbox, and the agent's small limits remain
//! for the agent alone. If the number of processes is exhausted, the worker is forked outside the
//! group and moved into it, which the kernel never refuses, so that files can be read during a fork
//! bomb.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use linux::caps::{self, CapSet};
use linux::descriptors;
use linux::namespaces::NamespaceSet;
use linux::spawn::{self, ForkResult};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Pid, Signal};
use wire::files::{FileOperation, FileRequest};
use wire::process::UserIdentity;
use wire::{AgentConfig, AgentReply, Fault, FaultKind, FaultOperation, FrameDecoder};

use crate::context::AgentContext;
use crate::event_loop::agent::Agent;
use crate::event_loop::connection::IncomingConnection;
use crate::event_loop::handles::ConnectionId;
use crate::event_loop::poll::RegisteredFd;
use crate::fault;
use crate::files::edit_history::open_history;
use crate::files::worker_connection::WorkerConnection;
use crate::files::{self, FileWorker};
use crate::identity::ResolvedUser;
use crate::isolation::namespace_broker::BrokerRequest;
use crate::process::child_table::{ChildRole, ChildTable};
use crate::process::tree;

/// The maximum number of operations at once; further ones wait.
const MAX_WORKERS: usize = 64;

/// The maximum number of operations that wait.
const MAX_QUEUED_JOBS: usize = 1024;

/// Watches last long, so they have their own limit and do not wait.
const MAX_WATCHERS: usize = 64;

/// How long a worker waits for a server that neither sends nor reads.
const SERVER_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// The group of the workers below the commands' group.
const WORKER_GROUP: &str = "files";

/// The capabilities of a worker that runs as root, so that root may access any file. Other workers
/// have none.
const ROOT_CAPABILITIES: CapSet = CapSet::of(&[caps::CHOWN, caps::DAC_OVERRIDE, caps::FOWNER, caps::FSETID]);

/// An operation and the connection for its reply.
#[derive(Debug)]
pub(crate) struct FileJob {
    connection: RegisteredFd,
    decoder: FrameDecoder,
    request: FileRequest,
}

/// The file operations that wait for a worker, and how many run.
#[derive(Debug, Default)]
pub(crate) struct WorkerPool {
    jobs: VecDeque<FileJob>,
    workers: usize,
    watchers: usize,
}

impl Agent {
    /// Passes the connection to a worker, now or when one is free.
    pub(crate) fn queue_file_job(
        &mut self,
        connection: ConnectionId,
        mut request: FileRequest,
    ) -> Result<(), Fault> {
        if let Some(session) = &request.isolated_session {
            let identity = self.sessions.isolated_session_user(session)?;
            // The default user for files of an isolated session is the user of the session.
            if request.identity == UserIdentity::Default {
                request.identity = identity;
            }
        }
        self.file_workers.check_room(&request.operation)?;
        let Some(asking) = self.connections.remove(connection) else { return Ok(()) };
        let (mut connection, decoder) = asking.into_parts();
        connection.deregister();
        let job = FileJob { connection, decoder, request };
        self.file_workers.queue(job, &mut self.context, &mut self.children);
        Ok(())
    }
}

impl WorkerPool {
    fn check_room(&self, operation: &FileOperation) -> Result<(), Fault> {
        let watch = matches!(operation, FileOperation::Watch { .. });
        if watch && self.watchers >= MAX_WATCHERS {
            return Err(fault::from_kind(FaultKind::Busy, "watch", "too many watches"));
        }
        if !watch && self.jobs.len() >= MAX_QUEUED_JOBS {
            return Err(fault::from_kind(FaultKind::Busy, "start", "too many file operations"));
        }
        Ok(())
    }

    fn queue(&mut self, job: FileJob, context: &mut AgentContext, children: &mut ChildTable) {
        if matches!(job.request.operation, FileOperation::Watch { .. }) {
            self.start_worker(job, ChildRole::Watcher, context, children);
        } else {
            self.jobs.push_back(job);
            self.start_queued_jobs(context, children);
        }
    }

    /// Starts waiting operations until the maximum number of workers is reached.
    fn start_queued_jobs(&mut self, context: &mut AgentContext, children: &mut ChildTable) {
        while self.workers < MAX_WORKERS
            && let Some(job) = self.jobs.pop_front()
        {
            self.start_worker(job, ChildRole::Worker, context, children);
        }
    }

    fn start_worker(
        &mut self,
        job: FileJob,
        kind: ChildRole,
        context: &mut AgentContext,
        children: &mut ChildTable,
    ) {
        let started = match job.request.isolated_session.clone() {
            Some(session) => start_isolated_worker(job, &session, context),
            None => start_plain_worker(job, context),
        };
        if let Some(pid) = started {
            children.insert_role(pid, kind);
            *self.count_of(kind) += 1;
        }
    }

    pub(crate) fn worker_ended(
        &mut self,
        kind: ChildRole,
        context: &mut AgentContext,
        children: &mut ChildTable,
    ) {
        *self.count_of(kind) -= 1;
        self.start_queued_jobs(context, children);
    }

    fn count_of(&mut self, kind: ChildRole) -> &mut usize {
        match kind {
            ChildRole::Watcher => &mut self.watchers,
            _ => &mut self.workers,
        }
    }
}

/// Forks a worker. If that fails, the connection is told why.
fn start_plain_worker(job: FileJob, context: &AgentContext) -> Option<Pid> {
    match fork_worker(context) {
        Ok((ForkResult::Child, join)) => {
            let FileJob { connection, decoder, request } = job;
            let Ok(connection) = rustix::io::fcntl_dupfd_cloexec(&connection, 3) else { spawn::exit_now(1) };
            let history = needs_history(&request.operation).then(|| open_history(&context.journals));
            let task = WorkerTask { connection, decoder, request, join, history };
            worker_main(context, &context.config, task, None)
        }
        Ok((ForkResult::Parent { pid, .. }, _)) => Some(pid),
        Err(errno) => {
            refuse_job(job.connection, fault::from_errno(errno, "fork", "a worker"));
            None
        }
    }
}

/// Like [`start_plain_worker`], in a process that the namespace broker clones.
fn start_isolated_worker(job: FileJob, session: &str, context: &mut AgentContext) -> Option<Pid> {
    let FileJob { connection, decoder, request } = job;
    // The broker cannot open it.
    let history = needs_history(&request.operation).then(|| open_history(&context.journals)).transpose();
    let history = match history {
        Ok(history) => history,
        Err(errno) => {
            refuse_job(connection, history_fault(errno));
            return None;
        }
    };
    let broker_request = BrokerRequest::Work {
        session: session.to_owned(),
        request,
        rest: Vec::from(decoder.into_rest()),
        config: context.config_update(),
    };
    let descriptors: Vec<_> =
        std::iter::once(connection.as_fd()).chain(history.iter().map(AsFd::as_fd)).collect();
    match context.send_broker_request(&broker_request, &descriptors) {
        Ok(started) => started,
        Err(fault) => {
            refuse_job(connection, fault);
            None
        }
    }
}

fn refuse_job(connection: RegisteredFd, fault: Fault) {
    let mut connection = IncomingConnection::new(connection);
    connection.queue_message(&AgentReply::Fault(fault));
    connection.flush().ok();
}

/// Forks into the workers' group. A child that could not be forked there gets the descriptor by
/// which it moves.
fn fork_worker(context: &AgentContext) -> rustix::io::Result<(ForkResult, Option<OwnedFd>)> {
    let raw = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let Some(commands) = &context.commands else {
        return Ok((context.thread.fork(NamespaceSet::NONE, None).map_err(raw)?, None));
    };
    let group = open_worker_group(commands)?;
    match context.thread.fork(NamespaceSet::NONE, Some(group.as_fd())).map_err(raw) {
        Err(Errno::AGAIN) => {
            let join = tree::open_members(&group)?;
            Ok((context.thread.fork(NamespaceSet::NONE, None).map_err(raw)?, Some(join)))
        }
        forked => Ok((forked?, None)),
    }
}

pub(crate) fn open_worker_group(commands: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat(commands, WORKER_GROUP, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            rustix::fs::mkdirat(commands, WORKER_GROUP, Mode::from_raw_mode(0o755))?;
            rustix::fs::openat(commands, WORKER_GROUP, flags, Mode::empty())
        }
        other => other,
    }
}

/// Whether an operation uses the undo history.
fn needs_history(operation: &FileOperation) -> bool {
    matches!(operation, FileOperation::Edit { .. } | FileOperation::UndoEdit { .. })
}

fn history_fault(errno: Errno) -> Fault {
    fault::from_errno(errno, "open", "the history of edits")
}

/// What a worker does, and the descriptors that it keeps.
pub(crate) struct WorkerTask {
    pub(crate) connection: OwnedFd,
    pub(crate) decoder: FrameDecoder,
    pub(crate) request: FileRequest,
    /// The descriptor by which a worker moves that could not be forked into its group.
    pub(crate) join: Option<OwnedFd>,
    /// The undo history, if the operation needs it. It is opened before the worker loses the right to.
    pub(crate) history: Option<rustix::io::Result<OwnedFd>>,
}

/// The main function of a worker. It never returns, because it closes its copies of the agent's
/// descriptors while the objects that own them still exist.
///
/// `enter` enters the namespace of the files, if that is another one; the privileges for it are
/// given up afterwards.
pub(crate) fn worker_main(
    context: &AgentContext,
    config: &AgentConfig,
    task: WorkerTask,
    enter: Option<&dyn Fn() -> io::Result<()>>,
) -> ! {
    let WorkerTask { connection, decoder, request, join, history } = task;
    let mut groups = join.iter().chain(&context.tasks).chain(context.worker_share());
    let joined = groups.try_for_each(|group| rustix::io::write(group, b"0").map(drop));
    let entered = enter.map_or(Ok(()), |enter| enter());
    let history = history.transpose();
    // The exec of another program closes what it does not inherit.
    let executes = files::executes_program(&request.operation);
    if !executes {
        let kept = history.iter().flatten().chain([&connection]).map(AsFd::as_fd);
        if descriptors::close_all_except_these(kept).is_err() {
            spawn::exit_now(1);
        }
    }
    let prepared = rustix::io::ioctl_fionbio(&connection, false)
        .and_then(|()| set_socket_timeout(&connection, Timeout::Recv, Some(SERVER_IDLE_TIMEOUT)))
        .and_then(|()| set_socket_timeout(&connection, Timeout::Send, Some(SERVER_IDLE_TIMEOUT)));
    if prepared.is_err() {
        spawn::exit_now(1);
    }
    let mut line = WorkerConnection::new(connection, decoder);
    // Nothing is done outside the sandbox's limits.
    let joined = joined.map_err(|errno| fault::from_errno(errno, "join the group", WORKER_GROUP));
    let entered = entered.map_err(|error| fault::from_io(&error, "enter", "the session"));
    let history = history.map_err(history_fault);
    let identity = || match executes {
        true => ResolvedUser::find(config, &request.identity),
        false => become_user(context, config, &request),
    };
    let done = joined.and(entered).and(history).and_then(|history| {
        let who = identity()?;
        let mut worker = FileWorker {
            connection: &mut line,
            config,
            user: &who,
            history: history.map(File::from),
            isolated_session: request.isolated_session.as_deref(),
        };
        worker.perform_operation(&request.operation, context)
    });
    if let Err(fault) = done {
        line.send_fault(fault);
    }
    spawn::exit_now(0)
}

fn become_user(
    context: &AgentContext,
    config: &AgentConfig,
    request: &FileRequest,
) -> Result<ResolvedUser, Fault> {
    let who = ResolvedUser::find(config, &request.identity)?;
    let named = |errno| fault::from_errno(errno, FaultOperation::BecomeUser, &who.name);
    let dropping = |error: io::Error| fault::from_io(&error, "drop capabilities", &who.name);
    who.assume_identity(config).map_err(named)?;
    let keep =
        if who.is_root() { CapSet(ROOT_CAPABILITIES.0 & context.own_capabilities.0) } else { CapSet::NONE };
    caps::set_capabilities(keep).map_err(dropping)?;
    context.drop_broker_privileges().map_err(dropping)?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    // A change of identity resets this setting, so it comes last. If the agent is pid 1, its end
    // kills all processes anyway; otherwise this worker must not outlive it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(named)?;
    Ok(who)
}

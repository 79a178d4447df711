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

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use linux::caps::{self, CapSet};
use linux::namespaces::Namespaces;
use linux::spawn::{self, Forked};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::Signal;
use wire::files::{FileOperation, FileRequest};
use wire::process::Identity;
use wire::{AgentConfig, Decoder, Fault, FaultKind, Reply};

use crate::agent::{Agent, Child};
use crate::connection::Connection;
use crate::files::Work;
use crate::identity::Who;
use crate::line::Line;
use crate::nester::Order;
use crate::place::Place;
use crate::poll::Source;
use crate::{child, fault, tree};

/// The maximum number of operations at once; further ones wait.
const MOST_WORKERS: usize = 64;

/// The maximum number of operations that wait.
const MOST_WAITING: usize = 1024;

/// Watches last long, so they have their own limit and do not wait.
const MOST_WATCHERS: usize = 64;

/// How long a worker waits for a server that neither sends nor reads.
const PATIENCE: Duration = Duration::from_secs(600);

/// The group of the workers below the commands' group.
const GROUP: &str = "files";

/// The capabilities of a worker that runs as root, so that root may access any file. Other workers
/// have none.
const ROOT_CAPABILITIES: CapSet = CapSet::of(&[caps::CHOWN, caps::DAC_OVERRIDE, caps::FOWNER, caps::FSETID]);

/// An operation and the connection for its reply.
#[derive(Debug)]
pub(crate) struct Job {
    connection: Source,
    decoder: Decoder,
    request: FileRequest,
}

impl Agent {
    /// Passes the connection to a worker, now or when one is free.
    pub(crate) fn work(&mut self, connection: u64, mut request: FileRequest) -> Result<(), Fault> {
        if let Some(session) = &request.nest {
            let identity = self.identity_inside(session)?;
            // The default user for files of an isolated session is the user of the session.
            if request.identity == Identity::Default {
                request.identity = identity;
            }
        }
        let watch = matches!(request.operation, FileOperation::Watch { .. });
        if watch && self.watchers >= MOST_WATCHERS {
            return Err(fault::plain(FaultKind::Busy, "watch", "too many watches"));
        }
        if !watch && self.jobs.len() >= MOST_WAITING {
            return Err(fault::plain(FaultKind::Busy, "start", "too many file operations"));
        }
        let Some(asking) = self.connections.remove(&connection) else { return Ok(()) };
        let (mut connection, decoder) = asking.into_parts();
        connection.mute();
        let job = Job { connection, decoder, request };
        if watch {
            self.employ(job, Child::Watcher);
        } else {
            self.jobs.push_back(job);
            self.employ_next();
        }
        Ok(())
    }

    /// Starts waiting operations until the maximum number of workers is reached.
    fn employ_next(&mut self) {
        while self.workers < MOST_WORKERS
            && let Some(job) = self.jobs.pop_front()
        {
            self.employ(job, Child::Worker);
        }
    }

    fn employ(&mut self, job: Job, kind: Child) {
        if let Some(session) = job.request.nest.clone() {
            return self.employ_in_nest(job, kind, &session);
        }
        match fork(&self.place) {
            Ok((Forked::Child, join)) => {
                let Job { connection, decoder, request } = job;
                let Ok(connection) = rustix::io::fcntl_dupfd_cloexec(&connection, 3) else {
                    spawn::exit_now(1)
                };
                run(&self.place, &self.place.config, connection, decoder, &request, join, None)
            }
            Ok((Forked::Parent { pid, .. }, _)) => {
                self.children.insert(pid, kind);
                match kind {
                    Child::Watcher => self.watchers += 1,
                    _ => self.workers += 1,
                }
            }
            Err(errno) => turn_away(job.connection, fault::from_errno(errno, "fork", "a worker")),
        }
    }

    /// Like [`Agent::employ`], in a process that the namespace broker clones.
    fn employ_in_nest(&mut self, job: Job, kind: Child, session: &str) {
        let Job { connection, decoder, request } = job;
        let order = Order::Work {
            session: session.to_owned(),
            request,
            rest: Vec::from(decoder.into_rest()),
            config: self.given(),
        };
        match self.order(&order, &[connection.as_fd()]) {
            Ok(Some(pid)) => {
                self.children.insert(pid, kind);
                match kind {
                    Child::Watcher => self.watchers += 1,
                    _ => self.workers += 1,
                }
            }
            Ok(None) => {}
            Err(fault) => turn_away(connection, fault),
        }
    }

    pub(crate) fn worker_ended(&mut self, kind: Child) {
        match kind {
            Child::Watcher => self.watchers -= 1,
            _ => self.workers -= 1,
        }
        self.employ_next();
    }
}

fn turn_away(connection: Source, fault: Fault) {
    let mut connection = Connection::new(connection);
    connection.say(&Reply::Fault(fault));
    connection.flush().ok();
}

/// Forks into the workers' group. A child that could not be forked there gets the descriptor by
/// which it moves.
fn fork(place: &Place) -> rustix::io::Result<(Forked, Option<OwnedFd>)> {
    let raw = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let Some(commands) = &place.commands else {
        return Ok((place.thread.fork(Namespaces::NONE, None).map_err(raw)?, None));
    };
    let group = open_group(commands)?;
    match place.thread.fork(Namespaces::NONE, Some(group.as_fd())).map_err(raw) {
        Err(Errno::AGAIN) => {
            let join = tree::open_members(&group)?;
            Ok((place.thread.fork(Namespaces::NONE, None).map_err(raw)?, Some(join)))
        }
        forked => Ok((forked?, None)),
    }
}

pub(crate) fn open_group(commands: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat(commands, GROUP, flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            rustix::fs::mkdirat(commands, GROUP, Mode::from_raw_mode(0o755))?;
            rustix::fs::openat(commands, GROUP, flags, Mode::empty())
        }
        other => other,
    }
}

/// The main function of a worker. It never returns, because it closes its copies of the agent's
/// descriptors while the objects that own them still exist.
///
/// `enter` enters the namespace of the files, if that is another one; the privileges for it are
/// given up afterwards.
pub(crate) fn run(
    place: &Place,
    config: &AgentConfig,
    connection: OwnedFd,
    decoder: Decoder,
    request: &FileRequest,
    join: Option<OwnedFd>,
    enter: Option<&dyn Fn() -> io::Result<()>>,
) -> ! {
    let mut groups = join.iter().chain(&place.tasks).chain(place.worker_share());
    let joined = groups.try_for_each(|group| rustix::io::write(group, b"0").map(drop));
    let entered = enter.map_or(Ok(()), |enter| enter());
    let Ok(connection) = child::alone_with(&connection) else { spawn::exit_now(1) };
    let prepared = rustix::io::ioctl_fionbio(&connection, false)
        .and_then(|()| set_socket_timeout(&connection, Timeout::Recv, Some(PATIENCE)))
        .and_then(|()| set_socket_timeout(&connection, Timeout::Send, Some(PATIENCE)));
    if prepared.is_err() {
        spawn::exit_now(1);
    }
    let mut line = Line::new(connection, decoder);
    // Nothing is done outside the sandbox's limits.
    let joined = joined.map_err(|errno| fault::from_errno(errno, "join the group", GROUP));
    let entered = entered.map_err(|error| fault::from_io(&error, "enter", "the session"));
    let done = joined
        .and(entered)
        .and_then(|()| become_user(place, config, request))
        .and_then(|who| Work { line: &mut line, config, who: &who }.perform(&request.operation));
    if let Err(fault) = done {
        line.fail(fault);
    }
    spawn::exit_now(0)
}

fn become_user(place: &Place, config: &AgentConfig, request: &FileRequest) -> Result<Who, Fault> {
    let who = Who::find(config, &request.identity)?;
    let named = |errno| fault::from_errno(errno, "become user", &who.name);
    let dropping = |error: io::Error| fault::from_io(&error, "drop capabilities", &who.name);
    who.assume(config).map_err(named)?;
    let keep =
        if who.is_root() { CapSet(ROOT_CAPABILITIES.0 & place.own_capabilities.0) } else { CapSet::NONE };
    caps::set(keep).map_err(dropping)?;
    place.confine_late().map_err(dropping)?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    // A change of identity resets this setting, so it comes last. If the agent is pid 1, its end
    // kills all processes anyway; otherwise this worker must not outlive it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(named)?;
    Ok(who)
}

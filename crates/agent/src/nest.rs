//! Isolated sessions: sessions whose shells have their own namespaces.
//!
//! ```text
//! open ─► the broker clones a namespace init ─► it reports ─► the shell starts in its namespaces
//!            │ the init ends for any reason                    │ idle for too long, or closed
//!            ▼                                                 ▼
//!          dead: runs are refused                           the init is killed, with everything inside
//! ```
//! The namespace init is a body of its own, so its group and its end are tracked like those of
//! commands. When it is killed, the kernel kills every process in its pid namespace.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use wire::nest::{Nest, NestStatus};
use wire::process::{Directory, Identity, Missing, RunInSession};
use wire::{Fault, FaultKind, Reply};

use crate::agent::{Agent, Alarm, now_ms};
use crate::body::Owner;
use crate::command::Surroundings;
use crate::exec::{self, Keeper, Launched, Spot, Wiring};
use crate::limit_view::THREADS_VARIABLE;
use crate::nester::{self, Begin, Given, Order, Program};
use crate::poll::{Source, Token};
use crate::process::{Caller, NewProcess, Subjects};
use crate::{fault, shell, tree};

/// The maximum number of isolated sessions at once.
const MOST_NESTS: usize = 64;

/// The maximum number of mounts in one.
const MOST_MOUNTS: usize = 128;

/// The longest note that is stored for a session.
const LONGEST_NOTE: usize = 256 << 10;

/// The longest report of a namespace init.
const LONGEST_REPORT: usize = 16 << 10;

/// The namespaces of a session.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The body of its namespace init, until that has ended.
    holder: Option<u64>,
    /// The pipe on which the namespace init reports that it is ready, or why not.
    report: Option<Source>,
    heard: Vec<u8>,
    created_ms: u64,
    used_ms: u64,
    /// The time at which the session is closed as idle.
    idle: Option<Instant>,
}

/// A program to be started in an isolated session.
pub(crate) struct Inside<'a> {
    pub(crate) identity: &'a Identity,
    pub(crate) directory: Option<&'a Directory>,
    pub(crate) env: &'a std::collections::BTreeMap<String, String>,
    pub(crate) nest: &'a Nest,
    pub(crate) program: Program,
    pub(crate) private: &'a [BorrowedFd<'a>],
}

impl Kept {
    pub(crate) fn is_alive(&self) -> bool {
        self.holder.is_some() && self.report.is_none()
    }

    pub(crate) fn has_holder(&self) -> bool {
        self.holder.is_some()
    }

    pub(crate) fn status(&self) -> NestStatus {
        let left = self.idle.map(|time| time.saturating_duration_since(Instant::now()));
        NestStatus {
            created_ms: self.created_ms,
            used_ms: self.used_ms,
            idle_left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            alive: self.is_alive(),
        }
    }
}

impl Agent {
    /// Whether this sandbox supports isolated sessions.
    pub(crate) fn check_nesting(&self) -> Result<(), Fault> {
        let without = |why: &str| Err(fault::plain(FaultKind::Unsupported, "isolate session", why));
        match (&self.place.nester, &self.place.commands) {
            (Some(_), Some(_)) => Ok(()),
            (_, None) => {
                without("this host gives sandboxes no control groups, which are needed to end a session")
            }
            (None, _) if self.nester_failed => without("the process that creates the namespaces has ended"),
            (None, _) => without("the sandbox was created without isolated sessions"),
        }
    }

    /// The parts of the configuration that an order needs.
    pub(crate) fn given(&self) -> Given {
        let config = &self.place.config;
        let mut env = config.env.clone();
        if let Some(threads) = config.threads {
            env.entry(THREADS_VARIABLE.to_owned()).or_insert_with(|| threads.to_string());
        }
        Given { env, env_file: config.env_file.clone() }
    }

    /// Sends an order to the namespace broker. A broker that fails to answer is not used again.
    pub(crate) fn order(&mut self, order: &Order, with: &[BorrowedFd<'_>]) -> Result<Option<Pid>, Fault> {
        self.check_nesting()?;
        let (channel, _) = self.place.nester.as_ref().expect("the check above has found it");
        match nester::ask(channel, order, with) {
            Ok(answer) => answer.0.map_err(|errno| fault::from_errno(errno, "start", "in the session")),
            Err(error) => {
                self.nester_ended();
                Err(fault::from_io(&error, "isolate session", "the process that creates the namespaces"))
            }
        }
    }

    /// The namespace broker is gone, so no more sessions can be isolated.
    pub(crate) fn nester_ended(&mut self) {
        self.nester_failed |= self.place.nester.take().is_some();
    }

    /// Starts to create a session's namespaces; its shell is started when they are ready.
    pub(crate) fn begin_nest(&mut self, number: u64) -> Result<(), Fault> {
        self.check_nesting()?;
        let session = self.sessions.get(&number).expect("the caller has added it");
        let nest = session.open.nest.clone().expect("the session is isolated");
        check_size(&nest)?;
        if self.sessions.values().filter(|session| session.nest.is_some()).count() >= MOST_NESTS {
            return Err(fault::plain(FaultKind::Busy, "open session", "too many isolated sessions"));
        }
        let (name, identity) = (session.name.clone(), session.open.identity.clone());
        let failed = |errno| fault::from_errno(errno, "open session", &name);
        let (report, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&report, true).map_err(failed)?;
        let spot = Spot { group: self.next_number(), share: self.quietest_share() };
        let commands = self.place.commands.as_ref().expect("the check above has found the groups");
        let group = tree::make_group(commands, spot.group).map_err(failed)?;
        let watched = self.poll.watch(report, Token::Nest(number), EventFlags::IN);
        let watched = watched.map_err(|error| fault::from_io(&error, "open session", &name))?;
        let order = Order::Make { session: name.clone(), nest, identity, share: spot.share };
        let pid = self.order(&order, &[theirs.as_fd(), group.as_fd()]);
        let Some(pid) = pid.inspect_err(|_| self.drop_group(spot.group))? else {
            return Err(failed(Errno::IO));
        };
        let holder = self.embody_holder(number, pid, spot);
        let now = now_ms();
        let kept = Kept {
            holder: Some(holder),
            report: Some(watched),
            heard: Vec::new(),
            created_ms: now,
            used_ms: now,
            idle: None,
        };
        self.sessions.get_mut(&number).expect("it is still there").nest = Some(kept);
        Ok(())
    }

    fn drop_group(&self, group: u64) {
        if let Some(commands) = &self.place.commands {
            tree::remove_group(commands, group);
        }
    }

    /// The namespace init has written to its report pipe or closed it.
    pub(crate) fn on_nest(&mut self, number: u64) {
        let Some(kept) = self.sessions.get_mut(&number).and_then(|session| session.nest.as_mut()) else {
            return;
        };
        let Some(report) = &kept.report else { return };
        let mut bytes = [0; 1024];
        match rustix::io::read(report.as_fd(), &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(count @ 1..) if kept.heard.len() < LONGEST_REPORT => {
                kept.heard.extend_from_slice(&bytes[..count]);
                return;
            }
            Ok(_) | Err(_) => kept.report = None,
        }
        let heard = std::mem::take(&mut kept.heard);
        if heard.is_empty() {
            let started = self.start_shell(number);
            if let Err(fault) = started {
                self.nest_failed(number, &fault);
            }
            return;
        }
        let unknown = || {
            fault::plain(FaultKind::Other, "isolate session", "the first process in its namespaces failed")
        };
        let fault = serde_json::from_slice(&heard).unwrap_or_else(|_error| unknown());
        self.nest_failed(number, &fault);
    }

    /// The namespaces cannot be used: reports this to the opener of the session and closes the
    /// session.
    pub(crate) fn nest_failed(&mut self, number: u64, fault: &Fault) {
        let opener = self.sessions.get_mut(&number).and_then(|session| session.opener.take());
        if let Some(opener) = opener {
            self.refuse(opener, fault.clone());
        }
        let name = self.sessions.get(&number).map(|session| session.name.clone());
        if let Some(name) = name {
            // A closing session stays in the table until its namespace init has ended.
            self.close_session(&name).ok();
        }
    }

    /// The namespace init has ended, and everything in its namespaces with it.
    pub(crate) fn nest_ended(&mut self, number: u64) {
        self.on_nest(number);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let name = session.name.clone();
        if let Some(kept) = &mut session.nest {
            kept.holder = None;
            kept.report = None;
        }
        // If the broker is gone there is nothing to forget, and its stored changes end with the
        // sandbox.
        self.order(&Order::Forget { session: name.clone() }, &[]).ok();
        if let Some(opener) = self.sessions.get_mut(&number).and_then(|session| session.opener.take()) {
            self.refuse(
                opener,
                fault::plain(
                    FaultKind::Other,
                    "open session",
                    "the first process in its namespaces was killed",
                ),
            );
            self.close_session(&name).ok();
        }
        self.drop_if_closed(number);
    }

    /// Kills the namespace init and thereby everything in its namespaces.
    pub(crate) fn kill_holder(&mut self, number: u64) {
        let Some(kept) = self.sessions.get_mut(&number).and_then(|session| session.nest.as_mut()) else {
            return;
        };
        let idle = kept.idle.take();
        let holder = kept.holder;
        self.stop_alarm(idle, Alarm::Idle(number));
        if let Some(body) = holder.and_then(|holder| self.bodies.get(&holder)) {
            // A group that cannot be killed has ended already.
            body.tree.kill(self.place.commands.as_ref(), body.pid).ok();
        }
    }

    /// Starts a program in an isolated session.
    pub(crate) fn launch_inside(
        &mut self,
        owner: Owner,
        session: &str,
        inside: Inside<'_>,
        wiring: Wiring,
    ) -> Result<u64, Fault> {
        let failed = |errno| fault::from_errno(errno, "start", session);
        self.refresh_limit_view();
        let around = Surroundings::new(&self.place.config, inside.identity, inside.env, inside.directory)?;
        let spot = Spot { group: self.next_number(), share: self.quietest_share() };
        let (ours, theirs) = exec::connect(&self.place, wiring, &around.who).map_err(failed)?;
        let (report, their_report) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&report, true).map_err(failed)?;
        let commands = self.place.commands.as_ref().ok_or(Errno::NOTSUP).map_err(failed)?;
        let group = tree::make_group(commands, spot.group).map_err(failed)?;
        let begin = Begin {
            session: session.to_owned(),
            identity: inside.identity.clone(),
            directory: inside.directory.cloned(),
            env: inside.env.clone(),
            screen: inside.nest.screen.clone(),
            program: inside.program,
            share: spot.share,
            terminal: theirs.terminal,
            config: self.given(),
        };
        let standard = [&theirs.stdin, &theirs.stdout, &theirs.stderr, &their_report, &group];
        let with: Vec<BorrowedFd<'_>> =
            standard.into_iter().map(AsFd::as_fd).chain(inside.private.iter().copied()).collect();
        let started = self.order(&Order::Start(Box::new(begin)), &with);
        let Some(pid) = started.inspect_err(|_| self.drop_group(spot.group))? else {
            return Err(failed(Errno::IO));
        };
        let launched = Launched { pid, keeper: Keeper::Group(spot.group), report, ours };
        self.embody(owner, launched, spot.share).map_err(|errno| {
            self.abandon(pid, spot);
            failed(errno)
        })
    }

    /// Runs text next to the session's shell, with the variables that the shell has exported so
    /// far.
    pub(crate) fn run_beside(
        &mut self,
        number: u64,
        connection: u64,
        run: RunInSession,
    ) -> Result<(), Fault> {
        let session = self.sessions.get(&number).expect("the caller has found it");
        let Some(nest) = session.open.nest.clone() else {
            return Err(fault::plain(
                FaultKind::Invalid,
                "run",
                "only an isolated session can run a command next to its shell",
            ));
        };
        let identity = session.open.identity.clone();
        let mut env = session.open.env.clone();
        env.extend(run.env);
        let directory = session.directory.clone();
        let directory = directory.map(|path| Directory { path, missing: Missing::Ignore, expand: false });
        let directory = run.directory.or(directory).or_else(|| session.open.directory.clone());
        let text = shell::compose(&session.exports, None, &run.text);
        let process = self.add_process(NewProcess {
            name: run.process.clone(),
            tag: None,
            session: Some(run.session.clone()),
            command: run.text,
            retention: run.retention,
            caller: Some(Caller { connection, follow: run.follow }),
            subjects: Subjects::default(),
        });
        let inside = Inside {
            identity: &identity,
            directory: directory.as_ref(),
            env: &env,
            nest: &nest,
            program: Program::Text(text),
            private: &[],
        };
        let wiring = Wiring { terminal: None, stdin: false };
        let launched = self.launch_inside(Owner::Process(process), &run.session, inside, wiring);
        let body = launched.inspect_err(|_| self.drop_process(process))?;
        let pid = self.bodies.get(&body).and_then(|body| body.pid);
        let deadline = self.set_deadline(process, run.deadline_ms);
        if let Some(begun) = self.processes.get_mut(&process) {
            begun.body = Some(body);
            begun.pid = pid;
            begun.deadline = deadline;
        }
        self.use_nest(number);
        Ok(())
    }

    /// Restarts the idle time of an isolated session.
    pub(crate) fn use_nest(&mut self, number: u64) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let busy = session.current.is_some() || session.closing;
        let Some(kept) = &mut session.nest else { return };
        kept.used_ms = now_ms();
        let limit = session.open.nest.as_ref().and_then(|nest| nest.idle_ms).filter(|_| !busy);
        let former = kept.idle.take();
        self.stop_alarm(former, Alarm::Idle(number));
        let next = limit.and_then(|limit| self.set_alarm(Duration::from_millis(limit), Alarm::Idle(number)));
        if let Some(kept) = self.sessions.get_mut(&number).and_then(|session| session.nest.as_mut()) {
            kept.idle = next;
        }
    }

    /// The idle time has passed. Closes the session unless something still runs next to its shell.
    pub(crate) fn nest_idle(&mut self, number: u64) {
        let Some(session) = self.sessions.get(&number) else { return };
        let name = session.name.clone();
        let runs = self.processes.values().any(|process| process.is_of(&name) && process.ended.is_none());
        if runs {
            self.use_nest(number);
        } else {
            // If it is closing already its name is no longer known.
            self.close_session(&name).ok();
        }
    }

    /// The user of an isolated session.
    pub(crate) fn identity_inside(&self, name: &str) -> Result<Identity, Fault> {
        let session = self.sessions.get(&self.session(name)?);
        let alive = session.filter(|session| session.nest.as_ref().is_some_and(Kept::is_alive));
        let alive = alive.ok_or_else(|| fault::plain(FaultKind::NotFound, "find session", name))?;
        Ok(alive.open.identity.clone())
    }

    pub(crate) fn note(&self, name: &str) -> Result<Reply, Fault> {
        let number = self.session(name)?;
        let nest = self.sessions.get(&number).and_then(|session| session.open.nest.as_ref());
        let nest = nest.ok_or_else(|| fault::plain(FaultKind::NotFound, "find isolated session", name))?;
        Ok(Reply::Note(nest.note.clone()))
    }
}

fn check_size(nest: &Nest) -> Result<(), Fault> {
    if nest.mounts.len() > MOST_MOUNTS || nest.note.len() > LONGEST_NOTE {
        return Err(fault::plain(FaultKind::Invalid, "open session", "too many mounts or too long a note"));
    }
    let paths = nest.mounts.iter().flat_map(|mount| [&mount.source, &mount.target]);
    for path in paths {
        let whole = path.starts_with('/') && path.len() <= 4096 && !path.contains('\0');
        if !whole || path.split('/').any(|word| matches!(word, "." | "..")) {
            return Err(fault::plain(FaultKind::Invalid, "show", path));
        }
    }
    Ok(())
}

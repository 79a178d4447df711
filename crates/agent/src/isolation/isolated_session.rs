//! Isolated sessions: sessions whose shells have their own namespaces.
//!
//! ```text
//! open ─► the broker clones a namespace init ─► it reports ─► the shell starts in its namespaces
//!            │ the init ends for any reason                    │ idle for too long, or closed
//!            ▼                                                 ▼
//!          dead: runs are refused                           the init is killed, with everything inside
//! ```
//! The namespace init is a running process of its own, so its group and its end are tracked like
//! those of commands. When it is killed, the kernel kills every process in its pid namespace.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use wire::isolated_session::{IsolatedSessionSpec, IsolatedSessionStatus};
use wire::process::{MissingDirectory, RunInSession, UserIdentity, WorkingDirectory};
use wire::{AgentReply, Fault, FaultKind, FaultOperation};

use crate::context::AgentContext;
use crate::event_loop::agent::{Agent, now_ms};
use crate::event_loop::alarms::{Alarm, AlarmQueue};
use crate::event_loop::handles::{ConnectionId, RunningHandle, SessionHandle};
use crate::event_loop::poll::{EventToken, RegisteredFd};
use crate::fault;
use crate::isolation::namespace_broker::{BrokerRequest, SessionProgram, StartProgramRequest};
use crate::process::child_table::ChildTable;
use crate::process::command::ExecEnvironment;
use crate::process::exec::{self, LaunchedCommand, StdioMode, TreeControl};
use crate::process::running_process::ProcessOwner;
use crate::process::{FaultSubjects, NewProcess, StartCaller};
use crate::session::Session;
use crate::session::shell;
use crate::session::table::SessionTable;

/// The maximum number of isolated sessions at once.
const MAX_ISOLATED_SESSIONS: usize = 64;

/// The maximum number of mounts in one.
const MAX_MOUNTS: usize = 128;

/// The longest note that is stored for a session.
const MAX_NOTE_BYTES: usize = 256 << 10;

/// The longest report of a namespace init.
const MAX_INIT_REPORT_BYTES: usize = 16 << 10;

/// The namespaces of a session.
#[derive(Debug)]
pub(crate) struct SessionNamespaces {
    /// Its namespace init, until that has ended.
    init: Option<RunningHandle>,
    /// The pipe on which the namespace init reports that it is ready, or why not.
    report: Option<RegisteredFd>,
    received: Vec<u8>,
    created_ms: u64,
}

/// A program to be started in an isolated session.
pub(crate) struct IsolatedLaunch<'a> {
    pub(crate) identity: &'a UserIdentity,
    pub(crate) directory: Option<&'a WorkingDirectory>,
    pub(crate) env: &'a std::collections::BTreeMap<String, String>,
    pub(crate) spec: &'a IsolatedSessionSpec,
    pub(crate) program: SessionProgram,
    pub(crate) private: &'a [BorrowedFd<'a>],
}

impl SessionNamespaces {
    pub(crate) fn is_alive(&self) -> bool {
        self.init.is_some() && self.report.is_none()
    }

    pub(crate) fn has_init(&self) -> bool {
        self.init.is_some()
    }

    pub(crate) fn status(&self, session: &Session) -> IsolatedSessionStatus {
        let left = session.idle.map(|time| time.saturating_duration_since(Instant::now()));
        IsolatedSessionStatus {
            created_ms: self.created_ms,
            used_ms: session.used_ms,
            idle_left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            alive: self.is_alive(),
        }
    }
}

impl Agent {
    /// Starts to create a session's namespaces; its shell is started when they are ready.
    pub(crate) fn create_namespaces(&mut self, number: SessionHandle) -> Result<(), Fault> {
        self.context.check_isolation_supported()?;
        let session = self.sessions.get(number).expect("the caller has added it");
        let spec = session.open.isolation.clone().expect("the session is isolated");
        check_session_spec(&spec)?;
        if self.sessions.values().filter(|session| session.namespaces.is_some()).count()
            >= MAX_ISOLATED_SESSIONS
        {
            return Err(fault::from_kind(FaultKind::Busy, "open session", "too many isolated sessions"));
        }
        let (name, identity) = (session.name.clone(), session.open.identity.clone());
        let failed = |errno| fault::from_errno(errno, "open session", &name);
        let (report, theirs) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&report, true).map_err(failed)?;
        let placement = self.children.next_placement(&self.context, &mut self.events);
        let commands = self.context.commands.as_ref().expect("the check above has found the groups");
        let group = placement.open_group(commands);
        let group =
            group.inspect_err(|_| self.context.remove_unused_group(placement.group)).map_err(failed)?;
        let watched = self.events.poll.register_fd(report, EventToken::NamespaceInit(number), EventFlags::IN);
        let watched = watched.map_err(|error| fault::from_io(&error, "open session", &name))?;
        let request = BrokerRequest::Make { session: name.clone(), spec, identity, share: placement.share };
        let pid = self.context.send_broker_request(&request, &[theirs.as_fd(), group.as_fd()]);
        let Some(pid) = pid.inspect_err(|_| self.context.remove_unused_group(placement.group))? else {
            return Err(failed(Errno::IO));
        };
        let init =
            self.children.track_namespace_init(number, pid, placement, &self.context, &mut self.events);
        let namespaces = SessionNamespaces {
            init: Some(init),
            report: Some(watched),
            received: Vec::new(),
            created_ms: now_ms(),
        };
        self.sessions.get_mut(number).expect("it is still there").namespaces = Some(namespaces);
        Ok(())
    }

    /// The namespace init has written to its report pipe or closed it.
    pub(crate) fn on_init_report(&mut self, number: SessionHandle) {
        let Some(namespaces) = self.sessions.get_mut(number).and_then(|session| session.namespaces.as_mut())
        else {
            return;
        };
        let Some(report) = &namespaces.report else { return };
        let mut bytes = [0; 1024];
        match rustix::io::read(report.as_fd(), &mut bytes) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(count @ 1..) if namespaces.received.len() < MAX_INIT_REPORT_BYTES => {
                namespaces.received.extend_from_slice(&bytes[..count]);
                return;
            }
            Ok(_) | Err(_) => namespaces.report = None,
        }
        let heard = std::mem::take(&mut namespaces.received);
        if heard.is_empty() {
            let started = self.start_shell(number);
            if let Err(fault) = started {
                self.isolation_failed(number, &fault);
            }
            return;
        }
        let unknown = || {
            fault::from_kind(
                FaultKind::Other,
                "isolate session",
                "the first process in its namespaces failed",
            )
        };
        let fault = serde_json::from_slice(&heard).unwrap_or_else(|_error| unknown());
        self.isolation_failed(number, &fault);
    }

    /// The namespaces cannot be used: reports this to the opener of the session and closes the
    /// session.
    pub(crate) fn isolation_failed(&mut self, number: SessionHandle, fault: &Fault) {
        let openers = self.sessions.get_mut(number).map(|session| std::mem::take(&mut session.openers));
        for opener in openers.into_iter().flatten() {
            self.connections.refuse_request(opener, fault.clone());
        }
        let name = self.sessions.get(number).map(|session| session.name.clone());
        if let Some(name) = name {
            // A closing session stays in the table until its namespace init has ended.
            self.close_session(&name).ok();
        }
    }

    /// The namespace init has ended, and everything in its namespaces with it.
    pub(crate) fn namespace_init_ended(&mut self, number: SessionHandle) {
        self.on_init_report(number);
        let Some(session) = self.sessions.get_mut(number) else { return };
        let name = session.name.clone();
        if let Some(namespaces) = &mut session.namespaces {
            namespaces.init = None;
            namespaces.report = None;
        }
        // If the broker is gone there is nothing to forget, and its stored changes end with the
        // sandbox.
        self.context.send_broker_request(&BrokerRequest::Forget { session: name.clone() }, &[]).ok();
        let opening = self.sessions.get(number).is_some_and(|session| !session.openers.is_empty());
        if opening {
            let killed = "the first process in its namespaces was killed";
            self.isolation_failed(number, &fault::from_kind(FaultKind::Other, "open session", killed));
        }
        self.sessions.drop_if_closed(number);
    }

    /// Starts a program in an isolated session.
    pub(crate) fn launch_isolated(
        &mut self,
        owner: ProcessOwner,
        session: &str,
        inside: IsolatedLaunch<'_>,
        wiring: StdioMode,
    ) -> Result<RunningHandle, Fault> {
        let failed = |errno| fault::from_errno(errno, "start", session);
        self.context.refresh_limit_view(&mut self.events);
        let environment =
            ExecEnvironment::new(&self.context.config, inside.identity, inside.env, inside.directory)?;
        let (ours, theirs) = exec::open_stdio(&self.context, wiring, &environment.user).map_err(failed)?;
        let (report, their_report) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&report, true).map_err(failed)?;
        let commands = self.context.commands.as_ref().ok_or(Errno::NOTSUP).map_err(failed)?;
        let placement = self.children.next_placement(&self.context, &mut self.events);
        let group = placement.open_group(commands);
        let group =
            group.inspect_err(|_| self.context.remove_unused_group(placement.group)).map_err(failed)?;
        let begin = StartProgramRequest {
            session: session.to_owned(),
            identity: inside.identity.clone(),
            directory: inside.directory.cloned(),
            env: inside.env.clone(),
            screen: inside.spec.screen.clone(),
            program: inside.program,
            share: placement.share,
            terminal: theirs.terminal,
            config: self.context.config_update(),
        };
        let standard = [&theirs.stdin, &theirs.stdout, &theirs.stderr, &their_report, &group];
        let with: Vec<BorrowedFd<'_>> =
            standard.into_iter().map(AsFd::as_fd).chain(inside.private.iter().copied()).collect();
        let started = self.context.send_broker_request(&BrokerRequest::Start(Box::new(begin)), &with);
        let Some(pid) = started.inspect_err(|_| self.context.remove_unused_group(placement.group))? else {
            return Err(failed(Errno::IO));
        };
        let launched =
            LaunchedCommand { pid, control: TreeControl::Group(placement.group), report, parent_ends: ours };
        self.children.track_launched(owner, launched, placement.share, &mut self.events).map_err(|errno| {
            self.children.track_for_cleanup(pid, placement, &self.context, &mut self.events);
            failed(errno)
        })
    }

    /// Runs text next to the session's shell, with the variables that the shell has exported so
    /// far.
    pub(crate) fn run_beside(
        &mut self,
        number: SessionHandle,
        connection: ConnectionId,
        run: RunInSession,
    ) -> Result<(), Fault> {
        let session = self.sessions.get(number).expect("the caller has found it");
        let Some(spec) = session.open.isolation.clone() else {
            return Err(fault::from_kind(
                FaultKind::Invalid,
                "run",
                "only an isolated session can run a command next to its shell",
            ));
        };
        let identity = session.open.identity.clone();
        let mut env = session.open.env.clone();
        env.extend(run.env);
        let directory = session.directory.clone();
        let directory =
            directory.map(|path| WorkingDirectory { path, missing: MissingDirectory::Ignore, expand: false });
        let directory = run.directory.or(directory).or_else(|| session.open.directory.clone());
        let text = shell::compose_run_text(&session.state, None, &run.text);
        let process = self.add_process(NewProcess {
            name: run.process.clone(),
            tag: None,
            session: Some(run.session.clone()),
            command: run.text,
            retention: run.retention,
            caller: Some(StartCaller { connection, follow: run.follow }),
            subjects: FaultSubjects::default(),
        });
        let inside = IsolatedLaunch {
            identity: &identity,
            directory: directory.as_ref(),
            env: &env,
            spec: &spec,
            program: SessionProgram::Text(text),
            private: &[],
        };
        let wiring = StdioMode { terminal: None, plain: false, stdin: false };
        let launched = self.launch_isolated(ProcessOwner::Process(process), &run.session, inside, wiring);
        let running = launched.inspect_err(|_| self.drop_process(process))?;
        let pid = self.children.pid_of(running);
        let deadline = self.set_deadline(process, run.deadline_ms);
        if let Some(begun) = self.processes.get_mut(process) {
            begun.running = Some(running);
            begun.pid = pid;
            begun.deadline = deadline;
        }
        if let Some(session) = self.sessions.get_mut(number) {
            session.record_run(process);
        }
        self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        Ok(())
    }

    /// The idle time has passed. Closes the session unless something still runs next to its shell.
    pub(crate) fn close_if_idle(&mut self, number: SessionHandle) {
        let Some(session) = self.sessions.get(number) else { return };
        let name = session.name.clone();
        let runs = self.processes.values().any(|process| process.is_run_of(&name) && process.ended.is_none());
        if runs {
            self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        } else {
            // If it is closing already its name is no longer known.
            self.close_session(&name).ok();
        }
    }
}

impl SessionTable {
    /// Kills the namespace init and thereby everything in its namespaces.
    pub(crate) fn kill_namespace_init(
        &mut self,
        number: SessionHandle,
        children: &ChildTable,
        context: &AgentContext,
        alarms: &mut AlarmQueue,
    ) {
        let Some(session) = self.get_mut(number) else { return };
        alarms.stop(session.idle.take(), Alarm::Idle(number));
        if let Some(init) = session.namespaces.as_ref().and_then(|namespaces| namespaces.init) {
            children.kill_tree(init, context);
        }
    }

    /// Restarts the idle time of a session.
    pub(crate) fn restart_idle_timer(&mut self, number: SessionHandle, alarms: &mut AlarmQueue) {
        let Some(session) = self.get_mut(number) else { return };
        session.used_ms = now_ms();
        self.set_idle_timer(number, alarms);
    }

    /// Lets the idle time of a session begin now.
    pub(crate) fn set_idle_timer(&mut self, number: SessionHandle, alarms: &mut AlarmQueue) {
        let Some(session) = self.get_mut(number) else { return };
        let busy = session.current.is_some() || session.closing;
        let isolated = session.open.isolation.as_ref().and_then(|spec| spec.idle_ms);
        let shared = session.open.sharing.as_ref().and_then(|sharing| sharing.idle_ms);
        let limit = isolated.or(shared).filter(|_| !busy);
        alarms.stop(session.idle.take(), Alarm::Idle(number));
        session.idle = limit.and_then(|limit| alarms.set(Duration::from_millis(limit), Alarm::Idle(number)));
    }

    /// The user of an isolated session.
    pub(crate) fn isolated_session_user(&self, name: &str) -> Result<UserIdentity, Fault> {
        let session = self.get(self.find(name)?);
        let alive =
            session.filter(|session| session.namespaces.as_ref().is_some_and(SessionNamespaces::is_alive));
        let alive =
            alive.ok_or_else(|| fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, name))?;
        Ok(alive.open.identity.clone())
    }

    /// The note that was given when an isolated session was opened.
    pub(crate) fn note(&self, name: &str) -> Result<AgentReply, Fault> {
        let number = self.find(name)?;
        let spec = self.get(number).and_then(|session| session.open.isolation.as_ref());
        let spec = spec.ok_or_else(|| {
            fault::from_kind(FaultKind::NotFound, FaultOperation::FindIsolatedSession, name)
        })?;
        Ok(AgentReply::Note(spec.note.clone()))
    }
}

fn check_session_spec(spec: &IsolatedSessionSpec) -> Result<(), Fault> {
    if spec.mounts.len() > MAX_MOUNTS || spec.note.len() > MAX_NOTE_BYTES {
        return Err(fault::from_kind(
            FaultKind::Invalid,
            "open session",
            "too many mounts or too long a note",
        ));
    }
    let paths = spec.mounts.iter().flat_map(|mount| [&mount.source, &mount.target]);
    for path in paths {
        let whole = path.starts_with('/') && path.len() <= 4096 && !path.contains('\0');
        if !whole || path.split('/').any(|word| matches!(word, "." | "..")) {
            return Err(fault::from_kind(FaultKind::Invalid, "show", path));
        }
    }
    Ok(())
}

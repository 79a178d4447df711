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
use rustix::process::Pid;
use wire::isolated_session::{IsolatedSessionSpec, IsolatedSessionStatus};
use wire::process::{MissingDirectory, RunInSession, UserIdentity, WorkingDirectory};
use wire::{AgentReply, Fault, FaultKind};

use crate::event_loop::agent::{Agent, now_ms};
use crate::event_loop::alarms::Alarm;
use crate::event_loop::handles::{ConnectionId, GroupId, RunningHandle, SessionHandle};
use crate::event_loop::poll::{EventToken, RegisteredFd};
use crate::fault;
use crate::isolation::limit_view::THREADS_VARIABLE;
use crate::isolation::namespace_broker::{
    self, BrokerRequest, ConfigUpdate, SessionProgram, StartProgramRequest,
};
use crate::process::command::ExecEnvironment;
use crate::process::exec::{self, CommandPlacement, LaunchedCommand, StdioMode, TreeControl};
use crate::process::running_process::ProcessOwner;
use crate::process::tree;
use crate::process::{FaultSubjects, NewProcess, StartCaller};
use crate::session::shell;

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
    used_ms: u64,
    /// The time at which the session is closed as idle.
    idle: Option<Instant>,
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

    pub(crate) fn status(&self) -> IsolatedSessionStatus {
        let left = self.idle.map(|time| time.saturating_duration_since(Instant::now()));
        IsolatedSessionStatus {
            created_ms: self.created_ms,
            used_ms: self.used_ms,
            idle_left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            alive: self.is_alive(),
        }
    }
}

impl Agent {
    /// Whether this sandbox supports isolated sessions.
    pub(crate) fn check_isolation_supported(&self) -> Result<(), Fault> {
        let without = |why: &str| Err(fault::from_kind(FaultKind::Unsupported, "isolate session", why));
        match (&self.context.broker, &self.context.commands) {
            (Some(_), Some(_)) => Ok(()),
            (_, None) => {
                without("this host gives sandboxes no control groups, which are needed to end a session")
            }
            (None, _) if self.broker_failed => without("the process that creates the namespaces has ended"),
            (None, _) => without("the sandbox was created without isolated sessions"),
        }
    }

    /// The parts of the configuration that a request needs.
    pub(crate) fn config_update(&self) -> ConfigUpdate {
        let config = &self.context.config;
        let mut env = config.env.clone();
        if let Some(threads) = config.threads {
            env.entry(THREADS_VARIABLE.to_owned()).or_insert_with(|| threads.to_string());
        }
        ConfigUpdate { env, env_file: config.env_file.clone() }
    }

    /// Sends a request to the namespace broker. A broker that fails to answer is not used again.
    pub(crate) fn send_broker_request(
        &mut self,
        request: &BrokerRequest,
        with: &[BorrowedFd<'_>],
    ) -> Result<Option<Pid>, Fault> {
        self.check_isolation_supported()?;
        let (channel, _) = self.context.broker.as_ref().expect("the check above has found it");
        match namespace_broker::send_request(channel, request, with) {
            Ok(answer) => answer.0.map_err(|errno| fault::from_errno(errno, "start", "in the session")),
            Err(error) => {
                self.broker_ended();
                Err(fault::from_io(&error, "isolate session", "the process that creates the namespaces"))
            }
        }
    }

    /// The namespace broker is gone, so no more sessions can be isolated.
    pub(crate) fn broker_ended(&mut self) {
        self.broker_failed |= self.context.broker.take().is_some();
    }

    /// Starts to create a session's namespaces; its shell is started when they are ready.
    pub(crate) fn create_namespaces(&mut self, number: SessionHandle) -> Result<(), Fault> {
        self.check_isolation_supported()?;
        let session = self.sessions.get(&number).expect("the caller has added it");
        let spec = session.open.nest.clone().expect("the session is isolated");
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
        let placement = CommandPlacement { group: self.next_handle(), share: self.least_used_share() };
        let commands = self.context.commands.as_ref().expect("the check above has found the groups");
        let group = tree::make_group(commands, placement.group).map_err(failed)?;
        let watched = self.poll.register_fd(report, EventToken::NamespaceInit(number), EventFlags::IN);
        let watched = watched.map_err(|error| fault::from_io(&error, "open session", &name))?;
        let request = BrokerRequest::Make { session: name.clone(), spec, identity, share: placement.share };
        let pid = self.send_broker_request(&request, &[theirs.as_fd(), group.as_fd()]);
        let Some(pid) = pid.inspect_err(|_| self.remove_unused_group(placement.group))? else {
            return Err(failed(Errno::IO));
        };
        let init = self.track_namespace_init(number, pid, placement);
        let now = now_ms();
        let namespaces = SessionNamespaces {
            init: Some(init),
            report: Some(watched),
            received: Vec::new(),
            created_ms: now,
            used_ms: now,
            idle: None,
        };
        self.sessions.get_mut(&number).expect("it is still there").namespaces = Some(namespaces);
        Ok(())
    }

    fn remove_unused_group(&self, group: GroupId) {
        if let Some(commands) = &self.context.commands {
            tree::remove_group(commands, group);
        }
    }

    /// The namespace init has written to its report pipe or closed it.
    pub(crate) fn on_init_report(&mut self, number: SessionHandle) {
        let Some(namespaces) = self.sessions.get_mut(&number).and_then(|session| session.namespaces.as_mut())
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
        let opener = self.sessions.get_mut(&number).and_then(|session| session.opener.take());
        if let Some(opener) = opener {
            self.refuse_request(opener, fault.clone());
        }
        let name = self.sessions.get(&number).map(|session| session.name.clone());
        if let Some(name) = name {
            // A closing session stays in the table until its namespace init has ended.
            self.close_session(&name).ok();
        }
    }

    /// The namespace init has ended, and everything in its namespaces with it.
    pub(crate) fn namespace_init_ended(&mut self, number: SessionHandle) {
        self.on_init_report(number);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let name = session.name.clone();
        if let Some(namespaces) = &mut session.namespaces {
            namespaces.init = None;
            namespaces.report = None;
        }
        // If the broker is gone there is nothing to forget, and its stored changes end with the
        // sandbox.
        self.send_broker_request(&BrokerRequest::Forget { session: name.clone() }, &[]).ok();
        if let Some(opener) = self.sessions.get_mut(&number).and_then(|session| session.opener.take()) {
            self.refuse_request(
                opener,
                fault::from_kind(
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
    pub(crate) fn kill_namespace_init(&mut self, number: SessionHandle) {
        let Some(namespaces) = self.sessions.get_mut(&number).and_then(|session| session.namespaces.as_mut())
        else {
            return;
        };
        let idle = namespaces.idle.take();
        let init = namespaces.init;
        self.alarms.stop(idle, Alarm::Idle(number));
        if let Some(running) = init.and_then(|init| self.running_processes.get(&init)) {
            // A group that cannot be killed has ended already.
            running.tree.kill(self.context.commands.as_ref(), running.pid).ok();
        }
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
        self.refresh_limit_view();
        let environment =
            ExecEnvironment::new(&self.context.config, inside.identity, inside.env, inside.directory)?;
        let placement = CommandPlacement { group: self.next_handle(), share: self.least_used_share() };
        let (ours, theirs) = exec::open_stdio(&self.context, wiring, &environment.user).map_err(failed)?;
        let (report, their_report) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        rustix::io::ioctl_fionbio(&report, true).map_err(failed)?;
        let commands = self.context.commands.as_ref().ok_or(Errno::NOTSUP).map_err(failed)?;
        let group = tree::make_group(commands, placement.group).map_err(failed)?;
        let begin = StartProgramRequest {
            session: session.to_owned(),
            identity: inside.identity.clone(),
            directory: inside.directory.cloned(),
            env: inside.env.clone(),
            screen: inside.spec.screen.clone(),
            program: inside.program,
            share: placement.share,
            terminal: theirs.terminal,
            config: self.config_update(),
        };
        let standard = [&theirs.stdin, &theirs.stdout, &theirs.stderr, &their_report, &group];
        let with: Vec<BorrowedFd<'_>> =
            standard.into_iter().map(AsFd::as_fd).chain(inside.private.iter().copied()).collect();
        let started = self.send_broker_request(&BrokerRequest::Start(Box::new(begin)), &with);
        let Some(pid) = started.inspect_err(|_| self.remove_unused_group(placement.group))? else {
            return Err(failed(Errno::IO));
        };
        let launched =
            LaunchedCommand { pid, control: TreeControl::Group(placement.group), report, parent_ends: ours };
        self.track_launched(owner, launched, placement.share).map_err(|errno| {
            self.track_for_cleanup(pid, placement);
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
        let session = self.sessions.get(&number).expect("the caller has found it");
        let Some(spec) = session.open.nest.clone() else {
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
        let text = shell::compose_run_text(&session.exports, None, &run.text);
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
        let wiring = StdioMode { terminal: None, stdin: false };
        let launched = self.launch_isolated(ProcessOwner::Process(process), &run.session, inside, wiring);
        let running = launched.inspect_err(|_| self.drop_process(process))?;
        let pid = self.running_processes.get(&running).and_then(|running| running.pid);
        let deadline = self.set_deadline(process, run.deadline_ms);
        if let Some(begun) = self.processes.get_mut(&process) {
            begun.running = Some(running);
            begun.pid = pid;
            begun.deadline = deadline;
        }
        self.restart_idle_timer(number);
        Ok(())
    }

    /// Restarts the idle time of an isolated session.
    pub(crate) fn restart_idle_timer(&mut self, number: SessionHandle) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let busy = session.current.is_some() || session.closing;
        let Some(namespaces) = &mut session.namespaces else { return };
        namespaces.used_ms = now_ms();
        let limit = session.open.nest.as_ref().and_then(|spec| spec.idle_ms).filter(|_| !busy);
        let former = namespaces.idle.take();
        self.alarms.stop(former, Alarm::Idle(number));
        let next = limit.and_then(|limit| self.alarms.set(Duration::from_millis(limit), Alarm::Idle(number)));
        if let Some(namespaces) =
            self.sessions.get_mut(&number).and_then(|session| session.namespaces.as_mut())
        {
            namespaces.idle = next;
        }
    }

    /// The idle time has passed. Closes the session unless something still runs next to its shell.
    pub(crate) fn close_if_idle(&mut self, number: SessionHandle) {
        let Some(session) = self.sessions.get(&number) else { return };
        let name = session.name.clone();
        let runs = self.processes.values().any(|process| process.is_run_of(&name) && process.ended.is_none());
        if runs {
            self.restart_idle_timer(number);
        } else {
            // If it is closing already its name is no longer known.
            self.close_session(&name).ok();
        }
    }

    /// The user of an isolated session.
    pub(crate) fn isolated_session_user(&self, name: &str) -> Result<UserIdentity, Fault> {
        let session = self.sessions.get(&self.find_session(name)?);
        let alive =
            session.filter(|session| session.namespaces.as_ref().is_some_and(SessionNamespaces::is_alive));
        let alive = alive.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find session", name))?;
        Ok(alive.open.identity.clone())
    }

    pub(crate) fn session_note(&self, name: &str) -> Result<AgentReply, Fault> {
        let number = self.find_session(name)?;
        let spec = self.sessions.get(&number).and_then(|session| session.open.nest.as_ref());
        let spec =
            spec.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find isolated session", name))?;
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

//! Sessions: shells and kernels that are kept open between runs.
//!
//! ```text
//! open ─► idle ⇄ running (one run at a time; others are refused or wait)
//!           │        │ the shell ends, whoever ended it
//!           ▼        ▼
//!          without a shell ── next run ─► a new shell with the last known directory and exports
//! ```
//! A run is a process with its own journal. Its body is the shell's, so that signals and
//! deadlines reach everything the session has started. A kernel is to its session what a shell is
//! to others; what it says in its own way is in `kernel.rs`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use linux::spawn::{End, Usage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use wire::process::{Directory, Kernel, Missing, OpenSession, Program, RunInSession, SessionStatus};
use wire::{Fault, FaultKind, Reply, StreamTag};

use crate::agent::Agent;
use crate::body::Owner;
use crate::child::Failure;
use crate::command::{self, Command, Surroundings};
use crate::exec::Wiring;
use crate::input::Input;
use crate::kernel::{self, Hearing};
use crate::nest::{Inside, Kept};
use crate::place::HIGH;
use crate::poll::{Source, Token};
use crate::process::{Caller, NewProcess, Subjects, is_plain};
use crate::shell::{self, Dialect, Kind};
use crate::{fault, nester};

/// How many runs may wait for their turn in one session.
const MOST_QUEUED: usize = 64;

/// How much is taken in at once of what a shell or kernel says. One that never stops must not
/// keep the agent from everybody else.
const EARFUL: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) name: String,
    pub(crate) open: OpenSession,
    kernel: Option<Kernel>,
    shell: Option<Shell>,
    /// Where its shells run, if not where everything does.
    pub(crate) nest: Option<Kept>,
    /// What the next shell starts with.
    pub(crate) directory: Option<String>,
    pub(crate) exports: String,
    pub(crate) current: Option<Run>,
    /// How many runs it has had.
    runs: u64,
    /// Variables of the last run, which the next is not to have.
    passing: Vec<String>,
    queue: VecDeque<(u64, RunInSession)>,
    /// The connection that waits for the first shell.
    pub(crate) opener: Option<u64>,
    pub(crate) closing: bool,
    /// The connections that wait for the end of its shell.
    restarters: Vec<u64>,
}

/// A shell or kernel that runs, and the private ways to it.
#[derive(Debug)]
struct Shell {
    body: u64,
    tongue: Tongue,
    orders: Input,
    verdicts: Source,
    heard: Vec<u8>,
    started: bool,
    /// It was started in the place of one that had died.
    forgetful: bool,
    subjects: Subjects,
}

/// What is spoken on the private ways.
#[derive(Debug)]
enum Tongue {
    Shell(Dialect),
    Kernel(Hearing),
}

/// The run that is on.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) process: u64,
    pub(crate) key: String,
    request: RunInSession,
}

impl Session {
    /// Its kernel's body, and what was heard from it.
    pub(crate) fn hearing(&mut self) -> Option<(u64, &mut Hearing)> {
        match self.shell.as_mut()? {
            Shell { body, tongue: Tongue::Kernel(hearing), .. } => Some((*body, hearing)),
            Shell { tongue: Tongue::Shell(_), .. } => None,
        }
    }

    /// Whether its first shell is all that whoever opens it waits for.
    pub(crate) fn opens_with_its_shell(&self) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.program == Program::Shell)
    }
}

impl Agent {
    /// Opens a session; answered when its shell runs.
    pub(crate) fn open_session(&mut self, connection: u64, open: OpenSession) -> Result<(), Fault> {
        self.add_session(connection, open, None).map(drop)
    }

    pub(crate) fn add_session(
        &mut self,
        connection: u64,
        open: OpenSession,
        kernel: Option<Kernel>,
    ) -> Result<u64, Fault> {
        if !is_plain(&open.session) {
            return Err(fault::plain(FaultKind::Invalid, "open session", "the name of the session"));
        }
        if self.session_names.contains_key(&open.session) {
            return Err(fault::plain(FaultKind::AlreadyExists, "open session", &open.session));
        }
        // One that was closed no longer counts, as long as it ends soon.
        let most = usize::try_from(self.place.config.max_processes).unwrap_or(usize::MAX);
        let open_ones = self.sessions.values().filter(|session| !session.closing).count();
        if open_ones >= most || self.sessions.len() >= most.saturating_mul(2) {
            return Err(fault::plain(FaultKind::Busy, "open session", "too many sessions"));
        }
        let number = self.next_number();
        let session = Session {
            name: open.session.clone(),
            open,
            kernel,
            shell: None,
            nest: None,
            directory: None,
            exports: String::new(),
            current: None,
            runs: 0,
            passing: Vec::new(),
            queue: VecDeque::new(),
            opener: Some(connection),
            closing: false,
            restarters: Vec::new(),
        };
        let nested = session.open.nest.is_some();
        self.session_names.insert(session.name.clone(), number);
        self.sessions.insert(number, session);
        let begun = if nested { self.begin_nest(number) } else { self.start_shell(number) };
        begun.inspect_err(|_| self.drop_session(number))?;
        Ok(number)
    }

    /// Runs text in a session, now or in its turn.
    pub(crate) fn run_in_session(&mut self, connection: u64, run: RunInSession) -> Result<(), Fault> {
        let number = self.session(&run.session)?;
        self.check_new_name(&run.process)?;
        let directory = run.directory.iter().map(|directory| &directory.path);
        if directory.chain(run.env.values()).chain([&run.text]).any(|text| text.contains('\0')) {
            return Err(fault::plain(FaultKind::Invalid, "run", "a text with a zero byte in it"));
        }
        if let Some(wrong) = run.env.keys().find(|name| !shell::is_variable(name)) {
            return Err(fault::plain(FaultKind::Invalid, "set variable", wrong));
        }
        let session = self.sessions.get_mut(&number).expect("it was just found");
        if session.nest.as_ref().is_some_and(|nest| !nest.is_alive()) {
            return Err(fault::plain(FaultKind::Other, "run", "the session's namespaces are gone"));
        }
        if run.beside {
            return self.run_beside(number, connection, run);
        }
        if session.current.is_none() {
            return self.begin_run(number, connection, run);
        }
        if !run.queue || session.queue.len() >= MOST_QUEUED {
            return Err(fault::plain(FaultKind::Busy, "run", &run.session));
        }
        session.queue.push_back((connection, run));
        Ok(())
    }

    pub(crate) fn session_statuses(&self) -> Vec<SessionStatus> {
        let status = |session: &Session| {
            let body = session.shell.as_ref().and_then(|shell| self.bodies.get(&shell.body));
            SessionStatus {
                session: session.name.clone(),
                busy: session.current.is_some(),
                terminal: session.open.terminal.is_some(),
                pid: body.and_then(|body| body.pid).map(rustix::process::Pid::as_raw_pid),
                kernel: session.kernel.as_ref().map(|kernel| kernel.language.clone()),
                nest: session.nest.as_ref().map(Kept::status),
            }
        };
        let mut statuses: Vec<_> = self.sessions.values().filter(|s| !s.closing).map(status).collect();
        statuses.sort_unstable_by(|a, b| a.session.cmp(&b.session));
        statuses
    }

    /// Ends a session with everything in it.
    pub(crate) fn close_session(&mut self, name: &str) -> Result<(), Fault> {
        let number = self.session(name)?;
        self.session_names.remove(name);
        let session = self.sessions.get_mut(&number).expect("it was just found");
        session.closing = true;
        for (connection, _) in std::mem::take(&mut session.queue) {
            self.refuse(connection, fault::plain(FaultKind::NotFound, "find session", name));
        }
        self.kill_shell(number);
        self.kill_holder(number);
        self.drop_if_closed(number);
        Ok(())
    }

    /// Ends a session's shell with everything in it; answered when it has ended. The next run has
    /// a new one.
    pub(crate) fn restart_session(&mut self, connection: u64, name: &str) -> Result<(), Fault> {
        let number = self.session(name)?;
        let session = self.sessions.get_mut(&number).expect("it was just found");
        session.directory = None;
        session.exports = String::new();
        if session.shell.is_none() {
            self.answer(connection, &Reply::Ok);
            return Ok(());
        }
        session.restarters.push(connection);
        self.kill_shell(number);
        Ok(())
    }

    pub(crate) fn session(&self, name: &str) -> Result<u64, Fault> {
        let number = self.session_names.get(name).copied();
        number.ok_or_else(|| fault::plain(FaultKind::NotFound, "find session", name))
    }

    fn drop_session(&mut self, number: u64) {
        if let Some(session) = self.sessions.remove(&number) {
            self.session_names.remove(&session.name);
        }
    }

    pub(crate) fn drop_if_closed(&mut self, number: u64) {
        let held = |session: &Session| session.nest.as_ref().is_some_and(Kept::has_holder);
        let over = |session: &Session| session.closing && session.shell.is_none() && !held(session);
        if self.sessions.get(&number).is_some_and(over) {
            self.sessions.remove(&number);
        }
    }

    pub(crate) fn kill_shell(&self, number: u64) {
        let shell = self.sessions.get(&number).and_then(|session| session.shell.as_ref());
        if let Some(body) = shell.and_then(|shell| self.bodies.get(&shell.body)) {
            // A tree that cannot be killed has ended already.
            body.tree.kill(self.place.commands.as_ref(), body.pid).ok();
        }
    }

    fn begin_run(&mut self, number: u64, connection: u64, request: RunInSession) -> Result<(), Fault> {
        let session = self.sessions.get(&number).expect("the caller has found it");
        self.check_directory(session, request.directory.as_ref())?;
        let key = new_key()?;
        let process = self.add_process(NewProcess {
            name: request.process.clone(),
            tag: None,
            session: Some(request.session.clone()),
            command: request.text.clone(),
            retention: request.retention,
            caller: Some(Caller { connection, follow: request.follow }),
            subjects: Subjects::default(),
        });
        let session = self.sessions.get_mut(&number).expect("it is still there");
        session.current = Some(Run { process, key, request });
        self.use_nest(number);
        let session = self.sessions.get(&number).expect("it is still there");
        match &session.shell {
            Some(shell) if shell.started => self.give_order(number),
            Some(_) => {}
            None => {
                let started = self.start_shell(number);
                started.inspect_err(|_| self.abandon_run(number))?;
            }
        }
        Ok(())
    }

    fn abandon_run(&mut self, number: u64) {
        let run = self.sessions.get_mut(&number).and_then(|session| session.current.take());
        if let Some(run) = run {
            self.drop_process(run.process);
        }
    }

    pub(crate) fn start_shell(&mut self, number: u64) -> Result<(), Fault> {
        let session = self.sessions.get(&number).expect("the caller has found it");
        let forgetful = session.directory.is_some() || !session.exports.is_empty();
        // A shell in the place of another starts where that one was.
        let last =
            session.directory.clone().map(|path| Directory { path, missing: Missing::Ignore, expand: false });
        let directory = last.as_ref().or(session.open.directory.as_ref());
        let open = &session.open;
        let around = Surroundings::new(&self.place.config, &open.identity, &open.env, directory)?;
        let wiring = Wiring { terminal: open.terminal, stdin: false };
        let failed = |errno| fault::from_errno(errno, "open session", &open.session);
        let (their_orders, orders) = private_pipe(&around).map_err(failed)?;
        let (verdicts, their_verdicts) = private_pipe(&around).map_err(failed)?;
        for ours in [&orders, &verdicts] {
            rustix::io::ioctl_fionbio(ours, true).map_err(failed)?;
        }
        let theirs = [their_orders, their_verdicts];
        let started = match (&open.nest, session.kernel.as_ref().map(|kernel| &kernel.program)) {
            (Some(nest), None) => {
                let path = command::shell_path();
                let (name, open, nest) = (session.name.clone(), open.clone(), nest.clone());
                let directory = directory.cloned();
                let inside = Inside {
                    identity: &open.identity,
                    directory: directory.as_ref(),
                    env: &open.env,
                    nest: &nest,
                    program: nester::Program::Shell,
                    private: &[theirs[0].as_fd(), theirs[1].as_fd()],
                };
                let subjects = Subjects { program: path.to_owned(), ..Subjects::of_place(&around) };
                let body = self.launch_inside(Owner::Session(number), &name, inside, wiring)?;
                (body, subjects, Tongue::Shell(Dialect::of(path)))
            }
            (Some(_), Some(_)) => {
                return Err(fault::plain(FaultKind::Invalid, "open session", "a kernel in a nest"));
            }
            (None, program) => {
                let (command, tongue) = match program {
                    None | Some(Program::Shell) => as_shell(around, theirs)?,
                    Some(program) => {
                        (Command::kernel(around, program, theirs)?, Tongue::Kernel(Hearing::default()))
                    }
                };
                let body = self.launch(Owner::Session(number), &command, wiring)?;
                (body, Subjects::of(&command), tongue)
            }
        };
        let (body, subjects, tongue) = started;
        let watch = |fd, token, interest| {
            let watched = self.poll.watch(fd, token, interest);
            watched.map_err(|error| fault::from_io(&error, "open session", &subjects.program))
        };
        let shell = Shell {
            body,
            tongue,
            orders: Input::pipe(watch(orders, Token::Orders(number), EventFlags::empty())?),
            verdicts: watch(verdicts, Token::Verdict(number), EventFlags::IN)?,
            heard: Vec::new(),
            started: false,
            forgetful,
            subjects,
        };
        self.sessions.get_mut(&number).expect("it is still there").shell = Some(shell);
        Ok(())
    }

    /// The shell runs, or it is known why not.
    pub(crate) fn shell_started(&mut self, number: u64, outcome: Result<(), Failure>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(shell) = &mut session.shell else { return };
        match outcome {
            Ok(()) => {
                shell.started = true;
                let opened = session.opens_with_its_shell();
                if let Some(opener) = session.opener.take_if(|_| opened) {
                    self.answer(opener, &Reply::Ok);
                }
                self.use_nest(number);
                self.give_order(number);
            }
            Err(failure) => {
                let fault = shell.subjects.fault(failure);
                session.shell = None;
                self.shell_failed(number, &fault);
            }
        }
    }

    fn shell_failed(&mut self, number: u64, fault: &Fault) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if session.opener.is_some() && session.nest.is_some() {
            self.nest_failed(number, fault);
            return;
        }
        if let Some(opener) = session.opener.take() {
            self.drop_session(number);
            self.refuse(opener, fault.clone());
            return;
        }
        if let Some(run) = session.current.take() {
            let caller = self.processes.get_mut(&run.process).and_then(|process| process.caller.take());
            self.drop_process(run.process);
            if let Some(caller) = caller {
                self.refuse(caller.connection, fault.clone());
            }
        }
        self.begin_next(number);
    }

    /// Hands the current run to the shell.
    fn give_order(&mut self, number: u64) {
        let Some(session) = self.sessions.get(&number) else { return };
        let (Some(shell), Some(run)) = (&session.shell, &session.current) else { return };
        let order = match &shell.tongue {
            Tongue::Shell(dialect) => dialect.order(&self.shell_text(session, shell, run), &run.key),
            Tongue::Kernel(_) => kernel::order(&run.request.text, &run.key),
        };
        let passing: Vec<String> = run.request.env.keys().cloned().collect();
        let (body, process, deadline) = (shell.body, run.process, run.request.deadline_ms);

        let session = self.sessions.get_mut(&number).expect("it is still there");
        session.runs += 1;
        let count = session.kernel.as_ref().filter(|kernel| kernel.program == Program::Shell);
        let count = count.map(|_| format!("{{\"count\":{}}}\n", session.runs));
        let shell = session.shell.as_mut().expect("it is still there");
        shell.forgetful = false;
        session.passing = passing;
        shell.orders.add(&order);
        // A shell that does not read has ended, which is told otherwise.
        shell.orders.pump().ok();
        let pid = self.bodies.get(&body).and_then(|body| body.pid);
        let deadline = self.set_deadline(process, deadline);
        let Some(begun) = self.processes.get_mut(&process) else { return };
        begun.body = Some(body);
        begun.pid = pid;
        begun.deadline = deadline;
        begun.begin();
        let caller = begun.caller.take();
        if let Some(count) = count {
            // A kernel counts for itself; for a shell it is done here.
            self.append_output(process, StreamTag::Tell, count.as_bytes());
        }
        self.tell_started(process, caller);
    }

    /// What a shell is to evaluate for a run.
    fn shell_text(&self, session: &Session, shell: &Shell, run: &Run) -> String {
        let directory = run.request.directory.as_ref();
        let way = directory.and_then(|directory| self.way(session, directory));
        let exports = if shell.forgetful { session.exports.as_str() } else { "" };
        let lent = shell::lend(&session.passing, &run.request.env);
        lent + &shell::compose(exports, way.as_ref(), &run.request.text)
    }

    pub(crate) fn on_orders(&mut self, number: u64) {
        let shell = self.sessions.get_mut(&number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell {
            // A shell that does not read has ended, which is told otherwise.
            shell.orders.pump().ok();
        }
    }

    /// The shell has said something.
    pub(crate) fn on_verdict(&mut self, number: u64) {
        let mut buffer = std::mem::take(&mut self.reports);
        let (mut taken, mut drains) = (0, 0);
        while taken < EARFUL && drains < kernel::MOST_DRAINS {
            let Some(count) = self.listen(number, &mut buffer, &mut drains) else { break };
            taken += count;
        }
        self.reports = buffer;
    }

    /// Takes in one piece of what the shell says. `None` if there was none.
    fn listen(&mut self, number: u64, buffer: &mut [u8], drains: &mut u32) -> Option<usize> {
        let shell = self.sessions.get_mut(&number)?.shell.as_mut()?;
        let count = match rustix::io::read(shell.verdicts.as_fd(), &mut *buffer) {
            Ok(count @ 1..) => count,
            Err(Errno::INTR) => return Some(0),
            Err(Errno::AGAIN) => return None,
            Ok(_) | Err(_) => {
                shell.verdicts.mute();
                if matches!(shell.tongue, Tongue::Kernel(_)) {
                    self.kill_shell(number);
                }
                return None;
            }
        };
        if matches!(shell.tongue, Tongue::Kernel(_)) {
            self.hear(number, &buffer[..count], drains);
            return Some(count);
        }
        shell.heard.extend_from_slice(&buffer[..count]);
        if shell.heard.len() > shell::LONGEST_VERDICT {
            shell.heard.clear();
            self.kill_shell(number);
            return None;
        }
        self.judge(number);
        Some(count)
    }

    /// Answers a kernel. One that does not read its answers gets no more of them.
    pub(crate) fn give_to_kernel(&mut self, number: u64, line: &[u8]) {
        let shell = self.sessions.get_mut(&number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell.filter(|shell| shell.orders.is_empty()) {
            shell.orders.add(line);
            // A kernel that does not read has ended, which is told otherwise.
            shell.orders.pump().ok();
        }
    }

    /// Takes in the verdicts that are complete. Those without the right key are not the shell's.
    fn judge(&mut self, number: u64) {
        loop {
            let Some(session) = self.sessions.get_mut(&number) else { return };
            let Some(shell) = &mut session.shell else { return };
            let Some(verdict) = shell::take_verdict(&mut shell.heard) else { return };
            let Some(verdict) = verdict else { continue };
            if session.current.as_ref().is_none_or(|run| run.key != verdict.key) {
                continue;
            }
            session.directory = Some(verdict.directory);
            session.exports = verdict.exports;
            if let Kind::Done(status) = verdict.kind {
                let body = shell.body;
                self.drain(body);
                self.finish_run(number, End::Code(status), Usage::default());
                self.begin_next(number);
            }
        }
    }

    pub(crate) fn finish_run(&mut self, number: u64, end: End, usage: Usage) {
        let run = self.sessions.get_mut(&number).and_then(|session| session.current.take());
        if let Some(run) = run {
            self.process_ended(run.process, end, usage);
            // The shell goes on; what it does next is not this run's.
            if let Some(process) = self.processes.get_mut(&run.process) {
                process.body = None;
            }
            self.use_nest(number);
        }
    }

    /// Starts the run that has waited longest.
    pub(crate) fn begin_next(&mut self, number: u64) {
        loop {
            let Some(session) = self.sessions.get_mut(&number) else { return };
            if session.current.is_some() {
                return;
            }
            let Some((connection, run)) = session.queue.pop_front() else { return };
            let begun = self.check_new_name(&run.process);
            match begun.and_then(|()| self.begin_run(number, connection, run)) {
                Ok(()) => return,
                Err(fault) => self.refuse(connection, fault),
            }
        }
    }

    /// The shell has ended. Its run ends with it, and the session waits for the next.
    pub(crate) fn shell_ended(&mut self, number: u64, end: End, usage: Usage) {
        self.on_verdict(number);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let shell = session.shell.take();
        session.passing.clear();
        let opener = session.opener.take();
        let restarters = std::mem::take(&mut session.restarters);
        if !restarters.is_empty() {
            // What the shell may have said last is not for its successor.
            session.directory = None;
            session.exports = String::new();
        }
        let kernel = matches!(&shell, Some(Shell { tongue: Tongue::Kernel(_), .. }));
        // A kernel that ends in the middle of a run has failed it, however politely.
        let end = if kernel && end == End::Code(0) { End::Code(1) } else { end };
        self.finish_run(number, end, usage);
        for connection in restarters {
            self.answer(connection, &Reply::Ok);
        }
        if let (Some(Shell { tongue: Tongue::Kernel(hearing), subjects, .. }), Some(opener)) = (shell, opener)
        {
            self.refuse(opener, hearing.obituary(&subjects.program, end));
            self.forsake(number);
            return;
        }
        self.begin_next(number);
        self.drop_if_closed(number);
    }

    /// Removes a session that could not be opened, with whoever has come to use it already.
    fn forsake(&mut self, number: u64) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let (name, queue) = (session.name.clone(), std::mem::take(&mut session.queue));
        self.drop_session(number);
        for (connection, _) in queue {
            self.refuse(connection, fault::plain(FaultKind::NotFound, "find session", &name));
        }
    }

    /// What was printed while no run was on. Before a kernel is ready it may say why it never is.
    pub(crate) fn overhear(&mut self, number: u64, stream: StreamTag, bytes: &[u8]) {
        let hearing = self.sessions.get_mut(&number).and_then(Session::hearing);
        if let Some((_, hearing)) = hearing.filter(|_| stream == StreamTag::Stderr) {
            hearing.overhear(bytes);
        }
    }

    /// Reads on from a shell or kernel, or waits until its readers have caught up.
    pub(crate) fn hold_reports(&mut self, name: &str, interest: EventFlags) {
        let number = self.session_names.get(name).copied();
        let session = number.and_then(|number| self.sessions.get_mut(&number));
        if let Some(shell) = session.and_then(|session| session.shell.as_mut()) {
            shell.verdicts.want(interest);
        }
    }

    /// Whose output it is that the shell's pipes carry now.
    pub(crate) fn current_run(&self, number: u64) -> Option<u64> {
        self.sessions.get(&number)?.current.as_ref().map(|run| run.process)
    }
}

/// The best shell there is, told to obey orders.
fn as_shell(around: Surroundings, [orders, verdicts]: [OwnedFd; 2]) -> Result<(Command, Tongue), Fault> {
    let path = command::shell_path();
    let dialect = Dialect::of(path);
    let words = dialect.words(path, orders.as_raw_fd(), verdicts.as_raw_fd());
    Ok((Command::from_words(around, &words, vec![orders, verdicts])?, Tongue::Shell(dialect)))
}

/// A pipe between us and a shell. The ends have high numbers, since the shell keeps one of them
/// open under the number it has here. It belongs to the user, so that it may be opened by name.
fn private_pipe(around: &Surroundings) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let read = rustix::io::fcntl_dupfd_cloexec(&read, HIGH)?;
    let write = rustix::io::fcntl_dupfd_cloexec(&write, HIGH)?;
    if !around.who.is_root() {
        rustix::fs::fchown(&read, Some(around.who.uid), Some(around.who.gid))?;
    }
    Ok((read, write))
}

fn new_key() -> Result<String, Fault> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| fault::from_errno(errno, "choose key", "a run"))?;
    Ok(format!("{:032x}", u128::from_le_bytes(random)))
}

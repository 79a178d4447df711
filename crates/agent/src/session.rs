//! Sessions: shells and kernels that are kept open between runs.
//!
//! ```text
//! open ─► idle ⇄ running (one run at a time; others are refused or wait)
//!           │        │ the shell ends for any reason
//!           ▼        ▼
//!          without a shell ── next run ─► a new shell with the last known directory and exports
//! ```
//! A run is a process with its own journal. Its body is the shell's, so that signals and deadlines
//! reach everything the session has started. A session may have a kernel instead of a shell;
//! `kernel.rs` has its protocol.

mod life;
mod run;

use std::collections::VecDeque;
use std::os::fd::AsFd;

use linux::spawn::{End, Usage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::process::{Kernel, OpenSession, Program, RunInSession, SessionStatus};
use wire::{Fault, FaultKind, Reply, StreamTag};

use crate::agent::{Agent, now_ms};
use crate::body::Body;
use crate::fault;
use crate::input::Input;
use crate::kernel::{self, Hearing};
use crate::nest::Kept;
use crate::poll::Source;
use crate::process::{Subjects, is_plain};
use crate::shell::{self, Dialect, Kind};

/// How much is read at once from the reports of a shell or kernel. One that never stops must not
/// starve everything else.
const EARFUL: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) name: String,
    pub(crate) open: OpenSession,
    kernel: Option<Kernel>,
    shell: Option<Shell>,
    /// The namespaces of its shells, if it is isolated.
    pub(crate) nest: Option<Kept>,
    /// The directory and exports that the next shell starts with.
    pub(crate) directory: Option<String>,
    pub(crate) exports: String,
    pub(crate) current: Option<Run>,
    /// The number of runs so far.
    runs: u64,
    /// Variables of the last run, which the next run must not see.
    passing: Vec<String>,
    queue: VecDeque<(u64, RunInSession)>,
    /// The connection that waits for the first shell.
    pub(crate) opener: Option<u64>,
    pub(crate) closing: bool,
    /// The connections that wait for the end of its shell.
    restarters: Vec<u64>,
    /// When it was opened.
    pub(crate) opened_ms: u64,
}

/// A running shell or kernel, and the private pipes to it.
#[derive(Debug)]
struct Shell {
    body: u64,
    tongue: Tongue,
    orders: Input,
    verdicts: Source,
    heard: Vec<u8>,
    started: bool,
    /// Whether it replaced a shell that had died.
    forgetful: bool,
    subjects: Subjects,
}

/// The protocol on the private pipes.
#[derive(Debug)]
enum Tongue {
    Shell(Dialect),
    Kernel(Hearing),
}

/// The run in progress.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) process: u64,
    pub(crate) key: String,
    request: RunInSession,
}

impl Session {
    /// The body of its kernel, and the state of its reports.
    pub(crate) fn hearing(&mut self) -> Option<(u64, &mut Hearing)> {
        match self.shell.as_mut()? {
            Shell { body, tongue: Tongue::Kernel(hearing), .. } => Some((*body, hearing)),
            Shell { tongue: Tongue::Shell(_), .. } => None,
        }
    }

    /// The body of its shell or kernel, while there is one.
    pub(crate) fn body(&self) -> Option<u64> {
        self.shell.as_ref().map(|shell| shell.body)
    }

    /// The language of its kernel, if it has one.
    pub(crate) fn language(&self) -> Option<&str> {
        self.kernel.as_ref().map(|kernel| kernel.language.as_str())
    }

    /// Whether the session is open as soon as its first shell runs.
    pub(crate) fn opens_with_its_shell(&self) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.program == Program::Shell)
    }
}

impl Agent {
    /// Opens a session; the reply comes when its shell runs.
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
        // A closed session does not count, provided that it ends soon.
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
            opened_ms: now_ms(),
        };
        let nested = session.open.nest.is_some();
        self.session_names.insert(session.name.clone(), number);
        self.sessions.insert(number, session);
        let begun = if nested { self.begin_nest(number) } else { self.start_shell(number) };
        begun.inspect_err(|_| self.drop_session(number))?;
        Ok(number)
    }

    pub(crate) fn session_statuses(&self) -> Vec<SessionStatus> {
        let status = |session: &Session| {
            let body = session.shell.as_ref().and_then(|shell| self.bodies.get(&shell.body));
            let has_company = |body: &Body| body.tree.has_company(self.place.commands.as_ref(), body.pid);
            SessionStatus {
                session: session.name.clone(),
                busy: session.current.is_some(),
                terminal: session.open.terminal.is_some(),
                pid: body.and_then(|body| body.pid).map(rustix::process::Pid::as_raw_pid),
                kernel: session.kernel.as_ref().map(|kernel| kernel.language.clone()),
                nest: session.nest.as_ref().map(Kept::status),
                left: session.opens_with_its_shell() && body.is_some_and(has_company),
            }
        };
        let mut statuses: Vec<_> = self.sessions.values().filter(|s| !s.closing).map(status).collect();
        statuses.sort_unstable_by(|a, b| a.session.cmp(&b.session));
        statuses
    }

    /// Closes a session and kills everything in it.
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

    /// Kills a session's shell with everything in it; the reply comes when it has ended. The next
    /// run starts a new one.
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

    pub(crate) fn on_orders(&mut self, number: u64) {
        let shell = self.sessions.get_mut(&number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell {
            // A shell that does not read has ended, which is reported elsewhere.
            shell.orders.pump().ok();
        }
    }

    /// The shell or kernel has sent a report.
    pub(crate) fn on_verdict(&mut self, number: u64) {
        let mut buffer = std::mem::take(&mut self.reports);
        let (mut taken, mut drains) = (0, 0);
        while taken < EARFUL && drains < kernel::MOST_DRAINS {
            let Some(count) = self.listen(number, &mut buffer, &mut drains) else { break };
            taken += count;
        }
        self.reports = buffer;
    }

    /// Reads and handles one piece of a report. Returns `None` if there was none.
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

    /// Sends a line to a kernel. A kernel that does not read its lines gets no more of them.
    pub(crate) fn give_to_kernel(&mut self, number: u64, line: &[u8]) {
        let shell = self.sessions.get_mut(&number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell.filter(|shell| shell.orders.is_empty()) {
            shell.orders.add(line);
            // A kernel that does not read has ended, which is reported elsewhere.
            shell.orders.pump().ok();
        }
    }

    /// Handles the complete verdicts. Those without the right key do not come from the shell.
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

    /// Output that was printed while no run was in progress. Before a kernel is ready it may
    /// contain the reason why it never is.
    pub(crate) fn overhear(&mut self, number: u64, stream: StreamTag, bytes: &[u8]) {
        let hearing = self.sessions.get_mut(&number).and_then(Session::hearing);
        if let Some((_, hearing)) = hearing.filter(|_| stream == StreamTag::Stderr) {
            hearing.overhear(bytes);
        }
    }

    /// Pauses or resumes reading the reports of a shell or kernel, depending on its readers.
    pub(crate) fn hold_reports(&mut self, name: &str, interest: EventFlags) {
        let number = self.session_names.get(name).copied();
        let session = number.and_then(|number| self.sessions.get_mut(&number));
        if let Some(shell) = session.and_then(|session| session.shell.as_mut()) {
            shell.verdicts.want(interest);
        }
    }
}

//! Processes: commands with a name, a journal and an end.
//!
//! ```text
//! Start ─► forked ─► started ─► … output … ─► ended ─► forgotten
//!             └─► could not be started: nothing remains
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use linux::spawn::{End, Usage};
use rustix::process::{Pid, Signal};
use wire::process::{Ended, Exit, ProcessStatus, Retention, Start};
use wire::{Fault, FaultKind, Reply, StreamTag};

use crate::agent::{Agent, Alarm, now_ms};
use crate::body::Owner;
use crate::child::{Failure, Step};
use crate::command::{Command, Surroundings};
use crate::exec::{self, Spot, Wiring};
use crate::fault;
use crate::hold::Backpressure;
use crate::interrupt::Interrupted;
use crate::journal::Journal;

/// The maximum number of finished processes that are remembered. The server forgets those it has
/// handled; this limits the cost of a server that does not.
const MOST_FINISHED: usize = 4096;

/// The longest name of a process or a session.
const LONGEST_NAME: usize = 64;

/// How much of a command's text is shown.
const SHOWN_TEXT: usize = 4096;

/// The status that a shell returns for a command killed by SIGKILL.
const SHELL_KILLED: i32 = 137;

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) tag: Option<String>,
    pub(crate) session: Option<String>,
    command: String,
    /// The body that runs it; for a run, the body of its session's shell.
    pub(crate) body: Option<u64>,
    pub(crate) pid: Option<Pid>,
    pub(crate) journal: Journal,
    pub(crate) followers: Vec<u64>,
    pub(crate) backpressure: Backpressure,
    pub(crate) caller: Option<Caller>,
    pub(crate) ended: Option<Ended>,
    pub(crate) deadline: Option<Instant>,
    /// The members of its group when it was last interrupted.
    pub(crate) interrupted: Interrupted,
    deadline_passed: bool,
    started: Instant,
    started_ms: u64,
    oom_kills_before: u64,
    /// For messages about a failed start.
    subjects: Subjects,
}

/// The connection that waits for the start, and whether it follows the output then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) connection: u64,
    pub(crate) follow: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Subjects {
    pub(crate) program: String,
    pub(crate) directory: String,
    pub(crate) user: String,
}

/// The properties of a new process.
#[derive(Debug)]
pub(crate) struct NewProcess {
    pub(crate) name: String,
    pub(crate) tag: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) command: String,
    pub(crate) retention: Retention,
    pub(crate) caller: Option<Caller>,
    pub(crate) subjects: Subjects,
}

impl Subjects {
    pub(crate) fn of(command: &Command) -> Self {
        Self {
            program: command.program_name.clone(),
            directory: command.directory.shown.clone(),
            user: command.who.name.clone(),
        }
    }

    pub(crate) fn of_place(around: &Surroundings) -> Self {
        Self {
            program: String::new(),
            directory: around.workdir.shown.clone(),
            user: around.who.name.clone(),
        }
    }

    pub(crate) fn fault(&self, failure: Failure) -> Fault {
        let subject = match failure.step {
            Step::Directory => &self.directory,
            Step::Identity => &self.user,
            _ => &self.program,
        };
        fault::from_errno(failure.errno, failure.step.name(), subject)
    }
}

impl Process {
    /// Whether it is a run of this session.
    pub(crate) fn is_of(&self, session: &str) -> bool {
        self.session.as_deref() == Some(session)
    }

    pub(crate) fn status(&self) -> ProcessStatus {
        ProcessStatus {
            process: self.name.clone(),
            pid: self.pid.map_or(0, Pid::as_raw_pid),
            tag: self.tag.clone(),
            session: self.session.clone(),
            command: self.command.clone(),
            started_ms: self.started_ms,
            written: self.journal.written(),
            first: self.journal.retention().first,
            ended: self.ended.clone(),
            left: false,
        }
    }

    /// A run that had to wait starts now.
    pub(crate) fn begin(&mut self) {
        self.started = Instant::now();
        self.started_ms = now_ms();
    }

    fn ended_as(&self, exit: Exit, usage: Usage) -> Ended {
        Ended {
            exit,
            written: self.journal.written(),
            ended_ms: now_ms(),
            duration_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            user_ms: usage.user_ms,
            system_ms: usage.system_ms,
            max_rss_kib: usage.max_rss_kib,
        }
    }
}

impl Agent {
    /// Starts a command; the reply comes when it is known whether the exec succeeded.
    pub(crate) fn start(&mut self, connection: u64, start: &Start) -> Result<(), Fault> {
        self.check_new_name(&start.process)?;
        if start.tag.as_ref().is_some_and(|tag| tag.len() > SHOWN_TEXT) {
            return Err(fault::plain(FaultKind::Invalid, "start", "a tag that is too long"));
        }
        self.refresh_limit_view();
        let command = Command::new(&self.place.config, start)?;
        let shown = match &start.command {
            wire::process::Command::Argv(words) => words.join(" "),
            wire::process::Command::Shell { text, .. } => text.clone(),
        };
        let number = self.add_process(NewProcess {
            name: start.process.clone(),
            tag: start.tag.clone(),
            session: None,
            command: shown,
            retention: start.retention,
            caller: Some(Caller { connection, follow: start.follow }),
            subjects: Subjects::of(&command),
        });
        let wiring = Wiring { terminal: start.terminal, stdin: start.stdin };
        let body = self.launch(Owner::Process(number), &command, wiring);
        let body = body.inspect_err(|_| self.drop_process(number))?;
        let deadline = self.set_deadline(number, start.deadline_ms);
        let process = self.processes.get_mut(&number).expect("it was just added");
        process.body = Some(body);
        process.deadline = deadline;
        Ok(())
    }

    pub(crate) fn set_deadline(&mut self, number: u64, deadline_ms: Option<u64>) -> Option<Instant> {
        self.set_alarm(Duration::from_millis(deadline_ms?), Alarm::Deadline(number))
    }

    /// Forks a command for an owner.
    pub(crate) fn launch(&mut self, owner: Owner, command: &Command, wiring: Wiring) -> Result<u64, Fault> {
        let spot = Spot { group: self.next_number(), share: self.quietest_share() };
        let failed = |errno| fault::from_errno(errno, "start", &command.program_name);
        let launched = exec::launch(&self.place, command, wiring, spot).map_err(failed)?;
        let pid = launched.pid;
        self.embody(owner, launched, spot.share).map_err(|errno| {
            // The command would not be tracked; the agent is out of descriptors or memory.
            rustix::process::kill_process(pid, Signal::KILL).ok();
            self.abandon(pid, spot);
            failed(errno)
        })
    }

    /// Checks that a process may be started under this name, which becomes a file name.
    pub(crate) fn check_new_name(&self, name: &str) -> Result<(), Fault> {
        if !is_plain(name) {
            return Err(fault::plain(FaultKind::Invalid, "start", "the name of the process"));
        }
        if self.process_names.contains_key(name) {
            return Err(fault::plain(FaultKind::AlreadyExists, "start", name));
        }
        let running = self.processes.len() - self.finished.len();
        if running >= usize::try_from(self.place.config.max_processes).unwrap_or(usize::MAX) {
            return Err(fault::plain(FaultKind::Busy, "start", "too many processes are running"));
        }
        Ok(())
    }

    pub(crate) fn add_process(&mut self, new: NewProcess) -> u64 {
        let number = self.next_number();
        let process = Process {
            number,
            journal: Journal::new(&new.name, new.retention),
            name: new.name.clone(),
            tag: new.tag,
            session: new.session,
            command: shorten(new.command),
            body: None,
            pid: None,
            followers: Vec::new(),
            backpressure: Backpressure::default(),
            caller: new.caller,
            ended: None,
            deadline: None,
            interrupted: Interrupted::default(),
            deadline_passed: false,
            started: Instant::now(),
            started_ms: now_ms(),
            oom_kills_before: self.oom_kills(),
            subjects: new.subjects,
        };
        self.process_names.insert(new.name, number);
        self.processes.insert(number, process);
        number
    }

    /// Removes a process with all its data.
    pub(crate) fn drop_process(&mut self, number: u64) {
        let Some(process) = self.processes.remove(&number) else { return };
        self.process_names.remove(&process.name);
        self.finished.retain(|finished| *finished != number);
        for follower in &process.followers {
            self.close(*follower);
        }
        process.journal.remove(self.place.journals.as_fd());
    }

    /// The exec has succeeded or failed.
    pub(crate) fn process_started(&mut self, number: u64, outcome: Result<(), Failure>) {
        let Some(process) = self.processes.get_mut(&number) else { return };
        let caller = process.caller.take();
        let body = process.body.and_then(|body| self.bodies.get(&body));
        process.pid = body.and_then(|body| body.pid);
        match outcome {
            Ok(()) => self.tell_started(number, caller),
            Err(failure) => {
                let fault = process.subjects.fault(failure);
                self.drop_process(number);
                if let Some(caller) = caller {
                    self.refuse(caller.connection, fault);
                }
            }
        }
    }

    pub(crate) fn tell_started(&mut self, number: u64, caller: Option<Caller>) {
        let (Some(process), Some(caller)) = (self.processes.get(&number), caller) else { return };
        let reply = Reply::Started { pid: process.pid.map_or(0, Pid::as_raw_pid) };
        if caller.follow {
            self.send(caller.connection, &reply);
            if let Some(process) = self.processes.get_mut(&number) {
                process.backpressure.reader = Some(caller.connection);
            }
            self.follow(caller.connection, number, 0);
        } else {
            self.answer(caller.connection, &reply);
        }
    }

    pub(crate) fn append_output(&mut self, number: u64, stream: StreamTag, bytes: &[u8]) {
        let Some(process) = self.processes.get_mut(&number) else { return };
        let offset = process.journal.written();
        process.journal.append(self.place.journals.as_fd(), stream, bytes, now_ms());
        self.pass_on(number, stream, offset, bytes);
        self.pump_followers(number);
        self.balance(number);
    }

    /// The main process has ended and its output was read.
    pub(crate) fn process_ended(&mut self, number: u64, end: End, usage: Usage) {
        let oom_kills = self.oom_kills();
        let Some(process) = self.processes.get_mut(&number) else { return };
        let killed = matches!(end, End::Signal(9) | End::Code(SHELL_KILLED));
        let exit = match end {
            _ if process.deadline_passed => Exit::Deadline,
            _ if killed && oom_kills > process.oom_kills_before => Exit::Oom,
            End::Code(code) => Exit::Code(code),
            End::Signal(signal) => Exit::Signal(signal),
        };
        let ended = process.ended_as(exit, usage);
        process.ended = Some(ended.clone());
        let deadline = process.deadline;
        self.stop_alarm(deadline, Alarm::Deadline(number));
        self.stop_stall_alarm(number);
        self.finished.push_back(number);
        self.pump_followers(number);
        // The followers learn of the end before it is written to the disk.
        if let Some(process) = self.processes.get_mut(&number) {
            process.journal.finish(self.place.journals.as_fd(), &ended);
            if process.followers.is_empty() {
                process.journal.rest();
            }
        }
        if self.finished.len() > MOST_FINISHED {
            let is_over =
                |number: &&u64| !self.processes.get(*number).is_some_and(|process| self.has_left(process));
            let oldest = self.finished.iter().find(is_over).or(self.finished.front()).copied();
            oldest.into_iter().for_each(|oldest| self.drop_process(oldest));
        }
    }

    /// Kills a process that has reached its deadline; its end is reported when it has ended.
    pub(crate) fn deadline_passed(&mut self, number: u64) {
        let Some(process) = self.processes.get_mut(&number) else { return };
        if process.ended.is_some() {
            return;
        }
        process.deadline_passed = true;
        if let Some(body) = process.body.and_then(|body| self.bodies.get(&body)) {
            // A tree that cannot be killed has ended already.
            body.tree.kill(self.place.commands.as_ref(), body.pid).ok();
        }
    }

    /// How many processes of the sandbox have been killed for lack of memory so far.
    fn oom_kills(&self) -> u64 {
        self.place.oom.as_ref().and_then(read_oom_kills).unwrap_or(0)
    }
}

/// Whether the name is safe as a file name.
pub(crate) fn is_plain(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(plain)
}

fn shorten(mut text: String) -> String {
    if text.len() > SHOWN_TEXT {
        let end = (0..=SHOWN_TEXT).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    text
}

fn read_oom_kills(file: &OwnedFd) -> Option<u64> {
    let mut buffer = [0; 1024];
    let count = rustix::io::pread(file, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..count]).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
}

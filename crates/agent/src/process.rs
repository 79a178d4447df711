//! Processes: commands with a name, a journal and an end.
//!
//! ```text
//! Start ─► forked ─► started ─► … output … ─► ended ─► forgotten
//!             └─► could not be started: nothing remains
//! ```

pub(crate) mod backpressure;
pub(crate) mod child;
pub(crate) mod child_table;
pub(crate) mod command;
pub(crate) mod envfile;
pub(crate) mod exec;
pub(crate) mod follow;
pub(crate) mod input;
pub(crate) mod interrupt;
pub(crate) mod journal;
pub(crate) mod memory_kill;
pub(crate) mod proc;
pub(crate) mod ring_memory;
pub(crate) mod runner;
pub(crate) mod running_process;
pub(crate) mod table;
pub(crate) mod tree;
pub(crate) mod tree_status;

use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::process::{Pid, Signal};
use wire::process::{
    ExitReason, OutputRetention, ProcessEnd, ProcessStatus, SignalProcess, SignalTarget, StartProcess,
};
use wire::{AgentReply, Fault, FaultKind, StreamTag};

use crate::event_loop::agent::{Agent, now_ms};
use crate::event_loop::alarms::Alarm;
use crate::event_loop::handles::{ConnectionId, ProcessHandle, RunningHandle};
use crate::fault;
use crate::process::backpressure::BackpressureState;
use crate::process::child::{ExecFailure, ExecStep};
use crate::process::command::{ExecEnvironment, PreparedCommand};
use crate::process::exec::StdioMode;
use crate::process::interrupt::InterruptedGroup;
use crate::process::journal::Journal;
use crate::process::running_process::ProcessOwner;

/// The maximum number of finished processes that are remembered. The server forgets those it has
/// handled; this limits the cost of a server that does not. The last runs of open sessions are
/// forgotten after all others.
const MAX_FINISHED: usize = 4096;

/// The longest name of a process or a session.
const MAX_NAME_LENGTH: usize = 64;

/// How much of a command's text is shown.
const MAX_SHOWN_TEXT: usize = 4096;

/// How long a kernel may continue after the deadline of its code and the interrupt.
const INTERRUPT_GRACE_MS: u64 = 3000;

/// The status that a shell returns for a command killed by SIGKILL.
const SHELL_KILLED_EXIT_CODE: i32 = 137;

#[derive(Debug)]
pub(crate) struct ManagedProcess {
    pub(crate) number: ProcessHandle,
    pub(crate) name: Rc<str>,
    pub(crate) tag: Option<String>,
    pub(crate) session: Option<String>,
    command: String,
    /// The command that runs it; for a run, the shell of its session, if that has one.
    pub(crate) running: Option<RunningHandle>,
    pub(crate) pid: Option<Pid>,
    pub(crate) journal: Journal,
    pub(crate) followers: Vec<ConnectionId>,
    pub(crate) backpressure: BackpressureState,
    pub(crate) caller: Option<StartCaller>,
    pub(crate) ended: Option<ProcessEnd>,
    pub(crate) deadline: Option<Instant>,
    /// The members of its group when it was last interrupted.
    pub(crate) interrupted: Option<Box<InterruptedGroup>>,
    deadline_passed: bool,
    /// The last signal that the server has sent to it.
    pub(crate) signalled: Option<i32>,
    started: Instant,
    started_ms: u64,
    oom_kills_before: u64,
    /// For messages about a failed start. `None` afterwards, to save memory: thousands of ended processes are remembered.
    subjects: Option<Box<FaultSubjects>>,
}

/// The connection that waits for the start, and whether it follows the output then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartCaller {
    pub(crate) connection: ConnectionId,
    pub(crate) follow: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FaultSubjects {
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
    pub(crate) retention: OutputRetention,
    pub(crate) caller: Option<StartCaller>,
    pub(crate) subjects: FaultSubjects,
}

impl FaultSubjects {
    pub(crate) fn of_command(command: &PreparedCommand) -> Self {
        Self {
            program: command.program_name.clone(),
            directory: command.directory.display_path.clone(),
            user: command.user.name.clone(),
        }
    }

    pub(crate) fn of_environment(environment: &ExecEnvironment) -> Self {
        Self {
            program: String::new(),
            directory: environment.workdir.display_path.clone(),
            user: environment.user.name.clone(),
        }
    }

    pub(crate) fn to_fault(&self, failure: ExecFailure) -> Fault {
        let subject = match failure.step {
            ExecStep::Directory => &self.directory,
            ExecStep::Identity => &self.user,
            _ => &self.program,
        };
        fault::from_errno(failure.errno, failure.step.name(), subject)
    }
}

impl ManagedProcess {
    /// Whether it is a run of this session.
    pub(crate) fn is_run_of(&self, session: &str) -> bool {
        self.session.as_deref() == Some(session)
    }

    pub(crate) fn status(&self) -> ProcessStatus {
        ProcessStatus {
            process: self.name.to_string(),
            pid: self.pid.map_or(0, Pid::as_raw_pid),
            tag: self.tag.clone(),
            session: self.session.clone(),
            command: self.command.clone(),
            started_ms: self.started_ms,
            written: self.journal.written(),
            first: self.journal.retention().first,
            ended: self.ended.clone(),
            left: false,
            stderr_before: None,
        }
    }

    /// Why it could not be started.
    pub(crate) fn start_fault(&self, failure: ExecFailure) -> Fault {
        let unknown = FaultSubjects::default();
        self.subjects.as_deref().unwrap_or(&unknown).to_fault(failure)
    }

    /// A run that had to wait starts now.
    pub(crate) fn mark_started(&mut self) {
        self.started = Instant::now();
        self.started_ms = now_ms();
    }

    fn ended_as(&self, exit: ExitReason, usage: ProcessUsage) -> ProcessEnd {
        ProcessEnd {
            exit,
            written: self.journal.written(),
            ended_ms: now_ms(),
            duration_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            user_ms: usage.user_ms,
            system_ms: usage.system_ms,
            max_rss_kib: usage.max_rss_kib,
            interrupted: false,
            signalled: self.signalled,
        }
    }
}

impl Agent {
    /// Starts a command; the reply comes when it is known whether the exec succeeded.
    pub(crate) fn start_process(
        &mut self,
        connection: ConnectionId,
        start: &StartProcess,
    ) -> Result<(), Fault> {
        self.processes.check_new_name(&start.process, &self.context.config)?;
        if start.tag.as_ref().is_some_and(|tag| tag.len() > MAX_SHOWN_TEXT) {
            return Err(fault::from_kind(FaultKind::Invalid, "start", "a tag that is too long"));
        }
        self.context.refresh_limit_view(&mut self.events);
        let command = PreparedCommand::new(&self.context.config, start)?;
        let shown = match &start.command {
            wire::process::CommandLine::Argv(words) => words.join(" "),
            wire::process::CommandLine::Shell { text, .. } => text.clone(),
        };
        let number = self.add_process(NewProcess {
            name: start.process.clone(),
            tag: start.tag.clone(),
            session: None,
            command: shown,
            retention: start.retention,
            caller: Some(StartCaller { connection, follow: start.follow }),
            subjects: FaultSubjects::of_command(&command),
        });
        let wiring = StdioMode { terminal: start.terminal, plain: false, stdin: start.stdin };
        let running = self.launch_process(ProcessOwner::Process(number), &command, wiring);
        let running = running.inspect_err(|_| self.drop_process(number))?;
        let deadline = self.set_deadline(number, start.deadline_ms);
        let process = self.processes.get_mut(number).expect("it was just added");
        process.running = Some(running);
        process.deadline = deadline;
        Ok(())
    }

    pub(crate) fn set_deadline(
        &mut self,
        number: ProcessHandle,
        deadline_ms: Option<u64>,
    ) -> Option<Instant> {
        self.events.alarms.set(Duration::from_millis(deadline_ms?), Alarm::Deadline(number))
    }

    /// Forks a command for an owner.
    pub(crate) fn launch_process(
        &mut self,
        owner: ProcessOwner,
        command: &PreparedCommand,
        wiring: StdioMode,
    ) -> Result<RunningHandle, Fault> {
        let placement = self.children.next_placement(&self.context, &mut self.events);
        let failed = |errno| fault::from_errno(errno, "start", &command.program_name);
        let launched = exec::launch_command(&self.context, command, wiring, placement)
            .inspect_err(|_| self.context.remove_unused_group(placement.group))
            .map_err(failed)?;
        let pid = launched.pid;
        self.children.track_launched(owner, launched, placement.share, &mut self.events).map_err(|errno| {
            // The command would not be tracked; the agent is out of descriptors or memory.
            rustix::process::kill_process(pid, Signal::KILL).ok();
            self.children.track_for_cleanup(pid, placement, &self.context, &mut self.events);
            failed(errno)
        })
    }

    pub(crate) fn add_process(&mut self, new: NewProcess) -> ProcessHandle {
        let number = self.events.next_handle();
        let name: Rc<str> = new.name.into();
        let process = ManagedProcess {
            number,
            journal: Journal::new(name.clone(), new.retention, self.context.ring_memory.clone()),
            name,
            tag: new.tag,
            session: new.session,
            command: truncate_text(new.command),
            running: None,
            pid: None,
            followers: Vec::new(),
            backpressure: BackpressureState::default(),
            caller: new.caller,
            ended: None,
            deadline: None,
            interrupted: None,
            deadline_passed: false,
            signalled: None,
            started: Instant::now(),
            started_ms: now_ms(),
            oom_kills_before: self.context.oom_kills(),
            subjects: Some(Box::new(new.subjects)),
        };
        self.processes.insert(process);
        number
    }

    /// Removes a process with all its data.
    pub(crate) fn drop_process(&mut self, number: ProcessHandle) {
        let Some(process) = self.processes.remove(number) else { return };
        for follower in &process.followers {
            self.close_connection(*follower);
        }
        process.journal.remove_file(self.context.journals.as_fd());
    }

    /// The exec has succeeded or failed.
    pub(crate) fn process_started(&mut self, number: ProcessHandle, outcome: Result<(), ExecFailure>) {
        let Some(process) = self.processes.get_mut(number) else { return };
        let caller = process.caller.take();
        process.pid = process.running.and_then(|running| self.children.pid_of(running));
        match outcome {
            Ok(()) => {
                process.subjects = None;
                self.report_started(number, caller);
            }
            Err(failure) => {
                let fault = process.start_fault(failure);
                self.drop_process(number);
                if let Some(caller) = caller {
                    self.connections.refuse_request(caller.connection, fault);
                }
            }
        }
    }

    pub(crate) fn report_started(&mut self, number: ProcessHandle, caller: Option<StartCaller>) {
        let (Some(process), Some(caller)) = (self.processes.get(number), caller) else { return };
        let reply = AgentReply::Started { pid: process.pid.map_or(0, Pid::as_raw_pid) };
        if caller.follow {
            self.connections.send_reply(caller.connection, &reply);
            if let Some(process) = self.processes.get_mut(number) {
                process.backpressure.reader = Some(caller.connection);
            }
            self.follow_process(caller.connection, number, 0);
        } else {
            self.connections.send_final_reply(caller.connection, &reply);
        }
    }

    pub(crate) fn append_output(&mut self, number: ProcessHandle, stream: StreamTag, bytes: &[u8]) {
        let Some(process) = self.processes.get_mut(number) else { return };
        let offset = process.journal.written();
        process.journal.append(self.context.journals.as_fd(), stream, bytes, now_ms());
        self.processes.send_new_output(number, stream, offset, bytes, &mut self.connections);
        self.pump_followers(number);
        self.update_backpressure(number);
    }

    /// The main process has ended and its output was read.
    pub(crate) fn process_ended(&mut self, number: ProcessHandle, end: ProcessExit, usage: ProcessUsage) {
        let Some(process) = self.processes.get_mut(number) else { return };
        let killed = matches!(end, ProcessExit::Signal(9) | ProcessExit::Code(SHELL_KILLED_EXIT_CODE));
        let exit = match end {
            _ if process.deadline_passed => ExitReason::Deadline,
            _ if killed && self.context.oom_kills() > process.oom_kills_before => ExitReason::Oom,
            ProcessExit::Code(code) => ExitReason::Code(code),
            ProcessExit::Signal(signal) => ExitReason::Signal(signal),
        };
        let session = process.session.clone();
        let interrupted = exit == ExitReason::Deadline
            && session.is_some_and(|session| self.sessions.has_running_kernel(&session));
        let ended = ProcessEnd { interrupted, ..process.ended_as(exit, usage) };
        process.ended = Some(ended.clone());
        let deadline = process.deadline;
        process.subjects = None;
        process.interrupted = None;
        self.events.alarms.stop(deadline, Alarm::Deadline(number));
        self.processes.stop_stall_alarm(number, &mut self.events.alarms);
        self.processes.mark_finished(number);
        self.pump_followers(number);
        // The followers learn of the end before it is written to the disk.
        if let Some(process) = self.processes.get_mut(number) {
            process.journal.finish(self.context.journals.as_fd(), &ended);
            if process.followers.is_empty() {
                process.journal.close_if_finished();
            }
        }
        if self.processes.finished_count() > MAX_FINISHED {
            let oldest = self.processes.oldest_finished(|process| {
                !self.children.has_leftovers(process) && !self.sessions.keeps_run(process)
            });
            oldest.into_iter().for_each(|oldest| self.drop_process(oldest));
        }
    }

    /// Kills a process that has reached its deadline; its end is reported when it has ended. Code in a kernel is
    /// interrupted first, since its state is lost if the kernel is killed.
    pub(crate) fn deadline_passed(&mut self, number: ProcessHandle) {
        let Some(process) = self.processes.get_mut(number).filter(|process| process.ended.is_none()) else {
            return;
        };
        let first = !std::mem::replace(&mut process.deadline_passed, true);
        let in_kernel = process.session.as_ref().is_some_and(|session| self.sessions.has_kernel(session));
        if first && in_kernel {
            let signal = Signal::INT.as_raw();
            let request =
                SignalProcess { process: process.name.to_string(), signal, reach: SignalTarget::Group };
            // A kernel that cannot be signalled is killed when this time has passed, too.
            self.signal_process(&request).ok();
            let deadline = self.set_deadline(number, Some(INTERRUPT_GRACE_MS));
            if let Some(process) = self.processes.get_mut(number) {
                process.deadline = deadline;
            }
            return;
        }
        if let Some(running) = process.running {
            self.children.kill_tree(running, &self.context);
        }
    }
}

/// Whether the name is safe as a file name.
pub(crate) fn is_safe_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=MAX_NAME_LENGTH).contains(&name.len()) && name.bytes().all(plain)
}

pub(crate) fn truncate_text(mut text: String) -> String {
    if text.len() > MAX_SHOWN_TEXT {
        let end = (0..=MAX_SHOWN_TEXT).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    text
}

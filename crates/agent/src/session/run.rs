//! Runs: how a run begins, is passed to the shell, and ends.

use std::collections::VecDeque;

use linux::spawn::{ProcessExit, ProcessUsage};
use wire::process::{KernelProgram, RunInSession};
use wire::{AgentConfig, AgentReply, Fault, FaultKind, FaultOperation, StreamTag};

use super::{QueuedCaller, QueuedRun, Session, SessionProtocol, SessionRun, SessionShell};
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::{ConnectionId, ProcessHandle, SessionHandle};
use crate::fault;
use crate::process::{FaultSubjects, NewProcess, StartCaller};
use crate::session::{kernel, shell};

/// The maximum number of runs that may wait in one session.
const MAX_QUEUED_RUNS: usize = 64;

impl Agent {
    /// Runs text in a session, now or after the runs before it.
    pub(crate) fn run_in_session(
        &mut self,
        connection: ConnectionId,
        run: RunInSession,
    ) -> Result<(), Fault> {
        let number = self.sessions.find(&run.session)?;
        self.check_run(&run)?;
        let session = self.sessions.get_mut(number).expect("it was just found");
        if session.namespaces.as_ref().is_some_and(|namespaces| !namespaces.is_alive()) {
            return Err(fault::from_kind(FaultKind::Other, "run", "the session's namespaces are gone"));
        }
        if run.beside {
            return self.run_beside(number, connection, run);
        }
        if session.current.is_none() {
            return self.begin_run(number, QueuedCaller::Connection(connection), run);
        }
        if !run.queue || session.queue.len() >= MAX_QUEUED_RUNS {
            return Err(fault::from_kind(FaultKind::Busy, "run", &run.session));
        }
        let caller = if run.detached {
            self.connections.send_final_reply(connection, &AgentReply::Started { pid: 0 });
            QueuedCaller::Detached(self.add_run(&run, None, FaultSubjects::default()))
        } else {
            QueuedCaller::Connection(connection)
        };
        let session = self.sessions.get_mut(number).expect("the session exists");
        session.queue.push_back(QueuedRun { request: run, caller });
        Ok(())
    }

    /// Refuses a run that no session can execute.
    pub(super) fn check_run(&self, run: &RunInSession) -> Result<(), Fault> {
        self.processes.check_new_name(&run.process, &self.context.config)?;
        let directory = run.directory.iter().map(|directory| &directory.path);
        if directory.chain(run.env.values()).chain([&run.text]).any(|text| text.contains('\0')) {
            return Err(fault::from_kind(FaultKind::Invalid, "run", "a text with a zero byte"));
        }
        match run.env.keys().find(|name| !shell::is_variable_name(name)) {
            Some(wrong) => Err(fault::from_kind(FaultKind::Invalid, "set variable", wrong)),
            None => Ok(()),
        }
    }

    /// Adds the process that represents a run.
    fn add_run(
        &mut self,
        run: &RunInSession,
        caller: Option<StartCaller>,
        subjects: FaultSubjects,
    ) -> ProcessHandle {
        self.add_process(NewProcess {
            name: run.process.clone(),
            tag: None,
            session: Some(run.session.clone()),
            command: run.text.clone(),
            retention: run.retention,
            caller,
            subjects,
        })
    }

    /// The process of a run that begins. If its caller was already answered, there is one.
    pub(super) fn add_begun_run(
        &mut self,
        caller: QueuedCaller,
        request: &RunInSession,
        subjects: FaultSubjects,
    ) -> ProcessHandle {
        match caller {
            QueuedCaller::Connection(connection) => {
                let follow = request.follow && !request.detached;
                self.add_run(request, Some(StartCaller { connection, follow }), subjects)
            }
            QueuedCaller::Detached(process) => process,
        }
    }

    pub(super) fn begin_run(
        &mut self,
        number: SessionHandle,
        caller: QueuedCaller,
        request: RunInSession,
    ) -> Result<(), Fault> {
        let session = self.sessions.get(number).expect("the caller has found it");
        if session.runs_commands() {
            return self.begin_command_run(number, caller, request);
        }
        session.check_run_directory(&self.context.config, request.directory.as_ref())?;
        let key = new_run_key()?;
        let process = self.add_begun_run(caller, &request, FaultSubjects::default());
        let session = self.sessions.get_mut(number).expect("the session exists");
        session.current = Some(SessionRun { process, key, request, new_directory: None });
        self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        let session = self.sessions.get(number).expect("the session exists");
        match &session.shell {
            Some(shell) if shell.started && !shell.ending => self.send_current_run(number),
            Some(_) => {}
            None => {
                let started = self.start_shell(number);
                started.inspect_err(|_| self.abandon_run(number))?;
            }
        }
        Ok(())
    }

    fn abandon_run(&mut self, number: SessionHandle) {
        let run = self.sessions.get_mut(number).and_then(|session| session.current.take());
        if let Some(run) = run {
            self.drop_unstarted_run(run.process);
            self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        }
    }

    /// Drops the run that is about to begin if its caller has gone: the caller was told that it failed, and may have
    /// sent it again.
    pub(super) fn drop_run_without_caller(&mut self, number: SessionHandle) {
        let run = self.sessions.get(number).and_then(|session| session.current.as_ref());
        let process = run.and_then(|run| self.processes.get(run.process));
        let caller = process.and_then(|process| process.caller);
        if caller.is_some_and(|caller| self.connections.get(caller.connection).is_none()) {
            self.abandon_run(number);
            self.begin_next_run(number);
        }
    }

    /// Refuses the run that was about to begin.
    pub(super) fn refuse_current_run(&mut self, number: SessionHandle, fault: &Fault) {
        let run = self.sessions.get(number).and_then(|session| session.current.as_ref());
        let process = run.and_then(|run| self.processes.get(run.process));
        let caller = process.and_then(|process| process.caller);
        self.abandon_run(number);
        if let Some(caller) = caller {
            self.connections.refuse_request(caller.connection, fault.clone());
        }
    }

    /// Removes the process of a run that did not begin. If its caller was answered already, the process ends instead.
    pub(super) fn drop_unstarted_run(&mut self, process: ProcessHandle) {
        let waits = self.processes.get(process).is_some_and(|process| process.caller.is_some());
        if waits {
            self.drop_process(process);
        } else {
            self.process_ended(process, ProcessExit::Signal(9), ProcessUsage::default());
        }
    }

    /// Ends a detached run that waits for its turn. Returns whether there was one.
    pub(crate) fn cancel_queued_run(&mut self, process: ProcessHandle) -> bool {
        let session = self.processes.get(process).and_then(|process| process.session.clone());
        let number = session.and_then(|session| self.sessions.find(&session).ok());
        let Some(session) = number.and_then(|number| self.sessions.get_mut(number)) else { return false };
        let before = session.queue.len();
        let is_it =
            |run: &QueuedRun| matches!(run.caller, QueuedCaller::Detached(queued) if queued == process);
        session.queue.retain(|run| !is_it(run));
        let cancelled = session.queue.len() < before;
        if cancelled {
            self.process_ended(process, ProcessExit::Signal(9), ProcessUsage::default());
        }
        cancelled
    }

    /// Passes the current run to the shell.
    pub(super) fn send_current_run(&mut self, number: SessionHandle) {
        self.separate_earlier_runs(number);
        let Some(session) = self.sessions.get(number) else { return };
        let (Some(shell), Some(run)) = (&session.shell, &session.current) else { return };
        let command = match &shell.protocol {
            SessionProtocol::Shell(dialect) => {
                dialect.format_command(&session.shell_text(&self.context.config, shell, run), &run.key)
            }
            SessionProtocol::Kernel(_) => kernel::format_run_command(&run.request.text, &run.key),
        };
        let passing: Vec<String> = run.request.env.keys().cloned().collect();
        let (running, process, deadline) = (shell.running, run.process, run.request.deadline_ms);

        let session = self.sessions.get_mut(number).expect("the session exists");
        session.record_run(process);
        let count = session.kernel().filter(|kernel| kernel.program == KernelProgram::Shell);
        let count = count.map(|_| format!("{{\"count\":{}}}\n", session.runs));
        let shell = session.shell.as_mut().expect("the shell exists");
        shell.is_replacement = false;
        shell.was_used = true;
        session.run_variables = passing;
        shell.commands.queue_bytes(&command);
        // A shell that does not read has ended, which is reported elsewhere.
        shell.commands.write_queued().ok();
        let pid = self.children.pid_of(running);
        let deadline = self.set_deadline(process, deadline);
        let Some(begun) = self.processes.get_mut(process) else { return };
        begun.running = Some(running);
        begun.pid = pid;
        begun.deadline = deadline;
        begun.mark_started();
        let caller = begun.caller.take();
        if let Some(count) = count {
            // A kernel counts its runs itself; for a shell it is done here.
            self.append_output(process, StreamTag::KernelEvent, count.as_bytes());
        }
        self.report_started(process, caller);
    }

    pub(crate) fn finish_run(&mut self, number: SessionHandle, end: ProcessExit, usage: ProcessUsage) {
        let run = self.sessions.get_mut(number).and_then(|session| session.current.take());
        if let Some(run) = run {
            self.process_ended(run.process, end, usage);
            let shared_shell = self.sessions.get(number).is_some_and(|session| !session.runs_commands());
            let exit = self.processes.get_mut(run.process).and_then(|process| {
                // A shell continues; its later output does not belong to this run.
                process.running = process.running.filter(|_| !shared_shell);
                process.ended.as_ref().map(|ended| ended.exit)
            });
            if let Some(session) = self.sessions.get_mut(number) {
                session.last_run = Some(run.request.process);
                session.last_exit = exit;
            }
            self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        }
    }

    /// Starts the run that has waited longest.
    pub(crate) fn begin_next_run(&mut self, number: SessionHandle) {
        loop {
            let Some(session) = self.sessions.get_mut(number) else { return };
            if session.current.is_some() {
                return;
            }
            let Some(QueuedRun { request, caller }) = session.queue.pop_front() else {
                self.end_surplus_shells();
                return;
            };
            let begun = match caller {
                QueuedCaller::Connection(connection) if self.connections.get(connection).is_none() => {
                    // Its caller has gone.
                    continue;
                }
                QueuedCaller::Connection(_) => {
                    self.processes.check_new_name(&request.process, &self.context.config)
                }
                QueuedCaller::Detached(_) => Ok(()),
            };
            match begun.and_then(|()| self.begin_run(number, caller, request)) {
                Ok(()) => return,
                Err(fault) => self.refuse_queued_run(caller, fault),
            }
        }
    }

    /// Refuses the runs that wait for a session that does not exist any more.
    pub(super) fn refuse_queued_runs(&mut self, queue: VecDeque<QueuedRun>, session: &str) {
        for QueuedRun { caller, .. } in queue {
            let gone = fault::from_kind(FaultKind::NotFound, FaultOperation::FindSession, session);
            self.refuse_queued_run(caller, gone);
        }
    }

    fn refuse_queued_run(&mut self, caller: QueuedCaller, fault: Fault) {
        match caller {
            QueuedCaller::Connection(connection) => self.connections.refuse_request(connection, fault),
            // It never began, so it ends without a code.
            QueuedCaller::Detached(process) => {
                let waits = self.processes.get(process).is_some_and(|process| process.ended.is_none());
                if waits {
                    self.process_ended(process, ProcessExit::Signal(9), ProcessUsage::default());
                }
            }
        }
    }
}

impl Session {
    /// The text that a shell evaluates for a run.
    fn shell_text(&self, config: &AgentConfig, shell: &SessionShell, run: &SessionRun) -> String {
        let directory = run.request.directory.as_ref();
        let change_dir = directory.and_then(|directory| self.run_change_dir(config, directory));
        let (state, former) = if shell.is_replacement {
            (self.state.as_str(), &self.state_run_variables)
        } else {
            ("", &self.run_variables)
        };
        let variables = shell::run_variables_text(former, &run.request.env);
        let text = shell::compose_run_text("", change_dir.as_ref(), &run.request.text);
        shell::restore_state_text(state) + &variables + &text
    }
}

fn new_run_key() -> Result<String, Fault> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| fault::from_errno(errno, "choose key", "a run"))?;
    Ok(format!("{:032x}", u128::from_le_bytes(random)))
}

//! Runs: how a run begins, is passed to the shell, and ends.

use linux::spawn::{ProcessExit, ProcessUsage};
use wire::process::{KernelProgram, RunInSession};
use wire::{AgentConfig, Fault, FaultKind, StreamTag};

use super::{Session, SessionProtocol, SessionRun, SessionShell};
use crate::event_loop::agent::Agent;
use crate::event_loop::handles::{ConnectionId, SessionHandle};
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
        self.processes.check_new_name(&run.process, &self.context.config)?;
        let directory = run.directory.iter().map(|directory| &directory.path);
        if directory.chain(run.env.values()).chain([&run.text]).any(|text| text.contains('\0')) {
            return Err(fault::from_kind(FaultKind::Invalid, "run", "a text with a zero byte"));
        }
        if let Some(wrong) = run.env.keys().find(|name| !shell::is_variable_name(name)) {
            return Err(fault::from_kind(FaultKind::Invalid, "set variable", wrong));
        }
        let session = self.sessions.get_mut(number).expect("it was just found");
        if session.namespaces.as_ref().is_some_and(|namespaces| !namespaces.is_alive()) {
            return Err(fault::from_kind(FaultKind::Other, "run", "the session's namespaces are gone"));
        }
        if run.beside {
            return self.run_beside(number, connection, run);
        }
        if session.current.is_none() {
            return self.begin_run(number, connection, run);
        }
        if !run.queue || session.queue.len() >= MAX_QUEUED_RUNS {
            return Err(fault::from_kind(FaultKind::Busy, "run", &run.session));
        }
        session.queue.push_back((connection, run));
        Ok(())
    }

    fn begin_run(
        &mut self,
        number: SessionHandle,
        connection: ConnectionId,
        request: RunInSession,
    ) -> Result<(), Fault> {
        let session = self.sessions.get(number).expect("the caller has found it");
        session.check_run_directory(&self.context.config, request.directory.as_ref())?;
        let key = new_run_key()?;
        let process = self.add_process(NewProcess {
            name: request.process.clone(),
            tag: None,
            session: Some(request.session.clone()),
            command: request.text.clone(),
            retention: request.retention,
            caller: Some(StartCaller { connection, follow: request.follow }),
            subjects: FaultSubjects::default(),
        });
        let session = self.sessions.get_mut(number).expect("the session exists");
        session.current = Some(SessionRun { process, key, request });
        self.sessions.restart_idle_timer(number, &mut self.events.alarms);
        let session = self.sessions.get(number).expect("the session exists");
        match &session.shell {
            Some(shell) if shell.started => self.send_current_run(number),
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
            self.drop_process(run.process);
        }
    }

    /// Passes the current run to the shell.
    pub(super) fn send_current_run(&mut self, number: SessionHandle) {
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
        session.runs += 1;
        let count = session.kernel.as_ref().filter(|kernel| kernel.program == KernelProgram::Shell);
        let count = count.map(|_| format!("{{\"count\":{}}}\n", session.runs));
        let shell = session.shell.as_mut().expect("the shell exists");
        shell.is_replacement = false;
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
            // The shell continues; its later output does not belong to this run.
            if let Some(process) = self.processes.get_mut(run.process) {
                process.running = None;
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
            let Some((connection, run)) = session.queue.pop_front() else { return };
            let begun = self.processes.check_new_name(&run.process, &self.context.config);
            match begun.and_then(|()| self.begin_run(number, connection, run)) {
                Ok(()) => return,
                Err(fault) => self.connections.refuse_request(connection, fault),
            }
        }
    }
}

impl Session {
    /// The text that a shell evaluates for a run.
    fn shell_text(&self, config: &AgentConfig, shell: &SessionShell, run: &SessionRun) -> String {
        let directory = run.request.directory.as_ref();
        let change_dir = directory.and_then(|directory| self.run_change_dir(config, directory));
        let exports = if shell.is_replacement { self.exports.as_str() } else { "" };
        let variables = shell::run_variables_text(&self.run_variables, &run.request.env);
        variables + &shell::compose_run_text(exports, change_dir.as_ref(), &run.request.text)
    }
}

fn new_run_key() -> Result<String, Fault> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| fault::from_errno(errno, "choose key", "a run"))?;
    Ok(format!("{:032x}", u128::from_le_bytes(random)))
}

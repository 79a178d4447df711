//! Runs: how a run begins, is passed to the shell, and ends.

use linux::spawn::{End, Usage};
use wire::process::{Program, RunInSession};
use wire::{Fault, FaultKind, StreamTag};

use super::{Run, Session, Shell, Tongue};
use crate::agent::Agent;
use crate::process::{Caller, NewProcess, Subjects};
use crate::{fault, kernel, shell};

/// The maximum number of runs that may wait in one session.
const MOST_QUEUED: usize = 64;

impl Agent {
    /// Runs text in a session, now or after the runs before it.
    pub(crate) fn run_in_session(&mut self, connection: u64, run: RunInSession) -> Result<(), Fault> {
        let number = self.session(&run.session)?;
        self.check_new_name(&run.process)?;
        let directory = run.directory.iter().map(|directory| &directory.path);
        if directory.chain(run.env.values()).chain([&run.text]).any(|text| text.contains('\0')) {
            return Err(fault::plain(FaultKind::Invalid, "run", "a text with a zero byte"));
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
        let session = self.sessions.get_mut(&number).expect("the session exists");
        session.current = Some(Run { process, key, request });
        self.use_nest(number);
        let session = self.sessions.get(&number).expect("the session exists");
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

    /// Passes the current run to the shell.
    pub(super) fn give_order(&mut self, number: u64) {
        let Some(session) = self.sessions.get(&number) else { return };
        let (Some(shell), Some(run)) = (&session.shell, &session.current) else { return };
        let order = match &shell.tongue {
            Tongue::Shell(dialect) => dialect.order(&self.shell_text(session, shell, run), &run.key),
            Tongue::Kernel(_) => kernel::order(&run.request.text, &run.key),
        };
        let passing: Vec<String> = run.request.env.keys().cloned().collect();
        let (body, process, deadline) = (shell.body, run.process, run.request.deadline_ms);

        let session = self.sessions.get_mut(&number).expect("the session exists");
        session.runs += 1;
        let count = session.kernel.as_ref().filter(|kernel| kernel.program == Program::Shell);
        let count = count.map(|_| format!("{{\"count\":{}}}\n", session.runs));
        let shell = session.shell.as_mut().expect("the shell exists");
        shell.forgetful = false;
        session.passing = passing;
        shell.orders.add(&order);
        // A shell that does not read has ended, which is reported elsewhere.
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
            // A kernel counts its runs itself; for a shell it is done here.
            self.append_output(process, StreamTag::Tell, count.as_bytes());
        }
        self.tell_started(process, caller);
    }

    /// The text that a shell evaluates for a run.
    fn shell_text(&self, session: &Session, shell: &Shell, run: &Run) -> String {
        let directory = run.request.directory.as_ref();
        let way = directory.and_then(|directory| self.way(session, directory));
        let exports = if shell.forgetful { session.exports.as_str() } else { "" };
        let lent = shell::lend(&session.passing, &run.request.env);
        lent + &shell::compose(exports, way.as_ref(), &run.request.text)
    }

    pub(crate) fn finish_run(&mut self, number: u64, end: End, usage: Usage) {
        let run = self.sessions.get_mut(&number).and_then(|session| session.current.take());
        if let Some(run) = run {
            self.process_ended(run.process, end, usage);
            // The shell continues; its later output does not belong to this run.
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

    /// The run to which the present output of the shell belongs.
    pub(crate) fn current_run(&self, number: u64) -> Option<u64> {
        self.sessions.get(&number)?.current.as_ref().map(|run| run.process)
    }
}

fn new_key() -> Result<String, Fault> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| fault::from_errno(errno, "choose key", "a run"))?;
    Ok(format!("{:032x}", u128::from_le_bytes(random)))
}

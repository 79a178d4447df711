//! Dispatches requests from the first frame of a connection to the code that handles them.

use std::collections::BTreeMap;

use rustix::io::Errno;
use rustix::process::Signal;
use wire::process::{ProcessStatus, Reach, SignalProcess};
use wire::{Call, Fault, FaultKind, Frame, FrameError, Reply, Request};

use crate::agent::Agent;
use crate::connection::Stage;
use crate::fault;
use crate::interrupt::Interrupted;
use crate::nester::Order;
use crate::process::Process;
use crate::tree::Tree;

/// The fault for bytes that are not valid frames.
pub(crate) fn malformed() -> Fault {
    fault::plain(FaultKind::Invalid, "read", "a malformed frame")
}

impl Agent {
    pub(crate) fn on_call(&mut self, connection: u64, frame: &Frame) {
        if let Some(asking) = self.connections.get_mut(&connection) {
            asking.stage = Stage::Waiting;
            asking.set_interest(false);
        }
        let handled = read_call(frame).and_then(|call| self.handle(connection, call.request));
        if let Err(fault) = handled {
            self.refuse(connection, fault);
        }
    }

    fn handle(&mut self, connection: u64, request: Request) -> Result<(), Fault> {
        self.used |= leaves_traces(&request);
        match request {
            Request::Ping => self.answer(connection, &Reply::Ok),
            Request::Adopt { env, env_file } => {
                self.adopt(env, env_file)?;
                self.answer(connection, &Reply::Ok);
            }
            Request::Start(start) => self.start(connection, &start)?,
            Request::Follow { process, from } => {
                let process = self.process(&process)?;
                let (number, status) = (process.number, self.status_of(process));
                self.send(connection, &Reply::Status(status));
                self.follow(connection, number, from);
            }
            Request::Status { process } => {
                let status = self.status_of(self.process(&process)?);
                self.answer(connection, &Reply::Status(status));
            }
            Request::Processes => {
                self.sweep_groups();
                let statuses = self.statuses();
                self.answer(connection, &Reply::Statuses(statuses));
            }
            Request::Trees { ended } => {
                self.sweep_groups();
                let trees = self.trees(ended);
                self.answer(connection, &Reply::Trees(trees));
            }
            Request::Signal(order) => {
                self.signal(&order)?;
                self.answer(connection, &Reply::Ok);
            }
            Request::Input { process } => {
                let body = self.input_of(&process)?;
                self.begin_feeding(connection, body);
            }
            Request::Resize { process, columns, rows } => {
                self.resize(&process, columns, rows)?;
                self.answer(connection, &Reply::Ok);
            }
            Request::Forget { process } => {
                self.forget(&process)?;
                self.answer(connection, &Reply::Ok);
            }
            Request::File(request) => self.work(connection, request)?,
            Request::Tunnel { port } => self.dial(connection, port)?,
            Request::Occupy { port } => {
                self.occupy(port)?;
                self.answer(connection, &Reply::Ok);
            }
            Request::OpenSession(open) => self.open_session(connection, open)?,
            Request::OpenKernel(open) => self.open_kernel(connection, open)?,
            Request::Run(run) => self.run_in_session(connection, run)?,
            Request::Sessions => {
                let statuses = self.session_statuses();
                self.answer(connection, &Reply::Sessions(statuses));
            }
            Request::RestartSession { session } => self.restart_session(connection, &session)?,
            Request::Nesting => {
                self.check_nesting()?;
                self.answer(connection, &Reply::Ok);
            }
            Request::Note { session } => {
                let note = self.note(&session)?;
                self.answer(connection, &note);
            }
            Request::CloseSession { session } => {
                self.close_session(&session)?;
                self.answer(connection, &Reply::Ok);
            }
        }
        Ok(())
    }

    /// Takes the variables of the owner that the sandbox is handed to.
    fn adopt(&mut self, env: BTreeMap<String, String>, env_file: Option<String>) -> Result<(), Fault> {
        if self.used {
            return Err(fault::plain(FaultKind::Busy, "adopt", "the agent was used before"));
        }
        self.used = true;
        self.place.config.env.extend(env);
        self.place.config.env_file = env_file.or_else(|| self.place.config.env_file.take());
        Ok(())
    }

    pub(crate) fn process(&self, name: &str) -> Result<&Process, Fault> {
        let number = self.process_names.get(name);
        let process = number.and_then(|number| self.processes.get(number));
        process.ok_or_else(|| fault::plain(FaultKind::NotFound, "find process", name))
    }

    fn status_of(&self, process: &Process) -> ProcessStatus {
        ProcessStatus { left: process.ended.is_some() && self.has_left(process), ..process.status() }
    }

    /// Whether something that a process has started still runs.
    pub(crate) fn has_left(&self, process: &Process) -> bool {
        let body = process.body.and_then(|body| self.bodies.get(&body));
        body.is_some_and(|body| !matches!(body.tree, Tree::Gone))
    }

    /// The statuses of as many processes as fit in one message, in the order of their start. If not
    /// all fit, processes that run or have left something running take precedence, then the newest.
    fn statuses(&self) -> Vec<ProcessStatus> {
        let mut numbers: Vec<&u64> = self.processes.keys().collect();
        let over = |process: &Process| process.ended.is_some() && !self.has_left(process);
        let rank = |number: &u64| (over(&self.processes[number]), std::cmp::Reverse(*number));
        numbers.sort_unstable_by_key(|number| rank(number));
        let mut room = wire::frame::MAX_PAYLOAD / 2;
        let mut listed = Vec::new();
        for number in numbers {
            let status = self.status_of(&self.processes[number]);
            // JSON may write a byte as six, and the fields besides the text need some room.
            let size = status.command.len() * 6 + 1024;
            if size > room {
                break;
            }
            room -= size;
            listed.push((number, status));
        }
        listed.sort_unstable_by_key(|(number, _)| **number);
        listed.into_iter().map(|(_, status)| status).collect()
    }

    /// Signals a process or, if the name is a session's, what runs in that session or context.
    fn signal(&mut self, order: &SignalProcess) -> Result<(), Fault> {
        let (number, body) = match self.process(&order.process) {
            Ok(process) => (Some(process.number), process.body),
            Err(fault) => {
                let session =
                    self.session_names.get(&order.process).and_then(|number| self.sessions.get(number));
                (None, session.ok_or(fault)?.body())
            }
        };
        let Some(signal) = Signal::from_named_raw(order.signal) else {
            return Err(fault::plain(FaultKind::Invalid, "signal", &order.signal.to_string()));
        };
        let gone = || fault::from_errno(rustix::io::Errno::SRCH, "signal", &order.process);
        let body = body.and_then(|body| self.bodies.get(&body)).ok_or_else(gone)?;
        let commands = self.place.commands.as_ref();
        let before = body.pid.filter(|_| signal == Signal::INT).map(Interrupted::look);
        let sent = match (order.reach, body.pid) {
            (Reach::Group, Some(leader)) => rustix::process::kill_process_group(leader, signal),
            (Reach::Tree | Reach::Group, leader) if signal == Signal::KILL => {
                body.tree.kill(commands, leader)
            }
            // The leader has ended; the processes it left behind can only be reached through the
            // tree.
            (Reach::Tree | Reach::Group, leader) => body.tree.signal(commands, leader, signal),
        };
        let sent_to = body.pid;
        if let (Ok(()), Some(before), Some(number)) = (&sent, before, number) {
            self.insist(number, before);
        }
        match (sent, sent_to) {
            // Processes of an isolated session are in another Landlock domain than the agent.
            (Err(Errno::PERM), Some(leader)) if self.place.nester.is_some() => {
                let order = Order::Signal { group: leader.as_raw_pid(), signal: order.signal };
                self.order(&order, &[]).map(drop)
            }
            (sent, _) => sent.map_err(|errno| fault::from_errno(errno, "signal", &order.process)),
        }
    }

    fn input_of(&self, name: &str) -> Result<u64, Fault> {
        let process = self.process(name)?;
        let open = |number: &u64| self.bodies.get(number).is_some_and(|body| body.input.is_some());
        let closed = || fault::plain(FaultKind::Invalid, "write", &format!("{name}: its input is not open"));
        process.body.filter(|_| process.ended.is_none()).filter(open).ok_or_else(closed)
    }

    fn resize(&self, name: &str, columns: u16, rows: u16) -> Result<(), Fault> {
        let process = self.process(name)?;
        let body = process.body.and_then(|body| self.bodies.get(&body)).filter(|body| body.terminal);
        let Some((_, master)) = body.and_then(|body| body.outputs.first()) else {
            return Err(fault::plain(FaultKind::Invalid, "resize", &format!("{name}: it has no terminal")));
        };
        linux::pty::resize(master, columns, rows).map_err(|error| fault::from_io(&error, "resize", name))
    }

    fn forget(&mut self, name: &str) -> Result<(), Fault> {
        let process = self.process(name)?;
        if process.ended.is_none() {
            return Err(fault::plain(FaultKind::Busy, "forget", &format!("{name}: it has not ended")));
        }
        let number = process.number;
        self.drop_process(number);
        Ok(())
    }
}

/// Whether the request may leave traces that a later owner of the sandbox could find.
fn leaves_traces(request: &Request) -> bool {
    matches!(
        request,
        Request::Start(_)
            | Request::OpenSession(_)
            | Request::OpenKernel(_)
            | Request::Run(_)
            | Request::File(_)
            | Request::Tunnel { .. }
            | Request::Occupy { .. }
    )
}

/// Parses the request. A request that only a newer server knows is distinguished from an invalid
/// one.
fn read_call(frame: &Frame) -> Result<Call, Fault> {
    frame.read().map_err(|error| match &error {
        FrameError::Message(reason) => {
            let reason = reason.to_string();
            let unknown = reason.starts_with("unknown variant");
            let kind = if unknown { FaultKind::Unsupported } else { FaultKind::Invalid };
            fault::plain(kind, "read", first_clause(&reason))
        }
        _ => malformed(),
    })
}

/// The reason without the list of valid values and the position, which change with every version.
fn first_clause(reason: &str) -> &str {
    let ends = [", expected", " at line"].map(|end| reason.find(end));
    &reason[..ends.into_iter().flatten().min().unwrap_or(reason.len())]
}

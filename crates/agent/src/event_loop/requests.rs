//! Dispatches requests from the first frame of a connection to the code that handles them.

use std::collections::BTreeMap;

use rustix::io::Errno;
use rustix::process::Signal;
use wire::process::{ProcessStatus, SignalProcess, SignalTarget};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame, FrameError, VersionedRequest};

use crate::event_loop::agent::Agent;
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::handles::{ConnectionId, RunningHandle};
use crate::fault;
use crate::isolation::namespace_broker::BrokerRequest;
use crate::process::ManagedProcess;
use crate::process::interrupt::InterruptedGroup;
use crate::process::tree::CommandTree;

/// The fault for bytes that are not valid frames.
pub(crate) fn malformed_fault() -> Fault {
    fault::from_kind(FaultKind::Invalid, "read", "a malformed frame")
}

impl Agent {
    pub(crate) fn on_request(&mut self, connection: ConnectionId, frame: &Frame) {
        if let Some(asking) = self.connections.get_mut(&connection) {
            asking.stage = ConnectionStage::Waiting;
            asking.set_interest(false);
        }
        let handled = parse_request(frame).and_then(|call| self.handle_request(connection, call.request));
        if let Err(fault) = handled {
            self.refuse_request(connection, fault);
        }
    }

    fn handle_request(&mut self, connection: ConnectionId, request: AgentRequest) -> Result<(), Fault> {
        self.used |= leaves_traces(&request);
        match request {
            AgentRequest::Ping => self.send_final_reply(connection, &AgentReply::Ok),
            AgentRequest::Adopt { env, env_file } => {
                self.adopt_owner(env, env_file)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Start(start) => self.start_process(connection, &start)?,
            AgentRequest::Follow { process, from } => {
                let process = self.find_process(&process)?;
                let (number, status) = (process.number, self.process_status(process));
                self.send_reply(connection, &AgentReply::Status(status));
                self.follow_process(connection, number, from);
            }
            AgentRequest::Status { process } => {
                let status = self.process_status(self.find_process(&process)?);
                self.send_final_reply(connection, &AgentReply::Status(status));
            }
            AgentRequest::Processes => {
                self.remove_empty_groups();
                let statuses = self.process_statuses();
                self.send_final_reply(connection, &AgentReply::Statuses(statuses));
            }
            AgentRequest::Trees { ended } => {
                self.remove_empty_groups();
                let trees = self.tree_statuses(ended);
                self.send_final_reply(connection, &AgentReply::Trees(trees));
            }
            AgentRequest::Signal(request) => {
                self.signal_process(&request)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Input { process } => {
                let running = self.find_open_input(&process)?;
                self.begin_feeding(connection, running);
            }
            AgentRequest::Resize { process, columns, rows } => {
                self.resize_terminal(&process, columns, rows)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Forget { process } => {
                self.forget_process(&process)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::File(request) => self.queue_file_job(connection, request)?,
            AgentRequest::Tunnel { port } => self.dial_port(connection, port)?,
            AgentRequest::Occupy { port } => {
                let number = self.next_handle();
                self.reserved_ports.reserve(number, port, &self.poll)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::OpenSession(open) => self.open_session(connection, open)?,
            AgentRequest::OpenKernel(open) => self.open_kernel(connection, open)?,
            AgentRequest::Run(run) => self.run_in_session(connection, run)?,
            AgentRequest::Sessions => {
                let statuses = self.session_statuses();
                self.send_final_reply(connection, &AgentReply::Sessions(statuses));
            }
            AgentRequest::RestartSession { session } => self.restart_session(connection, &session)?,
            AgentRequest::Nesting => {
                self.check_isolation_supported()?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Note { session } => {
                let note = self.session_note(&session)?;
                self.send_final_reply(connection, &note);
            }
            AgentRequest::CloseSession { session } => {
                self.close_session(&session)?;
                self.send_final_reply(connection, &AgentReply::Ok);
            }
        }
        Ok(())
    }

    /// Takes the variables of the owner that the sandbox is handed to.
    fn adopt_owner(&mut self, env: BTreeMap<String, String>, env_file: Option<String>) -> Result<(), Fault> {
        if self.used {
            return Err(fault::from_kind(FaultKind::Busy, "adopt", "the agent was used before"));
        }
        self.used = true;
        self.context.config.env.extend(env);
        self.context.config.env_file = env_file.or_else(|| self.context.config.env_file.take());
        Ok(())
    }

    pub(crate) fn find_process(&self, name: &str) -> Result<&ManagedProcess, Fault> {
        let process = self.processes.find(name);
        process.ok_or_else(|| fault::from_kind(FaultKind::NotFound, "find process", name))
    }

    fn process_status(&self, process: &ManagedProcess) -> ProcessStatus {
        ProcessStatus { left: process.ended.is_some() && self.has_leftovers(process), ..process.status() }
    }

    /// Whether something that a process has started still runs.
    pub(crate) fn has_leftovers(&self, process: &ManagedProcess) -> bool {
        let running = process.running.and_then(|running| self.running_processes.get(&running));
        running.is_some_and(|running| !matches!(running.tree, CommandTree::Gone))
    }

    /// The statuses of as many processes as fit in one message, in the order of their start. If not
    /// all fit, processes that run or have left something running take precedence, then the newest.
    fn process_statuses(&self) -> Vec<ProcessStatus> {
        let mut processes: Vec<&ManagedProcess> = self.processes.values().collect();
        let over = |process: &ManagedProcess| process.ended.is_some() && !self.has_leftovers(process);
        processes.sort_unstable_by_key(|process| (over(process), std::cmp::Reverse(process.number)));
        let mut room = wire::frame::MAX_PAYLOAD / 2;
        let mut listed = Vec::new();
        for process in processes {
            let status = self.process_status(process);
            // JSON may write a byte as six, and the fields besides the text need some room.
            let size = status.command.len() * 6 + 1024;
            if size > room {
                break;
            }
            room -= size;
            listed.push((process.number, status));
        }
        listed.sort_unstable_by_key(|(number, _)| *number);
        listed.into_iter().map(|(_, status)| status).collect()
    }

    /// Signals a process or, if the name is a session's, what runs in that session or context.
    fn signal_process(&mut self, request: &SignalProcess) -> Result<(), Fault> {
        let (number, running) = match self.find_process(&request.process) {
            Ok(process) => (Some(process.number), process.running),
            Err(fault) => {
                let session =
                    self.sessions.find(&request.process).and_then(|number| self.sessions.get(&number));
                (None, session.ok_or(fault)?.running_process())
            }
        };
        let Some(signal) = Signal::from_named_raw(request.signal) else {
            return Err(fault::from_kind(FaultKind::Invalid, "signal", &request.signal.to_string()));
        };
        let gone = || fault::from_errno(rustix::io::Errno::SRCH, "signal", &request.process);
        let running = running.and_then(|running| self.running_processes.get(&running)).ok_or_else(gone)?;
        let commands = self.context.commands.as_ref();
        let before = running.pid.filter(|_| signal == Signal::INT).map(InterruptedGroup::capture_members);
        let sent = match (request.reach, running.pid) {
            (SignalTarget::Group, Some(leader)) => rustix::process::kill_process_group(leader, signal),
            (SignalTarget::Tree | SignalTarget::Group, leader) if signal == Signal::KILL => {
                running.tree.kill(commands, leader)
            }
            // The leader has ended; the processes it left behind can only be reached through the
            // tree.
            (SignalTarget::Tree | SignalTarget::Group, leader) => {
                running.tree.signal(commands, leader, signal)
            }
        };
        let sent_to = running.pid;
        if let (Ok(()), Some(before), Some(number)) = (&sent, before, number) {
            self.schedule_interrupt_resend(number, before);
        }
        match (sent, sent_to) {
            // Processes of an isolated session are in another Landlock domain than the agent.
            (Err(Errno::PERM), Some(leader)) if self.context.broker.is_some() => {
                let request = BrokerRequest::Signal { group: leader.as_raw_pid(), signal: request.signal };
                self.send_broker_request(&request, &[]).map(drop)
            }
            (sent, _) => sent.map_err(|errno| fault::from_errno(errno, "signal", &request.process)),
        }
    }

    fn find_open_input(&self, name: &str) -> Result<RunningHandle, Fault> {
        let process = self.find_process(name)?;
        let open = |number: &RunningHandle| {
            self.running_processes.get(number).is_some_and(|running| running.input.is_some())
        };
        let closed =
            || fault::from_kind(FaultKind::Invalid, "write", &format!("{name}: its input is not open"));
        process.running.filter(|_| process.ended.is_none()).filter(open).ok_or_else(closed)
    }

    fn resize_terminal(&self, name: &str, columns: u16, rows: u16) -> Result<(), Fault> {
        let process = self.find_process(name)?;
        let running = process
            .running
            .and_then(|running| self.running_processes.get(&running))
            .filter(|running| running.terminal);
        let Some((_, master)) = running.and_then(|running| running.outputs.first()) else {
            return Err(fault::from_kind(
                FaultKind::Invalid,
                "resize",
                &format!("{name}: it has no terminal"),
            ));
        };
        linux::pty::resize_terminal(master, columns, rows)
            .map_err(|error| fault::from_io(&error, "resize", name))
    }

    fn forget_process(&mut self, name: &str) -> Result<(), Fault> {
        let process = self.find_process(name)?;
        if process.ended.is_none() {
            return Err(fault::from_kind(FaultKind::Busy, "forget", &format!("{name}: it has not ended")));
        }
        let number = process.number;
        self.drop_process(number);
        Ok(())
    }
}

/// Whether the request may leave traces that a later owner of the sandbox could find.
fn leaves_traces(request: &AgentRequest) -> bool {
    matches!(
        request,
        AgentRequest::Start(_)
            | AgentRequest::OpenSession(_)
            | AgentRequest::OpenKernel(_)
            | AgentRequest::Run(_)
            | AgentRequest::File(_)
            | AgentRequest::Tunnel { .. }
            | AgentRequest::Occupy { .. }
    )
}

/// Parses the request. A request that only a newer server knows is distinguished from an invalid
/// one.
fn parse_request(frame: &Frame) -> Result<VersionedRequest, Fault> {
    frame.parse_message().map_err(|error| match &error {
        FrameError::Message(reason) => {
            let reason = reason.to_string();
            let unknown = reason.starts_with("unknown variant");
            let kind = if unknown { FaultKind::Unsupported } else { FaultKind::Invalid };
            fault::from_kind(kind, "read", first_clause(&reason))
        }
        _ => malformed_fault(),
    })
}

/// The reason without the list of valid values and the position, which change with every version.
fn first_clause(reason: &str) -> &str {
    let ends = [", expected", " at line"].map(|end| reason.find(end));
    &reason[..ends.into_iter().flatten().min().unwrap_or(reason.len())]
}

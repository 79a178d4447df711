//! Dispatches requests from the first frame of a connection to the code that handles them.

use std::collections::BTreeMap;

use rustix::io::Errno;
use rustix::process::Signal;
use wire::process::{ProcessStatus, SignalProcess, SignalTarget};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame, FrameError, VersionedRequest};

use crate::event_loop::agent::Agent;
use crate::event_loop::connection::ConnectionStage;
use crate::event_loop::handles::ConnectionId;
use crate::fault;
use crate::isolation::namespace_broker::BrokerRequest;
use crate::process::interrupt::InterruptedGroup;

/// The fault for bytes that are not valid frames.
pub(crate) fn malformed_fault() -> Fault {
    fault::from_kind(FaultKind::Invalid, "read", "a malformed frame")
}

impl Agent {
    pub(crate) fn on_request(&mut self, connection: ConnectionId, frame: &Frame) {
        if let Some(asking) = self.connections.get_mut(connection) {
            asking.stage = ConnectionStage::Waiting;
            asking.set_interest(false);
        }
        let handled = parse_request(frame).and_then(|call| self.handle_request(connection, call.request));
        if let Err(fault) = handled {
            self.connections.refuse_request(connection, fault);
        }
    }

    fn handle_request(&mut self, connection: ConnectionId, request: AgentRequest) -> Result<(), Fault> {
        self.used |= leaves_traces(&request);
        match request {
            AgentRequest::Ping => self.connections.send_final_reply(connection, &AgentReply::Ok),
            AgentRequest::Adopt { env, env_file } => {
                self.adopt_owner(env, env_file)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Start(start) => self.start_process(connection, &start)?,
            AgentRequest::Follow { process, from } => {
                let process = self.processes.find(&process)?;
                let (number, status) = (process.number, self.children.status_of(process));
                let status = ProcessStatus { stderr_before: self.stderr_before(number, from), ..status };
                self.connections.send_reply(connection, &AgentReply::Status(status));
                self.follow_process(connection, number, from);
            }
            AgentRequest::OutputTimes { process, from } => {
                let number = self.processes.find(&process)?.number;
                let times = self.output_times(number, from);
                self.connections.send_final_reply(connection, &AgentReply::OutputTimes(times));
            }
            AgentRequest::Status { process } => {
                let status = self.children.status_of(self.processes.find(&process)?);
                self.connections.send_final_reply(connection, &AgentReply::Status(status));
            }
            AgentRequest::Processes => {
                self.children.remove_empty_groups(&self.context);
                let statuses = self.processes.statuses(&self.children);
                self.connections.send_final_reply(connection, &AgentReply::Statuses(statuses));
            }
            AgentRequest::Trees { ended } => {
                self.children.remove_empty_groups(&self.context);
                let trees = self.tree_statuses(ended);
                self.connections.send_final_reply(connection, &AgentReply::Trees(trees));
            }
            AgentRequest::Signal(request) => {
                self.signal_process(&request)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Input { process } => {
                let running = self.children.find_open_input(self.processes.find(&process)?)?;
                self.begin_feeding(connection, running);
            }
            AgentRequest::Resize { process, columns, rows } => {
                self.children.resize_terminal(self.processes.find(&process)?, columns, rows)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::KillLargest => {
                self.kill_largest_process()?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Forget { process } => {
                self.forget_process(&process)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::File(request) => self.queue_file_job(connection, request)?,
            AgentRequest::Tunnel { port } => self.tunnels.dial_port(connection, port, &mut self.events)?,
            AgentRequest::Occupy { port } => {
                self.reserved_ports.reserve(port, &mut self.events)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::OpenSession(open) => self.open_session(connection, open)?,
            AgentRequest::OpenKernel(open) => self.open_kernel(connection, open)?,
            AgentRequest::OpenCommands(open) => self.open_commands(connection, open)?,
            AgentRequest::Run(run) => self.run_in_session(connection, run)?,
            AgentRequest::OpenAndRun(request) => self.open_and_run(connection, request)?,
            AgentRequest::Sessions => {
                let statuses = self.sessions.statuses(&self.children, &self.context);
                self.connections.send_final_reply(connection, &AgentReply::Sessions(statuses));
            }
            AgentRequest::SessionStatus { session } => {
                let number = self.sessions.find(&session)?;
                self.report_session(number, connection);
            }
            AgentRequest::UpdateSession(update) => self.update_session(connection, update)?,
            AgentRequest::SessionRuns { session } => {
                self.children.remove_empty_groups(&self.context);
                let runs = self.sessions.recent_runs(&session)?;
                let runs = runs.filter_map(|run| self.processes.get(run));
                let statuses = runs.map(|run| self.children.status_of(run)).collect();
                self.connections.send_final_reply(connection, &AgentReply::Statuses(statuses));
            }
            AgentRequest::RestartSession { session } => self.restart_session(connection, &session)?,
            AgentRequest::IsolatedSessions => {
                self.context.check_isolation_supported()?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
            }
            AgentRequest::Note { session } => {
                let note = self.sessions.note(&session)?;
                self.connections.send_final_reply(connection, &note);
            }
            AgentRequest::CloseSession { session, requested_ns, grace_ms } => {
                self.close_session_at(&session, requested_ns, grace_ms)?;
                self.connections.send_final_reply(connection, &AgentReply::Ok);
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

    /// Signals a process or, if the name is a session's, what runs in that session or context.
    pub(crate) fn signal_process(&mut self, request: &SignalProcess) -> Result<(), Fault> {
        let (number, running) = match self.processes.find(&request.process) {
            Ok(process) => (Some(process.number), process.running),
            Err(fault) => {
                let session =
                    self.sessions.find(&request.process).ok().and_then(|number| self.sessions.get(number));
                let session = session.ok_or(fault)?;
                let run = session.current.as_ref().filter(|_| session.runs_commands());
                match run.and_then(|run| self.processes.get(run.process)) {
                    Some(process) => (Some(process.number), process.running),
                    None => (None, session.running_process()),
                }
            }
        };
        let Some(signal) = Signal::from_named_raw(request.signal) else {
            return Err(fault::from_kind(FaultKind::Invalid, "signal", &request.signal.to_string()));
        };
        if signal == Signal::KILL && number.is_some_and(|number| self.cancel_queued_run(number)) {
            return Ok(());
        }
        let gone = || fault::from_errno(rustix::io::Errno::SRCH, "signal", &request.process);
        let running = running.and_then(|running| self.children.get(running)).ok_or_else(gone)?;
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
        if let Some(process) =
            number.and_then(|number| self.processes.get_mut(number)).filter(|_| sent.is_ok())
        {
            process.signalled = Some(request.signal);
        }
        if let (Ok(()), Some(before), Some(number)) = (&sent, before, number) {
            self.processes.schedule_interrupt_resend(number, before, &mut self.events.alarms);
        }
        match (sent, sent_to) {
            // Processes of an isolated session are in another Landlock domain than the agent.
            (Err(Errno::PERM), Some(leader)) if self.context.broker.pid().is_some() => {
                let request = BrokerRequest::Signal { group: leader.as_raw_pid(), signal: request.signal };
                self.context.send_broker_request(&request, &[]).map(drop)
            }
            (sent, _) => sent.map_err(|errno| fault::from_errno(errno, "signal", &request.process)),
        }
    }

    fn forget_process(&mut self, name: &str) -> Result<(), Fault> {
        let process = self.processes.find(name)?;
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
            | AgentRequest::OpenCommands(_)
            | AgentRequest::Run(_)
            | AgentRequest::OpenAndRun(_)
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
            let unknown = frame.has_unknown_variant::<VersionedRequest>();
            let kind = if unknown { FaultKind::Unsupported } else { FaultKind::Invalid };
            fault::from_kind(kind, "read", first_clause(&reason.to_string()))
        }
        _ => malformed_fault(),
    })
}

/// The reason without the list of valid values and the position, which change with every version.
fn first_clause(reason: &str) -> &str {
    let ends = [", expected", " at line"].map(|end| reason.find(end));
    &reason[..ends.into_iter().flatten().min().unwrap_or(reason.len())]
}

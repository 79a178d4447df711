//! The main process of a sandbox, which its driver starts and watches until it ends.

use std::time::Duration;

use domain::process::{CommandLine, ProcessSpec};
use domain::{ExitReason, OutputRetention, ProcessId};
use wire::{AgentReply, AgentRequest, Frame};

use crate::agent::client::{AgentClient, AgentError, parse_answer};
use crate::agent::reply::ProcessStarted;
use crate::agent::{faults, translate};
use crate::error::ServiceError;

/// The tag by which fronts find the main process.
pub(crate) const ENTRYPOINT_TAG: &str = "entrypoint";

/// The shortest and the longest time before the process is followed again after the connection broke.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

pub(crate) async fn launch_entrypoint(
    agent: &AgentClient,
    id: &ProcessId,
    words: Vec<String>,
    retention: OutputRetention,
) -> Result<(), ServiceError> {
    let tag = Some(ENTRYPOINT_TAG.to_owned());
    let process = ProcessSpec { tag, retention, ..ProcessSpec::new(CommandLine::Argv(words)) };
    let start = wire::process::StartProcess { follow: false, ..translate::wire_start(id, process) };
    match agent.request(AgentRequest::Start(start)).await? {
        Ok(ProcessStarted) => Ok(()),
        Err(fault) => Err(ServiceError::Entrypoint(Box::new(faults::file_error(agent, fault)))),
    }
}

/// Whether the agent has ever started the process.
pub(crate) async fn was_started(agent: &AgentClient, id: &ProcessId) -> Result<bool, ServiceError> {
    let request = AgentRequest::Status { process: id.as_str().to_owned() };
    match agent.request::<AgentReply>(request).await? {
        Ok(_) => Ok(true),
        Err(fault) => match faults::process_error(agent, id, fault) {
            ServiceError::NoProcess(_) => Ok(false),
            error => Err(error),
        },
    }
}

/// Waits until the process has ended. The driver drops this future when the sandbox itself has died.
pub(crate) async fn wait_for_end(agent: AgentClient, id: ProcessId) -> ExitReason {
    let mut pause = MIN_RETRY_DELAY;
    loop {
        match follow_to_exit(&agent, &id).await {
            Ok(exit) => return exit,
            Err(ServiceError::NoProcess(_)) => return ExitReason::Lost,
            Err(error) => {
                tracing::debug!(sandbox = %agent.id(), %error, "lost the connection that follows the entrypoint; retrying")
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_DELAY);
    }
}

/// Follows from the largest possible offset, so that only the end is sent. Output that an agent sends nevertheless is
/// dropped unread.
async fn follow_to_exit(agent: &AgentClient, id: &ProcessId) -> Result<ExitReason, ServiceError> {
    let request = AgentRequest::Follow { process: id.as_str().to_owned(), from: u64::MAX };
    let mut connection = agent.open_request(request).await?;
    let status = agent.first_answer::<wire::process::ProcessStatus>(&mut connection).await?;
    status.map_err(|fault| faults::process_error(agent, id, fault))?;
    let broken = |source| agent.agent_error("send the output of a process", source);
    loop {
        let frame = connection.next_frame().await.map_err(broken)?;
        let frame = frame.ok_or(AgentError::EndedEarly).map_err(broken)?;
        if matches!(frame, Frame::Output { .. }) {
            continue;
        }
        match parse_answer(&frame).map_err(broken)? {
            Ok(AgentReply::Ended(ended)) => return Ok(translate::process_end(&ended).exit),
            Ok(AgentReply::Gap { .. }) => {}
            Ok(_) => return Err(agent.unexpected_reply()),
            Err(fault) => return Err(faults::process_error(agent, id, fault)),
        }
    }
}

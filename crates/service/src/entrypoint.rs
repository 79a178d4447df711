//! The main process of a sandbox, which its driver starts and watches until it ends.

use std::time::Duration;

use domain::process::{Command, Process};
use domain::{Exit, ProcessId, Retention};
use wire::{Frame, Reply, Request};

use crate::agent_client::{Agent, AgentError, read_answer};
use crate::error::ServiceError;
use crate::{faults, translate};

/// The tag by which fronts find the main process.
pub(crate) const TAG: &str = "entrypoint";

/// The shortest and the longest time before the process is followed again after the connection broke.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(30);

pub(crate) async fn launch(
    agent: &Agent,
    id: &ProcessId,
    words: &[String],
    retention: Retention,
) -> Result<(), ServiceError> {
    let tag = Some(TAG.to_owned());
    let process = Process { tag, retention, ..Process::new(Command::Argv(words.to_vec())) };
    let start = wire::process::Start { follow: false, ..translate::start(id, process) };
    match agent.ask(Request::Start(start)).await? {
        Ok(Reply::Started { .. }) => Ok(()),
        Ok(_) => Err(agent.unexpected()),
        Err(fault) => Err(ServiceError::Entrypoint(Box::new(faults::of_file(agent, fault)))),
    }
}

/// Whether the agent has ever started the process.
pub(crate) async fn was_started(agent: &Agent, id: &ProcessId) -> Result<bool, ServiceError> {
    match agent.ask(Request::Status { process: id.as_str().to_owned() }).await? {
        Ok(_) => Ok(true),
        Err(fault) => match faults::of_process(agent, id, fault) {
            ServiceError::NoProcess(_) => Ok(false),
            error => Err(error),
        },
    }
}

/// Waits until the process has ended. The driver drops this future when the sandbox itself has died.
pub(crate) async fn ended(agent: Agent, id: ProcessId) -> Exit {
    let mut pause = FIRST_RETRY;
    loop {
        match follow(&agent, &id).await {
            Ok(exit) => return exit,
            Err(ServiceError::NoProcess(_)) => return Exit::Lost,
            Err(error) => {
                tracing::debug!(sandbox = %agent.id(), %error, "lost the connection that follows the entrypoint; retrying")
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

/// Follows from the largest possible offset, so that only the end is sent. Output that an agent sends nevertheless is
/// dropped unread.
async fn follow(agent: &Agent, id: &ProcessId) -> Result<Exit, ServiceError> {
    let request = Request::Follow { process: id.as_str().to_owned(), from: u64::MAX };
    let mut connection = agent.call(request).await?;
    match agent.first_answer(&mut connection).await? {
        Ok(Reply::Status(_)) => {}
        Ok(_) => return Err(agent.unexpected()),
        Err(fault) => return Err(faults::of_process(agent, id, fault)),
    }
    let broken = |source| agent.failed("send the output of a process", source);
    loop {
        let frame = connection.frame().await.map_err(broken)?;
        let frame = frame.ok_or(AgentError::EndedEarly).map_err(broken)?;
        if matches!(frame, Frame::Output { .. }) {
            continue;
        }
        match read_answer(&frame).map_err(broken)? {
            Ok(Reply::Ended(ended)) => return Ok(translate::ended(&ended).exit),
            Ok(Reply::Gap { .. }) => {}
            Ok(_) => return Err(agent.unexpected()),
            Err(fault) => return Err(faults::of_process(agent, id, fault)),
        }
    }
}

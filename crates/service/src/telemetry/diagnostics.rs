//! Queries for diagnosing a sandbox. They do not count as a use.

use std::time::{Duration, SystemTime};

use domain::ProcessId;
use wire::{AgentReply, AgentRequest, Frame};

use crate::agent::client::{AgentClient, AgentError, parse_answer};
use crate::agent::faults;
use crate::sandboxes::entrypoint;
use crate::{LifecycleEvent, ProcessStatus, SandboxRef, ServiceError};

/// How long reading may take in total. The output exists already, so only a malicious agent needs longer.
const TAIL_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The end of a process's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTail {
    pub bytes: Vec<u8>,
    /// Whether the process printed anything before these bytes.
    pub cut: bool,
    /// When the process ended.
    pub ended: Option<SystemTime>,
}

impl SandboxRef {
    /// The last bytes, at most `most`, that the main process of a sandbox printed; `None` if it has no main process.
    pub async fn entrypoint_tail(&self, most: u64) -> Result<Option<OutputTail>, ServiceError> {
        let handle = self.usable_now()?;
        let agent = &handle.agent;
        let processes = self.core.read_processes(agent).await?;
        let main =
            processes.into_iter().find(|status| status.tag.as_deref() == Some(entrypoint::ENTRYPOINT_TAG));
        let Some(main) = main else { return Ok(None) };
        let reading = read_tail(agent, &main, most);
        let read = tokio::time::timeout(TAIL_READ_TIMEOUT, reading).await;
        read.unwrap_or_else(|_elapsed| Err(agent.unexpected_reply())).map(Some)
    }

    /// The last events of a sandbox, at most `most`, oldest first.
    pub fn lifecycle_events(&self, most: usize) -> Vec<LifecycleEvent> {
        self.core.telemetry.events.sandbox_events(self.owner(), self.id(), most)
    }
}

async fn read_tail(agent: &AgentClient, main: &ProcessStatus, most: u64) -> Result<OutputTail, ServiceError> {
    let from = main.written.saturating_sub(most);
    let mut tail =
        OutputTail { bytes: Vec::new(), cut: from > 0, ended: main.ended.as_ref().map(|end| end.ended) };
    if from == main.written {
        return Ok(tail);
    }
    let process: &ProcessId = &main.process;
    let mut connection =
        agent.open_request(AgentRequest::Follow { process: process.as_str().to_owned(), from }).await?;
    let status = agent.first_answer::<wire::process::ProcessStatus>(&mut connection).await?;
    status.map_err(|fault| faults::process_error(agent, process, fault))?;
    let broken = |source| agent.agent_error("send the output of a process", source);
    loop {
        let frame = connection.next_frame().await.map_err(broken)?;
        match frame.ok_or(AgentError::EndedEarly).map_err(broken)? {
            Frame::Output { offset, bytes, .. } => {
                let room = usize::try_from(main.written.saturating_sub(offset)).unwrap_or(usize::MAX);
                let taken = bytes.len().min(room);
                tail.bytes.extend_from_slice(&bytes[..taken]);
                let too_much = tail.bytes.len() as u64 > most;
                if too_much {
                    return Err(agent.unexpected_reply());
                }
                if taken == room {
                    return Ok(tail);
                }
            }
            frame => match parse_answer(&frame).map_err(broken)? {
                // Output before the gap is older than the requested bytes.
                Ok(AgentReply::Gap { to, .. }) => {
                    tail = OutputTail { bytes: Vec::new(), cut: true, ..tail };
                    if to >= main.written {
                        return Ok(tail);
                    }
                }
                Ok(AgentReply::Ended(_)) => return Ok(tail),
                Ok(_) => return Err(agent.unexpected_reply()),
                Err(fault) => return Err(faults::process_error(agent, process, fault)),
            },
        }
    }
}

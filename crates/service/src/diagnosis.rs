//! Queries for diagnosing a sandbox. They do not count as a use.

use std::time::{Duration, SystemTime};

use domain::{Owner, ProcessId, SandboxId};
use wire::{Frame, Reply, Request};

use crate::agent_client::{Agent, AgentError, read_answer};
use crate::{LifeEvent, ProcessStatus, Service, ServiceError, entrypoint, faults};

/// How long reading may take in total. The output exists already, so only a malicious agent needs longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The end of a process's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tail {
    pub bytes: Vec<u8>,
    /// Whether the process printed anything before these bytes.
    pub cut: bool,
    /// When the process ended.
    pub ended: Option<SystemTime>,
}

impl Service {
    /// The last bytes, at most `most`, that the main process of a sandbox printed; `None` if it has no main process.
    pub async fn entrypoint_tail(
        &self,
        owner: &Owner,
        id: &SandboxId,
        most: u64,
    ) -> Result<Option<Tail>, ServiceError> {
        let handle = self.0.reach(owner, id)?;
        let agent = &handle.agent;
        let processes = self.0.processes_of(agent).await?;
        let main = processes.into_iter().find(|status| status.tag.as_deref() == Some(entrypoint::TAG));
        let Some(main) = main else { return Ok(None) };
        let reading = read_tail(agent, &main, most);
        let read = tokio::time::timeout(PATIENCE, reading).await;
        read.unwrap_or_else(|_elapsed| Err(agent.unexpected())).map(Some)
    }

    /// The last events of a sandbox, at most `most`, oldest first.
    pub fn events_of(
        &self,
        owner: &Owner,
        id: &SandboxId,
        most: usize,
    ) -> Result<Vec<LifeEvent>, ServiceError> {
        self.0.find(owner, id)?;
        Ok(self.0.events.of(owner, id, most))
    }
}

async fn read_tail(agent: &Agent, main: &ProcessStatus, most: u64) -> Result<Tail, ServiceError> {
    let from = main.written.saturating_sub(most);
    let mut tail = Tail { bytes: Vec::new(), cut: from > 0, ended: main.ended.as_ref().map(|end| end.ended) };
    if from == main.written {
        return Ok(tail);
    }
    let process: &ProcessId = &main.process;
    let mut connection = agent.call(Request::Follow { process: process.as_str().to_owned(), from }).await?;
    match agent.first_answer(&mut connection).await? {
        Ok(Reply::Status(_)) => {}
        Ok(_) => return Err(agent.unexpected()),
        Err(fault) => return Err(faults::of_process(agent, process, fault)),
    }
    let broken = |source| agent.failed("send the output of a process", source);
    loop {
        let frame = connection.frame().await.map_err(broken)?;
        match frame.ok_or(AgentError::EndedEarly).map_err(broken)? {
            Frame::Output { offset, bytes, .. } => {
                let room = usize::try_from(main.written.saturating_sub(offset)).unwrap_or(usize::MAX);
                let taken = bytes.len().min(room);
                tail.bytes.extend_from_slice(&bytes[..taken]);
                let too_much = tail.bytes.len() as u64 > most;
                if too_much {
                    return Err(agent.unexpected());
                }
                if taken == room {
                    return Ok(tail);
                }
            }
            frame => match read_answer(&frame).map_err(broken)? {
                // Output before the gap is older than the requested bytes.
                Ok(Reply::Gap { to, .. }) => {
                    tail = Tail { bytes: Vec::new(), cut: true, ..tail };
                    if to >= main.written {
                        return Ok(tail);
                    }
                }
                Ok(Reply::Ended(_)) => return Ok(tail),
                Ok(_) => return Err(agent.unexpected()),
                Err(fault) => return Err(faults::of_process(agent, process, fault)),
            },
        }
    }
}

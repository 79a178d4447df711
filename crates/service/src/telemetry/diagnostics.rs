//! Queries for diagnosing a sandbox. They do not count as a use.

use std::time::{Duration, SystemTime};

use domain::ProcessId;
use wire::{AgentReply, AgentRequest, Frame};

use crate::agent::client::{AgentClient, AgentError, parse_answer};
use crate::agent::faults;
use crate::agent::reply::OutputTimes;
use crate::sandboxes::entrypoint;
use crate::{LifecycleEvent, ProcessStatus, SandboxRef, ServiceError};

/// How long reading may take in total. The output exists already, so only a malicious agent needs longer.
const TAIL_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// More times than these are ignored; the agent sends fewer.
const MAX_TIMES: usize = 8192;

/// The end of a process's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTail {
    pub bytes: Vec<u8>,
    /// When the bytes from an index on were read, in order, to the second. Empty if the agent is of an older version.
    pub times: Vec<(usize, SystemTime)>,
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
        let reading = read_tail_with_times(agent, &main, most);
        let read = tokio::time::timeout(TAIL_READ_TIMEOUT, reading).await;
        read.unwrap_or_else(|_elapsed| Err(agent.unexpected_reply())).map(Some)
    }

    /// The last events of a sandbox, at most `most`, oldest first.
    pub fn lifecycle_events(&self, most: usize) -> Vec<LifecycleEvent> {
        self.core.telemetry.events.sandbox_events(self.owner(), self.id(), most)
    }
}

/// Reads the tail and the times of its parts. Times are an addition: without them, the tail is still useful.
async fn read_tail_with_times(
    agent: &AgentClient,
    main: &ProcessStatus,
    most: u64,
) -> Result<OutputTail, ServiceError> {
    let mut tail = read_tail(agent, main, most).await?;
    let from = main.written.saturating_sub(tail.bytes.len() as u64);
    if from == main.written {
        return Ok(tail);
    }
    let process = main.process.as_str().to_owned();
    let answer = agent.request::<OutputTimes>(AgentRequest::OutputTimes { process, from }).await;
    if let Ok(Ok(OutputTimes(times))) = answer {
        tail.times = locate_times(&times, from, tail.bytes.len());
    }
    Ok(tail)
}

/// Converts offsets of the whole output to indices of its last `length` bytes, which begin at `from`. The agent is not
/// trusted: anything out of order or out of range is left out.
fn locate_times(times: &[(u64, u64)], from: u64, length: usize) -> Vec<(usize, SystemTime)> {
    let mut located: Vec<(usize, SystemTime)> = Vec::new();
    for (offset, millis) in times.iter().take(MAX_TIMES) {
        let index = usize::try_from(offset.saturating_sub(from)).unwrap_or(usize::MAX);
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(*millis));
        let follows = located.last().is_none_or(|(before, _)| *before < index);
        if let Some(time) = time.filter(|_| follows && index < length) {
            located.push((index, time));
        }
    }
    located
}

async fn read_tail(agent: &AgentClient, main: &ProcessStatus, most: u64) -> Result<OutputTail, ServiceError> {
    let from = main.written.saturating_sub(most);
    let mut tail = OutputTail {
        bytes: Vec::new(),
        times: Vec::new(),
        cut: from > 0,
        ended: main.ended.as_ref().map(|end| end.ended),
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_out_of_order_or_range_are_left_out() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let times =
            [(5, 1000), (12, 2000), (11, 3000), (14, 4000), (15, 5000), (u64::MAX, 6000), (13, u64::MAX)];
        assert_eq!(locate_times(&times, 10, 5), [(0, at(1)), (2, at(2)), (4, at(4))]);
        assert_eq!(locate_times(&[], 10, 5), []);
    }
}

//! Directory listings: pages from the agent up to `End`, within limits.

use wire::{Frame, FrameError, Reply, Request};

use crate::agent_client::{Agent, AgentError, Connection, STALL, read_answer, within};
use crate::error::{FileError, FileFault, ServiceError};
use crate::{FileInfo, faults, translate};

/// The most entries of one listing.
const MOST_ENTRIES: usize = 100_000;

/// The most bytes of all pages together: names can be long.
const MOST_BYTES: usize = 64 << 20;

/// The least that a page counts, so that endless empty pages reach the limit too.
const LEAST_PAGE: usize = 1 << 10;

pub(crate) async fn list(agent: &Agent, path: &str, request: Request) -> Result<Vec<FileInfo>, ServiceError> {
    let mut connection = agent.call(request).await?;
    let mut entries = Vec::new();
    let mut bytes = 0;
    loop {
        let Some((page, size)) = page(agent, &mut connection).await? else { return Ok(entries) };
        bytes += size.max(LEAST_PAGE);
        if bytes > MOST_BYTES || entries.len() + page.len() > MOST_ENTRIES {
            return Err(too_large(path));
        }
        entries.extend(page.into_iter().map(translate::file_info));
    }
}

/// The next page and its size in bytes; `None` when there are no more.
async fn page(
    agent: &Agent,
    connection: &mut Connection,
) -> Result<Option<(Vec<wire::files::DirectoryEntry>, usize)>, ServiceError> {
    let broken = |source| agent.failed("list", source);
    let frame = within(STALL, "receive more files", connection.frame()).await;
    let frame = frame.and_then(|frame| frame.ok_or(AgentError::EndedEarly)).map_err(broken)?;
    let size = match &frame {
        Frame::End => return Ok(None),
        Frame::Control(json) => json.len(),
        Frame::Data(_) | Frame::Output { .. } => {
            return Err(broken(AgentError::Frame(FrameError::Unexpected)));
        }
    };
    match read_answer(&frame).map_err(broken)? {
        Ok(Reply::Entries(entries)) => Ok(Some((entries, size))),
        Ok(_) => Err(agent.unexpected()),
        Err(fault) => Err(faults::of_file(agent, fault)),
    }
}

fn too_large(path: &str) -> ServiceError {
    ServiceError::File(FileError {
        fault: FileFault::TooLarge,
        errno: None,
        operation: "list".to_owned(),
        path: path.to_owned(),
    })
}

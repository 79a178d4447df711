//! Directory listings: pages from the agent up to `End`, within limits.

use wire::{AgentReply, AgentRequest, Frame, FrameError};

use crate::FileInfo;
use crate::agent::client::{
    AgentClient, AgentError, OperationConnection, STALL_TIMEOUT, parse_answer, with_timeout,
};
use crate::agent::{faults, translate};
use crate::error::{FileError, FileFault, ServiceError};

/// The most entries of one listing.
const MAX_ENTRIES: usize = 100_000;

/// The most bytes of all pages together: names can be long.
const MAX_LISTING_BYTES: usize = 64 << 20;

/// The least that a page counts, so that endless empty pages reach the limit too.
const MIN_PAGE_BYTES: usize = 1 << 10;

pub(crate) async fn list_files(
    agent: &AgentClient,
    path: &str,
    request: AgentRequest,
) -> Result<Vec<FileInfo>, ServiceError> {
    let mut connection = agent.open_request(request).await?;
    let mut entries = Vec::new();
    let mut bytes = 0;
    loop {
        let Some((page, size)) = read_page(agent, &mut connection).await? else { return Ok(entries) };
        bytes += size.max(MIN_PAGE_BYTES);
        if bytes > MAX_LISTING_BYTES || entries.len() + page.len() > MAX_ENTRIES {
            return Err(listing_too_large(path));
        }
        entries.extend(page.into_iter().map(translate::file_info));
    }
}

/// The next page and its size in bytes; `None` when there are no more.
async fn read_page(
    agent: &AgentClient,
    connection: &mut OperationConnection,
) -> Result<Option<(Vec<wire::files::DirectoryEntry>, usize)>, ServiceError> {
    let broken = |source| agent.agent_error("list", source);
    let frame = with_timeout(STALL_TIMEOUT, "receive more files", connection.next_frame()).await;
    let frame = frame.and_then(|frame| frame.ok_or(AgentError::EndedEarly)).map_err(broken)?;
    let size = match &frame {
        Frame::End => return Ok(None),
        Frame::Control(json) => json.len(),
        Frame::Data(_) | Frame::Output { .. } => {
            return Err(broken(AgentError::Frame(FrameError::Unexpected)));
        }
    };
    match parse_answer(&frame).map_err(broken)? {
        Ok(AgentReply::Entries(entries)) => Ok(Some((entries, size))),
        Ok(_) => Err(agent.unexpected_reply()),
        Err(fault) => Err(faults::file_error(agent, fault)),
    }
}

fn listing_too_large(path: &str) -> ServiceError {
    ServiceError::File(FileError {
        fault: FileFault::TooLarge,
        errno: None,
        operation: "list".to_owned(),
        path: path.to_owned(),
        launch_step: None,
    })
}

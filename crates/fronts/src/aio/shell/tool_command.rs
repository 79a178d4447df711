//! Commands of tools that models call. A model knows no session ids, so its commands share one session, unless a call
//! wants another.

use domain::SessionName;
use service::RequestTime;

use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::exec::{ExecBody, ExecRequest, run_command};
use super::session::{NewShellSession, ShellStatus, open_session, read_session, session_of_id};

/// The name of the session that commands share.
const SHARED_SESSION_NAME: &str = "mcp";

/// The longest output in characters; a tool result is held in memory several times.
const MAX_OUTPUT_CHARS: usize = 1 << 20;

/// Where a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::aio) enum ToolSession {
    /// In the session of all calls, with the directory and the variables that earlier commands have left.
    Shared,
    New,
}

/// The result of a command.
#[derive(Debug)]
pub(in crate::aio) struct ToolCommandResult {
    pub(in crate::aio) session_id: String,
    pub(in crate::aio) status: ShellStatus,
    /// What was printed so far, if the command goes on.
    pub(in crate::aio) output: String,
    pub(in crate::aio) exit_code: Option<i32>,
    /// The directory of the session after the command; `None` if the session is gone.
    pub(in crate::aio) directory: Option<String>,
}

/// Runs a command as `POST /v1/shell/exec` does. The caller has counted the request as a long one.
pub(in crate::aio) async fn run_tool_command(
    target: AioTarget,
    session: ToolSession,
    body: ExecBody,
) -> Result<ToolCommandResult, AioProblem> {
    let requested = RequestTime::now();
    let mut request = ExecRequest::parse(body, &target)?;
    request.max_chars = request.max_chars.min(MAX_OUTPUT_CHARS);
    request.id = match session {
        ToolSession::New => None,
        ToolSession::Shared => Some(open_shared_session(&target, requested).await?),
    };
    let result = run_command(target.clone(), request, requested).await?;
    Ok(ToolCommandResult {
        directory: read_directory(&target, &result.session_id).await,
        status: result.status,
        output: result.output.or(result.partial_output).unwrap_or_default(),
        exit_code: result.exit_code,
        session_id: result.session_id,
    })
}

async fn read_directory(target: &AioTarget, id: &str) -> Option<String> {
    let session = read_session(target, &session_of_id(id).ok()?).await.ok()?;
    Some(session.working_directory(target))
}

/// Opens the session that commands share, or finds it, and returns its id.
async fn open_shared_session(target: &AioTarget, requested: RequestTime) -> Result<String, AioProblem> {
    let name = SessionName::parse(SHARED_SESSION_NAME).expect("the name is a valid one");
    let new = NewShellSession { name: Some(name), ..NewShellSession::default() };
    Ok(open_session(target, new, requested).await?.id().to_owned())
}

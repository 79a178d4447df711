//! The routes of the tools.

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::StatusCode;
use rmcp::model::{CallToolResult, ContentBlock, ListToolsResult};
use serde_json::Value;

use super::{SERVER_INFO, SERVER_NAME, TOOLS, ToolContext};
use crate::aio::AioState;
use crate::aio::body::AioJson;
use crate::aio::envelope::{DEFAULT_MESSAGE, ResponseEnvelope, data_response};
use crate::aio::keep_alive::respond_with_blanks;
use crate::aio::problem::AioProblem;
use crate::aio::routes::AioRoute;
use crate::aio::target::AioTarget;
use crate::kit::mcp::{McpMessage, ToolArguments};

pub(in crate::aio) fn routes() -> Vec<AioRoute> {
    vec![
        ("/mcp", post(answer_message)),
        ("/v1/mcp", post(answer_message)),
        ("/v1/mcp/servers", get(list_servers)),
        ("/v1/mcp/{server}/tools", get(list_tools)),
        ("/v1/mcp/{server}/tools/{tool}", post(call_tool)),
    ]
}

/// `POST /mcp`: a message of a client of the protocol.
async fn answer_message(
    State(state): State<AioState>,
    target: AioTarget,
    request: Request,
) -> Result<Response, AioProblem> {
    let message = match McpMessage::receive(request, state.settings.json_body_limit).await {
        Ok(message) => message,
        Err(refusal) => return Ok(refusal.into_response()),
    };
    if message.calls_tool() {
        target.begin_stream()?;
    }
    Ok(message.answer(SERVER_INFO, &TOOLS, ToolContext { state, target }).await)
}

/// `GET /v1/mcp/servers`: no server is hidden.
async fn list_servers() -> Json<ResponseEnvelope<[&'static str; 1]>> {
    data_response([SERVER_NAME])
}

/// `GET /v1/mcp/{server}/tools`
async fn list_tools(
    Path(server): Path<String>,
) -> Result<Json<ResponseEnvelope<ListToolsResult>>, AioProblem> {
    check_server(&server)?;
    let mut tools = ListToolsResult::with_all_items(TOOLS.definitions());
    // A field of the protocol's newest revision.
    tools.result_type = None;
    Ok(data_response(tools))
}

/// `POST /v1/mcp/{server}/tools/{tool}`: the body has the arguments.
async fn call_tool(
    State(state): State<AioState>,
    target: AioTarget,
    Path((server, tool)): Path<(String, String)>,
    AioJson(arguments): AioJson<ToolArguments>,
) -> Result<Response, AioProblem> {
    check_server(&server)?;
    if TOOLS.definition(&tool).is_none() {
        return Err(AioProblem::new(StatusCode::NOT_FOUND, format!("Tool {tool} not found")));
    }
    target.begin_stream()?;
    let called = async move {
        let result = TOOLS.call(&tool, ToolContext { state, target }, arguments).await;
        result.map(result_envelope).ok_or_else(AioProblem::not_found)
    };
    let late_failure = |problem: AioProblem| {
        result_envelope(CallToolResult::error(vec![ContentBlock::text(problem.message)]))
    };
    Ok(respond_with_blanks(called, late_failure).await?.into_response())
}

fn check_server(server: &str) -> Result<(), AioProblem> {
    match server == SERVER_NAME {
        true => Ok(()),
        false => Err(AioProblem::new(StatusCode::NOT_FOUND, format!("MCP server {server} not found"))),
    }
}

/// The result of a call; a failed one is in `data`, too.
fn result_envelope(mut result: CallToolResult) -> ResponseEnvelope<Value> {
    result.result_type = None;
    let failed = result.is_error == Some(true);
    let data = serde_json::to_value(result).expect("results consist of texts and JSON");
    match failed {
        true => ResponseEnvelope::failure("Tool call failed", data),
        false => ResponseEnvelope::success(DEFAULT_MESSAGE, data),
    }
}

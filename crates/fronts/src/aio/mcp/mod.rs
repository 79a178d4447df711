//! Tools for models: `/mcp` for clients of the Model Context Protocol, and `/v1/mcp/…` for plain HTTP.
//!
//! The tools call the functions behind the HTTP routes. A sandbox has one server with them; AIO's image has others,
//! such as one for its browser, which does not exist here.

mod command_tools;
mod file_tools;
mod info_tools;
mod routes;

use std::sync::LazyLock;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::AioState;
use super::body::parse_fields;
use super::problem::AioProblem;
use super::sandbox_info::API_VERSION;
use super::target::AioTarget;
use crate::kit::mcp::{McpServerInfo, ToolArguments, ToolFailure, ToolSet};

pub(super) use self::routes::routes;

/// The server that the tools belong to.
const SERVER_NAME: &str = "sandbox";

const SERVER_INFO: McpServerInfo = McpServerInfo {
    name: SERVER_NAME,
    version: API_VERSION,
    instructions: "The tools work in one Linux sandbox, whose files stay between calls. Paths are absolute. \
                   sandbox_get_context says what is installed.",
};

static TOOLS: LazyLock<ToolSet<ToolContext>> = LazyLock::new(|| {
    ToolSet::new(
        include_str!("tools.json"),
        &[
            ("sandbox_execute_bash", command_tools::execute_bash),
            ("sandbox_execute_code", command_tools::execute_code),
            ("sandbox_file_operations", file_tools::operate_on_file),
            ("sandbox_str_replace_editor", file_tools::edit_file),
            ("sandbox_get_context", info_tools::get_context),
            ("sandbox_get_packages", info_tools::get_packages),
        ],
    )
});

/// The sandbox that a tool works in.
#[derive(Clone)]
struct ToolContext {
    state: AioState,
    target: AioTarget,
}

impl From<AioProblem> for ToolFailure {
    fn from(problem: AioProblem) -> Self {
        let AioProblem { mut message, data, hint, validation, .. } = problem;
        if !validation.is_empty() {
            let errors = validation.iter().map(|error| {
                // The first part says that the value was in the body.
                let name = error.loc.get(1..).unwrap_or_default().join(".");
                format!("Invalid argument `{name}`: {}.", error.msg)
            });
            message = errors.collect::<Vec<_>>().join(" ");
        }
        if let Some(hint) = hint {
            message = format!("{message} ({hint})");
        }
        let data = data.map(|error| json!({"success": false, "message": message, "error": error}));
        Self { message, data }
    }
}

/// Reads arguments as the body of the HTTP route that does the same.
fn read_arguments<T: DeserializeOwned>(arguments: ToolArguments) -> Result<T, ToolFailure> {
    Ok(parse_fields(Value::Object(arguments))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_definition_has_a_function() {
        assert_eq!(TOOLS.definitions().len(), 6);
    }

    #[test]
    fn refused_arguments_are_named() {
        let failure = ToolFailure::from(AioProblem::invalid_field("timeout", "it is negative"));
        assert_eq!(failure.message, "Invalid argument `timeout`: it is negative.");
    }
}

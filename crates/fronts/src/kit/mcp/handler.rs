//! A set of tools as rmcp's handler of one message.

use std::borrow::Cow;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, Implementation, ListToolsResult, PaginatedRequestParams,
    ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};

use super::tools::ToolSet;

/// How many characters of a name that a client sent appear in an error.
const MAX_SHOWN_CHARS: usize = 100;

/// How a server introduces itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct McpServerInfo {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// What a model should know before it uses the tools.
    pub(crate) instructions: &'static str,
}

/// Answers one message.
pub(super) struct ToolHandler<C: 'static> {
    pub(super) info: McpServerInfo,
    pub(super) tools: &'static ToolSet<C>,
    pub(super) context: C,
}

impl<C: Clone + Send + Sync + 'static> ServerHandler for ToolHandler<C> {
    fn get_info(&self) -> ServerConfig {
        let McpServerInfo { name, version, instructions } = self.info;
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new(name, version))
            .with_instructions(instructions)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools.definitions()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tools.definition(name).cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let CallToolRequestParams { name, arguments, .. } = request;
        let call = self.tools.call(&name, self.context.clone(), arguments.unwrap_or_default());
        let result = tokio::select! {
            biased;
            result = call => result,
            // The client has disconnected. Dropping the call ends it, as it ends the handler of a request.
            () = context.ct.cancelled() => return Err(ErrorData::internal_error("the call was cancelled", None)),
        };
        result.map(CallToolResponse::Complete).ok_or_else(|| unknown_tool(&name))
    }
}

fn unknown_tool(name: &str) -> ErrorData {
    let shown: String = name.chars().take(MAX_SHOWN_CHARS).collect();
    ErrorData::invalid_params(
        Cow::Owned(format!("unknown tool `{shown}`; `tools/list` names them all")),
        None,
    )
}

//! Tools for models over the Model Context Protocol.
//!
//! ```text
//! POST ─► endpoint.rs ─► rmcp ─► handler.rs ─► tools.rs ─► the functions of a front
//! ```
//! A front has a set of tools, and gives each message the context that its functions need, such as a sandbox. The server
//! keeps nothing between two messages, so clients go on after its restart, and any number of them costs nothing.

mod endpoint;
mod handler;
mod tools;

pub(crate) use self::endpoint::McpMessage;
pub(crate) use self::handler::McpServerInfo;
pub(crate) use self::tools::{ToolArguments, ToolFailure, ToolFuture, ToolImage, ToolOutput, ToolSet};

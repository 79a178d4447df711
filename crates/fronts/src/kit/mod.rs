//! Parts that any front may use. Nothing here knows a front: what differs between APIs is a
//! parameter.

pub(crate) mod axum_socket;
pub(crate) mod body;
pub(crate) mod byte_search;
pub(crate) mod command_ending;
pub(crate) mod command_socket;
pub(crate) mod download;
pub(crate) mod error_format;
pub(crate) mod headers;
pub(crate) mod json_text_encoder;
pub(crate) mod json_text_scanner;
pub(crate) mod lines;
#[cfg(feature = "kit-mcp")]
pub(crate) mod mcp;
pub(crate) mod multipart;
pub(crate) mod nested;
pub(crate) mod output_records;
pub(crate) mod query;
pub(crate) mod socket;
pub(crate) mod sse;
pub(crate) mod terminal_socket;
pub(crate) mod time;
pub(crate) mod utf8_decoder;

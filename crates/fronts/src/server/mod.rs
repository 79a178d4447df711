//! What happens to a connection and a request before any front sees it: accepting, HTTP framing,
//! the limit on requests in progress, the request log.

pub(crate) mod accept;
pub(crate) mod concurrency;
pub(crate) mod connection;
pub(crate) mod drain_body;
pub(crate) mod malformed;
pub(crate) mod request_log;

//! What happens to a connection and a request before any front sees it: accepting, HTTP framing,
//! limits on connections and on requests in progress, the request log.

pub(crate) mod accept;
pub(crate) mod concurrency;
pub(crate) mod connection;
pub(crate) mod connection_state;
pub(crate) mod drain_body;
pub(crate) mod head_limit;
pub(crate) mod malformed;
pub(crate) mod owner_slots;
pub(crate) mod peer_limits;
pub(crate) mod request_log;

#[cfg(test)]
mod tests;

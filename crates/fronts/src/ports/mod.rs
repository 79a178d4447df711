//! Forwarding of requests to ports inside sandboxes, for any front. A front parses the address,
//! decides who may use it and formats errors; the headers that never reach a sandbox are in the
//! registry.

mod address_mask;
mod body;
pub(crate) mod forward;
mod headers;
mod relay;
pub(crate) mod target;

//! The connections by which the keeper and servers control egress.
//!
//! ```text
//! packet ─► role allows it? ─► applied in the order of arrival ─► reply, at once or when connections are closed
//! ```
//!
//! A keeper brings sockets and settings and is trusted. A server brings policies; what it sends is checked and bounded, and
//! at worst its connection is closed.

mod connection;
mod requests;
#[cfg(test)]
mod tests;

pub(crate) use connection::{accept_servers, serve_control};

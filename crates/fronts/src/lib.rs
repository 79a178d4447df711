//! The HTTP surface: compatible APIs, each in its own folder, on one listener.
//!
//! A front translates requests into calls to `service`, and its results into the format of one API.
//! It depends on nothing below `service`, and no front depends on another. [`router`] combines the
//! fronts, [`serve`] speaks HTTP.

#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a test may panic"))]

mod answer;
mod auth;
mod door;
mod hosts;
mod leftover;
mod limits;
mod openapi;
mod records;
mod router;
mod serve;
mod settings;
mod trace;
mod unreadable;

#[cfg(feature = "opensandbox")]
mod opensandbox;
#[cfg(feature = "operator")]
mod operator;

#[cfg(feature = "operator")]
pub use router::operators_router;
pub use router::router;
pub use serve::{serve, serve_operators};
pub use settings::{ApiPorts, Gateway, GatewayMode, Lines, NotADialect, RouteKey, Settings, Short};
pub use trace::install_metrics;

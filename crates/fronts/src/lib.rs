//! The HTTP surface: compatible APIs, each in its own folder, on one listener.
//!
//! A front translates requests into calls to `service`, and its results into the format of one API.
//! It depends on nothing below `service`, and no front depends on another.
//!
//! ```text
//! registry.rs   one row per front; the shared layers take everything they know about it from there
//! server/       connections and requests before any front sees them
//! kit/          parts that any front may use
//! ports/        forwarding to ports inside sandboxes
//! ```
//! [`build_router`] combines the fronts, [`serve_network`] speaks HTTP.

#![cfg_attr(
    not(all(feature = "aio", feature = "opensandbox", feature = "operator")),
    allow(dead_code, reason = "a front alone does not use every shared part")
)]
#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a test may panic"))]

mod auth;
mod front_sandboxes;
mod front_settings;
mod home_page;
mod hosts;
mod kit;
mod openapi;
mod ports;
mod registry;
mod router;
mod server;
mod settings;

#[cfg(feature = "aio")]
mod aio;
#[cfg(feature = "opensandbox")]
mod opensandbox;
#[cfg(feature = "operator")]
mod operator;

pub use front_sandboxes::{
    FrontSandboxError, FrontSandboxRequest, RequestedNetwork, RootAccess, RootSandbox, RootSandboxError,
    RootVariables, open_root_sandbox, read_root_variables, sandbox_guests,
};
pub use front_settings::{
    FrontSection, FrontSetting, FrontSettingError, FrontSettingKind, FrontValues, SettingValues,
    front_sections,
};
pub use registry::{fronts_with_guest, guest_of_front};
pub use router::{build_router, operators_router};
pub use server::connection::{ConnectionSettings, serve_network, serve_operators, serve_private_socket};
pub use server::peer_limits::{TrustedNetwork, TrustedNetworkError};
pub use server::request_log::install_metrics;
pub use settings::{ApiPorts, GatewayMode, GatewaySettings, HttpSettings};

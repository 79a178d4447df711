//! The AIO API and its provisioner against the real binary: what must hold whatever clients, agents and pages do.
//! Single operations are tested in process and with the SDK.

mod clients;
mod crashes;
mod hanging_agent;
mod large_files;
mod outputs;
mod pools;
mod preview_pages;
mod recorded_requests;
mod root_files;
mod searches;
mod state_root;
mod user_data;

use e2e::aio;
use e2e::server::{ServerBuilder, TestServer};

/// A server whose provisioner can be used.
fn start_server() -> TestServer {
    ServerBuilder::new().env("CORACLE_API_KEY", aio::KEY).env("CORACLE_ON_STOP", "remove").start()
}

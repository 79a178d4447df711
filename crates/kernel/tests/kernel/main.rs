//! Tests kernels through their pipes, without an agent or a sandbox.
#![expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]

mod harness;
mod jupyter;
mod scripts;

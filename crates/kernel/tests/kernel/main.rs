//! Drives kernels by their pipes, without an agent or a sandbox.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod harness;
mod jupyter;
mod scripts;

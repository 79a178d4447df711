//! The programs that `coracle` contains, so that it stays one file: the agent of every sandbox, and a small
//! program with the client commands. `build.rs` builds both.
//!
//! `coracle` as a whole has tens of thousands of addresses that are relocated whenever it starts, which takes
//! time and private memory. Both programs are small: one starts in every sandbox, the other
//! in every `coracle exec`.
#![cfg_attr(
    client_program,
    expect(unsafe_code, reason = "the entry of `coracle` runs before there is anything to call")
)]

#[cfg(client_program)]
mod client_entry;

/// The program that is the first process of every sandbox.
pub static AGENT_PROGRAM: &[u8] = include_bytes!(env!("CORACLE_AGENT_PROGRAM"));

/// The variable that makes `coracle` start as a whole, whatever its command.
pub const WHOLE_PROGRAM_VARIABLE: &str = "CORACLE_WHOLE_PROGRAM";

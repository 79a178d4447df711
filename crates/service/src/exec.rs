//! What runs in a sandbox: commands, shells, contexts, and their output.

pub(crate) mod code_output;
pub(crate) mod command_slots;
pub(crate) mod contexts;
mod first_run;
pub(crate) mod kernels;
pub(crate) mod named_contexts;
pub(crate) mod output_stream;
pub(crate) mod processes;
pub(crate) mod sessions;
pub(crate) mod shared_sessions;
pub(crate) mod terminals;
pub(crate) mod terminate;
pub(crate) mod wait;

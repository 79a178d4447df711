//! What `/v1/shell` and `/v1/bash` have in common: their sessions in the core, runs in them, and checks of fields.
//!
//! ```text
//! fields.rs         checks of what clients send
//! session.rs        a session of one of the two groups: open, find, list
//! run.rs            a run with the usual limits, and input for it
//! bounded_text.rs   the beginning and the end of a text in bounded memory
//! ```

pub(super) mod bounded_text;
pub(super) mod fields;
pub(super) mod run;
pub(super) mod session;

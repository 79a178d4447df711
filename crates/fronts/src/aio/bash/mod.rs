//! Commands on pipes, `/v1/bash`: each is a new bash with separate output and errors, in a session that keeps a
//! directory and a history.
//!
//! ```text
//! exec ─► session.rs ─► a run of a command session ─► collected_output.rs    one JSON body, late if it takes long
//! output ─► stream_offsets.rs                         what was printed after two offsets
//! write, kill, sessions ─► session.rs, ../commands/   what the agent knows about a session
//! ws ─► socket.rs                                     the same for a person or a program that stays connected
//! ```
//! The server keeps nothing about sessions: the agent has their names, directories, runs and output.

mod collected_output;
mod command_status;
mod exec;
mod fields;
mod input;
mod output;
mod session;
mod sessions;
mod socket;
mod stream_offsets;

use axum::routing::{get, post};

use super::routes::AioRoute;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/bash/exec", post(exec::exec_command)),
        ("/v1/bash/output", post(output::read_output)),
        ("/v1/bash/write", post(input::write_input)),
        ("/v1/bash/kill", post(input::kill_command)),
        ("/v1/bash/sessions", get(sessions::list_sessions)),
        ("/v1/bash/sessions/create", post(sessions::create_session)),
        ("/v1/bash/sessions/{id}/close", post(sessions::close_session)),
        ("/v1/bash/ws", get(socket::attach_session)),
    ]
}

//! Shells on terminals, `/v1/shell`: sessions that clients name, the commands in them, and a terminal for people.
//!
//! ```text
//! exec ─► command_run.rs ─► collected_text.rs ─► exec_response.rs    one JSON body, with blanks before it if it takes long
//!                       └─► text.rs ─► exec_events.rs                the same as server-sent events
//! view, wait, write, kill, sessions ─► session.rs, ../commands/      what the agent knows about a session
//! tools of models ─► tool_command.rs ─► exec.rs                         commands in a session that all calls share
//! ws, /terminal ─► terminal.rs ─► the terminals of the service       they have nothing to do with the sessions above
//! ```
//! The server keeps nothing about sessions: the agent has their names, directories, runs and output.

mod collected_text;
mod command_run;
mod exec;
mod exec_events;
mod exec_response;
mod input;
mod session;
mod sessions;
mod terminal;
mod terminal_messages;
mod text;
mod tool_command;
mod view;
mod view_events;

use axum::routing::{delete, get, post};

use super::routes::AioRoute;

pub(super) use self::session::ShellStatus;
pub(super) use self::tool_command::{ToolSession, run_tool_command};

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/shell/exec", post(exec::exec_command)),
        ("/v1/shell/view", post(view::view_session)),
        ("/v1/shell/wait", post(view::wait_for_session)),
        ("/v1/shell/write", post(input::write_input)),
        ("/v1/shell/kill", post(input::kill_session)),
        ("/v1/shell/sessions", get(sessions::list_sessions).delete(sessions::delete_all_sessions)),
        ("/v1/shell/sessions/create", post(sessions::create_session)),
        ("/v1/shell/sessions/update", post(sessions::update_session)),
        ("/v1/shell/sessions/stats", get(sessions::get_stats)),
        // Clients insert names as they are, so they may contain slashes.
        ("/v1/shell/sessions/{*id}", delete(sessions::delete_session)),
        ("/v1/shell/terminal-url", get(terminal::create_terminal_url)),
        ("/v1/shell/ws", get(terminal::attach_terminal)),
        ("/terminal", get(terminal::show_page)),
    ]
}

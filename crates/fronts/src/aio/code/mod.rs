//! Code that clients run: `/v1/jupyter`, `/v1/nodejs` and `/v1/code`.
//!
//! ```text
//! jupyter.rs, nodejs.rs, unified.rs   the three APIs
//!   └─► context_run.rs                code in a context of the core, under the client's name for the session
//!   └─► node_process.rs               code in a Node.js process of its own
//!         └─► outputs.rs              what the code printed, displayed and raised
//! ```
//! Python sessions of `/v1/jupyter` and `/v1/code` are the same contexts, and so are those of JavaScript.

mod context_run;
mod jupyter;
mod limits;
mod node_process;
mod nodejs;
mod outputs;
mod session_name;
mod unified;

use axum::routing::{delete, get, post};

use super::routes::AioRoute;

pub(super) use self::unified::execute_code;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/jupyter/execute", post(jupyter::execute_code)),
        ("/v1/jupyter/info", get(jupyter::get_info)),
        ("/v1/jupyter/sessions", get(jupyter::list_sessions).delete(jupyter::delete_sessions)),
        ("/v1/jupyter/sessions/create", post(jupyter::create_session)),
        ("/v1/jupyter/sessions/{session_id}", delete(jupyter::delete_session)),
        ("/v1/nodejs/execute", post(nodejs::execute_code)),
        ("/v1/nodejs/info", get(nodejs::get_info)),
        ("/v1/nodejs/sessions", get(nodejs::list_sessions).post(nodejs::create_session)),
        (
            "/v1/nodejs/sessions/{session_id}",
            get(nodejs::get_session).patch(nodejs::update_session).delete(nodejs::delete_session),
        ),
        ("/v1/code/execute", post(unified::execute_code)),
        ("/v1/code/info", get(unified::get_info)),
    ]
}

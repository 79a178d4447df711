//! The description of a sandbox: its context and the packages in it.

mod context;
mod packages;
mod short_command;

use axum::routing::get;

use super::routes::AioRoute;

pub(super) use self::context::ToolCache;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/sandbox", get(context::get_context)),
        ("/v1/sandbox/packages/python", get(packages::list_python_packages)),
        ("/v1/sandbox/packages/nodejs", get(packages::list_node_packages)),
    ]
}

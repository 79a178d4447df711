//! The sandbox itself: its context, the packages in it, and its shutdown hooks.

mod context;
mod hooks;
mod packages;
mod short_command;

use axum::routing::{delete, get};

use super::routes::AioRoute;

pub(super) use self::context::{API_VERSION, ToolCache, get_context};
pub(super) use self::packages::{InstalledPackage, list_node_packages, list_python_packages};

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/sandbox", get(context::get_context)),
        ("/v1/sandbox/packages/python", get(packages::list_python_packages)),
        ("/v1/sandbox/packages/nodejs", get(packages::list_node_packages)),
        ("/v1/sandbox/hooks", get(hooks::list_hooks).post(hooks::register_hook)),
        ("/v1/sandbox/hooks/{name}", delete(hooks::remove_hook)),
    ]
}

//! One sandbox, seen through the address and token that its server gave out.

use super::http::Api;

/// Access to the commands, files and terminals of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    pub(super) api: Api,
}

impl Sandbox {
    pub(super) fn new(api: Api) -> Self {
        Self { api }
    }
}

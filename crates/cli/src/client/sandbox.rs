//! One sandbox, seen through the address and token that its server gave out.

use super::http::ApiClient;

/// Access to the commands, files and terminals of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct SandboxClient {
    pub(super) api: ApiClient,
}

impl SandboxClient {
    pub(super) fn new(api: ApiClient) -> Self {
        Self { api }
    }
}

//! Sandboxes that are made without the provisioner: by `coracle create --guest aio`, and for `coracle aio`, whose server
//! serves one of them at its root.
//!
//! ```text
//! variables.rs   what the variables of AIO's image mean
//! plan.rs        a request and its variables ─► a sandbox of the core
//! root.rs        every path of a server ─► access ─► the API of its one sandbox
//! ```

mod plan;
mod root;
mod variables;

use http::request::Parts;
use service::{SandboxRef, Service};

use super::ORIGIN;
use super::address::SandboxAddress;
use super::notes::AioNotes;
use super::provisioner::UrlOrigin;
use crate::front_sandboxes::FrontSandboxes;
use crate::settings::HttpSettings;

pub(super) static SANDBOXES: FrontSandboxes = FrontSandboxes {
    plan_sandbox: plan::plan_sandbox,
    sandbox_url,
    root_routes: root::build_root,
    variable_names: variables::ENVIRONMENT_NAMES,
    read_variables: variables::read_variables,
};

/// The address of a sandbox, if this front made it.
fn sandbox_url(
    service: &Service,
    settings: &HttpSettings,
    parts: &Parts,
    sandbox: &SandboxRef,
) -> Option<String> {
    let key = sandbox.key().filter(|_| sandbox.read_state(|state| state.origin == ORIGIN))?;
    let address = SandboxAddress::of_key(service, key, &AioNotes::of_sandbox(sandbox));
    Some(UrlOrigin::of_request(settings, parts).sandbox_url(&address))
}

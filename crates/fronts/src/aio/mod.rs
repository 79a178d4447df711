//! The API of AIO Sandbox, one for each sandbox, and the provisioner API by which DeerFlow creates sandboxes.
//!
//! ```text
//! /api/sandboxes…            provisioner/ ─► creates sandboxes and returns their addresses
//! /aio/{handle}.{mac}/…      address.rs ─► target.rs ─► the routes of one sandbox (routes.rs)
//! aio-{handle}-{mac} as host address.rs ─► the same
//! ```
//! An address opens its sandbox and nothing else; no key is needed with it. Where an address has no code, `access/`
//! decides.

mod access;
mod address;
mod bash;
mod body;
mod code;
mod commands;
mod documents;
mod envelope;
mod files;
mod guest;
mod keep_alive;
mod mcp;
mod notes;
mod observe;
mod operations;
mod own_sandbox;
mod ports;
mod problem;
mod provisioner;
mod routes;
mod sandbox_info;
mod settings;
mod shell;
mod skills;
mod target;
mod unsupported;

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, any};
use service::Service;

use crate::registry::{Front, FrontRoutes, PortHandler};
use crate::settings::HttpSettings;

use self::settings::AioSettings;

pub(crate) use self::provisioner::FRONT as PROVISIONER_FRONT;

/// The origin stored with the sandboxes of this front.
const ORIGIN: &str = "aio";

/// The row of the sandbox API in the registry.
pub(crate) static FRONT: Front = Front {
    name: "aio",
    guest: Some(guest::guest_of_server),
    sandboxes: Some(&own_sandbox::SANDBOXES),
    router: |service, settings| {
        let state = AioState::new(service, settings);
        let sandboxes = target::SandboxRouter { router: routes::build_router(state.clone()), state };
        let router = path_routes()
            .into_iter()
            .fold(Router::new(), |router, (path, method)| router.route(&path, method));
        let router = router.with_state(sandboxes.clone());
        let ports: PortHandler = Arc::new(move |label, request| {
            let sandboxes = sandboxes.clone();
            Box::pin(async move { sandboxes.answer_label(&label, request).await })
        });
        FrontRoutes { router, ports: Some(ports) }
    },
    settings: settings::SETTINGS,
    check_settings: settings::check_settings,
    on_operators_socket: false,
    path_prefixes: &["/aio"],
    claims_label: address::claims_label,
    routing_headers: &[],
    key_headers: &[],
    open_paths: &[],
    stripped_headers: &[ports::PORT_HEADER_NAME, access::KEY_HEADER_NAME],
    error_format: &envelope::ENVELOPE_ERRORS,
    openapi: operations::openapi_part,
    #[cfg(test)]
    paths: || path_routes().into_iter().map(|(path, _)| path).collect(),
};

/// The state shared by all handlers of this front.
#[derive(Clone)]
pub(crate) struct AioState {
    service: Service,
    settings: Arc<HttpSettings>,
    own_settings: Arc<AioSettings>,
    /// The credentials of sandboxes whose address contains no code.
    access: Arc<access::AccessControl>,
    tools: Arc<sandbox_info::ToolCache>,
    /// Sessions and reports of observed sandboxes.
    observe: Arc<observe::ObserveRegistry>,
    /// Watches of files, which outlive requests.
    watches: Arc<files::WatchRegistry>,
    skills: Arc<skills::SkillLimits>,
}

impl AioState {
    fn new(service: Service, settings: Arc<HttpSettings>) -> Self {
        let own_settings = settings.fronts.get(FRONT.name).map(AioSettings::from_values);
        let own_settings =
            own_settings.transpose().expect("settings are checked when the configuration is read");
        let own_settings = own_settings.unwrap_or_default();
        Self {
            service,
            settings,
            access: Arc::new(access::AccessControl::new(own_settings.access.clone())),
            own_settings: Arc::new(own_settings),
            tools: Arc::default(),
            observe: Arc::default(),
            watches: Arc::default(),
            skills: Arc::default(),
        }
    }
}

/// The paths below which the API of each sandbox is served.
fn path_routes() -> Vec<(String, MethodRouter<target::SandboxRouter>)> {
    // A wildcard does not match the bare slash.
    ["/aio/{address}", "/aio/{address}/", "/aio/{address}/{*path}"]
        .map(|path| (path.to_owned(), any(target::answer_path)))
        .to_vec()
}

//! What separates parts of a sandbox from each other and from the host's values: isolated sessions,
//! the broker that creates their namespaces, and the files that show the sandbox's own limits.

pub(crate) mod broker_client;
pub(crate) mod env_filter;
pub(crate) mod isolated_session;
pub(crate) mod limit_view;
pub(crate) mod namespace_broker;

//! Sandboxes from their creation to their end: the registry, one driver each, keys and leases, expiry, and recovery
//! after a restart.

pub(crate) mod acquire;
pub(crate) mod activity;
pub(crate) mod admission;
pub(crate) mod detached_creates;
pub(crate) mod driver;
pub(crate) mod entrypoint;
pub(crate) mod hooks;
pub(crate) mod key_removal;
pub(crate) mod lease;
pub(crate) mod planning;
pub(crate) mod reaper;
pub(crate) mod reconcile;
pub(crate) mod registry;
pub(crate) mod sandbox_keys;
pub(crate) mod sandbox_ref;
pub(crate) mod shutdown_hooks;

//! Sandboxes on this host.

pub mod volumes;

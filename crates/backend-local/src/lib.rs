//! Sandboxes on this host.

pub mod images;
pub mod volumes;

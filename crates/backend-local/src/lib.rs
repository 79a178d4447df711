//! Sandboxes on this host.

pub mod images;
pub mod range;
pub mod volumes;

//! Sandboxes on this host: namespaces, overlays, control groups and filters.
//!
//! `native` is the backend as the service sees it; it talks to the `launcher`, the one process
//! with privileges, which builds each `jail` from a plan.

pub mod backup;
pub mod cgroups;
pub mod identity;
mod ids;
pub mod images;
pub mod jail;
pub mod launcher;
pub mod local;
mod measure_words;
pub mod network;
pub mod probe;
pub mod settings;
pub mod uid_ranges;
pub mod volumes;

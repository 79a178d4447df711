//! The jail: the plan of a sandbox, and building it from outside and from inside.

pub(crate) mod build;
pub(crate) mod enter;
pub(crate) mod filters;
pub(crate) mod host_shares;
pub(crate) mod id_maps;
pub(crate) mod limit_view;
pub mod plan;
pub(crate) mod sources;
pub(crate) mod stages;
pub(crate) mod step;

//! The native jail: the plan of a sandbox, and building it from outside and from inside.

pub mod build;
pub mod enter;
pub mod filters;
pub mod id_maps;
pub mod limit_view;
pub mod plan;
pub mod sources;
pub mod step;

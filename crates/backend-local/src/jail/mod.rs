//! The native jail: what to build, building it from outside, and building it from inside.

pub mod build;
pub mod enter;
pub mod filters;
pub mod limit_view;
pub mod owners;
pub mod plan;
pub mod sources;
pub mod step;

//! The end-to-end tests: a module per subject, all against the real binary.

mod crash;
mod escape;
mod events;
mod keys;
mod limits;
mod owners;
mod run;

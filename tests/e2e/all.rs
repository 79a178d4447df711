//! The end-to-end tests: a module per subject, all against the real binary.

mod crash;
mod escape;
mod events;
mod failures;
mod keys;
mod limits;
mod maxima;
mod open_files;
mod owners;
mod run;

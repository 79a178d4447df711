//! The end-to-end tests: a module per subject, all against the real binary.

mod crash;
mod escape;
mod full_disk;
mod keys;
mod large_files;
mod limits;
mod mounts;
mod owners;
mod run;
mod serving;

//! The end-to-end tests: a module per subject, all against the real binary.

mod contexts;
mod crash;
mod escape;
mod events;
mod failures;
mod full_disk;
mod images;
mod kernels;
mod keys;
mod large_files;
mod limits;
mod maxima;
mod mounts;
mod network;
mod open_files;
mod operators;
mod owners;
mod pools;
mod run;
mod serving;
mod snapshots;
mod volumes;

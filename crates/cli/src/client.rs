//! A client of a Coracle server, which uses the same OpenSandbox API as every other client.
//!
//! [`Server`] makes, lists and removes sandboxes; [`Sandbox`] gives access to one of them, with its
//! commands, files and terminals. Both are an [`http::Api`]: a base address and the headers that
//! authorize access to it.

mod commands;
mod exec_socket;
mod files;
mod http;
mod images;
mod keys;
mod lifecycle;
mod operator;
mod pools;
mod processes;
mod resolve;
mod sandbox;
mod snapshots;
mod terminal;
mod volumes;
mod way;

pub(crate) use commands::{LogRecord, Logs};
pub(crate) use exec_socket::ExecSocket;
pub(crate) use files::{FileInfo, Kind};
pub(crate) use http::Refused;
pub(crate) use images::{ArchiveStream, ImageProgress, ImageSource};
pub(crate) use keys::{KeyInfo, RevokedKey};
pub(crate) use lifecycle::{NewSandbox, SandboxInfo, Server};
pub(crate) use operator::{EventsFrom, Hour, Report, Sample, UsedImage};
pub(crate) use pools::{NewPool, PoolInfo};
pub(crate) use processes::{ProcessInfo, ProcessRef};
pub(crate) use resolve::{Candidate, OwnerScope, SandboxRef, SnapshotRef, VolumeKey};
pub(crate) use sandbox::Sandbox;
pub(crate) use snapshots::{OwnedSnapshot, SnapshotInfo};
pub(crate) use terminal::{FromTerminal, Terminal, ToTerminal};
pub(crate) use volumes::VolumeInfo;

/// Whether the server answered with this status.
pub(crate) fn refused_with(error: &anyhow::Error, status: ::http::StatusCode) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == status)
}

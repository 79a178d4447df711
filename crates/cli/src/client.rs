//! A client of a Coracle server, which uses the same OpenSandbox API as every other client.
//!
//! [`ServerClient`] makes, lists and removes sandboxes; [`SandboxClient`] gives access to one of them, with its
//! commands, files and terminals. Both are an [`http::ApiClient`]: a base address and the headers that
//! authorize access to it.

mod commands;
mod connector;
mod exec_socket;
mod files;
mod guest_sandboxes;
mod http;
mod images;
mod keys;
mod lifecycle;
mod network;
mod operator;
mod pools;
mod processes;
mod resolve;
mod sandbox;
mod snapshots;
mod terminal;
mod volumes;
mod websocket;

pub(crate) use commands::{LogRecord, LogStream};
pub(crate) use exec_socket::{ExecSocket, StartCarrier};
pub(crate) use files::{FileInfo, FileKind};
pub(crate) use guest_sandboxes::CreateGuestRequest;
pub(crate) use http::ServerResponseError;
pub(crate) use images::{ArchiveStream, ImageProgress, ImageSource};
pub(crate) use keys::{KeyInfo, RevokedKey};
pub(crate) use lifecycle::{CreateSandboxRequest, SandboxInfo, ServerClient};
pub(crate) use network::{PolicyStatus, policy_body};
pub(crate) use operator::{EventsFrom, HourlyUsage, SandboxReport, UsageSample, UsedImage};
pub(crate) use pools::{CreatePoolRequest, PoolInfo};
pub(crate) use processes::{ProcessInfo, ProcessRef};
pub(crate) use resolve::{OwnerScope, ResolveCandidate, SandboxRef, SnapshotRef, VolumeKey};
pub(crate) use sandbox::SandboxClient;
pub(crate) use snapshots::{OwnedSnapshot, SnapshotInfo};
pub(crate) use terminal::{TerminalEvent, TerminalMessage, TerminalSocket};
pub(crate) use volumes::VolumeInfo;

/// Whether the server refused the request before it did anything. A proxy may report another failure although
/// its server has begun.
pub(crate) fn is_refusal(error: &anyhow::Error) -> bool {
    error.downcast_ref::<ServerResponseError>().is_some_and(|refused| {
        refused.status.is_client_error() && refused.status != ::http::StatusCode::REQUEST_TIMEOUT
    })
}

/// Whether the server answered with this status.
pub(crate) fn failed_with_status(error: &anyhow::Error, status: ::http::StatusCode) -> bool {
    error.downcast_ref::<ServerResponseError>().is_some_and(|refused| refused.status == status)
}

//! Files in a sandbox, each operation with the identity it is done as.

use std::time::SystemTime;

use backend::AgentStream;
use domain::{Identity, Owner, SandboxId};

use crate::{Reading, Service, ServiceError, Watching, Writing};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// The absolute path.
    pub path: String,
    pub kind: FileKind,
    pub size: u64,
    /// Permission bits with set-id and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Names from the accounts inside, or decimal numbers.
    pub owner: String,
    pub group: String,
    pub modified: SystemTime,
    pub created: SystemTime,
    pub link_target: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

/// What is left out stays as it is or gets its default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, such as `0o644`.
    pub mode: Option<u32>,
    /// The name of an account or a decimal uid.
    pub owner: Option<String>,
    pub group: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The old file stays until the new one is complete.
    Replace,
    Append,
}

/// Each occurrence of `old` in the file becomes `new`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    pub path: String,
    pub old: String,
    pub new: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    pub path: String,
    pub change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Created,
    Written,
    Removed,
    Renamed,
    Attributes,
    /// Events were dropped; the watcher should look again.
    Overflow,
}

impl Service {
    pub async fn stat(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        paths: &[String],
    ) -> Result<Vec<FileInfo>, ServiceError> {
        todo!()
    }

    pub async fn read(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Reading, ServiceError> {
        todo!()
    }

    pub async fn write(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        attributes: Attributes,
        mode: WriteMode,
    ) -> Result<Writing, ServiceError> {
        todo!()
    }

    pub async fn list_directory(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        depth: u32,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        todo!()
    }

    pub async fn search(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        pattern: &str,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        todo!()
    }

    pub async fn move_file(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        from: &str,
        to: &str,
        overwrite: bool,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    pub async fn remove(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        recursive: bool,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    pub async fn make_directory(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        attributes: Attributes,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    pub async fn set_attributes(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        attributes: Attributes,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    /// How often each edit's text was found and replaced.
    pub async fn replace(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        edits: Vec<Edit>,
    ) -> Result<Vec<u64>, ServiceError> {
        todo!()
    }

    pub async fn watch(
        &self,
        owner: &Owner,
        id: &SandboxId,
        identity: &Identity,
        path: &str,
        recursive: bool,
    ) -> Result<Watching, ServiceError> {
        todo!()
    }

    /// Opens a byte stream to `127.0.0.1:port` inside.
    pub async fn tunnel(
        &self,
        owner: &Owner,
        id: &SandboxId,
        port: u16,
    ) -> Result<AgentStream, ServiceError> {
        todo!()
    }
}

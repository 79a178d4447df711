//! File operations in a sandbox, each done as a given identity.

use std::time::SystemTime;

use backend::AgentStream;
use domain::{Identity, Owner, SandboxId, SessionId};
use wire::files::{FileOperation, FileRequest};
use wire::{Reply, Request};

use crate::agent_client::{Agent, Connection, STALL, within};
use crate::transfer::Tunnel;
use crate::{Reading, Service, ServiceError, Watching, Writing, faults, listing, translate};

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
    /// Names from the accounts inside the sandbox, or decimal numbers.
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

/// Attributes that are `None` stay as they are or get their default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// Permission bits, such as `0o644`.
    pub mode: Option<u32>,
    /// The permission bits of a newly created file, if `mode` is `None`.
    pub new_mode: Option<u32>,
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

/// Replaces each occurrence of `old` in the file by `new`.
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
    /// Events were dropped; the watcher should scan again.
    Overflow,
}

/// The identity of a file operation, and the session in whose nest it is done, if any.
#[derive(Clone, Copy, Debug)]
pub struct Actor<'a> {
    pub identity: &'a Identity,
    pub nest: Option<&'a SessionId>,
}

impl<'a> From<&'a Identity> for Actor<'a> {
    fn from(identity: &'a Identity) -> Self {
        Self { identity, nest: None }
    }
}

impl Service {
    /// Returns one entry for each path, in order; a missing path fails the whole call.
    pub async fn stat(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        paths: &[String],
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let operation = FileOperation::Stat { paths: paths.to_vec() };
        let (handle, _activity) = self.0.enter(owner, id)?;
        match ask(&handle.agent, actor, operation).await? {
            Reply::Info(infos) if infos.len() == paths.len() => {
                Ok(infos.into_iter().map(translate::file_info).collect())
            }
            _ => Err(handle.agent.unexpected()),
        }
    }

    /// Reads a file, or `length` bytes of it from `offset` on.
    pub async fn read(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<Reading, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let operation = FileOperation::Read { path: path.to_owned(), offset, length };
        let agent = handle.agent.clone();
        let (connection, reply) = begin(&agent, actor, operation).await?;
        match reply {
            Reply::Reading { size } => Ok(Reading::new(agent, connection, size, length, activity)),
            _ => Err(agent.unexpected()),
        }
    }

    /// Begins to write a file. The reason why it cannot be written may be returned by any later step.
    pub async fn write(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        attributes: Attributes,
        mode: WriteMode,
    ) -> Result<Writing, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let (path, attributes) = (path.to_owned(), translate::attributes(attributes));
        let operation = match mode {
            WriteMode::Replace => FileOperation::Write { path, attributes },
            WriteMode::Append => FileOperation::Append { path, attributes },
        };
        let agent = handle.agent.clone();
        let connection = agent.call(request(actor, operation)).await?;
        Ok(Writing::new(agent, connection, activity))
    }

    /// The entries below `path`, down to `depth`, depth first and sorted by name.
    pub async fn list_directory(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        depth: u32,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        listing::list(
            &handle.agent,
            path,
            request(actor, FileOperation::List { path: path.to_owned(), depth }),
        )
        .await
    }

    /// The files below `path` whose base name matches the glob.
    pub async fn search(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        pattern: &str,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        let operation = FileOperation::Search { path: path.to_owned(), pattern: pattern.to_owned() };
        listing::list(&handle.agent, path, request(actor, operation)).await
    }

    pub async fn move_file(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        from: &str,
        to: &str,
        overwrite: bool,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::Move { from: from.to_owned(), to: to.to_owned(), overwrite };
        self.change(owner, id, actor, operation).await
    }

    /// Removes a file or directory; it is no error if there is none.
    pub async fn remove(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        recursive: bool,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::Remove { path: path.to_owned(), recursive };
        self.change(owner, id, actor, operation).await
    }

    /// Makes a directory and its parents; attributes apply to newly made directories only.
    pub async fn make_directory(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        attributes: Attributes,
    ) -> Result<(), ServiceError> {
        let attributes = translate::attributes(attributes);
        let operation = FileOperation::MakeDirectory { path: path.to_owned(), attributes };
        self.change(owner, id, actor, operation).await
    }

    /// Makes a symbolic link with its parents; a file or link of its name is replaced.
    pub async fn make_link(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        target: &str,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::MakeLink { path: path.to_owned(), target: target.to_owned() };
        self.change(owner, id, actor, operation).await
    }

    pub async fn set_attributes(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        attributes: Attributes,
    ) -> Result<(), ServiceError> {
        let attributes = translate::attributes(attributes);
        let operation = FileOperation::SetAttributes { path: path.to_owned(), attributes };
        self.change(owner, id, actor, operation).await
    }

    /// Replaces texts, and returns how often each was found.
    pub async fn replace(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        edits: Vec<Edit>,
    ) -> Result<Vec<u64>, ServiceError> {
        let count = edits.len();
        let operation = FileOperation::Replace { edits: edits.into_iter().map(translate::edit).collect() };
        let (handle, _activity) = self.0.enter(owner, id)?;
        match ask(&handle.agent, actor, operation).await? {
            Reply::Replaced(counts) if counts.len() == count => Ok(counts),
            _ => Err(handle.agent.unexpected()),
        }
    }

    pub async fn watch(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        path: &str,
        recursive: bool,
    ) -> Result<Watching, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let operation = FileOperation::Watch { path: path.to_owned(), recursive };
        let agent = handle.agent.clone();
        match begin(&agent, actor, operation).await? {
            (connection, Reply::Ok) => Ok(Watching::new(agent, connection, activity)),
            _ => Err(agent.unexpected()),
        }
    }

    /// Opens a byte stream to `127.0.0.1:port` inside the sandbox.
    pub async fn tunnel(
        &self,
        owner: &Owner,
        id: &SandboxId,
        port: u16,
    ) -> Result<AgentStream, ServiceError> {
        let (handle, activity) = self.0.enter(owner, id)?;
        let agent = &handle.agent;
        let mut connection = agent.call(Request::Tunnel { port }).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(Reply::Ok) => Ok(Box::new(Tunnel::new(connection, activity))),
            Ok(_) => Err(agent.unexpected()),
            Err(fault) => Err(faults::of_tunnel(agent, port, fault)),
        }
    }

    /// Does an operation whose only answer is success.
    async fn change(
        &self,
        owner: &Owner,
        id: &SandboxId,
        actor: impl Into<Actor<'_>> + Send,
        operation: FileOperation,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.enter(owner, id)?;
        match ask(&handle.agent, actor, operation).await? {
            Reply::Ok => Ok(()),
            _ => Err(handle.agent.unexpected()),
        }
    }
}

fn request<'a>(actor: impl Into<Actor<'a>>, operation: FileOperation) -> Request {
    let Actor { identity, nest } = actor.into();
    let nest = nest.map(|session| session.as_str().to_owned());
    Request::File(FileRequest { identity: translate::identity(identity), nest, operation })
}

async fn ask(
    agent: &Agent,
    actor: impl Into<Actor<'_>> + Send,
    operation: FileOperation,
) -> Result<Reply, ServiceError> {
    begin(agent, actor, operation).await.map(|(_connection, reply)| reply)
}

/// Sends an operation and reads the first answer. Long operations, such as a large move, may take up to [`STALL`].
async fn begin(
    agent: &Agent,
    actor: impl Into<Actor<'_>> + Send,
    operation: FileOperation,
) -> Result<(Connection, Reply), ServiceError> {
    let mut connection = agent.call(request(actor, operation)).await?;
    let answer = within(STALL, "receive an answer about a file", connection.answer()).await;
    let answer = answer.map_err(|source| agent.failed("answer", source))?;
    answer.map(|reply| (connection, reply)).map_err(|fault| faults::of_file(agent, fault))
}

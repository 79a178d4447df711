//! File operations in a sandbox, each done as a given identity.

pub(crate) mod edit;
mod listing;
pub(crate) mod search;
pub(crate) mod transfer;

use std::time::SystemTime;

use domain::{SessionId, UserIdentity};
use wire::AgentRequest;
use wire::files::{FileOperation, FileRequest};

use crate::agent::client::{AgentClient, OperationConnection, STALL_TIMEOUT, with_timeout};
use crate::agent::reply::{ExpectedReply, ReadingSize, ReplacedCounts};
use crate::agent::{faults, translate};
use crate::{ErrorKind, FileReader, FileWatch, FileWriter, SandboxRef, ServiceError};

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
pub struct FileAttributes {
    /// Permission bits, such as `0o644`.
    pub mode: Option<u32>,
    /// The name of an account or a decimal uid.
    pub owner: Option<String>,
    pub group: Option<String>,
}

/// How a file is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteFileRequest {
    pub mode: WriteMode,
    pub attributes: FileAttributes,
    /// The permission bits of a file that does not exist yet, if `attributes` names none: every API has its own. `None`
    /// for those of a file that a shell creates.
    pub new_file_mode: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The old file stays until the new one is complete.
    Replace,
    Append,
}

/// Replaces each occurrence of `old` in the file by `new`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEdit {
    pub path: String,
    pub old: String,
    pub new: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// Grows with each event of a watch; the first is at least 1.
    pub sequence: u64,
    pub path: String,
    pub change: FileChange,
    /// The path that a renamed file has now, if that is in the watched tree. An older agent reports that path as created
    /// instead.
    pub new_path: Option<String>,
    /// What the file is. Of a file that is gone it is only known if it was a directory.
    pub kind: Option<FileKind>,
    /// Attributes of the file when the event was reported, if it still existed. An older agent does not report them.
    pub size: Option<u64>,
    pub modified: Option<SystemTime>,
    pub inode: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileChange {
    Created,
    Written,
    Removed,
    Renamed,
    Attributes,
    /// Events were dropped; the watcher should scan again.
    Overflow,
}

/// The identity of a file operation, and the session in whose namespaces it is done, if any.
#[derive(Clone, Copy, Debug)]
pub struct FileCaller<'a> {
    pub identity: &'a UserIdentity,
    pub isolated_session: Option<&'a SessionId>,
}

impl<'a> From<&'a UserIdentity> for FileCaller<'a> {
    fn from(identity: &'a UserIdentity) -> Self {
        Self { identity, isolated_session: None }
    }
}

/// The files of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxFiles<'a>(pub(crate) &'a SandboxRef);

impl SandboxFiles<'_> {
    /// Returns one entry for each path, in order; a missing path fails the whole call.
    pub async fn stat_files(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        paths: &[String],
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let operation = FileOperation::Stat { paths: paths.to_vec() };
        let (handle, _activity) = self.0.begin_use()?;
        let infos: Vec<wire::files::FileInfo> = run_operation(&handle.agent, actor, operation).await?;
        if infos.len() != paths.len() {
            return Err(handle.agent.unexpected_reply());
        }
        Ok(infos.into_iter().map(translate::file_info).collect())
    }

    /// Reads a file, or `length` bytes of it from `offset` on.
    pub async fn read_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<FileReader, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let operation = FileOperation::Read { path: path.to_owned(), offset, length };
        let agent = handle.agent.clone();
        let (connection, ReadingSize(size)) = begin_operation(&agent, actor, operation).await?;
        Ok(FileReader::new(agent, connection, size, length, activity))
    }

    /// Reads the lines of a text file from `start`, counted from zero, up to `end`, with their line endings. A file that
    /// is not UTF-8 up to there is refused before any of it is sent.
    pub async fn read_lines(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        start: u64,
        end: Option<u64>,
    ) -> Result<FileReader, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let operation = FileOperation::ReadLines { path: path.to_owned(), start, end };
        let agent = handle.agent.clone();
        let (connection, ReadingSize(size)) = begin_operation(&agent, actor, operation).await?;
        Ok(FileReader::new(agent, connection, size, None, activity))
    }

    /// Begins to write a file. The reason why it cannot be written may be returned by any later step.
    pub async fn write_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        request: WriteFileRequest,
    ) -> Result<FileWriter, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let WriteFileRequest { mode, attributes, new_file_mode } = request;
        let attributes =
            wire::files::FileAttributes { new_mode: new_file_mode, ..translate::wire_attributes(attributes) };
        let path = path.to_owned();
        let operation = match mode {
            WriteMode::Replace => FileOperation::Write { path, attributes },
            WriteMode::Append => FileOperation::Append { path, attributes },
        };
        let agent = handle.agent.clone();
        let connection = agent.open_request(file_request(actor, operation)).await?;
        Ok(FileWriter::new(agent, connection, activity))
    }

    /// The entries below `path`, down to `depth`, depth first and sorted by name.
    pub async fn list_directory(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        depth: u32,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        listing::list_files(
            &handle.agent,
            path,
            file_request(actor, FileOperation::List { path: path.to_owned(), depth }),
        )
        .await
    }

    /// The files below `path` whose base name matches the glob.
    pub async fn search_files(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        pattern: &str,
    ) -> Result<Vec<FileInfo>, ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let operation = FileOperation::Search { path: path.to_owned(), pattern: pattern.to_owned() };
        listing::list_files(&handle.agent, path, file_request(actor, operation)).await
    }

    pub async fn move_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        from: &str,
        to: &str,
        overwrite: bool,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::Move { from: from.to_owned(), to: to.to_owned(), overwrite };
        self.change_file(actor, operation).await
    }

    /// Removes a file or directory; it is no error if there is none.
    pub async fn remove_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        recursive: bool,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::Remove { path: path.to_owned(), recursive };
        self.change_file(actor, operation).await
    }

    /// Makes a directory and its parents; attributes apply to newly made directories only.
    pub async fn make_directory(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        attributes: FileAttributes,
    ) -> Result<(), ServiceError> {
        let attributes = translate::wire_attributes(attributes);
        let operation = FileOperation::MakeDirectory { path: path.to_owned(), attributes };
        self.change_file(actor, operation).await
    }

    /// Makes a symbolic link with its parents; a file or link of its name is replaced.
    pub async fn make_link(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        target: &str,
    ) -> Result<(), ServiceError> {
        let operation = FileOperation::MakeLink { path: path.to_owned(), target: target.to_owned() };
        self.change_file(actor, operation).await
    }

    pub async fn set_attributes(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        attributes: FileAttributes,
    ) -> Result<(), ServiceError> {
        let attributes = translate::wire_attributes(attributes);
        let operation = FileOperation::SetAttributes { path: path.to_owned(), attributes };
        self.change_file(actor, operation).await
    }

    /// Replaces texts, and returns how often each was found.
    pub async fn replace_text(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        edits: Vec<FileEdit>,
    ) -> Result<Vec<u64>, ServiceError> {
        let count = edits.len();
        let operation =
            FileOperation::Replace { edits: edits.into_iter().map(translate::wire_edit).collect() };
        let (handle, _activity) = self.0.begin_use()?;
        let ReplacedCounts(counts) = run_operation(&handle.agent, actor, operation).await?;
        if counts.len() != count {
            return Err(handle.agent.unexpected_reply());
        }
        Ok(counts)
    }

    pub async fn watch_files(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        path: &str,
        recursive: bool,
    ) -> Result<FileWatch, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let operation = FileOperation::Watch { path: path.to_owned(), recursive, details: true };
        let agent = handle.agent.clone();
        let (connection, ()) = begin_operation(&agent, actor, operation).await?;
        Ok(FileWatch::new(agent, connection, activity))
    }

    /// Does an operation whose only answer is success.
    async fn change_file(
        self,
        actor: impl Into<FileCaller<'_>> + Send,
        operation: FileOperation,
    ) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        run_operation(&handle.agent, actor, operation).await
    }
}

/// Makes a directory that the guest of a sandbox has, or gives an existing mount to its owner. An earlier sandbox may have
/// put anything else in its place, which is then kept.
pub(crate) async fn make_guest_directory(
    agent: &AgentClient,
    path: &str,
    owner: &str,
    is_mount: bool,
) -> Result<(), ServiceError> {
    let owner = Some(owner.to_owned());
    let attributes = FileAttributes { mode: None, owner: owner.clone(), group: owner };
    let (path, attributes) = (path.to_owned(), translate::wire_attributes(attributes));
    let operation = match is_mount {
        true => FileOperation::SetAttributes { path, attributes },
        false => FileOperation::MakeDirectory { path, attributes },
    };
    let root = UserIdentity::User("root".to_owned());
    match run_operation(agent, &root, operation).await {
        Err(error) if matches!(error.kind(), ErrorKind::File(_)) => {
            tracing::warn!(%error, "failed to make a directory of the guest on a volume; it is left as it is");
            Ok(())
        }
        made => made,
    }
}

fn file_request<'a>(actor: impl Into<FileCaller<'a>>, operation: FileOperation) -> AgentRequest {
    let FileCaller { identity, isolated_session } = actor.into();
    let isolated_session = isolated_session.map(|session| session.as_str().to_owned());
    AgentRequest::File(FileRequest {
        identity: translate::wire_identity(identity),
        isolated_session,
        operation,
    })
}

async fn run_operation<R: ExpectedReply>(
    agent: &AgentClient,
    actor: impl Into<FileCaller<'_>> + Send,
    operation: FileOperation,
) -> Result<R, ServiceError> {
    begin_operation(agent, actor, operation).await.map(|(_connection, reply)| reply)
}

/// Sends an operation and reads the first answer. Long operations, such as a large move, may take up to [`STALL_TIMEOUT`].
async fn begin_operation<R: ExpectedReply>(
    agent: &AgentClient,
    actor: impl Into<FileCaller<'_>> + Send,
    operation: FileOperation,
) -> Result<(OperationConnection, R), ServiceError> {
    let mut connection = agent.open_request(file_request(actor, operation)).await?;
    let answer =
        with_timeout(STALL_TIMEOUT, "receive an answer about a file", connection.next_answer()).await;
    let answer = answer.map_err(|source| agent.agent_error("answer", source))?;
    let reply = agent.expect_reply(answer)?.map_err(|fault| faults::file_error(agent, fault))?;
    Ok((connection, reply))
}

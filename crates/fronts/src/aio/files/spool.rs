//! Content of a request that cannot be written before the whole request is known.
//!
//! Fields of a JSON object have any order, and the usual client sends `encoding`, `append` and `sudo` behind `content`.
//! Whether the content is valid is also known only at its end, and an append must not begin before. So the beginning of
//! a content is held in memory, and a longer one is written to a draft inside the sandbox: its owner pays for the space,
//! and the server needs the same memory for any length. At the end the draft is copied to the target, which is replaced
//! at once, and removed.
//!
//! The draft belongs to root, so that the content of a write as root cannot be changed meanwhile by another user. A draft
//! whose content is incomplete has no name that anybody knows: the sandbox removes it with the connection.

use bytes::Bytes;
use service::{
    FileAttributes, FileReader, FileWriter, SandboxRef, ServiceError, WriteFileRequest, WriteMode,
};

use super::root_identity;
use crate::server::request_log::unique_hex;

/// How much of a content is held in memory.
pub(in crate::aio) const MAX_MEMORY_BYTES: usize = 1 << 20;
/// Where drafts are.
pub(in crate::aio) const DRAFT_DIRECTORY: &str = "/tmp";

/// Content that is being received.
pub(in crate::aio) struct ContentSpool {
    sandbox: SandboxRef,
    memory: Vec<u8>,
    draft: Option<(FileWriter, ContentDraft)>,
}

/// Content that was received completely.
pub(in crate::aio) enum SpooledContent {
    Memory(Bytes),
    Draft(ContentDraft),
}

/// A draft in the sandbox. Dropping it removes it.
pub(in crate::aio) struct ContentDraft {
    sandbox: SandboxRef,
    /// `None` once it is removed.
    path: Option<String>,
}

/// The pieces of a content.
pub(in crate::aio) enum ContentPieces {
    Memory(Option<Bytes>),
    Draft(FileReader),
}

impl ContentSpool {
    pub(in crate::aio) fn new(sandbox: SandboxRef) -> Self {
        Self { sandbox, memory: Vec::new(), draft: None }
    }

    pub(in crate::aio) async fn add_bytes(&mut self, bytes: Bytes) -> Result<(), ServiceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some((writer, _)) = &mut self.draft {
            return writer.send_bytes(bytes).await;
        }
        if self.memory.len() + bytes.len() <= MAX_MEMORY_BYTES {
            self.memory.extend_from_slice(&bytes);
            return Ok(());
        }
        let (mut writer, draft) = ContentDraft::create(&self.sandbox).await?;
        writer.send_bytes(std::mem::take(&mut self.memory).into()).await?;
        writer.send_bytes(bytes).await?;
        self.draft = Some((writer, draft));
        Ok(())
    }

    /// Must be called when nothing more of the request is awaited.
    pub(in crate::aio) async fn finish(self) -> Result<SpooledContent, ServiceError> {
        match self.draft {
            None => Ok(SpooledContent::Memory(self.memory.into())),
            Some((writer, draft)) => {
                writer.finish().await?;
                Ok(SpooledContent::Draft(draft))
            }
        }
    }
}

impl SpooledContent {
    pub(in crate::aio) async fn read_pieces(&self) -> Result<ContentPieces, ServiceError> {
        match self {
            Self::Memory(bytes) => Ok(ContentPieces::Memory(Some(bytes.clone()))),
            Self::Draft(draft) => {
                let path = draft.path.as_deref().unwrap_or_default();
                let reader = draft.sandbox.files().read_file(&root_identity(), path, 0, None).await?;
                Ok(ContentPieces::Draft(reader))
            }
        }
    }

    /// Removes what was stored for it.
    pub(in crate::aio) async fn discard(self) {
        if let Self::Draft(mut draft) = self
            && let Some(path) = draft.path.clone()
        {
            remove_draft(&draft.sandbox, &path).await;
            draft.path = None;
        }
    }
}

impl ContentPieces {
    pub(in crate::aio) async fn next_piece(&mut self) -> Result<Option<Bytes>, ServiceError> {
        match self {
            Self::Memory(bytes) => Ok(bytes.take().filter(|bytes| !bytes.is_empty())),
            Self::Draft(reader) => reader.next().await,
        }
    }
}

impl ContentDraft {
    async fn create(sandbox: &SandboxRef) -> Result<(FileWriter, Self), ServiceError> {
        let path = format!("{DRAFT_DIRECTORY}/.coracle-draft-{}", unique_hex());
        let attributes = FileAttributes { mode: Some(0o600), ..FileAttributes::default() };
        let request = WriteFileRequest { mode: WriteMode::Replace, attributes, new_file_mode: None };
        let writer = sandbox.files().write_file(&root_identity(), &path, request).await?;
        Ok((writer, Self { sandbox: sandbox.clone(), path: Some(path) }))
    }
}

impl Drop for ContentDraft {
    /// The client has disconnected while the draft was used.
    fn drop(&mut self) {
        let Some(path) = self.path.take() else { return };
        let sandbox = self.sandbox.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // It ends within the time limit of a file operation.
            runtime.spawn(async move { remove_draft(&sandbox, &path).await });
        }
    }
}

async fn remove_draft(sandbox: &SandboxRef, path: &str) {
    if let Err(error) = sandbox.files().remove_file(&root_identity(), path, false).await {
        tracing::debug!(%error, "failed to remove a draft; it stays in the sandbox");
    }
}

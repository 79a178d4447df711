//! File operations, as a worker performs them: with the requested identity, and blocking where
//! necessary.
//!
//! Paths are those of the sandbox and are opened as any program inside would open them; nothing
//! here protects the sandbox from itself. Only the caller is protected: a pipe or a device instead
//! of a file is refused, because opening it could block.

mod attributes;
mod changes;
mod copy;
mod draft;
mod edit;
pub(crate) mod edit_history;
mod glob;
mod grep;
mod info;
mod lines;
mod listing;
mod path_pattern;
mod replace;
mod text_edit;
mod transfer;
mod watch;
mod watch_details;
pub(crate) mod worker;
pub(crate) mod worker_connection;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use wire::files::FileOperation;
use wire::{AgentConfig, AgentReply, Fault, FaultKind};

use crate::context::AgentContext;
use crate::fault;
use crate::files::worker_connection::WorkerConnection;
use crate::identity::ResolvedUser;

/// A worker's task: the connection to reply on, and the user it works as.
pub(crate) struct FileWorker<'a> {
    pub(crate) connection: &'a mut WorkerConnection,
    pub(crate) config: &'a AgentConfig,
    pub(crate) user: &'a ResolvedUser,
    /// The undo history, for operations that need it.
    pub(crate) history: Option<File>,
    /// The isolated session whose file tree the operation sees.
    pub(crate) isolated_session: Option<&'a str>,
}

/// Turns an error into a fault that names the operation and the path.
pub(crate) trait ErrorContext<T> {
    fn or_fault(self, operation: &str, path: &Path) -> Result<T, Fault>;
}

impl<T> ErrorContext<T> for io::Result<T> {
    fn or_fault(self, operation: &str, path: &Path) -> Result<T, Fault> {
        self.map_err(|error| fault::from_io(&error, operation, &path.to_string_lossy()))
    }
}

impl<T> ErrorContext<T> for rustix::io::Result<T> {
    fn or_fault(self, operation: &str, path: &Path) -> Result<T, Fault> {
        self.map_err(|errno| fault::from_errno(errno, operation, &path.to_string_lossy()))
    }
}

impl FileWorker<'_> {
    /// `context` is only for an operation that [`executes_program`].
    pub(crate) fn perform_operation(
        &mut self,
        operation: &FileOperation,
        context: &AgentContext,
    ) -> Result<(), Fault> {
        match operation {
            FileOperation::Stat { paths } => self.stat_files(paths),
            FileOperation::Read { path, offset, length } => {
                self.read_file(&self.resolve_path(path)?, *offset, *length)
            }
            FileOperation::ReadLines { path, start, end } => {
                self.read_lines(&self.resolve_path(path)?, *start, *end)
            }
            FileOperation::Write { path, attributes } => {
                self.write_file(&self.resolve_path(path)?, attributes)
            }
            FileOperation::Append { path, attributes } => {
                self.append_file(&self.resolve_path(path)?, attributes)
            }
            FileOperation::List { path, depth } => self.list_directory(&self.resolve_path(path)?, *depth),
            FileOperation::Search { path, pattern } => self.search_files(&self.resolve_path(path)?, pattern),
            FileOperation::Glob(request) => self.find_paths(request),
            FileOperation::Grep(request) => self.exec_search(context, request).map(|never| match never {}),
            FileOperation::Watch { path, recursive, details } => {
                self.watch_path(&self.resolve_path(path)?, *recursive, *details)
            }
            FileOperation::Replace { edits } => self.replace_text(edits),
            FileOperation::Edit { path, edit, max_content } => self.edit_file(path, edit, *max_content),
            FileOperation::UndoEdit { path, if_changed, max_content } => {
                self.undo_edit(path, *if_changed, *max_content)
            }
            FileOperation::Move { from, to, overwrite } => {
                changes::move_file(&self.resolve_path(from)?, &self.resolve_path(to)?, *overwrite)?;
                self.send_ok()
            }
            FileOperation::Remove { path, recursive } => {
                changes::remove_path(&self.resolve_path(path)?, *recursive)?;
                self.send_ok()
            }
            FileOperation::MakeDirectory { path, attributes } => {
                changes::make_directory(&self.resolve_path(path)?, attributes)?;
                self.send_ok()
            }
            FileOperation::MakeLink { path, target } => {
                changes::make_link(&self.resolve_path(path)?, target)?;
                self.send_ok()
            }
            FileOperation::SetAttributes { path, attributes } => {
                let path = self.resolve_path(path)?;
                attributes::ResolvedAttributes::new(attributes)?.apply_to_path(&path)?;
                self.send_ok()
            }
        }
    }

    pub(crate) fn send_ok(&mut self) -> Result<(), Fault> {
        Ok(self.connection.send_reply(&AgentReply::Ok)?)
    }

    /// Makes a path absolute: `~` is the home directory, and a relative path starts at the default
    /// directory.
    pub(crate) fn resolve_path(&self, path: &str) -> Result<PathBuf, Fault> {
        if path.is_empty() || path.contains('\0') {
            return Err(fault::from_kind(FaultKind::Invalid, "open", path));
        }
        let resolved = match path.strip_prefix('~') {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{}{rest}", self.user.home),
            _ => path.to_owned(),
        };
        // `join` discards the base if the path is absolute.
        Ok(Path::new(&self.config.default_directory).join(resolved))
    }
}

/// Whether a worker executes another program for the operation, which confines itself on the way.
pub(crate) fn executes_program(operation: &FileOperation) -> bool {
    matches!(operation, FileOperation::Grep(_))
}

/// Creates the missing directories above a path.
pub(crate) fn make_parents(path: &Path) -> Result<(), Fault> {
    match path.parent() {
        Some(parent) => std::fs::create_dir_all(parent).or_fault("make directory", parent),
        None => Ok(()),
    }
}

/// A random name in the same directory.
pub(crate) fn temporary_name(path: &Path) -> Result<PathBuf, Fault> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .or_fault("choose name", path)?;
    Ok(path.with_file_name(format!(".coracle-{:016x}", u64::from_le_bytes(random))))
}

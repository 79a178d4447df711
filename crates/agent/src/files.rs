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
mod info;
mod listing;
mod replace;
mod transfer;

use std::io;
use std::path::{Path, PathBuf};

use wire::files::FileOperation;
use wire::{AgentConfig, Fault, FaultKind, Reply};

use crate::fault;
use crate::identity::Who;
use crate::line::Line;

/// A worker's task: the connection to reply on, and the user it works as.
pub(crate) struct Work<'a> {
    pub(crate) line: &'a mut Line,
    pub(crate) config: &'a AgentConfig,
    pub(crate) who: &'a Who,
}

/// Turns an error into a fault that names the operation and the path.
pub(crate) trait Named<T> {
    fn named(self, operation: &str, path: &Path) -> Result<T, Fault>;
}

impl<T> Named<T> for io::Result<T> {
    fn named(self, operation: &str, path: &Path) -> Result<T, Fault> {
        self.map_err(|error| fault::from_io(&error, operation, &path.to_string_lossy()))
    }
}

impl<T> Named<T> for rustix::io::Result<T> {
    fn named(self, operation: &str, path: &Path) -> Result<T, Fault> {
        self.map_err(|errno| fault::from_errno(errno, operation, &path.to_string_lossy()))
    }
}

impl Work<'_> {
    pub(crate) fn perform(&mut self, operation: &FileOperation) -> Result<(), Fault> {
        match operation {
            FileOperation::Stat { paths } => self.stat(paths),
            FileOperation::Read { path, offset, length } => self.read(&self.resolve(path)?, *offset, *length),
            FileOperation::Write { path, attributes } => self.write(&self.resolve(path)?, attributes),
            FileOperation::Append { path, attributes } => self.append(&self.resolve(path)?, attributes),
            FileOperation::List { path, depth } => self.list(&self.resolve(path)?, *depth),
            FileOperation::Search { path, pattern } => self.search(&self.resolve(path)?, pattern),
            FileOperation::Watch { path, recursive } => self.watch(&self.resolve(path)?, *recursive),
            FileOperation::Replace { edits } => self.replace(edits),
            FileOperation::Move { from, to, overwrite } => {
                changes::move_file(&self.resolve(from)?, &self.resolve(to)?, *overwrite)?;
                self.done()
            }
            FileOperation::Remove { path, recursive } => {
                changes::remove(&self.resolve(path)?, *recursive)?;
                self.done()
            }
            FileOperation::MakeDirectory { path, attributes } => {
                changes::make_directory(&self.resolve(path)?, attributes)?;
                self.done()
            }
            FileOperation::MakeLink { path, target } => {
                changes::make_link(&self.resolve(path)?, target)?;
                self.done()
            }
            FileOperation::SetAttributes { path, attributes } => {
                let path = self.resolve(path)?;
                attributes::Wanted::new(attributes)?.apply(&path)?;
                self.done()
            }
        }
    }

    pub(crate) fn done(&mut self) -> Result<(), Fault> {
        Ok(self.line.say(&Reply::Ok)?)
    }

    /// Makes a path absolute: `~` is the home directory, and a relative path starts at the default
    /// directory.
    pub(crate) fn resolve(&self, path: &str) -> Result<PathBuf, Fault> {
        if path.is_empty() || path.contains('\0') {
            return Err(fault::plain(FaultKind::Invalid, "open", path));
        }
        let resolved = match path.strip_prefix('~') {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{}{rest}", self.who.home),
            _ => path.to_owned(),
        };
        // `join` discards the base if the path is absolute.
        Ok(Path::new(&self.config.default_directory).join(resolved))
    }
}

/// Creates the missing directories above a path.
pub(crate) fn make_parents(path: &Path) -> Result<(), Fault> {
    match path.parent() {
        Some(parent) => std::fs::create_dir_all(parent).named("make directory", parent),
        None => Ok(()),
    }
}

/// A random name in the same directory.
pub(crate) fn temporary_name(path: &Path) -> Result<PathBuf, Fault> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).named("choose name", path)?;
    Ok(path.with_file_name(format!(".coracle-{:016x}", u64::from_le_bytes(random))))
}

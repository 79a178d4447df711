//! Directory listings.
//!
//! A listing is sent in pages during the walk, so its total size is not limited here. Entries that
//! vanish during the walk are left out, and so are unreadable directories below the start.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use globset::{Glob, GlobMatcher};
use wire::files::{FileInfo, FileKind};
use wire::frame::MAX_PAYLOAD;
use wire::{AgentReply, Fault, FaultKind};

use super::info::read_file_info;
use super::{ErrorContext, FileWorker};
use crate::accounts::AccountFiles;
use crate::fault;

/// The size at which a page is sent; the frame has space for the entry that exceeds it.
const PAGE_BYTES: usize = MAX_PAYLOAD / 4;

/// The maximum depth of a walk.
const MAX_DEPTH: u32 = 1000;

/// One walk over a tree.
struct DirectoryWalk<'a, 'b> {
    work: &'a mut FileWorker<'b>,
    accounts: AccountFiles,
    wanted: Option<GlobMatcher>,
    page: Vec<FileInfo>,
    page_size: usize,
}

impl FileWorker<'_> {
    pub(super) fn list_directory(&mut self, path: &Path, depth: u32) -> Result<(), Fault> {
        self.walk_directory(path, depth.min(MAX_DEPTH), None)
    }

    pub(super) fn search_files(&mut self, path: &Path, pattern: &str) -> Result<(), Fault> {
        let glob = Glob::new(pattern).map_err(|error| {
            fault::from_kind(FaultKind::Invalid, "read pattern", &format!("{pattern}: {}", error.kind()))
        })?;
        self.walk_directory(path, MAX_DEPTH, Some(glob.compile_matcher()))
    }

    fn walk_directory(&mut self, path: &Path, depth: u32, wanted: Option<GlobMatcher>) -> Result<(), Fault> {
        // The start must be a directory even if the depth is zero.
        let names = sorted_names(path).or_fault("list", path)?;
        let mut walk = DirectoryWalk {
            work: self,
            accounts: AccountFiles::read(),
            wanted,
            page: Vec::new(),
            page_size: 0,
        };
        walk.visit_entries(path, names, depth)?;
        walk.send_page()?;
        Ok(self.connection.send_end()?)
    }
}

impl DirectoryWalk<'_, '_> {
    fn visit_entries(&mut self, directory: &Path, names: Vec<OsString>, depth: u32) -> Result<(), Fault> {
        if depth == 0 {
            return Ok(());
        }
        for name in names {
            let path = directory.join(&name);
            let Ok(info) = read_file_info(&path, &self.accounts) else { continue };
            let is_directory = info.kind == FileKind::Directory;
            let wanted = self.wanted.as_ref().is_none_or(|glob| !is_directory && glob.is_match(&name));
            if wanted {
                self.add_entry(info)?;
            }
            if is_directory
                && depth > 1
                && let Ok(names) = sorted_names(&path)
            {
                self.visit_entries(&path, names, depth - 1)?;
            }
        }
        Ok(())
    }

    fn add_entry(&mut self, info: FileInfo) -> Result<(), Fault> {
        // JSON may encode one byte as six.
        let text = info.path.len() + info.link_target.as_ref().map_or(0, String::len);
        self.page_size += text * 6 + 512;
        self.page.push(info);
        if self.page_size >= PAGE_BYTES { self.send_page() } else { Ok(()) }
    }

    fn send_page(&mut self) -> Result<(), Fault> {
        if self.page.is_empty() {
            return Ok(());
        }
        let page = std::mem::take(&mut self.page);
        self.page_size = 0;
        self.work.connection.send_bounded_reply(&AgentReply::Entries(page), "a page of entries")
    }
}

fn sorted_names(directory: &Path) -> io::Result<Vec<OsString>> {
    let entries = std::fs::read_dir(directory)?;
    let mut names: Vec<OsString> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    Ok(names)
}

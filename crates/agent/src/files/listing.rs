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
use wire::{Fault, FaultKind, Reply};

use super::info::info;
use super::{Named, Work};
use crate::accounts::Accounts;
use crate::fault;

/// The size at which a page is sent; the frame has space for the entry that exceeds it.
const PAGE: usize = MAX_PAYLOAD / 4;

/// The maximum depth of a walk.
const DEEPEST: u32 = 1000;

/// One walk over a tree.
struct Walk<'a, 'b> {
    work: &'a mut Work<'b>,
    accounts: Accounts,
    wanted: Option<GlobMatcher>,
    page: Vec<FileInfo>,
    page_size: usize,
}

impl Work<'_> {
    pub(super) fn list(&mut self, path: &Path, depth: u32) -> Result<(), Fault> {
        self.walk(path, depth.min(DEEPEST), None)
    }

    pub(super) fn search(&mut self, path: &Path, pattern: &str) -> Result<(), Fault> {
        let glob = Glob::new(pattern).map_err(|error| {
            fault::plain(FaultKind::Invalid, "read pattern", &format!("{pattern}: {}", error.kind()))
        })?;
        self.walk(path, DEEPEST, Some(glob.compile_matcher()))
    }

    fn walk(&mut self, path: &Path, depth: u32, wanted: Option<GlobMatcher>) -> Result<(), Fault> {
        // The start must be a directory even if the depth is zero.
        let names = names_in(path).named("list", path)?;
        let mut walk =
            Walk { work: self, accounts: Accounts::read(), wanted, page: Vec::new(), page_size: 0 };
        walk.enter(path, names, depth)?;
        walk.send_page()?;
        Ok(self.line.send_end()?)
    }
}

impl Walk<'_, '_> {
    fn enter(&mut self, directory: &Path, names: Vec<OsString>, depth: u32) -> Result<(), Fault> {
        if depth == 0 {
            return Ok(());
        }
        for name in names {
            let path = directory.join(&name);
            let Ok(info) = info(&path, &self.accounts) else { continue };
            let is_directory = info.kind == FileKind::Directory;
            let wanted = self.wanted.as_ref().is_none_or(|glob| !is_directory && glob.is_match(&name));
            if wanted {
                self.add(info)?;
            }
            if is_directory
                && depth > 1
                && let Ok(names) = names_in(&path)
            {
                self.enter(&path, names, depth - 1)?;
            }
        }
        Ok(())
    }

    fn add(&mut self, info: FileInfo) -> Result<(), Fault> {
        // JSON may encode one byte as six.
        let text = info.path.len() + info.link_target.as_ref().map_or(0, String::len);
        self.page_size += text * 6 + 512;
        self.page.push(info);
        if self.page_size >= PAGE { self.send_page() } else { Ok(()) }
    }

    fn send_page(&mut self) -> Result<(), Fault> {
        if self.page.is_empty() {
            return Ok(());
        }
        let page = std::mem::take(&mut self.page);
        self.page_size = 0;
        self.work.line.say_bounded(&Reply::Entries(page), "a page of entries")
    }
}

fn names_in(directory: &Path) -> io::Result<Vec<OsString>> {
    let entries = std::fs::read_dir(directory)?;
    let mut names: Vec<OsString> = entries.flatten().map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    Ok(names)
}

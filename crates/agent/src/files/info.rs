//! File metadata, read without opening the file.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, StatxTimestamp};
use wire::files::{FileInfo, FileKind};
use wire::{Fault, Reply};

use super::{Named, Work};
use crate::accounts::Accounts;

impl Work<'_> {
    pub(super) fn stat(&mut self, paths: &[String]) -> Result<(), Fault> {
        let accounts = Accounts::read();
        let info = |path: &String| {
            let path = self.resolve(path)?;
            info(&path, &accounts).named("stat", &path)
        };
        let infos = paths.iter().map(info).collect::<Result<Vec<_>, _>>()?;
        self.line.say_bounded(&Reply::Info(infos), "too many paths")
    }
}

/// For a symbolic link, returns the metadata of the link itself, and its target.
pub(super) fn info(path: &Path, accounts: &Accounts) -> rustix::io::Result<FileInfo> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted)?;
    let kind = kind_of(&stat);
    let target = (kind == FileKind::Symlink).then(|| rustix::fs::readlink(path, Vec::new())).transpose()?;
    let created = if has_birth(&stat) { stat.stx_btime } else { stat.stx_mtime };
    let owner = accounts.by_uid(stat.stx_uid).map(|account| account.name);
    let group = accounts.group_name(stat.stx_gid).map(str::to_owned);
    Ok(FileInfo {
        path: path.to_string_lossy().into_owned(),
        kind,
        size: stat.stx_size,
        mode: u32::from(stat.stx_mode) & 0o7777,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        owner: owner.unwrap_or_else(|| stat.stx_uid.to_string()),
        group: group.unwrap_or_else(|| stat.stx_gid.to_string()),
        modified_ms: milliseconds(stat.stx_mtime),
        created_ms: milliseconds(created),
        link_target: target.map(|target| target.to_string_lossy().into_owned()),
    })
}

fn has_birth(stat: &Statx) -> bool {
    StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME)
}

fn kind_of(stat: &Statx) -> FileKind {
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

fn milliseconds(time: StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1000).saturating_add(i64::from(time.tv_nsec / 1_000_000))
}

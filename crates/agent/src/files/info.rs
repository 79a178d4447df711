//! File metadata, read without opening the file.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, StatxTimestamp};
use wire::files::{FileInfo, FileKind};
use wire::{AgentReply, Fault};

use super::{ErrorContext, FileWorker};
use crate::accounts::AccountFiles;

impl FileWorker<'_> {
    pub(super) fn stat_files(&mut self, paths: &[String]) -> Result<(), Fault> {
        let accounts = AccountFiles::read();
        let info = |path: &String| {
            let path = self.resolve_path(path)?;
            read_file_info(&path, &accounts).or_fault("stat", &path)
        };
        let infos = paths.iter().map(info).collect::<Result<Vec<_>, _>>()?;
        self.connection.send_bounded_reply(&AgentReply::Info(infos), "too many paths")
    }
}

/// For a symbolic link, returns the metadata of the link itself, and its target.
pub(super) fn read_file_info(path: &Path, accounts: &AccountFiles) -> rustix::io::Result<FileInfo> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted)?;
    let kind = file_kind(&stat);
    let target = (kind == FileKind::Symlink).then(|| rustix::fs::readlink(path, Vec::new())).transpose()?;
    let created = if has_birth_time(&stat) { stat.stx_btime } else { stat.stx_mtime };
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
        modified_ms: to_milliseconds(stat.stx_mtime),
        created_ms: to_milliseconds(created),
        link_target: target.map(|target| target.to_string_lossy().into_owned()),
    })
}

fn has_birth_time(stat: &Statx) -> bool {
    StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME)
}

pub(super) fn file_kind(stat: &Statx) -> FileKind {
    match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

pub(super) fn to_milliseconds(time: StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(1000).saturating_add(i64::from(time.tv_nsec / 1_000_000))
}

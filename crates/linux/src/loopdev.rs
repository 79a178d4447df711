//! Loop devices: block devices backed by a file. See loop(4).
//!
//! Every device is attached with autoclear, so it disappears with its last user and a killed
//! process leaves none behind.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::ioctl::{self, Getter, IntegerSetter, NoArg, Setter};

use crate::check_int;

const CLEAR_WITH_LAST_USER: u32 = 4;
const DIRECT_IO: u32 = 16;
const CONFIGURE: u32 = 0x4C0A;
const SET_CAPACITY: u32 = 0x4C07;
const GET_STATUS: u32 = 0x4C05;
const CONTROL_REMOVE: u32 = 0x4C81;
const CONTROL_GET_FREE: libc::Ioctl = 0x4C82;

/// The kernel creates this many devices at start; we never remove those.
const PRECREATED_DEVICES: u32 = 8;
/// How often another process may take a free device before we give up.
const MAX_ATTACH_ATTEMPTS: usize = 64;

/// An attached device. It stays attached while this value, a mount or another user holds it.
#[derive(Debug)]
pub struct LoopDevice {
    device: File,
    number: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

impl LoopDevice {
    /// Returns the device of `file`: the one it already has, or a new one. A file is never attached
    /// twice, because two devices over one file would destroy the filesystem in it.
    pub fn for_file(file: &File) -> io::Result<Self> {
        match Self::find_attached(file)? {
            Some(found) => Ok(found),
            None => Self::attach_new(file, Self::configure),
        }
    }

    /// Attaches `file`, which the caller knows to have no device, to a new one that reads and writes through the
    /// page cache. Short-lived data then need not reach the disk at all.
    pub fn attach_cached(file: &File) -> io::Result<Self> {
        Self::attach_new(file, |device, file| device.configure_with(file, 0))
    }

    /// Returns the device that `file` is already attached to.
    pub fn find_attached(file: &File) -> io::Result<Option<Self>> {
        let wanted = file.metadata()?;
        for number in device_numbers()?.into_iter().filter(|number| is_attached(*number)) {
            let Some(candidate) = Self::open(number, OpenOptions::new().read(true))? else { continue };
            // Checked after opening: an open device cannot be cleared.
            if candidate.is_backed_by(&wanted)? {
                return Ok(Some(candidate));
            }
        }
        Ok(None)
    }

    fn open(number: u32, options: &OpenOptions) -> io::Result<Option<Self>> {
        match options.open(device_path(number)) {
            Ok(device) => Ok(Some(Self { device, number })),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_backed_by(&self, wanted: &fs::Metadata) -> io::Result<bool> {
        // SAFETY: this request writes one `loop_info64`, whose layout `LoopInfo` has, and any bytes
        // are valid values of its integers and arrays.
        match unsafe { ioctl::ioctl(&self.device, Getter::<GET_STATUS, LoopInfo>::new()) } {
            Ok(info) => Ok(info.inode == wanted.ino() && info.device == encode_device(wanted.dev())),
            Err(rustix::io::Errno::NXIO) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn attach_new(
        file: &File,
        configure: impl Fn(&Self, &File) -> rustix::io::Result<()>,
    ) -> io::Result<Self> {
        let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
        for _ in 0..MAX_ATTACH_ATTEMPTS {
            let number = find_free_number(&control)?;
            let Some(free) = Self::open(number, OpenOptions::new().read(true).write(true))? else { continue };
            match configure(&free, file) {
                Ok(()) => return Ok(free),
                Err(rustix::io::Errno::BUSY) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "every free loop device was taken by other processes",
        ))
    }

    /// Attaches `file` to the device, bypassing the page cache where the filesystem supports it, so
    /// that nothing is cached twice.
    fn configure(&self, file: &File) -> rustix::io::Result<()> {
        match self.configure_with(file, DIRECT_IO) {
            Err(rustix::io::Errno::INVAL) => self.configure_with(file, 0),
            result => result,
        }
    }

    fn configure_with(&self, file: &File, flags: u32) -> rustix::io::Result<()> {
        let info = LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: CLEAR_WITH_LAST_USER | flags,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        };
        let fd = file.as_raw_fd().unsigned_abs();
        let config = LoopConfig { fd, block_size: 4096, info, reserved: [0; 8] };
        // SAFETY: this request reads one `loop_config`, whose layout `LoopConfig` has.
        unsafe { ioctl::ioctl(&self.device, Setter::<CONFIGURE, LoopConfig>::new(config)) }
    }

    /// Updates the device after its file has grown.
    pub fn refresh_size(&self) -> io::Result<()> {
        // SAFETY: this request takes no argument.
        unsafe { ioctl::ioctl(&self.device, NoArg::<SET_CAPACITY>::new()) }.map_err(io::Error::from)
    }

    /// Returns the device as a file, to write to it directly.
    pub fn try_clone_file(&self) -> io::Result<File> {
        self.device.try_clone()
    }

    pub fn path(&self) -> PathBuf {
        device_path(self.number)
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// Removes device nodes that were created on demand and have no file any more. The kernel creates
/// new ones when needed.
pub fn remove_unused_devices() -> io::Result<()> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    for number in device_numbers()? {
        if number >= PRECREATED_DEVICES && !is_attached(number) {
            let argument = usize::try_from(number).map_err(io::Error::other)?;
            // SAFETY: this request takes the number itself as its argument.
            match unsafe { ioctl::ioctl(&control, IntegerSetter::<CONTROL_REMOVE>::new_usize(argument)) } {
                Ok(()) | Err(rustix::io::Errno::BUSY | rustix::io::Errno::NODEV) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// The numbers of all devices, attached or not.
fn device_numbers() -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("loop"));
        numbers.extend(number.and_then(|digits| digits.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// Whether a device is attached: only then it has this directory.
fn is_attached(number: u32) -> bool {
    Path::new(&format!("/sys/block/loop{number}/loop")).exists()
}

fn find_free_number(control: &File) -> io::Result<u32> {
    // SAFETY: this request takes no argument and returns a number.
    let number = check_int(unsafe { libc::ioctl(control.as_raw_fd(), CONTROL_GET_FREE) })?;
    u32::try_from(number).map_err(io::Error::other)
}

fn device_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV))
}

/// Converts a device number to the kernel's 32-bit encoding.
fn encode_device(device: u64) -> u64 {
    let (major, minor) = (u64::from(rustix::fs::major(device)), u64::from(rustix::fs::minor(device)));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

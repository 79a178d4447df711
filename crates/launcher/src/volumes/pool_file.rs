//! The pool file: making, growing and mounting a btrfs in a sparse file.
//!
//! No mkfs is needed: the binary contains an empty filesystem (made by `template/make.sh`), which grows
//! to any size once it is mounted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use linux::btrfs;
use linux::freeze;
use linux::loopdev::LoopDevice;
use rustix::fs::IFlags;
use rustix::io::Errno;
use rustix::mount::MountFlags;

use domain::Bytes;

use super::{VolumeError, VolumeErrorContext, free_space};

const TEMPLATE: &[u8] = include_bytes!("template/pool.btrfs.zst");
const BLOCK_SIZE: usize = 4096;
const DEFAULT_MAX_SIZE: u64 = 64 << 30;

/// Mounts the pool in `file` at `target`, making or growing it first. A pool that is still attached to
/// a device, because sandboxes of a killed launcher use it, is mounted from that device.
pub(super) fn mount_pool(file: &Path, target: &Path, size: Option<Bytes>) -> Result<(), VolumeError> {
    let is_new = !file.exists();
    if is_new {
        make_pool(file).during("make the pool", file)?;
    }
    let pool = OpenOptions::new().read(true).write(true).open(file).during("open the pool", file)?;
    grow_pool(&pool, file, size)?;
    let device = LoopDevice::for_file(&pool).during("attach", file)?;
    device.refresh_size().during("grow the device of", file)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    // Discarding returns the space of removed volumes to the host.
    let result = rustix::mount::mount(device.path(), target, c"btrfs", flags, Some(c"discard=async"));
    match result {
        Ok(()) => {}
        Err(Errno::NODEV) => {
            if is_new {
                fs::remove_file(file).during("remove the unused pool", file)?;
            }
            return Err(VolumeError::NoBtrfs);
        }
        Err(error) => return Err(VolumeError::BadPool { path: file.to_owned(), source: error.into() }),
    }
    let root = File::open(target).during("open", target)?;
    // A backup that was killed may have left the filesystem frozen.
    freeze::thaw_filesystem(&root).during("thaw", target)?;
    btrfs::grow_to_device(&root).during("grow the filesystem at", target)
}

/// Whether there is a pool that was mounted once. Earlier versions left one that never was where the kernel has no
/// btrfs; it is as the template, whose generation every mount raises.
pub(super) fn was_mounted(file: &Path) -> Result<bool, VolumeError> {
    let pool = match File::open(file) {
        Ok(pool) => pool,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).during("open the pool", file),
    };
    let template = superblock::read_template().during("read the template of", file)?;
    match superblock::read_from(&pool) {
        Ok(block) => Ok(superblock::generation(&block) != superblock::generation(&template)),
        // Mounting it reports what is wrong with it.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(true),
        Err(error) => Err(error).during("read", file),
    }
}

/// Grows the file. It is sparse, so a large size costs nothing until it is used. It never shrinks.
fn grow_pool(pool: &File, path: &Path, size: Option<Bytes>) -> Result<(), VolumeError> {
    let present = pool.metadata().during("measure", path)?.len();
    let wanted = match size {
        Some(size) => size.0,
        None => (free_space(path)? / 10 * 8).min(DEFAULT_MAX_SIZE),
    };
    let whole = wanted / (1 << 20) * (1 << 20);
    if whole > present { pool.set_len(whole).during("grow", path) } else { Ok(()) }
}

/// Writes the template to a temporary file and renames it to `path` when it is complete.
pub(super) fn make_pool(path: &Path) -> io::Result<()> {
    let draft = path.with_extension("new");
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&draft)?;
    if btrfs::is_btrfs(&file)? {
        // Copy-on-write at both levels would fragment the file without benefit.
        rustix::fs::ioctl_setflags(&file, IFlags::NOCOW)?;
    }
    write_template(&file)?;
    set_random_identifier(&file)?;
    fs::rename(&draft, path)
}

/// Gives the filesystem in `file` a random identifier. It must not be mounted.
pub(super) fn set_random_identifier(file: &File) -> io::Result<()> {
    let mut identifier = [0; 16];
    rustix::rand::getrandom(&mut identifier, rustix::rand::GetRandomFlags::empty())?;
    superblock::set_identifier(file, identifier)?;
    file.sync_all()
}

/// Writes the blocks of the template that are not empty.
fn write_template(file: &File) -> io::Result<()> {
    let mut template = zstd::Decoder::with_buffer(TEMPLATE)?;
    let mut block = [0; BLOCK_SIZE];
    let mut length = 0;
    while read_block(&mut template, &mut block)? {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(&block, length)?;
        }
        length += BLOCK_SIZE as u64;
    }
    file.set_len(length)
}

fn read_block(source: &mut impl Read, block: &mut [u8]) -> io::Result<bool> {
    match source.read_exact(block) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Changes the identifier of a filesystem.
///
/// The kernel refuses to mount two btrfs filesystems with one identifier, so two servers on a host
/// could not both use the template unchanged. Since Linux 5.0 only the superblock needs the new
/// identifier; all other blocks keep the old one, which the superblock then contains as well.
mod superblock {
    use super::*;

    const SUPERBLOCK_OFFSET: u64 = 64 << 10;
    const CHECKSUM_SIZE: usize = 32;
    const IDENTIFIER: std::ops::Range<usize> = 32..48;
    const MAGIC: std::ops::Range<usize> = 64..72;
    const GENERATION: std::ops::Range<usize> = 72..80;
    const CHECKSUM_KIND: std::ops::Range<usize> = 196..198;
    const CRC32C: [u8; 2] = [0, 0];
    const INCOMPATIBLE: std::ops::Range<usize> = 188..196;
    const METADATA_UUID: std::ops::Range<usize> = 571..587;
    const HAS_METADATA_UUID: u64 = 1 << 10;

    pub(super) fn read_from(file: &File) -> io::Result<[u8; BLOCK_SIZE]> {
        let mut block = [0; BLOCK_SIZE];
        file.read_exact_at(&mut block, SUPERBLOCK_OFFSET)?;
        Ok(block)
    }

    pub(super) fn read_template() -> io::Result<[u8; BLOCK_SIZE]> {
        let mut template = zstd::Decoder::with_buffer(TEMPLATE)?;
        io::copy(&mut template.by_ref().take(SUPERBLOCK_OFFSET), &mut io::sink())?;
        let mut block = [0; BLOCK_SIZE];
        template.read_exact(&mut block)?;
        Ok(block)
    }

    /// The number of the last transaction.
    pub(super) fn generation(block: &[u8; BLOCK_SIZE]) -> u64 {
        block[GENERATION].try_into().map_or(0, u64::from_le_bytes)
    }

    pub(super) fn set_identifier(file: &File, identifier: [u8; 16]) -> io::Result<()> {
        let mut block = read_from(file)?;
        if block[MAGIC] != *b"_BHRfS_M" || block[CHECKSUM_KIND] != CRC32C {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the pool file contains no btrfs that this program made",
            ));
        }
        let old = block[IDENTIFIER].to_vec();
        let mut flags = [0; 8];
        flags.copy_from_slice(&block[INCOMPATIBLE]);
        let flags = u64::from_le_bytes(flags);
        block[IDENTIFIER].copy_from_slice(&identifier);
        // If the identifier was changed before, the blocks still have the first one.
        if flags & HAS_METADATA_UUID == 0 {
            block[METADATA_UUID].copy_from_slice(&old);
            block[INCOMPATIBLE].copy_from_slice(&(flags | HAS_METADATA_UUID).to_le_bytes());
        }
        let checksum = crc32c(&block[CHECKSUM_SIZE..]);
        block[..4].copy_from_slice(&checksum.to_le_bytes());
        file.write_all_at(&block, SUPERBLOCK_OFFSET)
    }

    /// Computes the Castagnoli checksum bit by bit: speed does not matter, because it is needed once for
    /// each pool.
    pub(super) fn crc32c(bytes: &[u8]) -> u32 {
        const POLYNOMIAL: u32 = 0x82f6_3b78;
        let step = |sum: u32| if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
        !bytes.iter().fold(!0, |sum: u32, byte| (0..8).fold(sum ^ u32::from(*byte), |sum, _| step(sum)))
    }
}

#[cfg(test)]
mod tests {
    use super::superblock::crc32c;

    #[test]
    fn checksum_matches_the_crc32c_test_vector() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}

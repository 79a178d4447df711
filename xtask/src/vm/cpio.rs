//! Writes a memory disk for the kernel: the `newc` form of cpio, as described in the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

const FILE_MODE: u32 = 0o100_000;
const DIRECTORY_MODE: u32 = 0o040_000;

/// An archive that is being written; [`CpioArchive::finish`] ends it.
pub(crate) struct CpioArchive<W> {
    out: W,
    entries: u32,
    written: usize,
}

impl<W: Write> CpioArchive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, entries: 0, written: 0 }
    }

    pub(crate) fn add_directory(&mut self, name: &str) -> io::Result<()> {
        self.add_entry(name, DIRECTORY_MODE | 0o755, &[])
    }

    pub(crate) fn add_program(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.add_entry(name, FILE_MODE | 0o755, content)
    }

    /// Adds everything below `from` as `name/...`, directories before what they hold.
    pub(crate) fn add_tree(&mut self, name: &str, from: &Path) -> io::Result<()> {
        self.add_directory(name)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let inside = format!("{name}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.add_tree(&inside, &entry.path())?;
            } else {
                self.add_program(&inside, &fs::read(entry.path())?)?;
            }
        }
        Ok(())
    }

    /// Ends the archive and returns its writer.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.add_entry("TRAILER!!!", 0, &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn add_entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        // Inode, mode, owner, group, links, time, size, four device numbers, name size, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        self.write_bytes(header.as_bytes())?;
        self.write_bytes(name.as_bytes())?;
        self.write_bytes(&[0])?;
        self.pad()?;
        self.write_bytes(content)?;
        self.pad()
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    /// Names and contents start at multiples of four.
    fn pad(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.write_bytes(&[0; 3][..missing])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_ends_the_archive() {
        let mut archive = CpioArchive::new(Vec::new());
        archive.add_program("init", b"hello").expect("a vector takes all");
        let bytes = archive.finish().expect("a vector takes all");
        // 110 bytes of header and "init\0" are 115, so the content starts at 116.
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..121], b"hello");
        assert_eq!(&bytes[124..130], b"070701");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
        assert_eq!(bytes.len() % 4, 0);
    }
}

//! Checks the zip file of skills. Everything is checked, also the content of every file, before anything is written.

use std::collections::BTreeSet;
use std::io::{Cursor, Read};

use bytes::Bytes;
use memchr::memmem;
use zip::ZipArchive;

use super::SKILL_FILE;

/// The longest archive; it is held in memory.
pub(super) const MAX_ARCHIVE_BYTES: usize = 16 << 20;
const MAX_ENTRIES: usize = 1000;
const MAX_FILE_BYTES: u64 = 16 << 20;
const MAX_TOTAL_BYTES: u64 = 64 << 20;
const MAX_PATH_BYTES: usize = 512;
const MAX_DEPTH: usize = 16;

/// The kinds of files in the mode of an entry.
const KIND_MASK: u32 = 0o170_000;
const KIND_DIRECTORY: u32 = 0o040_000;
const KIND_REGULAR: u32 = 0o100_000;
const KIND_LINK: u32 = 0o120_000;
const EXECUTABLE_BITS: u32 = 0o111;

/// The record at the end of an archive, the locator of a 64-bit record before it, and the header of an entry.
const END_SIGNATURE: &[u8] = b"PK\x05\x06";
const END_BYTES: usize = 22;
const ZIP64_SIGNATURE: &[u8] = b"PK\x06\x07";
const ZIP64_LOCATOR_BYTES: usize = 20;
const HEADER_SIGNATURE: &[u8] = b"PK\x01\x02";
const HEADER_BYTES: usize = 46;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ArchiveError {
    #[error("the file is not a zip archive that can be read: {0}")]
    Malformed(String),
    #[error("the archive has more than {MAX_ENTRIES} entries")]
    TooManyEntries,
    #[error("entry `{0}` of the archive has an absolute path")]
    AbsolutePath(String),
    #[error("entry `{0}` of the archive leads out of its directory")]
    Traversal(String),
    #[error("entry `{0}` of the archive has a path that is not accepted")]
    BadPath(String),
    #[error("entry `{0}` of the archive is a link")]
    Link(String),
    #[error("entry `{0}` of the archive is neither a file nor a directory")]
    SpecialFile(String),
    #[error("entry `{0}` of the archive is encrypted")]
    Encrypted(String),
    #[error("entry `{0}` of the archive is a file and a directory")]
    Duplicate(String),
    #[error("the archive has entries with the same name, or its directory is not where it should be")]
    Ambiguous,
    #[error("the archive has the zip64 format, which is not accepted")]
    Zip64,
    #[error("entry `{0}` of the archive exceeds {MAX_FILE_BYTES} bytes")]
    FileTooLarge(String),
    #[error("the files of the archive exceed {MAX_TOTAL_BYTES} bytes")]
    TooLarge,
    #[error("the archive has no {SKILL_FILE} at its top or in a directory at its top")]
    NoSkill,
}

/// An archive whose entries were all checked.
#[derive(Clone, Debug)]
pub(super) struct SkillArchive {
    content: Bytes,
    pub(super) files: Vec<ArchiveFile>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArchiveFile {
    index: usize,
    /// Relative, without `.` and `..`.
    pub(super) path: String,
    pub(super) is_executable: bool,
}

impl SkillArchive {
    /// Reads the whole archive once. Takes as long as decompressing it, so it must not be called by an async task.
    pub(super) fn open(content: Bytes) -> Result<Self, ArchiveError> {
        let count = check_directory(&content)?;
        let mut archive = open_zip(&content)?;
        // The reader keeps only the last of entries with the same name.
        if archive.len() != count {
            return Err(ArchiveError::Ambiguous);
        }
        let (mut files, mut paths, mut directories) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut total = 0;
        for index in 0..archive.len() {
            let mut entry = archive.by_index(index).map_err(malformed)?;
            let name = checked_name(entry.name_raw())?;
            let kind = entry.unix_mode().unwrap_or_default() & KIND_MASK;
            let is_directory = name.ends_with('/') || kind == KIND_DIRECTORY;
            let path = name.trim_end_matches('/').to_owned();
            match kind {
                _ if entry.encrypted() => return Err(ArchiveError::Encrypted(path)),
                KIND_LINK => return Err(ArchiveError::Link(path)),
                0 | KIND_DIRECTORY | KIND_REGULAR => {}
                _ => return Err(ArchiveError::SpecialFile(path)),
            }
            directories.extend(parent_paths(&path).map(str::to_owned));
            if is_directory {
                directories.insert(path);
                continue;
            }
            total += copy_bounded(&mut entry, &mut std::io::sink(), &path)?;
            if total > MAX_TOTAL_BYTES {
                return Err(ArchiveError::TooLarge);
            }
            if !paths.insert(path.clone()) {
                return Err(ArchiveError::Duplicate(path));
            }
            let is_executable = entry.unix_mode().is_some_and(|mode| mode & EXECUTABLE_BITS != 0);
            files.push(ArchiveFile { index, path, is_executable });
        }
        if let Some(path) = paths.intersection(&directories).next() {
            return Err(ArchiveError::Duplicate(path.clone()));
        }
        Ok(Self { content, files })
    }

    /// The directories that are skills: the top, as an empty text, or directories below it.
    pub(super) fn find_skills(&self) -> Result<Vec<String>, ArchiveError> {
        let parents = self.files.iter().filter_map(|file| match file.path.rsplit_once('/') {
            None if file.path == SKILL_FILE => Some(""),
            Some((parent, SKILL_FILE)) if !parent.contains('/') => Some(parent),
            _ => None,
        });
        let skills: BTreeSet<String> = parents.map(str::to_owned).collect();
        // A `SKILL.md` at the top makes the whole archive one skill.
        match skills.first().map(String::as_str) {
            None => Err(ArchiveError::NoSkill),
            Some("") => Ok(vec![String::new()]),
            Some(_) => Ok(skills.into_iter().collect()),
        }
    }

    /// The files of a skill, with their paths below its directory.
    pub(super) fn files_of_skill<'a>(
        &'a self,
        directory: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a ArchiveFile)> {
        self.files.iter().filter_map(move |file| match directory {
            "" => Some((file.path.as_str(), file)),
            _ => Some((file.path.strip_prefix(directory)?.strip_prefix('/')?, file)),
        })
    }

    /// The content of a file, whose size was checked before.
    pub(super) fn read_file(&self, file: &ArchiveFile) -> Result<Bytes, ArchiveError> {
        let mut archive = open_zip(&self.content)?;
        let mut entry = archive.by_index(file.index).map_err(malformed)?;
        let mut content = Vec::new();
        copy_bounded(&mut entry, &mut content, &file.path)?;
        Ok(content.into())
    }
}

/// Checks the directory of an archive, and returns the number of its entries.
///
/// The reader reserves memory for as many entries as a record claims, goes on to earlier records if it cannot use the
/// last one, and may follow a 64-bit record instead. So it gets only archives where none of this can happen: the last
/// record ends the file, and its directory begins where it says, has as many headers as it says, and ends before it.
fn check_directory(content: &[u8]) -> Result<usize, ArchiveError> {
    let end = memmem::rfind(content, END_SIGNATURE);
    let end = end.ok_or_else(|| ArchiveError::Malformed("it has no directory".to_owned()))?;
    let (before, record) = content.split_at(end);
    let locator = before.len().checked_sub(ZIP64_LOCATOR_BYTES).map(|start| &before[start..]);
    if locator.is_some_and(|locator| locator.starts_with(ZIP64_SIGNATURE)) {
        return Err(ArchiveError::Zip64);
    }
    let (Some(disk), Some(directory_disk), Some(count_on_disk), Some(count)) =
        (u16_at(record, 4), u16_at(record, 6), u16_at(record, 8), u16_at(record, 10))
    else {
        return Err(ArchiveError::Ambiguous);
    };
    let (Some(size), Some(start), Some(comment)) =
        (u32_at(record, 12), u32_at(record, 16), u16_at(record, 20))
    else {
        return Err(ArchiveError::Ambiguous);
    };
    if count > MAX_ENTRIES {
        return Err(ArchiveError::TooManyEntries);
    }
    let is_one_disk = (disk, directory_disk, count_on_disk) == (0, 0, count);
    let ends_file = END_BYTES + comment == record.len();
    if !is_one_disk || !ends_file || start.checked_add(size) != Some(end) {
        return Err(ArchiveError::Ambiguous);
    }
    let mut directory = &before[start..];
    for _ in 0..count {
        directory = skip_header(directory).ok_or(ArchiveError::Ambiguous)?;
    }
    if directory.is_empty() { Ok(count) } else { Err(ArchiveError::Ambiguous) }
}

/// What follows the first header of a directory.
fn skip_header(directory: &[u8]) -> Option<&[u8]> {
    let lengths = u16_at(directory, 28)? + u16_at(directory, 30)? + u16_at(directory, 32)?;
    directory.starts_with(HEADER_SIGNATURE).then_some(())?;
    directory.get(HEADER_BYTES + lengths..)
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<usize> {
    bytes.get(offset..)?.first_chunk().map(|number| usize::from(u16::from_le_bytes(*number)))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<usize> {
    let number = bytes.get(offset..)?.first_chunk().map(|number| u32::from_le_bytes(*number))?;
    usize::try_from(number).ok()
}

fn open_zip(content: &Bytes) -> Result<ZipArchive<Cursor<Bytes>>, ArchiveError> {
    ZipArchive::new(Cursor::new(content.clone())).map_err(malformed)
}

fn malformed(error: impl std::fmt::Display) -> ArchiveError {
    ArchiveError::Malformed(error.to_string().chars().take(200).collect())
}

/// Decompresses an entry up to the limit, whatever size its header claims, and checks its sum.
fn copy_bounded(
    entry: &mut impl Read,
    output: &mut impl std::io::Write,
    path: &str,
) -> Result<u64, ArchiveError> {
    let copied = std::io::copy(&mut entry.take(MAX_FILE_BYTES + 1), output).map_err(malformed)?;
    if copied > MAX_FILE_BYTES {
        return Err(ArchiveError::FileTooLarge(path.to_owned()));
    }
    Ok(copied)
}

/// Checks the path of an entry. A slash at its end marks a directory.
fn checked_name(raw: &[u8]) -> Result<String, ArchiveError> {
    let shown = || String::from_utf8_lossy(raw).chars().take(MAX_PATH_BYTES).collect::<String>();
    let Ok(name) = std::str::from_utf8(raw) else { return Err(ArchiveError::BadPath(shown())) };
    let path = name.strip_suffix('/').unwrap_or(name);
    let parts: Vec<&str> = path.split('/').collect();
    // On Windows, a backslash separates directories and a colon follows a drive.
    let is_strange = |byte: u8| byte.is_ascii_control() || matches!(byte, b'\\' | b':');
    match () {
        () if path.starts_with('/') => Err(ArchiveError::AbsolutePath(shown())),
        () if parts.contains(&"..") => Err(ArchiveError::Traversal(shown())),
        () if path.len() > MAX_PATH_BYTES
            || parts.len() > MAX_DEPTH
            || parts.iter().any(|part| part.is_empty() || *part == ".")
            || path.bytes().any(is_strange) =>
        {
            Err(ArchiveError::BadPath(shown()))
        }
        () => Ok(name.to_owned()),
    }
}

/// The directories above a path.
pub(super) fn parent_paths(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use zip::write::SimpleFileOptions;
    use zip::{CompressionMethod, ZipWriter};

    use super::*;

    fn options() -> SimpleFileOptions {
        SimpleFileOptions::default().compression_method(CompressionMethod::Deflated)
    }

    fn archive(entries: &[(&str, &[u8])]) -> Bytes {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        for (name, content) in entries {
            writer.start_file(*name, options()).unwrap();
            writer.write_all(content).unwrap();
        }
        writer.finish().unwrap().into_inner().into()
    }

    fn refused(entries: &[(&str, &[u8])]) -> ArchiveError {
        SkillArchive::open(archive(entries)).unwrap_err()
    }

    /// Changes the name of an entry to one of the same length, which no usual program would write.
    fn renamed(content: &Bytes, from: &str, to: &str) -> Bytes {
        assert_eq!(from.len(), to.len());
        let mut bytes = content.to_vec();
        for at in 0..bytes.len() - from.len() {
            if bytes[at..].starts_with(from.as_bytes()) {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            }
        }
        bytes.into()
    }

    #[test]
    fn skills_are_at_the_top_or_in_directories() {
        let one =
            SkillArchive::open(archive(&[("SKILL.md", b"x"), ("a/SKILL.md", b""), ("a/b", b"")])).unwrap();
        assert_eq!(one.find_skills().unwrap(), [""]);
        assert_eq!(one.files_of_skill("").count(), 3);
        assert_eq!(one.read_file(&one.files[0]).unwrap(), "x");
        let two = SkillArchive::open(archive(&[
            ("b/SKILL.md", b""),
            ("a/SKILL.md", b""),
            ("a/x/y", b""),
            ("ab", b""),
        ]));
        let two = two.unwrap();
        assert_eq!(two.find_skills().unwrap(), ["a", "b"]);
        assert_eq!(two.files_of_skill("a").map(|(path, _)| path).collect::<Vec<_>>(), ["SKILL.md", "x/y"]);
        let none = SkillArchive::open(archive(&[("a/b/SKILL.md", b"")])).unwrap();
        assert_eq!(none.find_skills(), Err(ArchiveError::NoSkill));
    }

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        for (name, expected) in [
            ("../abc", ArchiveError::Traversal("../abc".to_owned())),
            ("a/../b", ArchiveError::Traversal("a/../b".to_owned())),
            ("/etc/x", ArchiveError::AbsolutePath("/etc/x".to_owned())),
            ("..\\abc", ArchiveError::BadPath("..\\abc".to_owned())),
            ("c:/abc", ArchiveError::BadPath("c:/abc".to_owned())),
            ("a//abc", ArchiveError::BadPath("a//abc".to_owned())),
            ("./abcd", ArchiveError::BadPath("./abcd".to_owned())),
            ("abc\0de", ArchiveError::BadPath("abc\0de".to_owned())),
        ] {
            let placeholder = "q".repeat(name.len());
            let content = renamed(&archive(&[(&placeholder, b"")]), &placeholder, name);
            assert_eq!(SkillArchive::open(content).unwrap_err(), expected, "{name}");
        }
        assert!(matches!(refused(&[(&"a/".repeat(20), b"")]), ArchiveError::BadPath(_)));
        assert!(matches!(refused(&[(&"a".repeat(513), b"")]), ArchiveError::BadPath(_)));
    }

    #[test]
    fn links_and_special_files_are_refused() {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        writer.add_symlink("SKILL.md", "/etc/passwd", options()).unwrap();
        let link = writer.finish().unwrap().into_inner();
        assert_eq!(SkillArchive::open(link.into()).unwrap_err(), ArchiveError::Link("SKILL.md".to_owned()));
        let twice = renamed(&archive(&[("aaa1", b""), ("aaa2", b"")]), "aaa2", "aaa1");
        assert_eq!(SkillArchive::open(twice).unwrap_err(), ArchiveError::Ambiguous);
        let mut longer = archive(&[("SKILL.md", b"")]).to_vec();
        longer.extend_from_slice(b"more");
        assert!(SkillArchive::open(longer.into()).is_err());
        assert_eq!(refused(&[("a", b""), ("a/b", b"")]), ArchiveError::Duplicate("a".to_owned()));
    }

    #[test]
    fn bombs_are_refused_by_what_they_contain() {
        let zeros = vec![0; 15 << 20];
        let names: Vec<String> = (0..5).map(|number| number.to_string()).collect();
        let files: Vec<_> = names.iter().map(|name| (name.as_str(), zeros.as_slice())).collect();
        let bomb = archive(&files);
        assert!(bomb.len() < 1 << 20);
        assert_eq!(SkillArchive::open(bomb).unwrap_err(), ArchiveError::TooLarge);
        let large = vec![0; (16 << 20) + 1];
        assert_eq!(refused(&[("a", &large)]), ArchiveError::FileTooLarge("a".to_owned()));
        let names: Vec<String> = (0..=MAX_ENTRIES).map(|number| number.to_string()).collect();
        let files: Vec<_> = names.iter().map(|name| (name.as_str(), &b""[..])).collect();
        assert_eq!(refused(&files), ArchiveError::TooManyEntries);
    }

    /// The record at the end of an archive.
    fn end_record(count: u16, size: u32, start: u32, comment: &[u8]) -> Vec<u8> {
        let mut record = [END_SIGNATURE, &[0; 4], &count.to_le_bytes(), &count.to_le_bytes()].concat();
        record.extend_from_slice(&size.to_le_bytes());
        record.extend_from_slice(&start.to_le_bytes());
        record.extend_from_slice(&u16::try_from(comment.len()).unwrap().to_le_bytes());
        record.extend_from_slice(comment);
        record
    }

    #[test]
    fn directory_is_checked_before_memory_is_reserved_for_it() {
        let content = archive(&[("SKILL.md", b"text")]);
        let end = content.len() - END_BYTES;
        let start = u32_at(&content[end..], 16).unwrap();
        let (size, place) = (u32::try_from(end - start).unwrap(), u32::try_from(start).unwrap());
        let with_end = |record: Vec<u8>| [content[..end].to_vec(), record].concat();
        assert!(SkillArchive::open(with_end(end_record(1, size, place, b"a comment")).into()).is_ok());
        let nested = end_record(1, size, place, &end_record(1, size, place, b""));
        let mut locator = ZIP64_SIGNATURE.to_vec();
        locator.resize(ZIP64_LOCATOR_BYTES, 0);
        let zip64 = [locator, end_record(u16::MAX, u32::MAX, u32::MAX, b"")].concat();
        // Its own directory is missing, so that a reader may go back to the valid record.
        let fallback =
            [content.to_vec(), end_record(1, 0, u32::try_from(content.len()).unwrap(), b"")].concat();
        let fallback_with_text = [
            content.to_vec(),
            b"text".to_vec(),
            end_record(1, 4, u32::try_from(content.len()).unwrap(), b""),
        ];
        for (case, content, expected) in [
            ("more entries", with_end(end_record(2, size, place, b"")), ArchiveError::Ambiguous),
            ("fewer entries", with_end(end_record(0, size, place, b"")), ArchiveError::Ambiguous),
            ("too many", with_end(end_record(u16::MAX, size, place, b"")), ArchiveError::TooManyEntries),
            ("another start", with_end(end_record(1, size - 1, place, b"")), ArchiveError::Ambiguous),
            ("a prefix", [b"prefix".to_vec(), content.to_vec()].concat(), ArchiveError::Ambiguous),
            ("a suffix", [content.to_vec(), b"suffix".to_vec()].concat(), ArchiveError::Ambiguous),
            ("a record in the comment", with_end(nested), ArchiveError::Ambiguous),
            ("an earlier record", fallback, ArchiveError::Ambiguous),
            ("an earlier record before text", fallback_with_text.concat(), ArchiveError::Ambiguous),
            ("64 bits", with_end(zip64), ArchiveError::Zip64),
        ] {
            assert_eq!(SkillArchive::open(content.into()).unwrap_err(), expected, "{case}");
        }
    }

    #[test]
    fn damaged_archives_are_refused_and_never_panic() {
        let content = archive(&[("SKILL.md", b"some text that is long enough"), ("a/b", b"x")]);
        for end in 0..content.len() {
            assert!(SkillArchive::open(content.slice(..end)).is_err(), "{end}");
        }
        for at in 0..content.len() {
            let mut changed = content.to_vec();
            changed[at] ^= 0xff;
            SkillArchive::open(changed.into()).ok();
        }
        assert!(matches!(SkillArchive::open(Bytes::from_static(b"text")), Err(ArchiveError::Malformed(_))));
    }
}

//! The programs in the image `host`, detected only by reading files: running a program to get its
//! version might do anything, and this process is privileged.
//!
//! A program counts only if a sandbox of the image `host` could start it: every link on the path to
//! it must be visible in the image (`/usr`, the directories merged into it, and
//! `/etc/alternatives`). A link from `/usr/local/bin` into a user's home does not count.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use backend::host_software::{HostProgram, HostSoftware, OsRelease, leading_version, major_version};

use super::DEFAULT_PATH;

/// The maximum size read from any file; package databases have a few megabytes.
const MAX_READ_SIZE: u64 = 64 << 20;
/// The same limit as in the kernel.
const MAX_LINKS: usize = 40;

/// A result is cached only if the files it depends on are older than this: file systems stamp two
/// changes within one tick of the clock with the same time.
const MIN_AGE: Duration = Duration::from_secs(2);

/// Files and directories that the result depends on, besides the programs themselves. An upgrade of
/// the host changes at least one of them.
const STAMPED_PATHS: [&str; 13] = [
    "etc/os-release",
    "usr/lib/os-release",
    "usr/local/sbin",
    "usr/local/bin",
    "usr/sbin",
    "usr/bin",
    "sbin",
    "bin",
    "etc/alternatives",
    "usr/lib",
    "usr/local/lib",
    "var/lib/dpkg/status",
    "lib/apk/db/installed",
];

/// The files that the image `host` consists of. The result is cached until one of the files it
/// depends on changes, so that an upgrade of the host is detected and creating a sandbox reads
/// nothing.
#[derive(Clone, Debug)]
pub struct HostPrograms {
    root: PathBuf,
    cache: Arc<Mutex<Option<CachedLookup>>>,
}

impl PartialEq for HostPrograms {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root
    }
}

impl Eq for HostPrograms {}

#[derive(Debug)]
struct CachedLookup {
    found: HostSoftware,
    /// The files that the result depends on, with their stamps before they were read.
    stamps: Vec<(PathBuf, Option<FileStamp>)>,
}

/// Differs if a file was replaced or written to, or a directory entry was added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: SystemTime,
}

impl FileStamp {
    /// Returns `None` if there is no such file. Links are followed.
    fn of_file(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: metadata.modified().ok()?,
        })
    }

    fn is_older_than(&self, age: Duration, now: SystemTime) -> bool {
        now.duration_since(self.modified).is_ok_and(|since| since > age)
    }
}

impl HostPrograms {
    pub fn of_this_host() -> Self {
        Self { root: PathBuf::from("/"), cache: Arc::default() }
    }

    /// Uses another root directory instead of the host's.
    #[cfg(test)]
    pub(super) fn below(root: &Path) -> Self {
        Self { root: root.to_owned(), cache: Arc::default() }
    }

    /// Returns the programs, from the cache if nothing has changed since.
    pub fn read_software(&self) -> HostSoftware {
        let mut cache = self.cache.lock().expect("looking up does not panic");
        let unchanged = |cached: &&CachedLookup| {
            cached.stamps.iter().all(|(path, stamp)| FileStamp::of_file(path) == *stamp)
        };
        if let Some(cached) = cache.as_ref().filter(unchanged) {
            return cached.found.clone();
        }
        let lookup = self.read_contents();
        let found = lookup.found.clone();
        let now = SystemTime::now();
        let is_settled = lookup
            .stamps
            .iter()
            .all(|(_, stamp)| stamp.is_none_or(|stamp| stamp.is_older_than(MIN_AGE, now)));
        *cache = is_settled.then_some(lookup);
        found
    }

    /// Reads the contents. Each stamp is taken before the file is read: a change in between makes
    /// the next comparison fail.
    fn read_contents(&self) -> CachedLookup {
        let stamp = |path: PathBuf| {
            let stamp = FileStamp::of_file(&path);
            (path, stamp)
        };
        let mut stamps: Vec<_> = STAMPED_PATHS.iter().map(|path| stamp(self.root.join(path))).collect();
        let python = ["python3", "python"].iter().find_map(|name| self.find_program(name));
        let node = ["node", "nodejs"].iter().find_map(|name| self.find_program(name));
        for (entry, path) in python.iter().chain(&node) {
            stamps.push(stamp(self.on_host(entry)));
            stamps.push(stamp(self.on_host(path)));
        }
        let header = node.as_ref().and_then(|(_, path)| node_header_path(path));
        stamps.extend(header.map(|header| stamp(self.root.join(header))));
        let release = ["etc/os-release", "usr/lib/os-release"].iter().find_map(|path| self.read_file(path));
        let found = HostSoftware {
            os_release: release.and_then(|text| parse_os_release(&text)),
            python: python.map(|(_, path)| HostProgram { version: self.python_version(&path) }),
            node: node.map(|(_, path)| HostProgram { version: self.node_version(&path) }),
        };
        CachedLookup { found, stamps }
    }

    fn node_version(&self, path: &Path) -> Option<String> {
        let version = self.node_header(path).or_else(|| version_in_path(path));
        version.or_else(|| self.packaged_version("nodejs", path))
    }

    /// Finds the first program of this name on the PATH of a sandbox: its entry there, and the file
    /// after all links.
    fn find_program(&self, name: &str) -> Option<(PathBuf, PathBuf)> {
        DEFAULT_PATH.split(':').find_map(|directory| {
            let entry = Path::new(directory).join(name);
            let path = self.resolve_path(&entry)?;
            let found = fs::symlink_metadata(self.on_host(&path)).ok()?;
            (found.is_file() && found.permissions().mode() & 0o111 != 0).then_some((entry, path))
        })
    }

    /// Resolves a path inside the image; returns `None` if the target is not visible there.
    fn resolve_path(&self, path: &Path) -> Option<PathBuf> {
        let mut left: Vec<PathBuf> = reversed_components(path);
        let mut reached = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = left.pop() {
            if part == Path::new("..") {
                reached.pop();
                continue;
            }
            let next = reached.join(&part);
            let Ok(target) = fs::read_link(self.on_host(&next)) else {
                reached = next;
                continue;
            };
            links += 1;
            if links > MAX_LINKS || !is_visible(&next) {
                return None;
            }
            if target.is_absolute() {
                reached = PathBuf::from("/");
            }
            left.extend(reversed_components(&target));
        }
        is_visible(&reached).then_some(reached)
    }

    fn on_host(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn read_file(&self, path: &str) -> Option<String> {
        let mut text = Vec::new();
        let file = super::skeleton::open_nonblocking(&self.root.join(path)).ok()?;
        let plain = file.metadata().ok()?.is_file();
        file.take(MAX_READ_SIZE).read_to_end(&mut text).ok().filter(|_| plain)?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    /// Derives the version from the name of the program, or from the only library beside it. A
    /// script is a wrapper of unknown version.
    fn python_version(&self, path: &Path) -> Option<String> {
        let mut start = [0; 4];
        File::open(self.on_host(path)).and_then(|mut file| file.read_exact(&mut start)).ok()?;
        if start != *b"\x7fELF" {
            return None;
        }
        let version = leading_version(path.file_name()?.to_str()?.strip_prefix("python")?)?;
        if version.contains('.') {
            return Some(version);
        }
        let library = self.on_host(&path.parent()?.parent()?.join("lib"));
        let named = |name: &OsStr| leading_version(name.to_str()?.strip_prefix("python")?);
        let entries = fs::read_dir(library).into_iter().flatten().flatten();
        let whole = entries.filter(|entry| entry.path().join("os.py").exists());
        let mut found: Vec<String> = whole.filter_map(|entry| named(&entry.file_name())).collect();
        found.retain(|other| major_version(other) == major_version(&version));
        match found.as_slice() {
            [only] => Some(only.clone()),
            _ => Some(version),
        }
    }

    /// Reads the version from Node's own header, in the prefix where the program is installed.
    fn node_header(&self, path: &Path) -> Option<String> {
        let header = self.read_file(node_header_path(path)?.to_str()?)?;
        let number = |part: &str| {
            let name = format!("NODE_{part}_VERSION");
            let mut words = header.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let number = words.find_map(|words| match words.as_slice() {
                ["#define", defined, number] if *defined == name => Some((*number).to_owned()),
                _ => None,
            })?;
            number.parse::<u32>().ok()
        };
        Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
    }

    /// Reads the version from Debian's or Alpine's package database, for a program that is
    /// installed where packages are.
    fn packaged_version(&self, package: &str, path: &Path) -> Option<String> {
        if path.parent() != Some(Path::new("/usr/bin")) {
            return None;
        }
        let debian = ("var/lib/dpkg/status", "Package: ", "Version: ");
        let alpine = ("lib/apk/db/installed", "P:", "V:");
        [debian, alpine].into_iter().find_map(|(file, name_field, version_field)| {
            let text = self.read_file(file)?;
            let is_it = |paragraph: &&str| {
                paragraph.lines().any(|line| line.strip_prefix(name_field) == Some(package))
            };
            let paragraph = text.split("\n\n").find(is_it)?;
            let version = paragraph.lines().find_map(|line| line.strip_prefix(version_field))?;
            leading_version(version.split_once(':').map_or(version, |(_, after_epoch)| after_epoch))
        })
    }
}

/// Returns the path of the header of a node program, relative to the root.
fn node_header_path(path: &Path) -> Option<PathBuf> {
    let prefix = path.parent()?.parent()?.strip_prefix("/").ok()?;
    Some(prefix.join("include/node/node_version.h"))
}

/// Returns the components of a path, the last one first.
fn reversed_components(path: &Path) -> Vec<PathBuf> {
    let components = path.components().filter_map(|component| match component {
        Component::Normal(part) => Some(PathBuf::from(part)),
        Component::ParentDir => Some(PathBuf::from("..")),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    });
    let mut parts: Vec<PathBuf> = components.collect();
    parts.reverse();
    parts
}

/// Whether a host path is visible in the image `host`.
fn is_visible(path: &Path) -> bool {
    let mut first = path.components().skip(1).map(Component::as_os_str);
    match first.next().map(OsStr::as_bytes) {
        Some(b"usr") => true,
        Some(b"etc") => first.next() == Some(OsStr::new("alternatives")),
        Some(name) => super::host::MERGED_DIRECTORIES.iter().any(|merged| merged.as_bytes() == name),
        None => false,
    }
}

/// Returns the version in a directory name such as `node-v20.1.0-linux-x64` or `v20.1.0`.
fn version_in_path(path: &Path) -> Option<String> {
    path.parent()?.iter().rev().filter_map(OsStr::to_str).find_map(|part| {
        let version = leading_version(part.strip_prefix("node-").unwrap_or(part).strip_prefix('v')?)?;
        (version.matches('.').count() == 2).then_some(version)
    })
}

fn parse_os_release(text: &str) -> Option<OsRelease> {
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('='));
        let value = lines.find(|(key, _)| *key == name)?.1.trim().trim_matches(['"', '\'']);
        (!value.is_empty()).then(|| value.to_owned())
    };
    Some(OsRelease {
        id: field("ID")?,
        version_id: field("VERSION_ID"),
        codename: field("VERSION_CODENAME"),
        name: field("NAME"),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const HEADER: &str =
        "#define NODE_MAJOR_VERSION 20\n#define NODE_MINOR_VERSION 1\n#define NODE_PATCH_VERSION 7\n";

    /// Creates a root directory with these files; a value that begins with `-> ` is a link.
    fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, HostPrograms) {
        let root = tempfile::tempdir().expect("a temporary directory can be created");
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("the path is below the root"))
                .expect("our own directory");
            match content.strip_prefix("-> ") {
                Some(target) => symlink(target, &path).expect("the link is new"),
                None => {
                    fs::write(&path, content).expect("our own file");
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our own file");
                }
            }
        }
        let programs = HostPrograms::below(root.path());
        (root, programs)
    }

    fn python(files: &[(&str, &str)]) -> Option<Option<String>> {
        root(files).1.read_software().python.map(|found| found.version)
    }

    fn node(files: &[(&str, &str)]) -> Option<Option<String>> {
        root(files).1.read_software().node.map(|found| found.version)
    }

    #[test]
    fn python_version_is_read_from_the_name_behind_the_links() {
        let known = |version: &str| Some(Some(version.to_owned()));
        let link = ("usr/bin/python3", "-> python3.11");
        assert_eq!(python(&[link, ("usr/bin/python3.11", "\x7fELF")]), known("3.11"));
        let alternatives = [
            ("usr/bin/python3", "-> /etc/alternatives/python3"),
            ("etc/alternatives/python3", "-> /usr/bin/python3.9"),
            ("usr/bin/python3.9", "\x7fELF"),
        ];
        assert_eq!(python(&alternatives), known("3.9"));
        let plain = ("usr/bin/python3", "\x7fELF");
        assert_eq!(python(&[plain, ("usr/lib/python3.13/os.py", "")]), known("3.13"));
        assert_eq!(python(&[plain]), known("3"));
        assert_eq!(
            python(&[("usr/bin/python3", "#!/bin/sh\n")]),
            Some(None),
            "the version of a wrapper is unknown"
        );
        // The first one on the PATH counts, as inside.
        let local = [("usr/local/bin/python3", "-> python3.12"), ("usr/local/bin/python3.12", "\x7fELF")];
        assert_eq!(python(&[link, ("usr/bin/python3.11", "\x7fELF"), local[0], local[1]]), known("3.12"));
    }

    #[test]
    fn programs_outside_of_the_image_do_not_count() {
        let home = [("usr/local/bin/python3", "-> /root/bin/python3.12"), ("root/bin/python3.12", "\x7fELF")];
        assert_eq!(python(&home), None);
        let through = [
            ("usr/bin/python3", "-> /opt/python"),
            ("opt/python", "-> /usr/lib/python3.12"),
            ("usr/lib/python3.12", "\x7fELF"),
        ];
        assert_eq!(python(&through), None, "the link in /opt is not inside");
        assert_eq!(python(&[("usr/bin/python3", "-> python3")]), None, "a link to itself");
        assert_eq!(python(&[("usr/bin/python3", "-> ../../../opt/x"), ("opt/x", "\x7fELF")]), None);
    }

    #[test]
    fn node_version_is_read_from_header_path_or_package() {
        let known = |version: &str| Some(Some(version.to_owned()));
        let program = ("usr/bin/node", "\x7fELF");
        assert_eq!(node(&[program, ("usr/include/node/node_version.h", HEADER)]), known("20.1.7"));
        let elsewhere = [("usr/local/bin/node", "\x7fELF"), ("usr/include/node/node_version.h", HEADER)];
        assert_eq!(node(&elsewhere), Some(None), "the header is of another node");
        let archive = "usr/local/lib/node-v22.3.0-linux-x64/bin/node";
        let link = ("usr/local/bin/node", "-> ../lib/node-v22.3.0-linux-x64/bin/node");
        assert_eq!(node(&[(archive, "\x7fELF"), link]), known("22.3.0"));
        let database = "Package: bash\nVersion: 5.2\n\nPackage: nodejs\nVersion: 1:18.19.0+dfsg-6\n";
        assert_eq!(node(&[program, ("var/lib/dpkg/status", database)]), known("18.19.0"));
        assert_eq!(node(&[program]), Some(None));
        assert_eq!(node(&[]), None);
    }

    /// Makes files look as if they had not changed for an hour.
    fn age(root: &Path, paths: &[&str]) {
        let earlier = SystemTime::now() - Duration::from_secs(3600);
        for path in paths {
            let file = File::open(root.join(path)).expect("the file exists");
            file.set_modified(earlier).expect("our own file");
        }
    }

    #[test]
    fn unchanged_host_is_cached_and_upgrade_is_detected() {
        let database = "Package: nodejs\nVersion: 18.19.0\n";
        let files = [
            ("usr/bin/python3", "\x7fELF"),
            ("usr/bin/node", "\x7fELF"),
            ("usr/lib/python3.13/os.py", ""),
            ("var/lib/dpkg/status", database),
        ];
        let (root, programs) = root(&files);
        let root = root.path();
        let version = |found: Option<HostProgram>| found.and_then(|found| found.version);
        assert_eq!(version(programs.read_software().python).as_deref(), Some("3.13"));
        let is_cached = || programs.cache.lock().expect("looking up does not panic").is_some();
        assert!(!is_cached(), "files that just changed may change again unseen");

        age(root, &["usr/bin", "usr/lib", "usr/bin/python3", "usr/bin/node", "var/lib/dpkg/status"]);
        assert_eq!(version(programs.read_software().node).as_deref(), Some("18.19.0"));
        // No tracked file shows this change, so the old result proves that nothing was read.
        fs::remove_file(root.join("usr/lib/python3.13/os.py")).expect("our own file");
        assert_eq!(version(programs.read_software().python).as_deref(), Some("3.13"));

        fs::write(root.join("var/lib/dpkg/status"), database.replace("18", "20")).expect("our own file");
        assert_eq!(version(programs.read_software().node).as_deref(), Some("20.19.0"), "a new package");
        age(root, &["var/lib/dpkg/status"]);
        programs.read_software();
        fs::rename(root.join("usr/bin/python3"), root.join("usr/bin/python3.14")).expect("our own file");
        symlink("python3.14", root.join("usr/bin/python3")).expect("the link is new");
        assert_eq!(version(programs.read_software().python).as_deref(), Some("3.14"), "a new program");
    }

    #[test]
    fn os_release_is_parsed() {
        let text = "NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        let (_root, programs) = root(&[("usr/lib/os-release", text)]);
        let release = programs.read_software().os_release.expect("the release is found");
        assert_eq!((release.id.as_str(), release.codename.as_deref()), ("debian", Some("bookworm")));
        assert_eq!(release.to_string(), "Debian GNU/Linux 12");
        assert_eq!(parse_os_release("NAME=x\n"), None);
    }
}

//! The part of the host's `/etc` that programs need to run at all.
//!
//! Only what is named here is copied, and of that only what every user of the host may read
//! anyway. A link is kept when it leads into `/usr` or stays within what is copied; otherwise the
//! file it leads to is copied in its place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use super::host::Skeleton;
use super::{During, ImageError};

/// Files and directories of `/etc`; a `*` stands for the rest of a name.
const NAMES: [&str; 48] = [
    "ImageMagick-*",
    "OpenCL",
    "X11/fonts",
    "alternatives",
    "bash.bashrc",
    "bindresvport.blacklist",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "ethertypes",
    "fonts",
    "gai.conf",
    "ghostscript",
    "host.conf",
    "inputrc",
    "java*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libnl-3",
    "locale.alias",
    "locale.conf",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "manpath.config",
    "mime.types",
    "nanorc",
    "networks",
    "openmpi",
    "os-release",
    "perl",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "protocols",
    "python*",
    "redhat-release",
    "rpc",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "vim",
];

const MOST_ENTRIES: usize = 20_000;
const MOST_BYTES: u64 = 64 << 20;
const LARGEST_FILE: u64 = 16 << 20;
const MOST_DEPTH: usize = 16;

/// Copies the essentials into the skeleton.
pub(super) fn copy(skeleton: &mut Skeleton) -> Result<(), ImageError> {
    let mut copy = Copy { skeleton, entries: 0, bytes: 0 };
    for name in names()? {
        let path = Path::new("/etc").join(&name);
        copy.parents(&name)?;
        copy.place(&path, &path, 0)?;
    }
    Ok(())
}

/// The names that exist on this host, in a fixed order.
fn names() -> Result<Vec<PathBuf>, ImageError> {
    let etc = Path::new("/etc");
    let mut present = Vec::new();
    for entry in fs::read_dir(etc).during("list", etc)? {
        present.push(entry.during("list", etc)?.file_name());
    }
    present.sort();
    let matching = |pattern: &&str| -> Vec<PathBuf> {
        match pattern.strip_suffix('*') {
            Some(start) => {
                let fits =
                    |name: &&std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with(start));
                present.iter().filter(fits).map(PathBuf::from).collect()
            }
            None => vec![PathBuf::from(pattern)],
        }
    };
    Ok(NAMES.iter().flat_map(matching).collect())
}

struct Copy<'skeleton> {
    skeleton: &'skeleton mut Skeleton,
    entries: usize,
    bytes: u64,
}

impl Copy<'_> {
    fn parents(&mut self, name: &Path) -> Result<(), ImageError> {
        let above: Vec<&Path> = name.ancestors().skip(1).filter(|path| *path != Path::new("")).collect();
        let exists = |path: &&&Path| Path::new("/etc").join(path).is_dir();
        for path in above.iter().rev().filter(exists) {
            self.skeleton.directory(&Path::new("etc").join(path), 0o755)?;
        }
        Ok(())
    }

    /// Copies what lies at `source` to the place where `shown` is inside. `top` is the named
    /// entry it belongs to, within which links may stay.
    fn place(&mut self, source: &Path, top: &Path, depth: usize) -> Result<(), ImageError> {
        let Ok(found) = fs::symlink_metadata(source) else { return Ok(()) };
        self.entries += 1;
        if self.entries > MOST_ENTRIES || depth > MOST_DEPTH {
            return Err(ImageError::TooLarge("the essentials of `/etc` may have entries or levels"));
        }
        if found.is_symlink() {
            let target = fs::read_link(source).during("read the link", source)?;
            if stays(source, &target, top) {
                return self.skeleton.link(inside(source), &target);
            }
        }
        match open_as_anybody(source) {
            Some(file) => self.open(source, top, file, depth),
            None => Ok(()),
        }
    }

    fn open(&mut self, source: &Path, top: &Path, file: File, depth: usize) -> Result<(), ImageError> {
        let found = file.metadata().during("look at", source)?;
        if found.is_dir() {
            self.skeleton.directory(inside(source), 0o755)?;
            let mut below = Vec::new();
            for entry in fs::read_dir(source).during("list", source)? {
                below.push(entry.during("list", source)?.path());
            }
            below.sort();
            return below.iter().try_for_each(|path| self.place(path, top, depth + 1));
        }
        if !found.is_file() || found.len() > LARGEST_FILE {
            return Ok(());
        }
        let mut text = Vec::new();
        file.take(LARGEST_FILE).read_to_end(&mut text).during("read", source)?;
        self.bytes += text.len() as u64;
        if self.bytes > MOST_BYTES {
            return Err(ImageError::TooLarge("64 MiB of essentials in `/etc`"));
        }
        let mode = 0o644 | (found.mode() & 0o111);
        self.skeleton.text(inside(source), mode, &text)
    }
}

fn inside(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Whether a link means the same inside, where only `/usr` and the named entries exist.
fn stays(source: &Path, target: &Path, top: &Path) -> bool {
    let parent = source.parent().unwrap_or(Path::new("/"));
    let mut leads_to = PathBuf::from("/");
    for part in parent.join(target).components() {
        match part {
            Component::Normal(name) => leads_to.push(name),
            Component::ParentDir => drop(leads_to.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    let within = leads_to.starts_with(top) && leads_to != top;
    // Which program an alternative stands for matters more than whether it is there.
    within
        || leads_to.starts_with("/usr")
        || top == Path::new("/etc/alternatives")
        || leads_to.starts_with("/etc/alternatives")
}

/// Opens what every user of the host may read: the file itself and each directory above it, as
/// they really are after all links.
fn open_as_anybody(path: &Path) -> Option<File> {
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits();
    let flags = i32::try_from(nonblock).ok()?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let readable = file.metadata().ok()?.mode() & 0o004 != 0;
    let reachable = real.ancestors().skip(1).all(|above| {
        let mode: io::Result<u32> = fs::metadata(above).map(|found| found.mode());
        mode.is_ok_and(|mode| mode & 0o001 != 0)
    });
    (readable && reachable).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_stays_when_it_means_the_same_inside() {
        let check = |source: &str, target: &str, top: &str, expected: bool| {
            let stays = stays(Path::new(source), Path::new(target), Path::new(top));
            assert_eq!(stays, expected, "{source} -> {target}");
        };
        check("/etc/localtime", "/usr/share/zoneinfo/UTC", "/etc/localtime", true);
        check("/etc/os-release", "../usr/lib/os-release", "/etc/os-release", true);
        check("/etc/ssl/certs/a.0", "b.pem", "/etc/ssl/certs", true);
        check("/etc/ssl/certs/a.0", "../private/key.pem", "/etc/ssl/certs", false);
        check("/etc/ssl/certs/a.0", "/root/key.pem", "/etc/ssl/certs", false);
        check("/etc/ssl/certs", "../pki/tls/certs", "/etc/ssl/certs", false);
        check("/etc/ssl/certs/a", "/usr/../root/key", "/etc/ssl/certs", false);
    }
}

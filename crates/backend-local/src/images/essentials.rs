//! The part of the host's `/etc` that programs need in order to run.
//!
//! Only the names listed here are copied, and only files that every user of the host can read
//! anyway. A link is kept if it leads into `/usr` or stays within the copied files; otherwise its
//! target is copied instead.

use std::fs::{self, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use super::skeleton::{self, LARGEST_FILE, Plan};
use super::{During, ImageError};

/// Files and directories of `/etc`; a trailing `*` matches the rest of a name.
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
const MOST_DEPTH: usize = 16;

/// Adds the essentials to the skeleton.
pub(super) fn plan(plan: &mut Plan) -> Result<(), ImageError> {
    let mut copy = Copy { plan, bytes: 0 };
    for name in names()? {
        let path = Path::new("/etc").join(&name);
        copy.parents(&name);
        copy.place(&path, &path, 0)?;
    }
    Ok(())
}

/// Returns the names, with stars expanded to the names that exist on this host.
fn names() -> Result<Vec<PathBuf>, ImageError> {
    let etc = Path::new("/etc");
    let mut present = Vec::new();
    for entry in fs::read_dir(etc).during("list", etc)? {
        present.push(entry.during("list", etc)?.file_name());
    }
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

struct Copy<'plan> {
    plan: &'plan mut Plan,
    bytes: u64,
}

impl Copy<'_> {
    fn parents(&mut self, name: &Path) {
        let above = name.ancestors().skip(1).filter(|path| *path != Path::new(""));
        for path in above.filter(|path| Path::new("/etc").join(path).is_dir()) {
            self.plan.directory(&Path::new("etc").join(path), 0o755);
        }
    }

    /// Plans the entry at `source`. `top` is the listed entry it belongs to, within which links may
    /// stay.
    fn place(&mut self, source: &Path, top: &Path, depth: usize) -> Result<(), ImageError> {
        let Ok(found) = fs::symlink_metadata(source) else { return Ok(()) };
        if self.plan.len() > MOST_ENTRIES || depth > MOST_DEPTH {
            return Err(ImageError::TooLarge("the limit on entries or levels of `/etc`"));
        }
        if !found.is_symlink() {
            return self.take(source, top, &found, depth);
        }
        let target = fs::read_link(source).during("read the link", source)?;
        if stays(source, &target, top) {
            self.plan.link(inside(source), &target);
            return Ok(());
        }
        match reachable_by_anybody(source) {
            Some(found) => self.take(source, top, &found, depth),
            None => Ok(()),
        }
    }

    /// Adds a file or directory that everyone may read; others are skipped.
    fn take(&mut self, source: &Path, top: &Path, found: &Metadata, depth: usize) -> Result<(), ImageError> {
        if found.is_dir() && found.mode() & 0o005 == 0o005 {
            self.plan.directory(inside(source), 0o755);
            for entry in fs::read_dir(source).during("list", source)? {
                self.place(&entry.during("list", source)?.path(), top, depth + 1)?;
            }
        } else if found.is_file() && found.mode() & 0o004 != 0 && found.len() <= LARGEST_FILE {
            self.bytes += found.len();
            if self.bytes > MOST_BYTES {
                return Err(ImageError::TooLarge("64 MiB of essentials in `/etc`"));
            }
            self.plan.copy(inside(source), source, found);
        }
        Ok(())
    }
}

fn inside(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Whether a link has the same target inside, where only `/usr` and the listed entries exist.
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
    // For alternatives, the target matters even if it does not exist inside.
    within
        || leads_to.starts_with("/usr")
        || top == Path::new("/etc/alternatives")
        || leads_to.starts_with("/etc/alternatives")
}

/// Returns the metadata of a link's target, if every user of the host can reach it: each directory
/// above it, after resolving all links, must be searchable by everyone.
fn reachable_by_anybody(path: &Path) -> Option<Metadata> {
    let file = skeleton::open(path).ok()?;
    let real = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let passable = |above: &Path| fs::metadata(above).is_ok_and(|found| found.mode() & 0o001 != 0);
    if real.ancestors().skip(1).all(passable) { file.metadata().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_is_kept_when_its_target_is_the_same_inside() {
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

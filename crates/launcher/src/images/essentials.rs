//! The part of the host's `/etc` that programs need in order to run.
//!
//! Only the names listed here are copied, and only files that every user of the host can read
//! anyway. A link is kept if it leads into `/usr` or stays within the copied files; otherwise its
//! target is copied instead.

use std::fs::{self, Metadata};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use super::skeleton::{self, MAX_FILE_SIZE, SkeletonPlan};
use super::{ImageError, ImageErrorContext};

/// Files and directories of `/etc`; a trailing `*` matches the rest of a name.
const ETC_ENTRIES: [&str; 48] = [
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

const MAX_ENTRIES: usize = 20_000;
const MAX_BYTES: u64 = 64 << 20;
const MAX_DEPTH: usize = 16;

/// Adds the essentials to the skeleton.
pub(super) fn plan_essentials(plan: &mut SkeletonPlan) -> Result<(), ImageError> {
    let mut copy = EssentialsPlanner { plan, bytes: 0 };
    for name in expand_names()? {
        let path = Path::new("/etc").join(&name);
        copy.plan_parents(&name);
        copy.plan_entry(&path, &path, 0)?;
    }
    Ok(())
}

/// Returns the names, with stars expanded to the names that exist on this host.
fn expand_names() -> Result<Vec<PathBuf>, ImageError> {
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
    Ok(ETC_ENTRIES.iter().flat_map(matching).collect())
}

struct EssentialsPlanner<'plan> {
    plan: &'plan mut SkeletonPlan,
    bytes: u64,
}

impl EssentialsPlanner<'_> {
    fn plan_parents(&mut self, name: &Path) {
        let above = name.ancestors().skip(1).filter(|path| *path != Path::new(""));
        for path in above.filter(|path| Path::new("/etc").join(path).is_dir()) {
            self.plan.add_directory(&Path::new("etc").join(path), 0o755);
        }
    }

    /// Plans the entry at `source`. `top` is the listed entry it belongs to, within which links may
    /// stay.
    fn plan_entry(&mut self, source: &Path, top: &Path, depth: usize) -> Result<(), ImageError> {
        let Ok(found) = fs::symlink_metadata(source) else { return Ok(()) };
        if self.plan.len() > MAX_ENTRIES || depth > MAX_DEPTH {
            return Err(ImageError::TooLarge("the limit on entries or levels of `/etc`"));
        }
        if !found.is_symlink() {
            return self.plan_readable_entry(source, top, &found, depth);
        }
        let target = fs::read_link(source).during("read the link", source)?;
        if link_stays_valid(source, &target, top) {
            self.plan.add_link(path_inside(source), &target);
            return Ok(());
        }
        match publicly_reachable(source) {
            Some(found) => self.plan_readable_entry(source, top, &found, depth),
            None => Ok(()),
        }
    }

    /// Adds a file or directory that everyone may read; others are skipped.
    fn plan_readable_entry(
        &mut self,
        source: &Path,
        top: &Path,
        found: &Metadata,
        depth: usize,
    ) -> Result<(), ImageError> {
        if found.is_dir() && found.mode() & 0o005 == 0o005 {
            self.plan.add_directory(path_inside(source), 0o755);
            for entry in fs::read_dir(source).during("list", source)? {
                self.plan_entry(&entry.during("list", source)?.path(), top, depth + 1)?;
            }
        } else if found.is_file() && found.mode() & 0o004 != 0 && found.len() <= MAX_FILE_SIZE {
            self.bytes += found.len();
            if self.bytes > MAX_BYTES {
                return Err(ImageError::TooLarge("64 MiB of essentials in `/etc`"));
            }
            self.plan.add_copy(path_inside(source), source, found);
        }
        Ok(())
    }
}

fn path_inside(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Whether a link has the same target inside, where only `/usr` and the listed entries exist.
fn link_stays_valid(source: &Path, target: &Path, top: &Path) -> bool {
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
fn publicly_reachable(path: &Path) -> Option<Metadata> {
    let file = skeleton::open_nonblocking(path).ok()?;
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
            let stays = link_stays_valid(Path::new(source), Path::new(target), Path::new(top));
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

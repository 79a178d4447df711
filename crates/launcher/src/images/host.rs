//! The image `host`: the host's own `/usr` under a skeleton with everything else.
//!
//! The skeleton is an allow-list. Only the names listed here or in [`essentials`] exist inside: no
//! home, no `/var`, no live `/etc`. It is stored under a name derived from its content, so
//! sandboxes of an earlier start keep theirs.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use linux::fs::RootDirectory;

use super::skeleton::SkeletonPlan;
use super::skeleton_record::{RECORD_NAME, SkeletonRecord};
use super::{ImageError, ImageErrorContext, ImageTree, essentials};

/// The host image as it is on this host now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostImage {
    /// In the order in which they must be mounted.
    pub trees: Vec<ImageTree>,
}

/// On most hosts these are links into `/usr`; where they are directories, each is a separate tree.
pub(super) const MERGED_DIRECTORIES: [&str; 7] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"];

const EMPTY_DIRECTORIES: [(&str, u32); 22] = [
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o755),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

const SYMLINKS: [(&str, &str); 3] =
    [("var/run", "/run"), ("var/lock", "/run/lock"), ("etc/mtab", "../proc/self/mounts")];

const PASSWD: &str = "\
root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
";
const GROUP: &str = "\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
disk:x:6:
mail:x:8:
man:x:12:
www-data:x:33:
shadow:x:42:
utmp:x:43:
staff:x:50:
users:x:100:
nogroup:x:65534:
";
const SHADOW: &str = "root:*:19000:0:99999:7:::\n";
const HOSTS: &str = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n";
const RESOLV: &str = "# There is no name server: the network is off.\n";
const NSSWITCH: &str = "\
passwd: files
group: files
shadow: files
hosts: files dns
networks: files
protocols: files
services: files
";
const SHELLS: &str = "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n";
const PROFILE: &str = "\
export PATH=\"${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}\"
if [ -n \"${BASH-}\" ] && [ \"$BASH\" != /bin/sh ] && [ -r /etc/bash.bashrc ]; then
    . /etc/bash.bashrc
fi
";

/// Debian and others mark their Python as managed by the distribution, and pip then refuses to
/// install anything (PEP 668). Inside a sandbox there is no system to protect: everything pip
/// writes belongs to the sandbox alone. Versions of pip that do not know the setting ignore it.
const PIP: &str = "\
# Packages that are installed here belong to this sandbox alone.
[global]
break-system-packages = true
";

/// apt has no suitable message for a system without a package database. It prints the name of a
/// packaging system that it does not know, as its only line: "E: Packaging system '...' is not supported".
const APT: &str = "\
// Image `host` shows the programs of the host and has no package database, so apt cannot work here.
APT::System \"apt in image `host`, which has no package database: use pip or npm, \
install the package on the host, or use an image of a distribution (see docs/packages.md)\";
";

/// Creates the skeleton of this host below `dir` unless it exists, and returns the trees of the
/// image.
pub fn create_host_skeleton(dir: &Path) -> Result<HostImage, ImageError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).during("make", dir)?;
    if let Some(record) = SkeletonRecord::read_valid(dir) {
        return Ok(HostImage { trees: host_trees(dir.join(record.version), &record.split)? });
    }
    let (plan, split) = plan_skeleton()?;
    let version = PathBuf::from(plan.version());
    let store = RootDirectory::open(dir).during("open", dir)?;
    if store.stat(&version).is_err() {
        write_skeleton(&store, &plan, &version)?;
    }
    // Which files have to be stamped is known only after they were read, so a second plan shows whether they
    // changed meanwhile.
    let record = SkeletonRecord::of_plan(&plan, &split);
    if plan_skeleton()?.0.version() == plan.version() {
        record.write(dir)?;
    }
    Ok(HostImage { trees: host_trees(dir.join(version), &split)? })
}

/// Writes a draft and renames it when it is complete. A state directory has one launcher at a time,
/// so a draft found here was left behind by a launcher that was killed.
fn write_skeleton(store: &RootDirectory, plan: &SkeletonPlan, version: &Path) -> Result<(), ImageError> {
    let draft = PathBuf::from(".draft");
    store.remove_tree(&draft).during("remove", &draft)?;
    store.make_directory(&draft, 0o755).during("make", &draft)?;
    store.set_mode(&draft, 0o755).during("mark", &draft)?;
    let tree = store.open_subdirectory(&draft).during("open", &draft)?;
    plan.write(&tree)?;
    store.rename_without_replacing(&draft, version).during("keep the skeleton", version)
}

/// Removes the skeletons of earlier starts, unless a sandbox could still use one; `are_used` is
/// only called if there are any.
pub fn remove_old_skeletons(
    dir: &Path,
    current: &HostImage,
    are_used: impl FnOnce() -> io::Result<bool>,
) -> Result<(), ImageError> {
    let store = RootDirectory::open(dir).during("open", dir)?;
    let kept = current.trees.first().and_then(|tree| tree.lowers.first()).and_then(|path| path.file_name());
    let entries = store.list_entries().during("list", dir)?;
    let names = entries.iter().map(|entry| OsStr::from_bytes(entry.name.to_bytes()));
    let old: Vec<&OsStr> =
        names.filter(|name| Some(*name) != kept && *name != OsStr::new(RECORD_NAME)).collect();
    if old.is_empty() || are_used().during("look for users of", dir)? {
        return Ok(());
    }
    old.into_iter().map(Path::new).try_for_each(|name| store.remove_tree(name).during("remove", name))
}

/// Directories of `/usr` to create in the upper layer when the host's owners cannot be mapped:
/// without them an unprivileged user could install nothing there.
pub fn premade_usr_directories() -> Vec<PathBuf> {
    let names = [
        "bin",
        "sbin",
        "lib",
        "libexec",
        "include",
        "share",
        "share/man",
        "share/man/man1",
        "lib/node_modules",
        "lib/python3",
        "lib/python3/dist-packages",
        "local",
        "local/bin",
        "local/etc",
        "local/include",
        "local/lib",
        "local/lib/node_modules",
        "local/sbin",
        "local/share",
        "local/src",
    ];
    let fixed = names.iter().map(PathBuf::from);
    let python = fs::read_dir("/usr/local/lib").into_iter().flatten().flatten();
    let python = python.filter(|entry| entry.file_name().as_bytes().starts_with(b"python3"));
    let packages = python.flat_map(|entry| {
        let library = Path::new("local/lib").join(entry.file_name());
        [library.clone(), library.join("dist-packages"), library.join("site-packages")]
    });
    let is_directory =
        |path: &PathBuf| fs::symlink_metadata(Path::new("/usr").join(path)).is_ok_and(|found| found.is_dir());
    fixed.chain(packages).filter(is_directory).collect()
}

/// Returns the trees of the image `host` without making its skeleton, to look at the host's own ones.
pub(crate) fn host_image_trees() -> Result<HostImage, ImageError> {
    let is_directory =
        |name: &&str| fs::symlink_metadata(Path::new("/").join(name)).is_ok_and(|found| found.is_dir());
    let split: Vec<String> =
        MERGED_DIRECTORIES.iter().filter(|name| is_directory(name)).map(|name| (*name).to_owned()).collect();
    Ok(HostImage { trees: host_trees(PathBuf::new(), &split)? })
}

fn host_trees(skeleton: PathBuf, split: &[String]) -> Result<Vec<ImageTree>, ImageError> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .during("read the mounts of", Path::new("/proc/self/mountinfo"))?;
    let same = |path: &str| ImageTree { mount_point: path.to_owned(), lowers: vec![PathBuf::from(path)] };
    let mut trees = vec![ImageTree { mount_point: "/".to_owned(), lowers: vec![skeleton] }, same("/usr")];
    trees.extend(split.iter().map(|name| same(&format!("/{name}"))));
    trees.extend(mounts_below_usr(&mounts).iter().map(|path| same(path)));
    Ok(trees)
}

/// Returns the mount points below `/usr`; an overlay does not include these.
fn mounts_below_usr(mountinfo: &str) -> Vec<String> {
    let points = mountinfo.lines().filter_map(|line| {
        let kind = line.split(" - ").nth(1)?.split(' ').next()?;
        (kind != "autofs").then_some(line.split(' ').nth(4)?)
    });
    let mut found: Vec<String> =
        points.filter(|point| point.starts_with("/usr/")).map(unescape_mount_path).collect();
    found.sort();
    found.dedup();
    found
}

/// Decodes blanks and backslashes, which are written as three octal digits. See
/// proc_pid_mountinfo(5).
fn unescape_mount_path(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => plain.push_str(part),
        }
    }
    plain
}

/// Plans the skeleton; also returns which of the merged names are directories on this host.
fn plan_skeleton() -> Result<(SkeletonPlan, Vec<String>), ImageError> {
    let mut plan = SkeletonPlan::default();
    for (path, mode) in EMPTY_DIRECTORIES {
        plan.add_directory(Path::new(path), mode);
    }
    for (path, target) in SYMLINKS {
        plan.add_link(Path::new(path), Path::new(target));
    }
    essentials::plan_essentials(&mut plan)?;
    plan_synthetic_files(&mut plan);
    let split = plan_merged_directories(&mut plan)?;
    Ok((plan, split))
}

fn plan_synthetic_files(plan: &mut SkeletonPlan) {
    let bash = Path::new("/bin/bash").exists();
    let passwd = if bash { PASSWD.replacen("/bin/sh", "/bin/bash", 1) } else { PASSWD.to_owned() };
    for (name, mode, text) in [
        ("passwd", 0o644, passwd.as_str()),
        ("group", 0o644, GROUP),
        ("shadow", 0o600, SHADOW),
        ("hosts", 0o644, HOSTS),
        ("hostname", 0o644, "sandbox\n"),
        ("resolv.conf", 0o644, RESOLV),
        ("nsswitch.conf", 0o644, NSSWITCH),
        ("shells", 0o644, SHELLS),
        ("profile", 0o644, PROFILE),
        ("pip.conf", 0o644, PIP),
        ("machine-id", 0o444, ""),
    ] {
        plan.add_text(&Path::new("etc").join(name), mode, text);
    }
    if Path::new("/usr/bin/apt-get").exists() {
        plan.add_directory(Path::new("etc/apt"), 0o755);
        // Without this one apt warns before it says anything else.
        plan.add_directory(Path::new("etc/apt/apt.conf.d"), 0o755);
        plan.add_text(Path::new("etc/apt/apt.conf"), 0o644, APT);
    }
}

fn plan_merged_directories(plan: &mut SkeletonPlan) -> Result<Vec<String>, ImageError> {
    let mut split = Vec::new();
    for name in MERGED_DIRECTORIES {
        let source = Path::new("/").join(name);
        let Ok(found) = fs::symlink_metadata(&source) else { continue };
        if found.is_symlink() {
            plan.add_link(Path::new(name), &fs::read_link(&source).during("read the link", &source)?);
        } else if found.is_dir() {
            plan.add_directory(Path::new(name), 0o755);
            split.push(name.to_owned());
        }
    }
    Ok(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_below_usr_are_separate_trees() {
        let mountinfo = "\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 8:2 / /usr/local\\040x rw,relatime shared:1 - ext4 /dev/sda2 rw
31 22 8:3 / /usr/share rw - ext4 /dev/sda3 rw
32 22 8:3 / /usr/auto rw - autofs systemd-1 rw
33 22 8:4 / /usrx rw - ext4 /dev/sda4 rw
";
        assert_eq!(mounts_below_usr(mountinfo), ["/usr/local x", "/usr/share"]);
    }
}

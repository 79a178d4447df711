//! Reads from the kernel where hierarchies are mounted and which group this process is in.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A cgroup line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CgroupMount {
    pub(super) path: PathBuf,
    pub(super) kind: String,
    /// The group that is mounted at `path`.
    root: PathBuf,
    options: String,
}

/// Returns the hierarchies that are mounted here.
pub(super) fn read_cgroup_mounts() -> io::Result<Vec<CgroupMount>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(table.lines().filter_map(CgroupMount::parse).collect())
}

/// Returns the v2 hierarchy among them.
pub(super) fn find_unified_mount(mounts: &[CgroupMount]) -> io::Result<&CgroupMount> {
    let unified = mounts.iter().find(|mount| mount.kind == "cgroup2");
    unified.ok_or_else(|| io::Error::other("no cgroup v2 hierarchy is mounted"))
}

impl CgroupMount {
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, path) = (fields.next()?.into(), fields.next()?.into());
        let mut words = filesystem.split(' ');
        let kind = words.next()?;
        let options = words.nth(1)?.to_owned();
        let ours = kind == "cgroup" || kind == "cgroup2";
        ours.then(|| Self { path, root, kind: kind.to_owned(), options })
    }

    pub(super) fn has_option(&self, option: &str) -> bool {
        self.options.split(',').any(|word| word == option)
    }

    /// Whether the root of the hierarchy, or of our cgroup namespace, is mounted.
    pub(super) fn shows_whole_hierarchy(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Returns the directory of the v2 group that this process is in.
    pub(super) fn own_group(&self) -> io::Result<PathBuf> {
        let text = fs::read_to_string("/proc/self/cgroup")?;
        self.parse_own_group(&text)
            .ok_or_else(|| io::Error::other("our own control group is not visible here"))
    }

    /// Returns the directory of the v2 group named in a text such as `/proc/self/cgroup`.
    pub(super) fn parse_own_group(&self, text: &str) -> Option<PathBuf> {
        let group = text.lines().find_map(|line| line.strip_prefix("0::"))?;
        self.directory_of(group)
    }

    /// Returns the directory of this v1 hierarchy's group named in a text such as `/proc/self/cgroup`.
    pub(super) fn parse_own_legacy_group(&self, text: &str) -> Option<PathBuf> {
        let of_this_hierarchy = |line: &str| -> Option<PathBuf> {
            let (_, line) = line.split_once(':')?;
            let (names, group) = line.split_once(':')?;
            let all_here = !names.is_empty() && names.split(',').all(|name| self.has_option(name));
            if all_here { self.directory_of(group) } else { None }
        };
        text.lines().find_map(of_this_hierarchy)
    }

    /// Returns where a group of this hierarchy is, if it is below the group that is mounted.
    fn directory_of(&self, group: &str) -> Option<PathBuf> {
        let below = Path::new(group).strip_prefix(&self.root).ok()?;
        let outside = below.components().any(|part| part.as_os_str() == OsStr::new(".."));
        (!outside).then(|| self.path.join(below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_mounts_are_read_from_the_table() {
        let line =
            "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct";
        let mount = CgroupMount::parse(line).expect("a cgroup mount");
        assert_eq!(mount.path, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(mount.has_option("cpu") && !mount.has_option("memory"));
        assert!(CgroupMount::parse("22 1 8:1 / / rw - ext4 /dev/sda1 rw").is_none());
    }

    #[test]
    fn own_group_is_found_below_the_mounted_group() {
        let check = |root: &str, text: &str, expected: Option<&str>| {
            let line = format!("31 23 0:27 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate");
            let mount = CgroupMount::parse(&line).expect("a cgroup mount");
            assert_eq!(mount.parse_own_group(text), expected.map(PathBuf::from), "{root} {text}");
        };
        check("/", "0::/user.slice/a.scope\n", Some("/sys/fs/cgroup/user.slice/a.scope"));
        check("/", "4:memory:/x\n0::/\n", Some("/sys/fs/cgroup/"));
        check("/docker/1", "0::/docker/1/a\n", Some("/sys/fs/cgroup/a"));
        check("/docker/1", "0::/docker/2\n", None);
        check("/", "0::/../elsewhere\n", None);
        check("/", "4:memory:/x\n", None);
    }

    #[test]
    fn own_group_of_a_v1_hierarchy_is_found_by_its_controllers() {
        let check = |root: &str, options: &str, expected: Option<&str>| {
            let text = "9:name=systemd:/unit\n2:cpu,cpuacct:/docker/1/a\n1:cpuset:/b\n0::/c\n";
            let line = format!("31 23 0:27 {root} /cg rw - cgroup cgroup rw,{options}");
            let mount = CgroupMount::parse(&line).expect("a cgroup mount");
            assert_eq!(mount.parse_own_legacy_group(text), expected.map(PathBuf::from), "{root} {options}");
        };
        check("/", "xattr,name=systemd", Some("/cg/unit"));
        check("/", "cpuset", Some("/cg/b"));
        check("/docker/1", "cpu,cpuacct", Some("/cg/a"));
        check("/docker/2", "cpu,cpuacct", None);
        check("/", "memory", None);
    }
}

//! Containers as runc makes them, from a description of what they may do.
//!
//! The root directory is an empty one with the host's `/usr` mounted into it, so no registry is needed. Each
//! container has a control group and namespaces of its own and ends with the command that it runs.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::binary::ProgramCopies;
use crate::run::CommandOutput;

/// The place of the binary and of the state directory in a container.
pub const PROGRAM: &str = "/opt/coracle/coracle";
pub const STATE: &str = "/state";

/// The names of capabilities by number.
const CAPABILITIES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// What Docker, Podman and containerd leave to root unless told otherwise.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The system calls that Docker's default profile leaves to CAP_SYS_ADMIN.
const ADMIN_CALLS: [&str; 13] = [
    "unshare",
    "setns",
    "mount",
    "umount2",
    "pivot_root",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "quotactl",
];

/// The flags of new namespaces that clone(2) refuses under the same profile.
const NAMESPACE_FLAGS: [u64; 7] =
    [0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];

/// The paths that a container does not see by default.
const MASKED_PATHS: [&str; 6] =
    ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"];
const READ_ONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// A container under construction.
#[derive(Clone, Debug)]
pub struct TestContainer {
    uid: u32,
    capabilities: Vec<String>,
    seccomp: SeccompProfile,
    user_namespace: bool,
    hides_proc_parts: bool,
    writable_cgroups: bool,
    host_devices: bool,
    usr_on_overlay: bool,
    read_only_root: bool,
    without_state: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SeccompProfile {
    Unconfined,
    /// Docker's default for a container without CAP_SYS_ADMIN.
    Default,
}

impl TestContainer {
    /// As `docker run` makes it: root with a few capabilities, a filter, parts of /proc hidden.
    pub fn with_defaults() -> Self {
        Self {
            uid: 0,
            capabilities: DEFAULT_CAPABILITIES.map(str::to_owned).to_vec(),
            seccomp: SeccompProfile::Default,
            user_namespace: false,
            hides_proc_parts: true,
            writable_cgroups: false,
            host_devices: false,
            usr_on_overlay: false,
            read_only_root: false,
            without_state: false,
        }
    }

    /// As `docker run --privileged` makes it, with the host's control groups.
    pub fn privileged() -> Self {
        Self {
            capabilities: own_capabilities(),
            seccomp: SeccompProfile::Unconfined,
            hides_proc_parts: false,
            writable_cgroups: true,
            host_devices: true,
            ..Self::with_defaults()
        }
    }

    /// `--cap-add`. CAP_SYS_ADMIN also takes the filter of its system calls away.
    pub fn add_capability(mut self, name: &str) -> Self {
        self.capabilities.push(name.to_owned());
        if name == "SYS_ADMIN" {
            self.seccomp = SeccompProfile::Unconfined;
        }
        self
    }

    /// `--cap-drop`.
    pub fn drop_capability(mut self, name: &str) -> Self {
        self.capabilities.retain(|present| present != name);
        self
    }

    /// `--cap-drop ALL --user UID`.
    pub fn as_ordinary_user(mut self, uid: u32) -> Self {
        self.uid = uid;
        self.capabilities.clear();
        self
    }

    /// `--cap-drop ALL`, still as root.
    pub fn without_capabilities(mut self) -> Self {
        self.capabilities.clear();
        self
    }

    /// `--security-opt seccomp=unconfined`.
    pub fn without_seccomp(mut self) -> Self {
        self.seccomp = SeccompProfile::Unconfined;
        self
    }

    /// `--security-opt systempaths=unconfined`.
    pub fn with_whole_proc(mut self) -> Self {
        self.hides_proc_parts = false;
        self
    }

    /// `--userns` with a range of ids: root inside is an ordinary user outside.
    pub fn in_user_namespace(mut self) -> Self {
        self.user_namespace = true;
        self
    }

    pub fn with_read_only_cgroups(mut self) -> Self {
        self.writable_cgroups = false;
        self
    }

    /// `/usr` is part of an overlay, as in every container that was made from an image.
    pub fn with_usr_on_overlay(mut self) -> Self {
        self.usr_on_overlay = true;
        self
    }

    /// `--read-only`.
    pub fn with_read_only_root(mut self) -> Self {
        self.read_only_root = true;
        self
    }

    /// Without a volume for the state directory.
    pub fn without_state_volume(mut self) -> Self {
        self.without_state = true;
        self
    }

    /// Runs shell text in a new container, with a fresh state directory at [`STATE`].
    pub fn run_shell(&self, text: &str) -> CommandOutput {
        self.run_shell_with(text, &[])
    }

    /// As [`TestContainer::run_shell`], with directories of the host mounted read-only.
    pub fn run_shell_with(&self, text: &str, mounts: &[(&Path, &str)]) -> CommandOutput {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("e2e-container-{}-{number}", std::process::id());
        let bundle = ContainerBundle::make(self, &name, text, mounts);
        let output = Command::new("runc")
            .arg("--root")
            .arg(bundle.directory.path().join("runc"))
            .args(["run", "--bundle"])
            .arg(bundle.directory.path())
            .arg(&name)
            .stdin(Stdio::null())
            .output();
        output.expect("the caller checked that runc is there").into()
    }

    fn outside_id(&self) -> u32 {
        if self.user_namespace { FIRST_OUTSIDE_ID + self.uid } else { self.uid }
    }
}

/// The first of the host's ids for containers with a user namespace; no distribution assigns it.
const FIRST_OUTSIDE_ID: u32 = 1_900_000_000;

/// Returns whether containers can be made here; otherwise reports the test as skipped.
#[must_use]
pub fn can_run_containers() -> bool {
    let found = Command::new("runc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        testkit::skip_test("runc is not installed");
        return false;
    }
    testkit::needs_root()
}

/// A directory with `config.json` and an almost empty root.
struct ContainerBundle {
    directory: TempDir,
}

impl ContainerBundle {
    fn make(container: &TestContainer, name: &str, script: &str, mounts: &[(&Path, &str)]) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("container-")
            .permissions(Permissions::from_mode(0o755))
            .tempdir()
            .expect("the temporary directory can be written");
        let root = directory.path().join("rootfs");
        make_root(&root);
        let state = directory.path().join("state");
        fs::create_dir(&state).expect("our own directory");
        for path in [&state, &root, &root.join("root"), &root.join("var/lib"), &root.join("etc")] {
            let owner = container.outside_id();
            chown(path, Some(owner), Some(owner)).expect("tests with containers run as root");
        }
        let config = build_config(container, name, script, &state, mounts);
        fs::write(directory.path().join("config.json"), config.to_string()).expect("our own directory");
        Self { directory }
    }
}

fn make_root(root: &Path) {
    for name in [
        "usr",
        "opt/coracle",
        "state",
        "root",
        "tmp",
        "var/lib",
        "var/tmp",
        "etc",
        "proc",
        "sys",
        "dev",
        "run",
        "mnt",
    ] {
        fs::create_dir_all(root.join(name)).expect("our own directory");
    }
    fs::set_permissions(root.join("tmp"), Permissions::from_mode(0o1777)).expect("our own directory");
    for name in ["bin", "sbin", "lib", "lib64"] {
        let Ok(target) = fs::read_link(Path::new("/").join(name)) else { continue };
        symlink(target, root.join(name)).expect("our own directory");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").expect("our own directory");
    fs::write(root.join("etc/group"), "root:x:0:\n").expect("our own directory");
    fs::copy("/etc/ld.so.cache", root.join("etc/ld.so.cache")).expect("every host has it");
}

fn build_config(
    container: &TestContainer,
    name: &str,
    script: &str,
    state: &Path,
    mounts: &[(&Path, &str)],
) -> Value {
    let capabilities: Vec<String> = container.capabilities.iter().map(|name| format!("CAP_{name}")).collect();
    let mut namespaces = vec!["pid", "network", "ipc", "uts", "mount"];
    if container.user_namespace {
        namespaces.push("user");
    }
    let namespaces: Vec<Value> = namespaces.into_iter().map(|kind| json!({"type": kind})).collect();
    let mut linux = json!({
        "cgroupsPath": format!("/{name}"),
        "namespaces": namespaces,
        "resources": {"devices": device_rules(container)},
    });
    if container.hides_proc_parts {
        linux["maskedPaths"] = json!(MASKED_PATHS);
        linux["readonlyPaths"] = json!(READ_ONLY_PATHS);
    }
    if container.seccomp == SeccompProfile::Default {
        linux["seccomp"] = default_seccomp();
    }
    if container.user_namespace {
        let map = json!([{"containerID": 0, "hostID": FIRST_OUTSIDE_ID, "size": 65536}]);
        linux["uidMappings"] = map.clone();
        linux["gidMappings"] = map;
    }
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": container.uid, "gid": container.uid},
            "args": ["/bin/sh", "-c", script],
            "env": [format!("PATH=/opt/coracle:/usr/sbin:/usr/bin"), "HOME=/root"],
            "cwd": "/",
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
            },
        },
        "root": {"path": "rootfs", "readonly": container.read_only_root},
        "hostname": "container",
        "mounts": container_mounts(container, state, mounts),
        "linux": linux,
    })
}

fn container_mounts(container: &TestContainer, state: &Path, mounts: &[(&Path, &str)]) -> Vec<Value> {
    let bind = |source: &Path, target: &str, access: &str| json!({"destination": target, "type": "bind", "source": source, "options": ["rbind", access]});
    let kernel = |target: &str, kind: &str, options: &[&str]| json!({"destination": target, "type": kind, "source": kind, "options": options});
    let program = ProgramCopies::shared().coracle_path();
    let mut all = vec![kernel("/proc", "proc", &[])];
    if container.host_devices {
        all.push(bind(Path::new("/dev"), "/dev", "rw"));
    } else {
        all.push(kernel("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]));
        all.push(kernel(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
        ));
    }
    if container.user_namespace {
        all.push(bind(Path::new("/sys"), "/sys", "ro"));
    } else {
        all.push(kernel("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]));
        if container.writable_cgroups {
            all.push(bind(Path::new("/sys/fs/cgroup"), "/sys/fs/cgroup", "rw"));
        } else {
            all.push(kernel("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]));
        }
    }
    if container.usr_on_overlay {
        all.push(kernel("/usr", "overlay", &["lowerdir=/usr:/opt"]));
    } else {
        all.push(bind(Path::new("/usr"), "/usr", "ro"));
    }
    let directory = program.parent().expect("a file is in a directory");
    all.push(bind(directory, "/opt/coracle", "ro"));
    if !container.without_state {
        all.push(bind(state, STATE, "rw"));
    }
    all.extend(mounts.iter().map(|(source, target)| bind(source, target, "ro")));
    all
}

fn device_rules(container: &TestContainer) -> Value {
    if container.host_devices {
        return json!([{"allow": true, "access": "rwm"}]);
    }
    let mut rules = vec![json!({"allow": false, "access": "rwm"})];
    // null, zero, full, random, urandom, tty, console, ptmx and the terminals.
    for (major, minor) in [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, -1)] {
        let mut rule = json!({"allow": true, "type": "c", "major": major, "access": "rwm"});
        if minor >= 0 {
            rule["minor"] = json!(minor);
        }
        rules.push(rule);
    }
    json!(rules)
}

/// Docker's default profile, as far as it matters to namespaces and mounts.
fn default_seccomp() -> Value {
    const EPERM: u32 = 1;
    const ENOSYS: u32 = 38;
    let mut calls = vec![
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
        json!({"names": ADMIN_CALLS, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM}),
    ];
    calls.extend(NAMESPACE_FLAGS.map(|flag| {
        let has_flag = json!([{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}]);
        json!({"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": has_flag})
    }));
    json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": calls,
    })
}

/// The capabilities that this process can pass on.
fn own_capabilities() -> Vec<String> {
    let status = fs::read_to_string("/proc/self/status").expect("every process can read its own");
    let mask = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).expect("Linux shows it");
    let mask = u64::from_str_radix(mask.trim(), 16).expect("a number in base 16");
    let held = CAPABILITIES.iter().enumerate().filter(|(number, _)| mask & (1 << number) != 0);
    held.map(|(_, name)| (*name).to_owned()).collect()
}

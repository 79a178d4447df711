//! Runs the checks for all backends on the backend of this host: as root, with disks as on a kernel
//! without btrfs, as an ordinary user, and as an ordinary user with a delegated control group.
//!
//! This program is test, launcher and agent in one, like `coracle`. It forks, so it has its own main
//! function instead of the test harness with its threads.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test stops at the first surprise")]

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use backend::SharedBackend;
use backend::conformance::{Subject, check_all};
use backend_local::identity::ServerIdentity;
use backend_local::jail::plan::Limits;
use backend_local::launcher::Launcher;
use backend_local::launcher::record::Records;
use backend_local::launcher::serve::Loop;
use backend_local::native::{Defaults, Native};
use backend_local::network::{NetworkSettings, userspace};
use backend_local::range::DEFAULT_BASE;
use backend_local::settings::{Allowed, Lifetime, Maxima, MountRule, Settings};
use backend_local::volumes::Kind;
use domain::{Bytes, SandboxId};
use linux::namespaces::{self, Namespaces, Setgroups};
use linux::spawn::{self, End, Forked, SingleThread};
use rustix::process::{DumpableBehavior, Pid, Signal, kill_process, set_dumpable_behavior};
use tempfile::TempDir;

const ORDINARY: u32 = 61_234;
/// The run whose disks are image files, and the file in its state directory that marks it.
const ON_IMAGES: &str = "as root, with image files for disks";
const IMAGES: &str = "disks-are-images";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "__agent"] => panic!("{:?}", agent::run().unwrap_err()),
        [_, "__launcher", state, shared, instance] => launch(state.into(), shared.into(), instance),
        [_, userspace::WORD] => userspace::keep().unwrap(),
        _ => hold_all(),
    }
}

fn hold_all() {
    if !rustix::process::geteuid().is_root() {
        return hold("as an ordinary user", None, None);
    }
    hold("as root", None, None);
    hold_with_network();
    hold(ON_IMAGES, None, None);
    hold("as an ordinary user", Some(ORDINARY), None);
    let delegated = Delegated::make();
    hold("with a delegated group", Some(ORDINARY), Some(&delegated.0));
}

/// Runs the checks as root on a host that forwards packets, represented by a separate net namespace.
fn hold_with_network() {
    match SingleThread::prove().unwrap().fork(Namespaces::NET, None).unwrap() {
        Forked::Child => {
            namespaces::raise_loopback().unwrap();
            fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            hold("as root with a network", None, None);
            spawn::exit_now(0)
        }
        Forked::Parent { pidfd, .. } => {
            assert_eq!(spawn::wait(pidfd.as_fd()).unwrap(), End::Code(0), "a check failed");
        }
    }
}

/// Runs the checks in a child that has changed to `user` and moved into `group`.
fn hold(case: &str, user: Option<u32>, group: Option<&Path>) {
    let (state, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    fs::write(shared.path().join("greeting"), "hello\n").unwrap();
    if case == ON_IMAGES {
        fs::write(state.path().join(IMAGES), "").unwrap();
    }
    if user.is_some() {
        chown(state.path(), user, user).unwrap();
        chown(shared.path(), user, user).unwrap();
    }
    match SingleThread::prove().unwrap().fork(Namespaces::NONE, None).unwrap() {
        Forked::Child => {
            if let Some(group) = group {
                fs::write(group.join("cgroup.procs"), "0").unwrap();
            }
            if let Some(id) = user {
                namespaces::become_ids(id, id, Setgroups::Allow).unwrap();
                // After a change of ids a process cannot see its own /proc files; a program that was
                // started as this user can.
                set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
            }
            check(case, state.path(), shared.path());
            spawn::exit_now(0)
        }
        Forked::Parent { pidfd, .. } => {
            assert_eq!(spawn::wait(pidfd.as_fd()).unwrap(), End::Code(0), "{case}: a check failed");
        }
    }
}

fn check(case: &str, state: &Path, shared: &Path) {
    // Sandboxes whose launcher was killed become children of this process, as of the supervisor.
    namespaces::adopt_orphans().unwrap();
    let (state, shared) = (state.to_owned(), shared.to_owned());
    let host = Host { state, shared, launcher: Mutex::new(None) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let passed = runtime.block_on(check_all(&host));
    host.close();
    eprintln!("{case}: {} checks of backend::conformance passed", passed.len());
}

/// This host with a launcher that the test starts.
struct Host {
    state: PathBuf,
    shared: PathBuf,
    launcher: Mutex<Option<Child>>,
}

impl Host {
    fn start(&self) -> Child {
        let instance = instance();
        let mut child = Command::new("/proc/self/exe")
            .arg("__launcher")
            .arg(&self.state)
            .arg(&self.shared)
            .arg(instance)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).expect("the launcher comes up");
        child
    }

    /// Ends the launcher as at a server stop: it removes everything.
    fn close(&self) {
        let mut launcher = self.launcher.lock().unwrap().take().unwrap();
        drop(launcher.stdin.take());
        assert!(launcher.wait().unwrap().success());
    }
}

#[async_trait::async_trait]
impl Subject for Host {
    async fn open(&self) -> SharedBackend {
        let mut launcher = self.launcher.lock().unwrap();
        if let Some(mut former) = launcher.take() {
            former.kill().unwrap();
            former.wait().unwrap();
        }
        *launcher = Some(self.start());
        let limits = Limits { memory: 256 << 20, cpus: 1000, pids: 128, disk: 64 << 20 };
        let defaults = Defaults { limits, require_limits: false, max_processes: 16 };
        Arc::new(Native::connect(&self.state, defaults).unwrap())
    }

    fn shared(&self) -> PathBuf {
        self.shared.clone()
    }

    async fn strike(&self, id: &SandboxId) {
        let identity = ServerIdentity { instance: instance(), owns_unsigned_records: false };
        let record = Records::open(&self.state, identity).unwrap().read(id.as_str()).unwrap();
        let pid = Pid::from_raw(record.process.unwrap().pid).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }
}

/// Returns the identity of the state directories of this run.
fn instance() -> String {
    format!("conformance{}", std::process::id())
}

/// Serves requests until standard input ends.
fn launch(state_dir: PathBuf, shared: PathBuf, instance: &str) {
    let root = rustix::process::geteuid().is_root();
    if root {
        namespaces::unshare(Namespaces::MOUNT).unwrap();
        linux::mounts::make_private().unwrap();
    }
    let launcher = Launcher::open(Settings {
        disks: state_dir.join(IMAGES).exists().then_some(Kind::Ext4),
        image_state: state_dir.clone(),
        state_dir,
        instance: instance.to_owned(),
        owns_unsigned_records: false,
        uid_base: DEFAULT_BASE,
        server_uid: None,
        aliases: Default::default(),
        image_bytes: None,
        strict_images: true,
        pool_bytes: Some(Bytes::mib(1024).0),
        free_space_floor: 0,
        prepared: 1,
        maxima: Maxima::default(),
        mounts: MountRule::Below(vec![Allowed { written: shared.clone(), real: shared }]),
        network: NetworkSettings::default(),
        lifetime: Lifetime::Own,
    });
    let stop = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut serving = Loop::open(launcher.unwrap(), stop).unwrap();
    rustix::io::write(rustix::stdio::stdout(), b"r").unwrap();
    serving.run().unwrap();
}

/// A v2 group that belongs to an ordinary user, as systemd delegates one.
struct Delegated(PathBuf);

impl Delegated {
    fn make() -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.contains(" - cgroup2 ")).expect("there is a v2 hierarchy");
        let root = Path::new(line.split(' ').nth(4).unwrap());
        let group = root.join(format!("coracle-conformance-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        for name in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
            chown(group.join(name), Some(ORDINARY), Some(ORDINARY)).unwrap();
        }
        Self(group)
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        // This fails if something was left in the group.
        fs::remove_dir(&self.0).unwrap();
    }
}

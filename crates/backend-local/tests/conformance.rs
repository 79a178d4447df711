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
use backend::conformance::{BackendUnderTest, SkippedCheck, check_all};
use backend_local::LocalBackend;
use domain::{Bytes, SandboxId};
use launcher::identity::ServerIdentity;
use launcher::network::NetworkSettings;
use launcher::settings::{
    AllowedDirectory, LauncherSettings, LifetimePolicy, MaxLimits, MountRule, TotalLimits,
};
use launcher::{
    DEFAULT_UID_BASE, Launcher, LauncherLoop, LauncherRecords, ProgramSource, SandboxPrograms, VolumeKind,
};
use linux::namespaces::{self, NamespaceSet, SetgroupsPolicy};
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};
use rustix::process::{DumpableBehavior, Pid, Signal, kill_process, set_dumpable_behavior};
use tempfile::TempDir;

const ORDINARY_UID: u32 = 61_234;
/// The run whose disks are image files, and the file in its state directory that marks it.
const IMAGE_FILES_CASE: &str = "as root, with image files for disks";
const IMAGE_FILES_MARKER: &str = "disks-are-images";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "__agent"] => panic!("{:?}", agent::run().unwrap_err()),
        [_, "__launcher", state, shared, instance] => run_launcher(state.into(), shared.into(), instance),
        _ => run_all_cases(),
    }
}

fn run_all_cases() {
    if !testkit::is_root() {
        testkit::skip_test("the cases that need root; only this ordinary user was tested");
        return run_case("as an ordinary user", None, None);
    }
    run_case("as root", None, None);
    run_with_network();
    run_case(IMAGE_FILES_CASE, None, None);
    run_case("as an ordinary user", Some(ORDINARY_UID), None);
    let delegated = DelegatedGroup::make();
    run_case("with a delegated group", Some(ORDINARY_UID), Some(&delegated.0));
}

/// Runs the checks as root on a host that forwards packets, represented by a separate net namespace.
fn run_with_network() {
    match SingleThread::prove().unwrap().fork(NamespaceSet::NET, None).unwrap() {
        ForkResult::Child => {
            namespaces::set_loopback_up().unwrap();
            fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            run_case("as root with a network", None, None);
            spawn::exit_now(0)
        }
        ForkResult::Parent { pidfd, .. } => {
            assert_eq!(spawn::wait_for_child(pidfd.as_fd()).unwrap(), ProcessExit::Code(0), "a check failed");
        }
    }
}

/// Runs the checks in a child that has changed to `user` and moved into `group`.
fn run_case(case: &str, user: Option<u32>, group: Option<&Path>) {
    let (state, shared) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    fs::write(shared.path().join("greeting"), "hello\n").unwrap();
    if case == IMAGE_FILES_CASE {
        fs::write(state.path().join(IMAGE_FILES_MARKER), "").unwrap();
    }
    if user.is_some() {
        chown(state.path(), user, user).unwrap();
        chown(shared.path(), user, user).unwrap();
    }
    match SingleThread::prove().unwrap().fork(NamespaceSet::NONE, None).unwrap() {
        ForkResult::Child => {
            if let Some(group) = group {
                fs::write(group.join("cgroup.procs"), "0").unwrap();
            }
            if let Some(id) = user {
                namespaces::switch_ids(id, id, SetgroupsPolicy::Allow).unwrap();
                // After a change of ids a process cannot see its own /proc files; a program that was
                // started as this user can.
                set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
            }
            check_backend(case, state.path(), shared.path());
            spawn::exit_now(0)
        }
        ForkResult::Parent { pidfd, .. } => {
            assert_eq!(
                spawn::wait_for_child(pidfd.as_fd()).unwrap(),
                ProcessExit::Code(0),
                "{case}: a check failed"
            );
        }
    }
}

fn check_backend(case: &str, state: &Path, shared: &Path) {
    // Sandboxes whose launcher was killed become children of this process, as of the supervisor.
    namespaces::adopt_orphans().unwrap();
    let (state, shared) = (state.to_owned(), shared.to_owned());
    let host = TestHost { state, shared, launcher: Mutex::new(None) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let report = runtime.block_on(check_all(&host));
    host.close();
    for SkippedCheck { name, reason } in &report.skipped {
        testkit::skip_test(&format!("{case}: `{name}`: {reason}"));
    }
    eprintln!("{case}: {} checks of backend::conformance passed", report.passed.len());
}

/// This host with a launcher that the test starts.
struct TestHost {
    state: PathBuf,
    shared: PathBuf,
    launcher: Mutex<Option<Child>>,
}

impl TestHost {
    fn start_launcher(&self) -> Child {
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
impl BackendUnderTest for TestHost {
    async fn open(&self) -> SharedBackend {
        let mut launcher = self.launcher.lock().unwrap();
        if let Some(mut former) = launcher.take() {
            former.kill().unwrap();
            former.wait().unwrap();
        }
        *launcher = Some(self.start_launcher());
        Arc::new(LocalBackend::connect(&self.state).unwrap())
    }

    fn shared_directory(&self) -> PathBuf {
        self.shared.clone()
    }

    async fn kill_sandbox(&self, id: &SandboxId) {
        let identity =
            ServerIdentity { instance: instance(), owns_unsigned_records: false, auto_without_link: true };
        let record = LauncherRecords::open(&self.state, identity).unwrap().read(id).unwrap();
        let pid = Pid::from_raw(record.process.unwrap().pid).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }
}

/// Returns the identity of the state directories of this run.
fn instance() -> String {
    format!("conformance{}", std::process::id())
}

/// Serves requests until standard input ends.
fn run_launcher(state_dir: PathBuf, shared: PathBuf, instance: &str) {
    let root = rustix::process::geteuid().is_root();
    if root {
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).unwrap();
        linux::mounts::make_private().unwrap();
    }
    let settings = LauncherSettings {
        disks: state_dir.join(IMAGE_FILES_MARKER).exists().then_some(VolumeKind::Ext4),
        image_state: state_dir.clone(),
        state_dir,
        instance: instance.to_owned(),
        owns_unsigned_records: false,
        uid_base: DEFAULT_UID_BASE,
        server_uid: None,
        image_bytes: None,
        pool_bytes: Some(Bytes::from_mib(1024).0),
        free_space_floor: 0,
        prepared: 1,
        maxima: MaxLimits::default(),
        totals: TotalLimits::default(),
        mounts: MountRule::Below(vec![AllowedDirectory {
            written: shared.clone(),
            real: shared,
            purpose: None,
        }]),
        network: NetworkSettings::default(),
        open_files: None,
        egress_uid: None,
        lifetime: LifetimePolicy::Own,
    };
    let programs = SandboxPrograms { agent: ProgramSource::ThisProgram, kernels: None };
    let launcher = Launcher::open(settings, programs);
    let stop = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut serving = LauncherLoop::open(launcher.unwrap(), stop).unwrap();
    rustix::io::write(rustix::stdio::stdout(), b"r").unwrap();
    serving.run().unwrap();
}

/// A v2 group that belongs to an ordinary user, as systemd delegates one.
struct DelegatedGroup(PathBuf);

impl DelegatedGroup {
    fn make() -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.contains(" - cgroup2 ")).expect("there is a v2 hierarchy");
        let root = Path::new(line.split(' ').nth(4).unwrap());
        let group = root.join(format!("coracle-conformance-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        for name in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
            chown(group.join(name), Some(ORDINARY_UID), Some(ORDINARY_UID)).unwrap();
        }
        Self(group)
    }
}

impl Drop for DelegatedGroup {
    fn drop(&mut self) {
        // This fails if something was left in the group.
        fs::remove_dir(&self.0).unwrap();
    }
}

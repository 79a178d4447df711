//! Containers as engines make them. In each of them sandboxes run, or `doctor` prints the lines of the
//! container's specification that are missing; with exactly these lines, they run.

use std::path::Path;

use e2e::container::{TestContainer, can_run_containers};
use e2e::oci::TestImage;
use serde_json::Value;

/// Separates what `doctor` prints from what `run` prints.
const SEPARATOR: &str = "@@@";

/// The results of `doctor` and `run` in one container.
struct ContainerTrial {
    report: Value,
    run: String,
}

impl ContainerTrial {
    fn perform(container: &TestContainer) -> Self {
        let script = format!(
            "coracle --json doctor --state-dir /state; echo {SEPARATOR}; \
             coracle run --state-dir /state -- sh -c 'echo inside as $(id -u)' 2>&1"
        );
        let output = container.run_shell(&script);
        let (report, run) = output.stdout.split_once(SEPARATOR).unwrap_or_else(|| panic!("{output:?}"));
        let report = serde_json::from_str(report).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        Self { report, run: run.to_owned() }
    }

    /// The names of the checks with this status.
    fn checks(&self, status: &str) -> Vec<String> {
        let checks = self.report["checks"].as_array().into_iter().flatten();
        let named = checks.filter(|check| check["status"] == status).map(|check| check["name"].as_str());
        named.map(|name| name.expect("a check has a name").to_owned()).collect()
    }

    #[track_caller]
    fn assert_runs(&self, rootless: bool) {
        let report = &self.report;
        assert!(self.run.contains("inside as 0"), "{}\n{report:#}", self.run);
        assert_eq!(report["sandboxes_can_run"], Value::Bool(true), "{report:#}");
        assert_eq!(report["rootless"], Value::Bool(rootless), "{report:#}");
    }

    /// Checks that one cause is reported, with the flags that fix it.
    #[track_caller]
    fn assert_fix(&self, cause: &str, flags: &str) {
        let report = &self.report;
        assert_eq!(self.checks("missing"), [cause], "{report:#}");
        assert_eq!(report["container"]["docker_run"], flags, "{report:#}");
        assert!(!self.run.contains("inside"), "{}", self.run);
        assert!(self.run.contains("error:"), "{}", self.run);
    }
}

#[test]
fn privileged_container_makes_sandboxes_like_root() {
    if can_run_containers() {
        ContainerTrial::perform(&TestContainer::privileged()).assert_runs(false);
    }
}

#[test]
fn default_container_names_its_filter_as_the_one_cause() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::with_defaults();
    let trial = ContainerTrial::perform(&container);
    trial.assert_fix(
        "system calls",
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined",
    );
    let mut checks = trial.report["checks"].as_array().into_iter().flatten();
    let cause = checks.find(|check| check["status"] == "missing").expect("it was just found");
    let detail = cause["detail"].as_str().expect("a text");
    assert!(detail.contains("clone3 with ENOSYS") && detail.contains("mount"), "{detail}");
    let pod = trial.report["container"]["pod"].as_str().expect("a text");
    assert!(pod.contains("hostUsers: false") && pod.contains("procMount: Unmasked"), "{pod}");
    ContainerTrial::perform(&container.without_seccomp().with_whole_proc()).assert_runs(true);
}

#[test]
fn container_with_the_admin_capability_alone_needs_the_whole_of_proc() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::with_defaults().add_capability("SYS_ADMIN");
    ContainerTrial::perform(&container).assert_fix("fresh /proc", "--security-opt systempaths=unconfined");
    ContainerTrial::perform(&container.with_whole_proc()).assert_runs(true);
}

#[test]
fn container_without_capabilities_makes_sandboxes_by_user_namespaces() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::with_defaults().without_seccomp().with_whole_proc();
    ContainerTrial::perform(&container.clone().as_ordinary_user(1000)).assert_runs(true);
    let root = container.without_capabilities();
    ContainerTrial::perform(&root).assert_fix("user namespaces", "--cap-add SETFCAP");
    ContainerTrial::perform(&root.add_capability("SETFCAP")).assert_runs(true);
}

#[test]
fn container_in_a_user_namespace_makes_sandboxes_like_an_ordinary_user() {
    if can_run_containers() {
        ContainerTrial::perform(&TestContainer::privileged().in_user_namespace()).assert_runs(true);
    }
}

#[test]
fn read_only_container_needs_a_volume() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::with_defaults().without_seccomp().with_whole_proc().with_read_only_root();
    ContainerTrial::perform(&container).assert_runs(true);
    let trial = ContainerTrial::perform(&container.without_state_volume());
    assert!(
        trial.run.contains("hint: name a directory on a writable disk with --state-dir"),
        "{}",
        trial.run
    );
}

#[test]
fn privileged_container_without_writable_control_groups_is_told_so() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::privileged().with_read_only_cgroups();
    ContainerTrial::perform(&container).assert_fix("control groups", "--privileged");
}

#[test]
fn container_from_an_image_lacks_only_the_image_host() {
    if !can_run_containers() {
        return;
    }
    let container = TestContainer::privileged().with_usr_on_overlay();
    let trial = ContainerTrial::perform(&container);
    assert_eq!((trial.checks("missing"), trial.checks("untried")), (Vec::new(), Vec::new()));
    assert!(trial.checks("weaker").contains(&"image host".to_owned()), "{:#}", trial.report);
    assert!(trial.run.contains("use another image"), "{}", trial.run);
    let layout = tempfile::tempdir().expect("the temporary directory can be written");
    TestImage::with_shell().write_layout(layout.path());
    let script = "coracle image import box:1 /mnt --state-dir /state && \
                  coracle run --state-dir /state --image box:1 -- sh -c 'echo inside'";
    let mounts: [(&Path, &str); 1] = [(layout.path(), "/mnt")];
    let ran = container.run_shell_with(script, &mounts);
    assert!(ran.stdout.contains("inside"), "{ran:?}");
    // Without privileges nothing has to be mapped, so the image `host` works too.
    let ordinary = TestContainer::with_defaults().without_seccomp().with_whole_proc().with_usr_on_overlay();
    ContainerTrial::perform(&ordinary).assert_runs(true);
}

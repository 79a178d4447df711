//! Sandboxes that cannot be created: the error message, and that nothing is left behind.

use std::fs;
use std::path::{Path, PathBuf};

use e2e::host::HostState;
use e2e::run::{RunCommand, all_users};
use e2e::server::TestServer;
use serde_json::json;

#[test]
fn missing_mount_source_is_named_with_a_hint() {
    for user in all_users() {
        let ended =
            RunCommand::new(user).mount(Path::new("/nonexistent/source"), "/x", "ro").run_argv(&["true"]);
        assert_eq!(ended.code, Some(125), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("`/nonexistent/source`"), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("hint: ") && ended.stderr.contains("exists on this host"), "{ended:?}");
    }
}

#[test]
fn impossible_mount_target_is_named_with_a_hint() {
    for user in all_users() {
        let run = RunCommand::new(user);
        let ended = run.mount(Path::new("/usr"), "/etc/passwd/below", "ro").run_argv(&["true"]);
        assert_eq!(ended.code, Some(125), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("`/etc/passwd/below`: "), "{user:?}: {ended:?}");
        assert!(ended.stderr.contains("hint: choose another target"), "{user:?}: {ended:?}");
    }
}

#[test]
fn run_that_failed_to_start_leaves_nothing_behind() {
    for (place, user) in all_users().into_iter().enumerate() {
        let home = user.make_home();
        let state = home.path().join("state");
        let instance = format!("failing-{}-{place}", std::process::id());
        let run = RunCommand::new(user).state(&state).switch("--keep");
        let run = run.mount(Path::new("/usr"), "/etc/passwd/below", "ro");
        let output = run.command(&["true"]).env("CORACLE_INSTANCE", &instance).output();
        assert_eq!(output.expect("the binary can be run").status.code(), Some(125));
        assert_eq!(groups_of(&instance), Vec::<PathBuf>::new(), "{user:?}");
        for directory in ["alive", "boxes", "kept", "run"] {
            let entries = fs::read_dir(state.join("oneshot").join(directory)).into_iter().flatten();
            assert_eq!(entries.count(), 0, "{user:?}: {directory}");
        }
    }
}

#[test]
fn create_that_fails_half_way_is_undone_before_the_response() {
    let server = TestServer::start();
    let state = server.state_directory();
    let before = HostState::capture(&state);
    let request = json!({"image": {"uri": "host"}, "timeout": 60, "resourceLimits": {},
        "entrypoint": ["sleep", "infinity"],
        "volumes": [{"name": "v", "pvc": {"claimName": "half"}, "mountPath": "/etc/passwd/below"}]});
    let answer = server.client().post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(answer.status, 500, "{}", answer.text());
    let reported = answer.text();
    assert!(reported.contains("step `attach-mounts` failed"), "{reported}");
    let id = reported.split("sandbox `").nth(1).and_then(|rest| rest.split('`').next()).expect("it is named");
    let left = HostState::capture(&state).added_since(&before);
    assert!(!left.iter().any(|line| line.contains(id)), "{left:?}");
    assert_eq!(fs::read_dir(state.join("boxes")).expect("it is ours").count(), 0);
    assert_eq!(server.create_sandbox().run("echo fine").stdout, "fine\n");
}

/// The control groups of an instance's runs, in all hierarchies.
fn groups_of(instance: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let roots = hierarchies.map(|entry| entry.path()).chain([PathBuf::from("/sys/fs/cgroup")]);
    roots
        .map(|root| root.join("coracle").join(format!("{instance}-run")))
        .filter(|group| group.exists())
        .collect()
}

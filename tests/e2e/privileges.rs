//! Root without the power of the host's root: without some capability, or only in a user namespace. Sandboxes
//! are then made as those of an ordinary user.

use std::fs;
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, TestUser};
use e2e::server::ServerBuilder;
use serde_json::{Value, json};

/// Ways to start a program as uid 0 with less power than root has.
const WEAKENED_ROOT: [&[&str]; 3] = [
    &["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all"],
    &["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-all"],
    &["unshare", "--user", "--map-root-user"],
];

fn coracle_below(starter: &[&str], arguments: &[&str]) -> CommandOutput {
    let home = TestUser::Same.make_home();
    let mut command = Command::new(starter[0]);
    command.args(&starter[1..]).arg(ProgramCopies::shared().coracle_path()).args(arguments);
    command.env("HOME", home.path()).current_dir(home.path()).stdin(Stdio::null());
    command.output().expect("util-linux is installed").into()
}

#[test]
fn weakened_root_makes_sandboxes_like_an_ordinary_user() {
    if !testkit::needs_root() {
        return;
    }
    for starter in WEAKENED_ROOT {
        let ran =
            coracle_below(starter, &["run", "--state-dir", "state", "--", "sh", "-c", "id -u; echo $$"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "0\n2\n"), "{starter:?}: {ran:?}");
        assert!(ran.stderr.contains("no limit on memory is enforced"), "{starter:?}: {ran:?}");
        let doctor = coracle_below(starter, &["--json", "doctor", "--state-dir", "state"]);
        let report: Value = serde_json::from_str(&doctor.stdout).expect("doctor prints JSON");
        assert_eq!((&report["rootless"], doctor.code), (&Value::Bool(true), Some(0)), "{report}");
    }
}

#[test]
fn root_of_a_user_namespace_does_not_use_the_files_of_the_system() {
    if !testkit::needs_root() {
        return;
    }
    // Only a user whose namespace does not map the owner of /etc is not root of this system.
    let home = TestUser::Ordinary(61_234).make_home();
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user"]).arg(ProgramCopies::shared().coracle_path());
    command.args(["--json", "config", "show"]).env("HOME", home.path()).env_remove("XDG_STATE_HOME");
    TestUser::Ordinary(61_234).apply_to(&mut command);
    let shown = command.stdin(Stdio::null()).output().expect("util-linux is installed");
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    let expected = home.path().join(".local/state/coracle");
    assert!(text.contains(expected.to_str().expect("a plain path")), "{text}");
}

#[test]
fn server_of_weakened_root_runs_commands_and_has_no_capabilities() {
    if !testkit::needs_root() {
        return;
    }
    for starter in [WEAKENED_ROOT[0], WEAKENED_ROOT[2]] {
        let prefix = format!("exec {} \"$0\" \"$@\"", starter.join(" "));
        let server =
            ServerBuilder::new().with_shell_prefix(&prefix).env("CORACLE_REQUIRE_LIMITS", "false").start();
        let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
        let ran = sandbox.run("id -u");
        assert_eq!(ran.stdout, "0\n", "{ran:?}");
        let pid = server.part_pid("__server");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
        for set in ["CapEff", "CapPrm"] {
            assert!(status.contains(&format!("{set}:\t0000000000000000")), "{starter:?}: {status}");
        }
    }
}

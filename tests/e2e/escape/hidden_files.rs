//! Reading files below the host's `/usr` that not everyone may read. Root inside has the right to read every
//! file of a layer; a layer of whiteouts hides these.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::Value;

/// A directory of the host below `/usr` over which the test mounts its own, in its own mount namespace.
const PLACE: &str = "/usr/local/src";

/// Makes a directory with a closed file, a closed directory and an open file, each of which contains `token`.
fn make_secrets(home: &Path) -> PathBuf {
    let shown = home.join("shown");
    fs::create_dir_all(shown.join("closed")).expect("our own directory");
    for (name, mode) in [("secret", 0o640), ("closed/inner", 0o644), ("open", 0o644)] {
        make_file(&shown.join(name), mode);
    }
    fs::set_permissions(shown.join("closed"), Permissions::from_mode(0o750)).expect("our own directory");
    shown
}

fn make_file(path: &Path, mode: u32) {
    fs::write(path, "token\n").expect("our own directory");
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own file");
}

/// Runs a script with `PLACE` covered by a directory with secrets. In it, `attack PATH` reads a file from inside
/// a sandbox, `inside TEXT` runs shell text in one, and `forget` makes `coracle run` use no layer.
fn run_with_secrets(script: &str) -> CommandOutput {
    const BEGIN: &str = "\
        mount --bind \"$SHOWN\" \"$PLACE\" || exit 9
        run() { \"$CORACLE\" run --quiet --state-dir \"$STATE\" --mount \"$ATTACKS:/attacks:ro\" -- \"$@\"; }
        attack() { run /attacks/attacks read \"$PLACE/$1\" token; }
        inside() { run sh -c \"$1\"; }
        forget() { sed -i 's/\"layers\":\\[[^]]*\\]/\"layers\":[]/' \"$STATE/oneshot/hidden/record\"; }
        cd /\n";
    let home = TestUser::Same.make_home();
    let shown = make_secrets(home.path());
    let programs = ProgramCopies::shared();
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &format!("{BEGIN}{script}")])
        .env("SHOWN", &shown)
        .env("PLACE", PLACE)
        .env("CORACLE", programs.coracle_path())
        .env("ATTACKS", programs.attacks_directory())
        .env("STATE", home.path().join("state"))
        .env("HOME", home.path())
        .env_remove("XDG_RUNTIME_DIR")
        .output()
        .expect("the script can be run")
        .into()
}

fn can_cover() -> bool {
    if !testkit::needs_root() {
        return false;
    }
    if !std::path::Path::new(PLACE).is_dir() {
        testkit::skip_test("there is no directory below /usr that the test can cover");
        return false;
    }
    true
}

/// The same attack succeeds when `coracle run` is made to believe that nothing has to be hidden.
#[test]
fn root_inside_cannot_read_what_is_not_world_readable() {
    if !can_cover() {
        return;
    }
    let all = "attack secret; attack closed/inner; attack open";
    let ended = run_with_secrets(&format!("{all}; forget; {all}"));
    let (absent, read) = ("stopped: open: ENOENT", "succeeded: open");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines, [absent, absent, read, read, read, read], "{ended:?}");
}

#[test]
fn files_beside_hidden_ones_can_be_edited_in_place() {
    if !can_cover() {
        return;
    }
    let edit = format!(
        "inside 'cd {PLACE} && echo more >> open && cat open && ls && echo own > secret && cat secret && \
         chmod 600 /usr/bin/env && echo >> /usr/bin/env && stat -c %a {PLACE}'"
    );
    let ended = run_with_secrets(&edit);
    assert_eq!(ended.stdout, "token\nmore\nopen\nown\n755\n", "{ended:?}");
}

#[test]
fn a_change_of_the_covered_directory_is_noticed_by_the_next_run() {
    if !can_cover() {
        return;
    }
    let script = "attack open; chmod 600 \"$SHOWN/open\"; touch \"$SHOWN/new\"; attack open";
    let ended = run_with_secrets(script);
    assert_eq!(ended.stdout, "succeeded: open\nstopped: open: ENOENT\n", "{ended:?}");
}

/// A server in a mount namespace of its own, in which `shown` covers `PLACE`.
fn server_with_secrets(shown: &Path) -> ServerBuilder {
    let cover = format!("mount --bind {} {PLACE} && exec \"$@\"", shown.display());
    let prefix = format!("exec unshare --mount --propagation private sh -c '{cover}' sh \"$0\" \"$@\"");
    ServerBuilder::new().with_shell_prefix(&prefix)
}

/// What root inside a new sandbox gets by reading these files below `PLACE`.
fn read_from_sandbox(server: &TestServer, names: &[&str]) -> Vec<String> {
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    let read = |name: &&str| {
        sandbox.run(&format!("/opt/attacks read {PLACE}/{name} token")).stdout.trim_end().to_owned()
    };
    names.iter().map(read).collect()
}

/// A file that is closed while the server runs is read by the same attack until the next start, as
/// docs/security-model.md says. That shows that the attack works.
#[test]
fn sandbox_of_a_server_cannot_read_what_was_not_world_readable_at_its_start() {
    if !can_cover() {
        return;
    }
    let (absent, read) = ("stopped: open: ENOENT", "succeeded: open");
    let home = TestUser::Same.make_home();
    let shown = make_secrets(home.path());
    let start = || server_with_secrets(&shown);
    let mut server = start().start();
    make_file(&shown.join("late"), 0o640);
    let names = ["secret", "closed/inner", "open", "late"];
    assert_eq!(read_from_sandbox(&server, &names), [absent, absent, read, read]);
    server.terminate();
    server.restart(&start());
    assert_eq!(read_from_sandbox(&server, &names), [absent, absent, read, absent]);
}

#[test]
fn doctor_lists_all_hidden_paths_in_json() {
    const FILES: usize = 120;
    if !can_cover() {
        return;
    }
    let script = format!(
        "for n in $(seq {FILES}); do : > \"$SHOWN/f$n\"; chmod 600 \"$SHOWN/f$n\"; done
         \"$CORACLE\" --json doctor --state-dir \"$STATE\""
    );
    let ended = run_with_secrets(&script);
    let report: Value = serde_json::from_str(&ended.stdout).expect("doctor prints JSON");
    let checks = report["checks"].as_array().expect("a list");
    let hidden = checks.iter().find(|check| check["name"] == "hidden files").expect("a check");
    let paths = hidden["paths"].as_array().expect("a list");
    let listed = |name: &str| paths.iter().any(|path| *path == format!("{PLACE}/{name}"));
    assert!((1..=FILES).all(|number| listed(&format!("f{number}"))), "{hidden}");
    assert!(listed("secret") && listed("closed") && !listed("open"), "{hidden}");
}

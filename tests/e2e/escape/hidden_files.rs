//! Reading files below the host's `/usr` that not everyone may read. Root inside has the right to read every
//! file of a layer; a layer of whiteouts hides these.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, TestUser};

/// A directory of the host below `/usr` over which the test mounts its own, in its own mount namespace.
const PLACE: &str = "/usr/local/src";

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
    let shown = home.path().join("shown");
    fs::create_dir_all(shown.join("closed")).expect("our own directory");
    for (name, mode) in [("secret", 0o640), ("closed/inner", 0o644), ("open", 0o644)] {
        fs::write(shown.join(name), "token\n").expect("our own directory");
        fs::set_permissions(shown.join(name), Permissions::from_mode(mode)).expect("our own file");
    }
    fs::set_permissions(shown.join("closed"), Permissions::from_mode(0o750)).expect("our own directory");
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

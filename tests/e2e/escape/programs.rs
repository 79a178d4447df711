//! The programs that a sandbox executes from outside: nothing inside changes them or reaches those of the
//! host.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, TestUser, all_users};
use e2e::sandbox::RemoteSandbox;
use e2e::server::ServerBuilder;
use serde_json::json;

/// Everything about a file that a change of it would show.
fn file_facts(path: &Path) -> (u32, u64, i64, i64, i64) {
    let facts = fs::metadata(path).expect("the file exists");
    (facts.mode(), facts.size(), facts.mtime(), facts.ctime(), facts.ctime_nsec())
}

/// The copies of programs in the state directory of a server.
fn program_copies(state: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(state.join("bin")).expect("the copies exist");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut found: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_none_or(|word| word != "lock")).collect();
    found.sort();
    found
}

/// Attacks the programs that are its arguments, such as `/proc/1/exe`, unless their files are those of the sandbox:
/// their content, mode, times and attributes.
const ATTACK: &str = r#"
for exe; do
    case $(readlink "$exe") in /usr/*) continue ;; esac
    [ -e "${exe%/exe}" ] && echo tried
    head -c 4 "$exe" > /dev/null && echo "read $exe"
    chmod 4777 "$exe" && echo "changed the mode of $exe"
    touch -d 2001-01-01 "$exe" && echo "changed the time of $exe"
    (printf x >> "$exe") && echo "wrote to $exe"
    python3 -c 'import os, sys; os.setxattr(sys.argv[1], "user.mark", b"1")' "$exe" && echo "marked $exe"
done 2>/dev/null
exit 0"#;

/// Locks the programs of all processes. A lock that outlives the server must not keep the next one from starting.
const LOCK_ALL: &str =
    "for exe in /proc/[0-9]*/exe; do setsid flock -x \"$exe\" sleep 1000 > /dev/null 2>&1 & done";

/// Puts a copy of a program into `home`, which then belongs to the user, as one in a home directory does.
fn install_copy(program: &Path, home: &Path, user: TestUser) -> PathBuf {
    let copy = home.join("installed");
    fs::copy(program, &copy).expect("our own directory");
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).expect("our own file");
    if let TestUser::Ordinary(uid) = user {
        chown(&copy, Some(uid), Some(uid)).expect("tests for ordinary users run as root");
    }
    copy
}

/// Runs the attack outside, on one process that executes a program of the user's own.
fn attack_own_program(user: TestUser) -> CommandOutput {
    let home = user.make_home();
    let copy = install_copy(Path::new("/bin/sh"), home.path(), user);
    let mut victim = Command::new(&copy);
    victim.args(["-c", "read line"]).stdin(Stdio::piped());
    user.apply_to(&mut victim);
    let mut victim = victim.spawn().expect("the copy can be executed");
    let mut attacker = Command::new("sh");
    attacker.args(["-c", ATTACK, "sh", &format!("/proc/{}/exe", victim.id())]).current_dir("/");
    user.apply_to(&mut attacker);
    let attacked = attacker.output().expect("there is a shell");
    victim.kill().expect("it is our child");
    victim.wait().expect("it is our child");
    attacked.into()
}

#[test]
fn attack_on_programs_works_outside() {
    for user in all_users() {
        let attacked = attack_own_program(user);
        for goal in ["read ", "changed the mode", "changed the time", "marked "] {
            let reached = attacked.stdout.lines().any(|line| line.starts_with(goal));
            assert!(reached, "`{goal}` as {user:?}: {attacked:?}");
        }
    }
}

fn check_programs_of(user: TestUser) {
    let home = user.make_home();
    let installed = install_copy(&ProgramCopies::shared().coracle_path(), home.path(), user);
    let start = || {
        let instead = format!("exec {} \"$@\"", installed.display());
        ServerBuilder::new().as_user(user).with_shell_prefix(&instead).env("CORACLE_REQUIRE_LIMITS", "false")
    };
    let mut server = start().start_in(home);
    let executed = fs::read_link(format!("/proc/{}/exe", server.pid())).expect("the server runs");
    assert_eq!(executed, installed, "the server is not the program that is watched");
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let opened = sandbox.request_inside("POST", "code/context", &json!({"language": "javascript"}));
    assert_eq!(opened.status, 200, "{}", opened.text());
    let copies = program_copies(&server.state_directory());
    assert_eq!(copies.len(), 2, "the agent's program and that of kernels: {copies:?}");
    let facts = || copies.iter().chain([&installed]).map(|path| file_facts(path)).collect::<Vec<_>>();
    let before = facts();

    let attacked = sandbox.run(&format!("set -- /proc/[0-9]*/exe\n{ATTACK}"));
    let (tried, reached): (Vec<&str>, Vec<&str>) = attacked.stdout.lines().partition(|line| *line == "tried");
    assert!(tried.len() >= 2, "the programs of the agent and of the kernel were not found: {attacked:?}");
    // An ordinary user inside is the owner of the copies, and may read them.
    let may_read = !testkit::is_root() || user != TestUser::Same;
    let allowed = |line: &&str| may_read && line.starts_with("read ");
    assert!(reached.iter().all(allowed), "a program was reached from inside: {attacked:?}");
    assert_eq!(sandbox.run(LOCK_ALL).code, Some(0));
    assert_eq!(before, facts(), "a program was changed from inside");

    server.kill();
    server.restart(&start());
    assert_eq!(RemoteSandbox::existing(server.client(), &sandbox.id).run("echo runs").stdout, "runs\n");
}

#[test]
fn a_sandbox_cannot_change_the_programs_it_executes() {
    for user in all_users() {
        check_programs_of(user);
    }
}

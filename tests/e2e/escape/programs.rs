//! The programs that a sandbox executes from outside: nothing inside changes them or reaches those of the
//! host.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use e2e::run::{TestUser, all_users};
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

/// Attacks the program of every process whose file is not one of the sandbox: its mode, times, content and
/// attributes.
const ATTACK: &str = r#"
for exe in /proc/[0-9]*/exe; do
    case $(readlink "$exe") in /usr/*) continue ;; esac
    [ -e "${exe%/exe}" ] && echo tried
    chmod 4777 "$exe" && echo "changed the mode of $exe"
    touch -d 2001-01-01 "$exe" && echo "changed the time of $exe"
    (printf x >> "$exe") && echo "wrote to $exe"
    python3 -c 'import os, sys; os.setxattr(sys.argv[1], "user.mark", b"1")' "$exe" && echo "marked $exe"
    # A lock that outlives the server must not keep the next one from starting.
    setsid flock -x "$exe" sleep 1000 > /dev/null &
done 2>/dev/null
exit 0"#;

fn check_programs_of(user: TestUser) {
    let start = || ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false");
    let mut server = start().start();
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let opened = sandbox.request_inside("POST", "code/context", &json!({"language": "javascript"}));
    assert_eq!(opened.status, 200, "{}", opened.text());
    let copies = program_copies(&server.state_directory());
    let before: Vec<_> = copies.iter().map(|path| file_facts(path)).collect();
    let attacked = sandbox.run(ATTACK);
    let lines: Vec<&str> = attacked.stdout.lines().collect();
    assert!(lines.iter().all(|line| *line == "tried"), "a program was changed from inside: {attacked:?}");
    assert!(lines.len() >= 2, "the programs of the agent and of the kernel were not found: {attacked:?}");
    assert_eq!(copies.len(), 2, "the agent's program and that of kernels: {copies:?}");
    let after: Vec<_> = copies.iter().map(|path| file_facts(path)).collect();
    assert_eq!(before, after, "a program was changed from inside");
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

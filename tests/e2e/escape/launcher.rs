//! The launcher's socket: unreachable from inside, and closed to the host's other users.

use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, ORDINARY_USER, attack_outside};
use e2e::server::TestServer;

/// Where a server's launcher listens.
fn socket(server: &TestServer) -> String {
    server.state_directory().join("run/launcher").to_string_lossy().into_owned()
}

/// Shows that a client with access to the socket gets a response.
fn check_that_root_is_answered(server: &TestServer) {
    let ended = attack_outside(&["ask-launcher", &socket(server), "list"]);
    assert_eq!(ended.code, Some(0), "the attack does not work outside: {ended:?}");
}

#[test]
fn a_command_cannot_reach_the_launcher() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    check_that_root_is_answered(&server);
    let path = socket(&server);
    let up = format!("{}{path}", "../".repeat(8));
    for name in [path, up, format!("/proc/1/root{}", socket(&server))] {
        let ran = sandbox.run_argv(&["/opt/attacks", "ask-launcher", &name, "list"]);
        // The command is root inside, so the sandbox's own root directory stops it, not a file mode.
        let stopped = ran.stdout.contains("ENOENT") || ran.stdout.contains("EACCES");
        assert!(ran.code == Some(1) && stopped, "the launcher was reached by {name}: {ran:?}");
    }
}

#[test]
fn a_subverted_agent_cannot_reach_the_launcher() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    check_that_root_is_answered(&server);
    let path = socket(&server);
    let attacks = [format!("ask-launcher:{path}:list"), "connect-any-unix".to_owned()];
    let verdicts = super::agent::attack_from_agent(&server, &attacks);
    for attack in &attacks {
        let verdict = verdicts.get(attack).map_or("was not tried", String::as_str);
        assert!(verdict.starts_with("stopped: "), "{attack} from the agent: {verdict}");
    }
}

#[test]
fn another_user_of_the_host_cannot_ask_the_launcher_or_an_agent() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    check_that_root_is_answered(&server);
    let agent = server.state_directory().join("run").join(&sandbox.id).to_string_lossy().into_owned();
    assert_eq!(attack_outside(&["connect-unix", &agent]).code, Some(0), "the attack does not work as root");
    for words in [["ask-launcher", &socket(&server), "list"].as_slice(), &["connect-unix", &agent]] {
        let ended = as_ordinary_user(words);
        let refused = ended.code == Some(1) && ended.stdout.contains("connect: EACCES");
        assert!(refused, "{words:?} was not stopped by the socket's owner and mode: {ended:?}");
    }
}

fn as_ordinary_user(words: &[&str]) -> CommandOutput {
    let mut command = Command::new(ProgramCopies::shared().attacks_path());
    ORDINARY_USER.apply_to(command.args(words));
    command.output().expect("the attacker can be run").into()
}

//! Hosts with a low limit on open files.

use e2e::run::{CommandOutput, RunCommand, TestUser, with_shell_prefix};
use e2e::server::ServerBuilder;

fn run_within(limits: &str, text: &str) -> CommandOutput {
    let command = RunCommand::new(TestUser::Same).command(&["sh", "-c", text]);
    with_shell_prefix(limits, &command).output().expect("the binary can be run").into()
}

#[test]
fn a_low_soft_limit_is_enough_for_run_and_is_what_the_command_gets() {
    let ended = run_within("ulimit -Sn 256", "ulimit -Sn; ls /proc/self/fd | wc -l");
    // `ls` has the standard three and the directory.
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "256\n4\n"), "{ended:?}");
}

#[test]
fn a_low_hard_limit_is_enough_for_run() {
    let ended = run_within("ulimit -n 256", "ulimit -Hn");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "256\n"), "{ended:?}");
}

#[test]
fn a_hard_limit_that_is_too_low_is_named() {
    let ended = run_within("ulimit -n 64", "true");
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("this process may open 64 files"), "{ended:?}");
    assert!(ended.stderr.contains("hint: raise it: `ulimit -Hn"), "{ended:?}");
}

#[test]
fn a_server_with_a_low_limit_makes_sandboxes() {
    for limits in ["ulimit -Sn 256", "ulimit -n 256"] {
        let server = ServerBuilder::new().with_shell_prefix(limits).start();
        let mut sandboxes: Vec<_> = (0..4).map(|_| server.create_sandbox()).collect();
        for sandbox in &mut sandboxes {
            let ran = sandbox.run("ulimit -Sn");
            assert_eq!((ran.code, ran.stdout.trim()), (Some(0), "256"), "{limits}: {ran:?}");
        }
    }
}

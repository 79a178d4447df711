//! `coracle run --network filtered`.

use std::process::Stdio;

use e2e::probe::{host_reached, http, http_at, parse_results, probe_argv, probe_by_run, tls};
use e2e::run::{CommandOutput, RunCommand, all_users};
use e2e::test_network::hosts::{OTHER, WEB};
use e2e::test_network::{self, TestNetwork};
use serde_json::{Value, json};

#[test]
fn denied_names_are_printed_with_the_rule_that_would_admit_them() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    for user in all_users() {
        let run = RunCommand::new(user).flag("--network", "filtered").flag("--allow", "web.example");
        let (results, ended) = probe_by_run(
            &run,
            &[tls("web.example"), http("other.example"), http_at(WEB.v4, "shared.example")],
        );
        assert_eq!(host_reached(&results[0]), Some("web.example"), "as {user:?}: {results:?} {ended:?}");
        for name in ["other.example", "shared.example"] {
            assert!(ended.stderr.contains(name), "as {user:?}: `{name}` is not named: {ended:?}");
        }
        assert!(ended.stderr.contains("--allow other.example"), "as {user:?}: {ended:?}");
        assert!(!ended.stderr.contains("--allow web.example"), "as {user:?}: {ended:?}");
        // The addition works.
        let more = run.flag("--allow", "other.example");
        let (results, ended) = probe_by_run(&more, &[http("other.example")]);
        assert_eq!(host_reached(&results[0]), Some("other.example"), "as {user:?}: {results:?}");
        assert!(!ended.stderr.contains("--allow"), "as {user:?}: nothing was denied: {ended:?}");
    }
}

#[test]
fn a_command_keeps_its_status_and_leaves_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    test_network::use_world_resolver();
    for user in all_users() {
        let run = RunCommand::new(user).flag("--network", "filtered");
        let ended = run.run_shell("cat /etc/resolv.conf; ls /sys/class/net; exit 7");
        assert_eq!(ended.code, Some(7), "as {user:?}: {ended:?}");
        assert!(
            ended.stdout.contains("nameserver") && !ended.stdout.contains("eth0"),
            "as {user:?}: {ended:?}"
        );
        let (results, _) = probe_by_run(&run, &[http_at(OTHER.v4, "other.example"), http("web.example")]);
        assert!(results.iter().all(super::is_refused), "as {user:?}: {results:?}");
        let state = run.state_directory().display().to_string();
        let lasting = || e2e::host::pids_with_command_line(&state);
        e2e::eventually("every process ends with the command", || lasting().is_empty());
    }
    assert_eq!(world.count_contacts(OTHER.v4) + world.count_contacts(WEB.v4), 0);
}

#[test]
fn commands_with_one_state_directory_keep_their_own_networks() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    test_network::use_world_resolver();
    for user in all_users() {
        let first = RunCommand::new(user).flag("--network", "filtered").flag("--allow", "web.example");
        let second = RunCommand::new(user).state(first.state_directory());
        let second = second.flag("--network", "filtered").flag("--allow", "other.example");
        let requests: Vec<Value> =
            (0..10).flat_map(|_| [http("web.example"), json!({"do": "wait", "seconds": 0.3})]).collect();
        let argv = probe_argv(&requests);
        let mut command = first.command(&argv.each_ref().map(String::as_str));
        let before = world.count_contacts(WEB.v4) + world.count_contacts(WEB.v6);
        let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
        e2e::eventually("the first command is connected", || {
            world.count_contacts(WEB.v4) + world.count_contacts(WEB.v6) > before
        });
        let (results, _) = probe_by_run(&second, &[http("other.example"), http_at(WEB.v4, "web.example")]);
        assert_eq!(host_reached(&results[0]), Some("other.example"), "as {user:?}: {results:?}");
        assert!(super::is_refused(&results[1]), "as {user:?}: {results:?}");
        let ended = CommandOutput::from(running.wait_with_output().expect("it is our child"));
        for result in parse_results(&ended.stdout, &requests, &ended).iter().step_by(2) {
            assert_eq!(host_reached(result), Some("web.example"), "as {user:?}: the first: {ended:?}");
        }
    }
}

#[test]
fn invalid_targets_are_refused_before_anything_starts() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::use_world_resolver();
    for target in ["a.*.example", "web.example:0", "", "http://web.example", "10.0.0.0/40", "münchen.example"]
    {
        let ended = RunCommand::new(e2e::run::TestUser::Same)
            .flag("--network", "filtered")
            .flag("--allow", target)
            .run_argv(&["echo", "ran"]);
        assert!(ended.code != Some(0) && !ended.stdout.contains("ran"), "`{target}`: {ended:?}");
        assert!(ended.stderr.contains(target), "the error names the target: {ended:?}");
    }
}

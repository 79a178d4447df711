//! The variables in a sandbox's env file, and the variable with its id.

use e2e::server::TestServer;
use serde_json::{Value, json};

#[test]
fn saved_variables_reach_later_commands_shells_and_terminals() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let keep = r#"mkdir -p "$(dirname "$EXECD_ENVS")" && echo "KEPT='a b'" >> "$EXECD_ENVS""#;
    assert_eq!(sandbox.run(keep).code, Some(0));
    assert_eq!(sandbox.run("echo $EXECD_ENVS $KEPT").stdout, "/opt/opensandbox/.env a b\n");
    let own = sandbox.run_with(&json!({"command": "echo $KEPT", "envs": {"KEPT": "own"}}));
    assert_eq!(own.stdout, "own\n");
    let session = sandbox.request_inside("POST", "session", &json!({})).json()["session_id"].to_string();
    let path = format!("session/{}/run", session.trim_matches('"'));
    let reported = sandbox.request_inside("POST", &path, &json!({"command": "echo $KEPT"})).text();
    assert!(reported.contains(r#""text":"a b\n""#), "{reported}");
}

#[test]
fn saved_variables_expand_in_working_directories() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"env": {"OTHER": "/never/there"}}));
    let keep =
        r#"mkdir -p /opt/opensandbox "/tmp/a b" && printf "PLACE='/tmp/a b'\nOTHER=/usr\n" > "$EXECD_ENVS""#;
    assert_eq!(sandbox.run(keep).code, Some(0));
    for (cwd, place) in [("$PLACE", "/tmp/a b\n"), ("${OTHER}/bin", "/usr/bin\n")] {
        assert_eq!(sandbox.run_with(&json!({"command": "pwd", "cwd": cwd})).stdout, place, "{cwd}");
    }
    let own = json!({"command": "pwd", "cwd": "$PLACE", "envs": {"PLACE": "/etc"}});
    assert_eq!(sandbox.run_with(&own).stdout, "/etc\n");
    let missing = sandbox.request_inside("POST", "command", &json!({"command": "pwd", "cwd": "$PLACE/none"}));
    assert_eq!(missing.status, 400);
    assert!(missing.text().contains("$PLACE/none"), "{}", missing.text());

    let opened = sandbox.request_inside("POST", "session", &json!({"cwd": "$PLACE/new"})).json();
    let path = format!("session/{}/run", opened["session_id"].as_str().expect("a new session has an id"));
    for (cwd, reported) in [
        (Value::Null, r#""text":"/tmp/a b/new\n""#),
        (json!("$OTHER/lib"), r#""text":"/usr/lib\n""#),
        (json!("$PLACE/$(id)/`id`;id"), r#""evalue":"1""#),
    ] {
        let text = sandbox.request_inside("POST", &path, &json!({"command": "pwd", "cwd": cwd})).text();
        assert!(text.contains(reported) && !text.contains("uid="), "{cwd}: {text}");
    }
}

#[test]
fn client_cannot_override_the_sandbox_id_variable() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"env": {"OPENSANDBOX_ID": "forged", "A": "b"}}));
    assert_eq!(sandbox.run("echo $OPENSANDBOX_ID $A").stdout, format!("{} b\n", sandbox.id));
}

#[test]
fn env_file_path_is_chosen_by_the_client() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"env": {"EXECD_ENVS": "~/mine"}}));
    assert_eq!(sandbox.run("echo K=v > ~/mine").code, Some(0));
    assert_eq!(sandbox.run("echo $EXECD_ENVS $K").stdout, "~/mine v\n");
    let mut without = server.create_sandbox_with(&json!({"env": {"EXECD_ENVS": ""}}));
    assert_eq!(without.run("echo [$EXECD_ENVS]").stdout, "[]\n");
}

#[test]
fn hostile_env_file_breaks_no_command() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("mkdir -p /opt/opensandbox").code, Some(0));
    for trouble in ["mkfifo F", "ln -sf /dev/zero F", "rm F; yes 'A=$A$A$PATH' | head -c 9000000 > F"] {
        let made = sandbox.run(&trouble.replace('F', "/opt/opensandbox/.env"));
        assert_eq!(made.code, Some(0), "{trouble}: {}", made.stderr);
        let after = sandbox.run("echo well; rm -f /opt/opensandbox/.env");
        assert_eq!((after.stdout.as_str(), after.code), ("well\n", Some(0)), "{trouble}");
    }
    let refused = sandbox.request_inside("GET", "ping", &Value::Null);
    assert_eq!(refused.status, 200);
}

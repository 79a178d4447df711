//! Isolated sessions: shells in namespaces of their own inside a sandbox.

use e2e::run::{ORDINARY_USER, TestUser};
use e2e::sandbox::{CommandRun, RemoteSandbox};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// A sandbox in which isolated sessions can be opened.
fn sandbox_with_isolated_sessions(server: &TestServer) -> RemoteSandbox {
    server.create_sandbox_with(&json!({"extensions": {"bootstrap.execd.isolation": "enable"}}))
}

fn open(sandbox: &mut RemoteSandbox, request: &Value) -> String {
    let answer = sandbox.request_inside("POST", "v1/isolated/session", request);
    assert_eq!(answer.status, 201, "{request}: {}", answer.text());
    answer.json()["session_id"].as_str().expect("an id").to_owned()
}

fn workspace(sandbox: &mut RemoteSandbox, path: &str, mode: &str) -> String {
    open(sandbox, &json!({"workspace": {"path": path, "mode": mode}}))
}

fn run_with(sandbox: &mut RemoteSandbox, session: &str, body: &Value) -> CommandRun {
    let answer = sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), body);
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    CommandRun::from_events(&answer.text())
}

fn run(sandbox: &mut RemoteSandbox, session: &str, code: &str) -> CommandRun {
    run_with(sandbox, session, &json!({"code": code}))
}

fn printed(sandbox: &mut RemoteSandbox, session: &str, code: &str) -> String {
    let ran = run(sandbox, session, code);
    assert_eq!(ran.code, Some(0), "{code}: {ran:?}");
    ran.stdout
}

fn get(sandbox: &mut RemoteSandbox, path: &str) -> e2e::http::HttpResponse {
    sandbox.request_inside("GET", &format!("v1/isolated/{path}"), &Value::Null)
}

#[test]
fn sandbox_reports_whether_isolated_sessions_are_available() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut with = sandbox_with_isolated_sessions(&server);
    let reported = get(&mut with, "capabilities").json();
    assert_eq!(reported["available"], true, "{reported}");
    let mut without = server.create_sandbox();
    let reported = get(&mut without, "capabilities").json();
    assert_eq!(reported["available"], false);
    assert!(
        reported["message"].as_str().is_some_and(|why| why.contains("bootstrap.execd.isolation")),
        "{reported}"
    );
    let request = json!({"workspace": {"path": "/tmp"}});
    let refused = without.request_inside("POST", "v1/isolated/session", &request);
    assert_eq!((refused.status, refused.json()["code"].as_str()), (503, Some("SERVICE_UNAVAILABLE")));
    assert_eq!(get(&mut without, "sessions").status, 503);
}

#[test]
fn sessions_without_control_groups_are_unavailable_with_a_reason() {
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let mut sandbox = server.create_sandbox_with(&json!({
        "resourceLimits": {}, "extensions": {"bootstrap.execd.isolation": "enable"},
    }));
    let reported = get(&mut sandbox, "capabilities").json();
    let delegated = reported["available"] == true;
    let why = reported["message"].as_str().unwrap_or_default();
    assert!(delegated || why.contains("control groups"), "{reported}");
    let answer = sandbox.request_inside("POST", "v1/isolated/session", &json!({"workspace": {"path": "/w"}}));
    assert_eq!(answer.status, if delegated { 201 } else { 503 }, "{}", answer.text());
    assert_eq!(sandbox.run("echo well").stdout, "well\n");
}

#[test]
fn session_has_private_processes_and_files_and_keeps_state() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let one = workspace(&mut sandbox, "/workspace", "rw");
    let two = workspace(&mut sandbox, "/workspace", "rw");
    let pid: i32 = printed(&mut sandbox, &one, "echo $$").trim().parse().expect("a number");
    assert!(pid <= 2, "{pid}");
    assert_eq!(printed(&mut sandbox, &one, "export A=b; cd /usr; echo secret > /tmp/mine"), "");
    assert_eq!(printed(&mut sandbox, &one, "echo $A $PWD"), "b /usr\n");
    assert_eq!(run(&mut sandbox, &two, "cat /tmp/mine").code, Some(1));
    assert_eq!(sandbox.run("cat /tmp/mine").code, Some(1));
    // The session sees no other processes, and only processes outside see into it.
    let seen = printed(&mut sandbox, &one, "ls /proc | grep -E '^[0-9]+$' | wc -l");
    assert!(seen.trim().parse::<u32>().expect("a number") <= 6, "{seen}");
    let failed = run(&mut sandbox, &one, "(exit 7)");
    assert_eq!((failed.code, failed.error.contains("ExitError")), (Some(7), true), "{failed:?}");
}

#[test]
fn workspace_is_writable_overlaid_or_read_only() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    assert_eq!(sandbox.run("mkdir /w; echo old > /w/old").code, Some(0));
    let through = workspace(&mut sandbox, "/w", "rw");
    assert_eq!(printed(&mut sandbox, &through, "echo new > /w/through"), "");
    assert_eq!(sandbox.run("cat /w/through").stdout, "new\n");
    let over = workspace(&mut sandbox, "/w", "overlay");
    assert_eq!(
        printed(&mut sandbox, &over, "echo changed > old; rm through; echo x > added; cat old; ls"),
        "changed\nadded\nold\n"
    );
    assert_eq!(sandbox.run("cat /w/old; ls /w").stdout, "old\nold\nthrough\n");
    let read = workspace(&mut sandbox, "/w", "ro");
    assert_eq!(printed(&mut sandbox, &read, "cat /w/old"), "old\n");
    assert_ne!(run(&mut sandbox, &read, "echo x > /w/added").code, Some(0));
    // Everything else is read-only.
    for session in [&through, &over, &read] {
        assert_ne!(run(&mut sandbox, session, "echo x > /root/added").code, Some(0));
        assert_ne!(run(&mut sandbox, session, "echo x > /dev/added").code, Some(0));
    }
}

#[test]
fn overlays_binds_and_identities_work_in_sessions() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let made =
        sandbox.run("mkdir -p /w/deep /data/b; echo low > /w/deep/f; echo data > /data/b/f; chmod 777 /w");
    assert_eq!(made.code, Some(0));
    let session = open(
        &mut sandbox,
        &json!({
            "overlays": [{"path": "/w/deep", "mode": "ro"}, {"path": "/w", "persist": false}],
            "binds": [{"source": "/data/b", "dest": "/mnt/b", "readonly": true}], "extra_writable": ["/data/own"],
            "uid": 1000, "gid": 1000, "share_net": false,
        }),
    );
    assert_eq!(
        printed(&mut sandbox, &session, "id -u; id -g; cat /mnt/b/f /w/deep/f"),
        "1000\n1000\ndata\nlow\n"
    );
    assert_ne!(run(&mut sandbox, &session, "echo x > /w/deep/f").code, Some(0));
    assert_eq!(printed(&mut sandbox, &session, "echo x > /w/new; cat /w/new; echo y > /data/own/f"), "x\n");
    assert_eq!(sandbox.run("cat /data/own/f; stat -c %u /data/own").stdout, "y\n1000\n");
    assert_eq!(sandbox.run("ls /w").stdout, "deep\n");
    assert_eq!(printed(&mut sandbox, &session, "cat /proc/net/dev | grep -c :"), "1\n");
}

#[test]
fn variables_follow_the_profile_and_those_of_a_run_do_not_persist() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({
        "extensions": {"bootstrap.execd.isolation": "enable"}, "env": {"MY_TOKEN": "t", "PLAIN": "p"},
    }));
    let keep = "mkdir -p /opt/opensandbox; echo 'FILED=f' > $EXECD_ENVS; echo 'AWS_X=y' >> $EXECD_ENVS";
    assert_eq!(sandbox.run(keep).code, Some(0));
    let show = "echo [$MY_TOKEN] [$PLAIN] [$FILED] [$AWS_X]";
    let strict = workspace(&mut sandbox, "/w", "rw");
    assert_eq!(printed(&mut sandbox, &strict, show), "[] [p] [f] []\n");
    let balanced = open(&mut sandbox, &json!({"workspace": {"path": "/w"}, "profile": "balanced"}));
    assert_eq!(printed(&mut sandbox, &balanced, show), "[t] [p] [f] [y]\n");
    let only = json!({"workspace": {"path": "/w"}, "env_passthrough": {"mode": "allow", "keys": ["MY_*"]}});
    let only = open(&mut sandbox, &only);
    assert_eq!(printed(&mut sandbox, &only, show), "[t] [] [] []\n");
    let lent = json!({"code": "echo $PLAIN $OWN", "envs": {"PLAIN": "it's", "OWN": "o"}});
    assert_eq!(run_with(&mut sandbox, &strict, &lent).stdout, "it's o\n");
    assert_eq!(printed(&mut sandbox, &strict, "echo $PLAIN [$OWN]"), "p []\n");
}

#[test]
fn background_runs_have_status_and_logs_and_do_not_interfere() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = workspace(&mut sandbox, "/tmp", "rw");
    assert_eq!(printed(&mut sandbox, &session, "export A=exported"), "");
    let begin = |sandbox: &mut RemoteSandbox, code: &str| {
        let body = json!({"code": code, "background": true, "envs": {"B": "own"}});
        let answer = sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), &body);
        assert_eq!(answer.status, 202, "{}", answer.text());
        assert_eq!(answer.json()["session_id"], session.as_str());
        answer.json()["run_id"].as_str().expect("an id").to_owned()
    };
    let first = begin(&mut sandbox, "echo $A $B; exit 7");
    let status =
        |sandbox: &mut RemoteSandbox, id: &str| get(sandbox, &format!("session/{session}/runs/{id}")).json();
    e2e::eventually("it ends", || status(&mut sandbox, &first)["running"] == false);
    let reported = status(&mut sandbox, &first);
    assert_eq!((&reported["exit_code"], reported["error"].is_null()), (&json!(7), true), "{reported}");
    let logs = get(&mut sandbox, &format!("session/{session}/runs/{first}/logs"));
    assert_eq!(logs.text(), "exported own\n");
    let cursor = logs.header("EXECD-ISOLATED-TAIL-CURSOR").expect("a cursor").to_owned();
    let rest = get(&mut sandbox, &format!("session/{session}/runs/{first}/logs?cursor={cursor}"));
    assert_eq!((rest.status, rest.text().as_str()), (200, ""));
    // Processes of one session can signal each other and no others.
    let victim = begin(&mut sandbox, "echo $$ > /tmp/pid; exec sleep 600");
    let ended = "while ! test -s /tmp/pid; do :; done; kill $(cat /tmp/pid)";
    assert_eq!(printed(&mut sandbox, &session, ended), "");
    e2e::eventually("it was ended", || status(&mut sandbox, &victim)["running"] == false);
    let second = begin(&mut sandbox, "sleep 600");
    assert_eq!(printed(&mut sandbox, &session, "echo in front"), "in front\n");
    assert_eq!(status(&mut sandbox, &second)["running"], true);
    let ended = sandbox.request_inside("DELETE", &format!("command?id={second}"), &Value::Null);
    assert_eq!(ended.status, 200, "{}", ended.text());
    assert_eq!(status(&mut sandbox, &second)["running"], false);
    assert_eq!(get(&mut sandbox, &format!("session/{session}/runs/no-such-run")).status, 404);
}

#[test]
fn file_routes_act_through_the_session() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    assert_eq!(sandbox.run("mkdir /w; echo lower > /w/lower.txt").code, Some(0));
    let session = workspace(&mut sandbox, "/w", "overlay");
    let at = |path: &str| format!("v1/isolated/session/{session}/{path}");
    let moved = sandbox.request_inside(
        "POST",
        &at("files/mv"),
        &json!([{"src": "/w/lower.txt", "dest": "/w/moved.txt"}]),
    );
    assert_eq!(moved.status, 200, "{}", moved.text());
    let found = sandbox.request_inside("GET", &at("files/search?path=/w&pattern=*.txt"), &Value::Null).json();
    assert_eq!(found[0]["path"], "/w/moved.txt", "{found}");
    assert_eq!(
        sandbox.request_inside("GET", &at("files/download?path=/w/moved.txt"), &Value::Null).text(),
        "lower\n"
    );
    let made = sandbox.request_inside("POST", &at("directories"), &json!({"/w/d": {"mode": 755}}));
    assert_eq!(made.status, 200, "{}", made.text());
    assert_eq!(printed(&mut sandbox, &session, "ls /w"), "d\nmoved.txt\n");
    assert_eq!(sandbox.run("ls /w").stdout, "lower.txt\n");
    let read = workspace(&mut sandbox, "/w", "ro");
    let refused = sandbox.request_inside(
        "POST",
        &format!("v1/isolated/session/{read}/directories"),
        &json!({"/w/x": {"mode": 755}}),
    );
    assert!(refused.status >= 400, "{}", refused.status);
    let gone = sandbox.request_inside(
        "GET",
        "v1/isolated/session/00000000-0000-0000-0000-000000000000/files/info?path=/w",
        &Value::Null,
    );
    assert_eq!((gone.status, gone.json()["code"].as_str()), (404, Some("SESSION_NOT_FOUND")));
}

#[test]
fn session_ends_with_all_its_processes_and_outlives_the_server() {
    if !testkit::needs_root() {
        return;
    }
    let mut server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = workspace(&mut sandbox, "/w", "overlay");
    let daemon = "(setsid sh -c 'trap \"\" TERM; sleep 31415' > /dev/null 2>&1 &); echo kept > /w/f";
    assert_eq!(printed(&mut sandbox, &session, daemon), "");
    let sleeps = |sandbox: &mut RemoteSandbox| {
        sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 3141[5]'").code == Some(0)
    };
    e2e::eventually("it sleeps", || sleeps(&mut sandbox));
    server.kill();
    server.restart(&ServerBuilder::new());
    let mut again = RemoteSandbox::existing(server.client(), &sandbox.id);
    let reported = get(&mut again, &format!("session/{session}")).json();
    assert_eq!(
        (reported["status"].as_str(), reported["workspace"]["mode"].as_str()),
        (Some("active"), Some("overlay"))
    );
    assert_eq!(printed(&mut again, &session, "cat /w/f"), "kept\n");
    let deleted = again.request_inside("DELETE", &format!("v1/isolated/session/{session}"), &Value::Null);
    assert_eq!(deleted.status, 204, "{}", deleted.text());
    e2e::eventually("everything in it ended", || !sleeps(&mut again));
    assert_eq!(get(&mut again, &format!("session/{session}")).status, 404);
    let twice = again.request_inside("DELETE", &format!("v1/isolated/session/{session}"), &Value::Null);
    assert_eq!((twice.status, twice.json()["code"].as_str()), (404, Some("SESSION_NOT_FOUND")));
    assert_eq!(get(&mut again, "sessions").json(), json!({"sessions": []}));
}

#[test]
fn session_with_a_killed_init_reports_it_and_refuses_runs() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = workspace(&mut sandbox, "/w", "overlay");
    let shell = printed(&mut sandbox, &session, "sleep 27182 > /dev/null 2>&1 & echo on its way");
    assert_eq!(shell, "on its way\n");
    let mut below = Vec::new();
    e2e::eventually("it runs", || {
        below = e2e::host::pids_with_command_line("sleep 27182");
        !below.is_empty()
    });
    let holder = e2e::host::namespace_init_pid(below[0]).expect("the session has an init process");
    let killed = std::process::Command::new("kill").args(["-9", &holder.to_string()]).status();
    assert!(killed.expect("there is a `kill`").success());
    e2e::eventually("it is dead", || {
        get(&mut sandbox, &format!("session/{session}")).json()["status"] == "dead"
    });
    let refused = sandbox.request_inside(
        "POST",
        &format!("v1/isolated/session/{session}/run"),
        &json!({"code": "true"}),
    );
    assert_eq!(refused.status, 409, "{}", refused.text());
    assert_eq!(e2e::host::pids_with_command_line("sleep 27182"), Vec::<u32>::new());
    let deleted = sandbox.request_inside("DELETE", &format!("v1/isolated/session/{session}"), &Value::Null);
    assert_eq!(deleted.status, 204, "{}", deleted.text());
}

#[test]
fn idle_session_is_closed() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let request = json!({"workspace": {"path": "/w"}, "idle_timeout_seconds": 3});
    let session = open(&mut sandbox, &request);
    // A run keeps the session open, however long it takes.
    assert_eq!(printed(&mut sandbox, &session, "sleep 4; echo here"), "here\n");
    e2e::eventually("it is closed", || get(&mut sandbox, &format!("session/{session}")).status == 404);
}

#[test]
fn timed_out_run_ends_and_the_session_continues() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = sandbox_with_isolated_sessions(&server);
    let session = workspace(&mut sandbox, "/w", "overlay");
    assert_eq!(printed(&mut sandbox, &session, "echo kept > /w/f; echo too > /tmp/f"), "");
    let late = run_with(&mut sandbox, &session, &json!({"code": "sleep 600", "timeout_seconds": 1}));
    assert!(late.error.contains("timeout"), "{late:?}");
    assert_eq!(printed(&mut sandbox, &session, "cat /w/f /tmp/f"), "kept\ntoo\n");
    assert_ne!(run(&mut sandbox, &session, "exit 3").code, Some(0));
    assert_eq!(printed(&mut sandbox, &session, "cat /w/f"), "kept\n");
}

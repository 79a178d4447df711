//! Snapshots and forks through the API and the command line: what they keep, that they outlive sandboxes
//! and servers, and that no sandbox stays frozen because of them.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;

use e2e::binary::ProgramCopies;
use e2e::http::{HttpClient, HttpResponse};
use e2e::run::{ORDINARY_USER, TestUser};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// Takes a snapshot and waits until it is no longer being taken.
fn snapshot(server: &TestServer, sandbox: &str) -> Value {
    let mut client = server.client();
    let answer = client.post(&format!("/v1/sandboxes/{sandbox}/snapshots"), &json!({})).unwrap();
    assert_eq!(answer.status, 202, "{}", answer.text());
    assert_eq!(answer.json()["status"]["state"], "Creating");
    wait_until_stable(&mut client, answer.json()["id"].as_str().unwrap())
}

fn wait_until_stable(client: &mut HttpClient, id: &str) -> Value {
    let mut seen = Value::Null;
    e2e::eventually("the snapshot is taken or has failed", || {
        seen = client.get(&format!("/v1/snapshots/{id}")).unwrap().json();
        seen["status"]["state"] != "Creating"
    });
    seen
}

/// As [`snapshot`], returning only the id.
fn take_ready_snapshot(server: &TestServer, sandbox: &RemoteSandbox) -> String {
    let taken = snapshot(server, &sandbox.id);
    assert_eq!(taken["status"]["state"], "Ready", "{taken}");
    taken["id"].as_str().unwrap().to_owned()
}

fn restore(server: &TestServer, snapshot: &str) -> RemoteSandbox {
    server.create_sandbox_with(&json!({"image": null, "entrypoint": null, "snapshotId": snapshot}))
}

/// Runs shell text that must succeed, and returns its output.
fn ok(sandbox: &mut RemoteSandbox, text: &str) -> String {
    let ran = sandbox.run(text);
    assert_eq!(ran.code, Some(0), "`{text}`: {ran:?}");
    ran.stdout
}

fn delete(server: &TestServer, snapshot: &str) -> HttpResponse {
    server.client().delete(&format!("/v1/snapshots/{snapshot}")).unwrap()
}

fn code(answer: &HttpResponse) -> (u16, String) {
    (answer.status, answer.json()["code"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn snapshot_keeps_writes_deletions_renames_and_ownership() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut source = server.create_sandbox();
    ok(
        &mut source,
        "echo text > /root/file; rm /etc/hostname; mv /etc/group /etc/group2; mkdir -p /srv/d; \
         chown 1000:1001 /srv/d; chmod 4751 /srv/d; ln -s file /root/link; ln /root/file /root/hard; \
         touch /usr/bin/own; rm /usr/bin/env; echo x > '/root/odd name ü'",
    );
    let taken = take_ready_snapshot(&server, &source);
    ok(&mut source, "echo changed > /root/file; rm -r /srv/d");
    let look = "cat /root/file; stat -c '%u %g %a' /srv/d; readlink /root/link; stat -c %h /root/file; \
                cat '/root/odd name ü'; ls /etc/hostname /etc/group /usr/bin/env 2>/dev/null; \
                ls /usr/bin/own /etc/group2";
    let expected = "text\n1000 1001 4751\nfile\n2\nx\n/etc/group2\n/usr/bin/own\n";
    let mut restored = restore(&server, &taken);
    assert_eq!(ok(&mut restored, look), expected);
    // A fork of a fork has the same files, and each keeps its own later writes.
    ok(&mut restored, "echo mine > /root/file; rm /usr/bin/own");
    let again = take_ready_snapshot(&server, &restored);
    let mut second = restore(&server, &taken);
    assert_eq!(ok(&mut second, look), expected);
    let mut third = restore(&server, &again);
    assert_eq!(
        ok(&mut third, "cat /root/file; test ! -e /usr/bin/own; ls /etc/group2"),
        "mine\n/etc/group2\n"
    );
    for id in [&taken, &again] {
        assert_eq!(delete(&server, id).status, 204);
    }
    assert_eq!(ok(&mut second, "cat /root/file"), "text\n", "the fork no longer needs the snapshot");
}

/// The disks that belong to no sandbox and have a file of this name.
fn unassigned_disks_with(server: &TestServer, name: &str) -> Vec<String> {
    let state = server.state_directory();
    let below = state.strip_prefix("/").expect("a state directory is absolute");
    let root = Path::new("/proc").join(server.part_pid("__launcher").to_string()).join("root");
    let disks = fs::read_dir(root.join(below).join("disk/pool")).expect("the disks are in a pool").flatten();
    let unassigned = disks.filter(|entry| entry.file_name().to_string_lossy().starts_with("prepared-"));
    let holds_file = |disk: &fs::DirEntry| {
        let found = std::process::Command::new("find").arg(disk.path()).args(["-name", name]).output();
        // A disk may be assigned or removed while it is searched.
        !found.expect("there is a `find`").stdout.is_empty()
    };
    unassigned.filter(holds_file).map(|disk| disk.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn disk_is_copied_before_the_next_restore() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    if !server.state_directory().join("disk/pool").is_dir() {
        return testkit::skip_test("disks are not subvolumes here");
    }
    let (mut first, mut second) = (server.create_sandbox(), server.create_sandbox());
    ok(&mut first, "echo text > /root/file-of-first");
    ok(&mut second, "echo text > /root/file-of-second");
    let taken = [take_ready_snapshot(&server, &first), take_ready_snapshot(&server, &second)];
    let copies = ["file-of-first", "file-of-second"];
    let wait_for_copies = |expected: [usize; 2]| {
        e2e::eventually("the disk that is copied in advance is the expected one", || {
            copies.map(|name| unassigned_disks_with(&server, name).len()) == expected
        });
        copies.map(|name| unassigned_disks_with(&server, name))
    };
    let mut former = wait_for_copies([0, 0]);
    // One sandbox waits for its own copy, the next one takes the copy that was made in advance, and another follows.
    for text in ["one", "two"] {
        let mut restored = restore(&server, &taken[0]);
        assert_eq!(
            ok(&mut restored, "cat /root/file-of-first"),
            "text\n",
            "another sandbox wrote to this disk"
        );
        ok(&mut restored, &format!("echo {text} > /root/file-of-first"));
        e2e::eventually("the copy is taken by the restore", || {
            unassigned_disks_with(&server, copies[0]) != former[0]
        });
        former = wait_for_copies([1, 0]);
    }
    let mut other = restore(&server, &taken[1]);
    assert_eq!(ok(&mut other, "cat /root/file-of-second; ls /root"), "text\nfile-of-second\n");
    wait_for_copies([0, 1]);
    for id in &taken {
        assert_eq!(delete(&server, id).status, 204);
    }
    wait_for_copies([0, 0]);
}

#[test]
fn the_api_answers_as_its_reference_does() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let source = server.create_sandbox();
    let mut client = server.client();
    let path = format!("/sandboxes/{}/snapshots", source.id);
    let answer = client.post(&path, &json!({"name": "first"})).unwrap();
    let body = answer.json();
    let id = body["id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("location"), Some(format!("/v1/snapshots/{id}").as_str()));
    assert_eq!((&body["sandboxId"], &body["name"]), (&json!(source.id), &json!("first")));
    assert_eq!(body["status"]["reason"], "snapshot_accepted");
    assert_eq!(wait_until_stable(&mut client, &id)["status"]["reason"], "snapshot_ready");
    let other = take_ready_snapshot(&server, &source);
    let mut list = |query: &str| client.get(&format!("/snapshots?{query}")).unwrap().json();
    assert_eq!(list("")["pagination"]["totalItems"], 2);
    assert_eq!(list("name=first")["items"][0]["id"], json!(id));
    assert_eq!(list("pageSize=1")["items"][0]["id"], json!(other), "the newest comes first");
    assert_eq!(list("state=failed&state=CREATING")["items"], json!([]));
    assert_eq!(list(&format!("sandboxId={}&state=ready", source.id))["pagination"]["totalItems"], 2);
    assert_eq!(list("sandboxId=nobody")["items"], json!([]));
    let restored = restore(&server, &id);
    let shown = client.get(&format!("/v1/sandboxes/{}", restored.id)).unwrap().json();
    assert_eq!((&shown["snapshotId"], shown.get("image")), (&json!(id), None));
    assert_eq!(shown["entrypoint"], json!(["tail", "-f", "/dev/null"]));
    let absent = "/v1/snapshots/ffffffff-ffff-4fff-bfff-ffffffffffff";
    assert_eq!(code(&client.get(absent).unwrap()), (404, "SNAPSHOT::NOT_FOUND".to_owned()));
    assert_eq!(code(&client.delete(absent).unwrap()), (404, "SNAPSHOT::NOT_FOUND".to_owned()));
    let request = json!({"snapshotId": "ffffffff-ffff-4fff-bfff-ffffffffffff", "resourceLimits": {}});
    assert_eq!(
        code(&client.post("/v1/sandboxes", &request).unwrap()),
        (404, "SNAPSHOT::NOT_FOUND".to_owned())
    );
    client.post(&format!("/v1/sandboxes/{}/pause", source.id), &json!({})).unwrap();
    let paused = client.post(&path, &json!({})).unwrap();
    assert_eq!(code(&paused), (409, "SNAPSHOT::INVALID_SOURCE_STATE".to_owned()));
}

#[test]
fn disk_too_small_for_the_snapshot_is_refused() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut source = server.create_sandbox_with(&json!({"extensions": {"coracle.disk": "64Mi"}}));
    ok(&mut source, "head -c 30000000 /dev/urandom > /root/file");
    let taken = take_ready_snapshot(&server, &source);
    let request = json!({
        "snapshotId": taken, "resourceLimits": {}, "extensions": {"coracle.disk": "20Mi"},
    });
    let refused = server.client().post("/v1/sandboxes", &request).unwrap();
    assert_eq!(code(&refused), (409, "SNAPSHOT::INVALID_RESTORE_CONFIG".to_owned()), "{}", refused.text());
    let mut restored = restore(&server, &taken);
    assert_eq!(ok(&mut restored, "stat -c %s /root/file"), "30000000\n");
    // Files from the snapshot do not count against the limit, new ones do.
    let ran = restored.run("head -c 100000000 /dev/urandom > /root/more");
    assert_ne!(ran.code, Some(0), "its own limit holds");
}

/// Commands are frozen for a moment only, and every record that a writer has synced is in the snapshot,
/// complete.
#[test]
fn writer_continues_and_its_journal_is_consistent() {
    if !testkit::needs_root() {
        return;
    }
    const WRITER: &str = "import os\nf = os.open('/root/log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\nn = 0\n\
        while True:\n    os.write(f, (b'%015d\\n' % n) * 64)\n    os.fsync(f)\n    n += 1\n    print(n, flush=True)\n";
    const CHECK: &str = "import sys\ndata = open('/root/log', 'rb').read()\nsize = 16 * 64\n\
        for n in range(len(data) // size):\n    assert data[n * size:(n + 1) * size] == (b'%015d\\n' % n) * 64, n\n\
        print(len(data) // size)\n";
    let server = TestServer::start();
    let mut source = server.create_sandbox();
    source.upload("/root/writer.py", WRITER.as_bytes());
    source.upload("/root/check.py", CHECK.as_bytes());
    let mut follower = RemoteSandbox::existing(server.client(), &source.id);
    let stream =
        follower.request_streaming("POST", "command", &json!({"command": "python3 /root/writer.py"}));
    let mut lines = BufReader::new(stream.body).lines().map_while(Result::ok);
    let mut printed = || loop {
        let line = lines.next().expect("the writer continues");
        let event: Value = serde_json::from_str(line.trim_start_matches("data: ")).unwrap_or_default();
        if event["type"] == "stdout" {
            return event["text"].as_str().unwrap().trim().parse::<u64>().unwrap();
        }
    };
    for _ in 0..5 {
        let before = printed();
        let taken = take_ready_snapshot(&server, &source);
        // Records printed before the snapshot was requested had been synced.
        let mut restored = restore(&server, &taken);
        let found: u64 = ok(&mut restored, "python3 /root/check.py").trim().parse().unwrap();
        assert!(found >= before, "{found} records of {before}");
        while printed() <= found {}
        assert_eq!(delete(&server, &taken).status, 204);
    }
}

#[test]
fn a_snapshot_outlives_its_sandbox_and_its_server() {
    if !testkit::needs_root() {
        return;
    }
    let mut server = TestServer::start();
    let mut source = server.create_sandbox();
    ok(&mut source, "echo kept > /root/file");
    let taken = take_ready_snapshot(&server, &source);
    let mut survivor = restore(&server, &taken);
    server.client().delete(&format!("/v1/sandboxes/{}", source.id)).unwrap();
    for crash in [false, true] {
        if crash {
            server.kill();
        } else {
            server.terminate();
        }
        server.restart(&ServerBuilder::new());
        let mut restored = restore(&server, &taken);
        assert_eq!(ok(&mut restored, "cat /root/file"), "kept\n");
    }
    survivor = RemoteSandbox::existing(server.client(), &survivor.id);
    assert_eq!(ok(&mut survivor, "cat /root/file"), "kept\n");
    assert_eq!(delete(&server, &taken).status, 204);
}

#[test]
fn ordinary_users_server_reports_snapshots_unsupported() {
    let user = if rustix::process::geteuid().is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let source = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let path = format!("/v1/sandboxes/{}/snapshots", source.id);
    let refused = server.client().post(&path, &json!({})).unwrap();
    assert_eq!(code(&refused), (409, "SNAPSHOT::UNSUPPORTED_RUNTIME".to_owned()));
    assert!(refused.text().contains("disks are in memory on this server"), "{}", refused.text());
    assert_eq!(server.client().get("/v1/snapshots").unwrap().json()["items"], json!([]));
}

#[test]
fn a_fork_that_is_interrupted_leaves_no_snapshot_behind() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let source = server.create_sandbox();
    let mut command = ProgramCopies::shared().command();
    let url = format!("http://{}", server.address());
    command.args(["--url", &url, "fork", &source.id, "-n", "1000"]);
    let mut fork = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut reported = BufReader::new(fork.stdout.take().unwrap()).lines();
    assert_eq!(reported.next().unwrap().unwrap().len(), 20, "the first is made");
    rustix::process::kill_process(rustix::process::Pid::from_child(&fork), rustix::process::Signal::INT)
        .unwrap();
    let made = reported.count() + 1;
    assert_eq!(fork.wait().unwrap().code(), Some(130));
    assert!(made < 1000, "the writer continued");
    let left = server.client().get("/v1/snapshots").unwrap().json();
    assert_eq!(left["items"], json!([]), "{left}");
    server.remove_all().unwrap();
}

#[test]
fn the_command_line_forks_and_leaves_no_snapshot_behind() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut source = server.create_sandbox_with(&json!({"metadata": {"team": "blue"}}));
    ok(&mut source, "echo forked > /root/file");
    let coracle = |words: &[&str]| {
        let mut command = ProgramCopies::shared().command();
        let output = command.args(["--url", &format!("http://{}", server.address())]).args(words).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let forks = coracle(&["fork", &source.id, "-n", "3"]);
    assert_eq!(forks.lines().count(), 3, "{forks}");
    for id in forks.lines() {
        assert_eq!(ok(&mut RemoteSandbox::existing(server.client(), id), "cat /root/file"), "forked\n");
    }
    assert_eq!(coracle(&["ls", "-q", "-l", "team=blue"]).lines().count(), 4, "labels are kept");
    let empty: Value = serde_json::from_str(&coracle(&["--json", "snapshot", "ls"])).unwrap();
    assert_eq!(empty, json!([]));
    let taken = coracle(&["snapshot", "create", &source.id, "--name", "one"]);
    let reported: Value =
        serde_json::from_str(&coracle(&["--json", "snapshot", "inspect", taken.trim()])).unwrap();
    assert_eq!((&reported["name"], &reported["status"]["state"]), (&json!("one"), &json!("Ready")));
    let made = coracle(&["create", "--snapshot", taken.trim()]);
    assert_eq!(ok(&mut RemoteSandbox::existing(server.client(), made.trim()), "cat /root/file"), "forked\n");
    assert_eq!(coracle(&["snapshot", "rm", taken.trim()]), taken);
}

/// The confinement of a sandbox, as the operator's API and the sandbox itself report it.
fn confinement(server: &TestServer, id: &str) -> Value {
    let mut client = server.client();
    let inspected = client.get(&format!("/coracle/v1/sandboxes/{id}")).unwrap().json();
    let shown = client.get(&format!("/v1/sandboxes/{id}")).unwrap().json();
    let time = |name: &str| shown[name].as_str().map(|text| text.parse::<jiff::Timestamp>().unwrap());
    let lives = time("expiresAt").map(|end| end.as_second() - time("createdAt").unwrap().as_second());
    let usage = &inspected["usage"];
    let mut inside = RemoteSandbox::existing(server.client(), id);
    json!({
        "memory": usage["memoryLimitBytes"], "cpu": usage["cpuLimitMillis"], "pids": usage["pidsLimit"],
        "disk": usage["diskLimitBytes"], "lives": lives, "labels": shown["metadata"],
        "links": ok(&mut inside, "ls /sys/class/net 2>/dev/null; wc -l < /proc/net/dev"),
        "mark": ok(&mut inside, "printf %s \"$MARK\""),
    })
}

/// Every way to make a sandbox with the files of another gives it the confinement of that one.
#[test]
fn a_fork_inherits_the_confinement_of_its_parent() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let coracle = |words: &[&str]| {
        let mut command = ProgramCopies::shared().command();
        let output = command.args(["--url", &format!("http://{}", server.address())]).args(words).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let parent = coracle(&[
        "create",
        "--network",
        "off",
        "--pids",
        "50",
        "--cpus",
        "0.25",
        "--memory",
        "300m",
        "--disk",
        "64m",
        "--timeout",
        "1h",
        "--idle-timeout",
        "2h",
        "--env",
        "MARK=kept",
        "--label",
        "team=blue",
    ]);
    let expected = confinement(&server, &parent);
    assert_eq!(
        (&expected["memory"], &expected["cpu"], &expected["pids"]),
        (&json!(300 << 20), &json!(250), &json!(50))
    );
    assert_eq!((&expected["lives"], &expected["mark"]), (&json!(3600), &json!("kept")));
    let forked = coracle(&["fork", &parent]);
    assert_eq!(confinement(&server, &forked), expected, "fork");
    assert_eq!(confinement(&server, &coracle(&["fork", &forked])), expected, "a fork of a fork");
    let taken = coracle(&["snapshot", "create", &parent]);
    assert_eq!(
        confinement(&server, &coracle(&["create", "--snapshot", &taken])),
        expected,
        "create --snapshot"
    );
    let named = coracle(&["create", "--key", "n", "--snapshot", &taken]);
    assert_eq!(confinement(&server, &named), expected, "create --key --snapshot");
    let body = json!({"snapshotId": taken, "resourceLimits": {}});
    let answer = server.client().post("/v1/sandboxes", &body).unwrap();
    assert_eq!(answer.status, 202, "{}", answer.text());
    assert_eq!(confinement(&server, answer.json()["id"].as_str().unwrap()), expected, "the API");
    let reported = server.client().get(&format!("/v1/snapshots/{taken}")).unwrap().json()["settings"].clone();
    let limits = json!({"cpu": "0.25", "memory": "300Mi", "pids": "50", "disk": "64Mi"});
    assert_eq!((&reported["network"], &reported["resourceLimits"]), (&json!("off"), &limits), "{reported}");
    assert_eq!((&reported["timeout"], &reported["idleTimeout"]), (&json!(3600), &json!(7200)));
    assert!(
        reported["env"].as_array().unwrap().contains(&json!("MARK"))
            && !reported.to_string().contains("kept")
    );
    let printed = coracle(&["snapshot", "inspect", &taken]);
    for line in
        ["network       off", "memory        300.0 MiB", "timeout       1h", "label         team=blue"]
    {
        assert!(printed.contains(line), "{line} in {printed}");
    }
    // Explicit values take precedence, one by one.
    let other = coracle(&[
        "fork",
        &parent,
        "--memory",
        "200m",
        "--timeout",
        "never",
        "--idle-timeout",
        "never",
        "--env",
        "MARK=own",
        "--label",
        "more=x",
        "--key",
        "another",
        "--",
        "sleep",
        "infinity",
    ]);
    let other = confinement(&server, &other);
    assert_eq!(
        (&other["memory"], &other["pids"], &other["lives"]),
        (&json!(200 << 20), &json!(50), &Value::Null)
    );
    assert_eq!((&other["mark"], &other["labels"]), (&json!("own"), &json!({"more": "x", "team": "blue"})));
    server.remove_all().unwrap();
}

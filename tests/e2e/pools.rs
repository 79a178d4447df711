//! Warm sandboxes: claimed once, configured late, replaced.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use e2e::binary::ProgramCopies;
use e2e::http::HttpClient;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// A server whose configuration has a pool of this level.
fn pooled(level: usize) -> TestServer {
    pooled_with(level, ServerBuilder::new())
}

fn pooled_with(level: usize, start: ServerBuilder) -> TestServer {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("coracle.toml");
    std::fs::write(&file, format!("[[pool]]\nname = \"warm\"\nlevel = {level}\n"))
        .expect("our own directory");
    let server = start.argument("--config").argument(&file.display().to_string()).start();
    until_warm(&mut server.client(), "warm", level);
    server
}

fn pool(client: &mut HttpClient, name: &str) -> Value {
    client.get(&format!("/v1/pools/{name}")).expect("the server answers").json()
}

fn until_warm(client: &mut HttpClient, name: &str, level: usize) {
    e2e::eventually("the pool is full", || pool(client, name)["status"]["available"] == level);
}

/// The sandbox as a client sees it.
fn shown(server: &TestServer, id: &str) -> Value {
    server.client().get(&format!("/v1/sandboxes/{id}")).expect("the server answers").json()
}

#[test]
fn fifty_concurrent_clients_get_one_warm_sandbox_each_and_the_level_recovers() {
    const CLIENTS: usize = 50;
    let server = pooled(10);
    let (begin, enough) = (Barrier::new(CLIENTS), AtomicBool::new(false));
    let ids: BTreeSet<String> = std::thread::scope(|scope| {
        let client = |number: usize| {
            let (server, begin, enough) = (&server, &begin, &enough);
            scope.spawn(move || {
                begin.wait();
                let mark = format!("client-{number}");
                let mut sandbox = server.create_sandbox_with(&json!({"env": {"MARK": mark}}));
                let ran = sandbox.run("ls -A /root /tmp; echo $MARK > /root/mark; cat /root/mark");
                assert_eq!(ran.stdout, format!("/root:\n\n/tmp:\n{mark}\n"), "{ran:?}");
                while !enough.load(Ordering::Relaxed) {
                    assert_eq!(sandbox.run("echo $MARK").stdout, format!("{mark}\n"));
                }
                sandbox.id
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        let mut watching = server.client();
        e2e::eventually("all have one", || {
            let status = &pool(&mut watching, "warm")["status"];
            let served = status["claimed"].as_u64().unwrap_or(0) + status["cold"].as_u64().unwrap_or(0);
            served == CLIENTS as u64 && status["available"] == 10
        });
        enough.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().expect("it ends well")).collect()
    });
    assert_eq!(ids.len(), CLIENTS, "two clients share a sandbox");
    let status = pool(&mut server.client(), "warm")["status"].clone();
    assert!(status["claimed"].as_u64() >= Some(10), "{status}");
    assert_eq!(status["total"].as_u64(), status["allocated"].as_u64().map(|taken| taken + 10), "{status}");
    let listed = server.client().get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
    assert_eq!(listed["pagination"]["totalItems"], CLIENTS, "warm sandboxes are listed");
}

#[test]
fn limits_set_at_claim_are_enforced() {
    if !testkit::needs_root() {
        return;
    }
    let server = pooled(1);
    let mut sandbox = server.create_sandbox_with(&json!({
        "resourceLimits": {"memory": "64Mi", "cpu": "500m"},
        "extensions": {"coracle.pids": "20", "coracle.disk": "64Mi"},
    }));
    assert_eq!(shown(&server, &sandbox.id)["allocation"]["poolRef"], "warm");
    let report =
        server.client().get(&format!("/coracle/v1/sandboxes/{}", sandbox.id)).expect("it answers").json();
    let in_force = &report["inForce"];
    for (limit, amount) in
        [("memory", "64Mi"), ("cpus", "0.5"), ("pids", "20"), ("disk", "64Mi"), ("pool", "warm")]
    {
        assert!(in_force[limit].as_str().is_some_and(|text| text.contains(amount)), "{limit}: {report}");
    }
    assert_eq!(report["usage"]["memoryLimitBytes"], 64 << 20, "{report}");
    assert_eq!(report["usage"]["diskLimitBytes"], 64 << 20, "{report}");
    sandbox.upload_attacks();
    let ran = sandbox.run_argv(&["/opt/attacks", "eat", "disk", "/root"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stdout.contains("EDQUOT") || ran.stdout.contains("ENOSPC"), "{ran:?}");
    let ran = sandbox.run_argv(&["/opt/attacks", "eat", "memory"]);
    assert_ne!(ran.code, Some(0), "{ran:?}");
    let report =
        server.client().get(&format!("/coracle/v1/sandboxes/{}", sandbox.id)).expect("it answers").json();
    assert!(report["usage"]["oomKills"].as_u64() > Some(0), "{report}");
    let bomb = sandbox.start_background("/opt/attacks eat processes");
    e2e::eventually("the bomb sits at its limit", || sandbox.logs(&bomb).contains("stopped: fork"));
    let report =
        server.client().get(&format!("/coracle/v1/sandboxes/{}", sandbox.id)).expect("it answers").json();
    assert!(report["usage"]["pids"].as_u64() <= Some(20), "{report}");
}

#[test]
fn other_settings_are_applied_at_claim() {
    let server = pooled(1);
    let request = json!({
        "env": {"GIVEN": "a b"}, "metadata": {"team": "x"}, "timeout": 600,
        "entrypoint": ["sh", "-c", "echo up > /root/up; exec sleep 1000"],
    });
    let mut sandbox = server.create_sandbox_with(&request);
    let body = shown(&server, &sandbox.id);
    assert_eq!(
        body["allocation"],
        json!({"mode": "pool", "poolRef": "warm", "state": "allocated"}),
        "{body}"
    );
    assert_eq!((&body["metadata"], &body["entrypoint"]), (&request["metadata"], &request["entrypoint"]));
    assert!(body["expiresAt"].is_string(), "{body}");
    e2e::eventually("its entrypoint runs", || sandbox.run("cat /root/up").stdout == "up\n");
    assert_eq!(sandbox.run("echo \"$GIVEN\"").stdout, "a b\n");
    let events = server.client().get("/coracle/v1/events?after=0&follow=false").expect("it answers").text();
    let reported: Vec<&str> = events.lines().filter(|line| line.starts_with("data:")).collect();
    assert!(
        reported.iter().all(|line| line.contains(&sandbox.id)),
        "warm sandboxes have events: {reported:?}"
    );
    let mut plain = server.create_sandbox();
    assert_eq!(plain.run("echo [$GIVEN]; ls -A /root").stdout, "[]\n");
}

#[test]
fn volume_is_attached_to_a_warm_sandbox_at_claim() {
    if !testkit::needs_root() {
        return;
    }
    let server = pooled(2);
    let volume = |read_only| json!({"volumes": [{"name": "v", "mountPath": "/data", "readOnly": read_only, "pvc": {"claimName": "shared"}}]});
    let mut writer = server.create_sandbox_with(&volume(false));
    assert_eq!(shown(&server, &writer.id)["allocation"]["poolRef"], "warm");
    assert_eq!(writer.run("echo kept > /data/file").code, Some(0));
    until_warm(&mut server.client(), "warm", 2);
    let mut reader = server.create_sandbox_with(&volume(true));
    assert_eq!(shown(&server, &reader.id)["allocation"]["poolRef"], "warm");
    assert_eq!(reader.run("cat /data/file").stdout, "kept\n");
    assert_ne!(reader.run("echo x > /data/file").code, Some(0), "it is read-only");
}

#[test]
fn a_key_and_a_pool_lead_to_one_sandbox() {
    let mut server = pooled(2);
    let request = json!({"timeout": 3600, "extensions": {"poolRef": "warm", "coracle.key": "thread"}});
    let acquire = |server: &TestServer| {
        let answer = server.client().post("/v1/sandboxes", &request).expect("the server answers");
        assert_eq!(answer.status, 202, "{}", answer.text());
        answer.json()
    };
    let ids: BTreeSet<String> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..10).map(|_| scope.spawn(|| acquire(&server)["id"].to_string())).collect();
        all.into_iter().map(|one| one.join().expect("it ends well")).collect()
    });
    assert_eq!(ids.len(), 1, "{ids:?}");
    server.kill();
    server.restart(&ServerBuilder::new());
    let again = acquire_of(&server, "thread");
    assert!(ids.contains(&again["id"].to_string()), "{again}");
}

fn acquire_of(server: &TestServer, key: &str) -> Value {
    let request = json!({"image": {"uri": "host"}, "timeout": 3600, "resourceLimits": {},
        "entrypoint": ["sleep", "inf"], "extensions": {"coracle.key": key}});
    server.client().post("/v1/sandboxes", &request).expect("the server answers").json()
}

#[test]
fn operators_manage_pools_and_every_owner_uses_them() {
    let operator = "operator-key-0123456789";
    let server = ServerBuilder::new().env("CORACLE_API_KEY", operator).start();
    let with = |key: &str| {
        let mut client = server.client();
        client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
        client
    };
    let mut own = with(operator);
    let made = json!({
        "name": "p", "template": {"spec": {"containers": [{"image": "host"}]}},
        "capacitySpec": {"bufferMax": 1, "bufferMin": 0, "poolMax": 5, "poolMin": 0},
    });
    let answer = own.post("/v1/pools", &made).expect("it answers");
    assert_eq!((answer.status, &answer.json()["capacitySpec"]), (201, &made["capacitySpec"]));
    let again = own.post("/v1/pools", &made).expect("it answers");
    assert_eq!((again.status, &again.json()["code"]), (409, &json!("KUBERNETES::POOL_ALREADY_EXISTS")));
    until_warm(&mut own, "p", 1);
    let key = own.post("/coracle/v1/keys", &json!({"owner": "tenant"})).expect("it answers").json();
    let key = key["key"].as_str().expect("it is shown once").to_owned();
    server.add_secret(&key);
    let mut tenant = with(&key);
    for (method, path) in
        [("GET", "/v1/pools"), ("GET", "/v1/pools/p"), ("DELETE", "/v1/pools/p"), ("POST", "/v1/pools")]
    {
        let answer = tenant.request(method, path, "application/json", made.to_string().as_bytes());
        assert_eq!(answer.expect("it answers").status, 403, "{method} {path}");
    }
    let taken = tenant.post("/v1/sandboxes", &json!({"extensions": {"poolRef": "p"}})).expect("it answers");
    assert_eq!(
        (taken.status, &taken.json()["allocation"]["poolRef"]),
        (202, &json!("p")),
        "{}",
        taken.text()
    );
    let path = format!("/v1/sandboxes/{}", taken.json()["id"].as_str().expect("it has an id"));
    assert_eq!(own.get(&path).expect("it answers").status, 404, "it is the tenant's alone");
    let unknown = tenant.post("/v1/sandboxes", &json!({"extensions": {"poolRef": "q"}})).expect("it answers");
    assert_eq!((unknown.status, &unknown.json()["code"]), (404, &json!("KUBERNETES::POOL_NOT_FOUND")));
    assert_eq!(tenant.delete(&path).expect("it answers").status, 204);
    let set = json!({"capacitySpec": {"bufferMax": 0, "bufferMin": 0, "poolMax": 5, "poolMin": 0}});
    let answer = own.request("PUT", "/v1/pools/p", "application/json", set.to_string().as_bytes());
    assert_eq!(answer.expect("it answers").status, 200);
    until_warm(&mut own, "p", 0);
    assert_eq!(own.delete("/v1/pools/p").expect("it answers").status, 204);
    let gone = own.get("/v1/pools/p").expect("it answers");
    assert_eq!((gone.status, &gone.json()["code"]), (404, &json!("KUBERNETES::POOL_NOT_FOUND")));
}

#[test]
fn the_command_line_manages_pools() {
    let server = pooled(1);
    let url = format!("http://{}", server.address());
    let coracle = |words: &[&str]| {
        let output = ProgramCopies::shared().command().args(words).env("CORACLE_URL", &url).output();
        let output = output.expect("the binary can be run");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.success(), text, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert!(coracle(&["pool", "create", "own", "--level", "2", "--memory", "64m"]).0);
    let (done, text, _) = coracle(&["pool", "inspect", "own", "--json"]);
    let info: Value = serde_json::from_str(&text).expect("JSON");
    assert!(done && info["resourceLimits"]["memory"] == "64Mi" && info["managedBy"] == "api", "{text}");
    until_warm(&mut server.client(), "own", 2);
    let (done, id, _) = coracle(&["create", "--pool", "own"]);
    assert!(done);
    assert_eq!(shown(&server, id.trim())["allocation"]["poolRef"], "own");
    let mut sandbox = RemoteSandbox::existing(server.client(), id.trim());
    assert_eq!(sandbox.run("true").code, Some(0));
    for (words, most) in
        [(&["--max", "7"][..], json!(7)), (&[], json!(7)), (&["--max", "none"], json!(u32::MAX))]
    {
        assert!(coracle(&[&["pool", "set", "own", "--level", "0"], words].concat()).0);
        let pool = server.client().get("/v1/pools/own").expect("it answers").json();
        assert_eq!(pool["capacitySpec"]["poolMax"], most, "after {words:?}");
    }
    until_warm(&mut server.client(), "own", 0);
    let (_, listed, _) = coracle(&["pool", "ls"]);
    assert!(listed.contains("own") && listed.contains("config"), "{listed}");
    assert!(coracle(&["pool", "rm", "own"]).0);
    for (words, expected) in [
        (["pool", "rm", "own"], "there is no such pool"),
        (["pool", "rm", "warm"], "defined in the configuration"),
    ] {
        let (done, _, said) = coracle(&words);
        assert!(!done && said.contains(expected) && said.contains("hint:"), "{said}");
    }
}

#[test]
fn dead_warm_sandbox_is_replaced_and_none_outlive_the_server() {
    if !testkit::needs_root() {
        return;
    }
    let mut server = pooled(2);
    let boxes = server.state_directory().join("boxes");
    let ids = || -> BTreeSet<String> {
        let entries = std::fs::read_dir(&boxes).expect("records are there").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let before = ids();
    assert_eq!(before.len(), 2);
    let victim = before.first().expect("there are two");
    let agent = e2e::host::agent_pid(victim).expect("its agent runs");
    let pid = rustix::process::Pid::from_raw(i32::try_from(agent).expect("a pid")).expect("not zero");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
    e2e::eventually("it is gone and replaced", || !ids().contains(victim) && ids().len() == 2);
    until_warm(&mut server.client(), "warm", 2);
    assert!(server.terminate().success());
    assert_eq!(ids(), BTreeSet::new());
}

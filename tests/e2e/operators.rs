//! Operator features: the socket, usage, stopping, and starting without a database.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Output;

use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, Signal, Uid, kill_process};
use rustix::thread::set_thread_uid;
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

fn through_socket(server: &TestServer, words: &[&str]) -> Output {
    let socket = server.state_directory().join("operator.sock");
    let mut command = ProgramCopies::shared().command();
    command.args(["--json", "--url", &format!("unix:{}", socket.display())]).args(words);
    command.output().expect("the binary runs")
}

fn parse_output(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

#[test]
fn socket_access_makes_an_operator_who_sees_all_owners_sandboxes() {
    let server = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start();
    let key = parse_output(&through_socket(&server, &["key", "create", "tenant"]));
    let mut tenant = server.client();
    let key = key["key"].as_str().expect("it is shown once").to_owned();
    tenant.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key)]);
    let request =
        json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["sleep", "infinity"]});
    let made = tenant.post("/v1/sandboxes", &request).expect("the server answers").json();
    let id = made["id"].as_str().expect("it has an id").to_owned();

    let seen = parse_output(&through_socket(&server, &["top", "--once", "--every", "100ms"]));
    assert_eq!(seen[0]["id"].as_str(), Some(id.as_str()), "{seen}");
    assert_eq!(parse_output(&through_socket(&server, &["inspect", &id]))["owner"], "tenant");
    assert_eq!(server.client().get("/coracle/v1/sandboxes").expect("an answer").status, 401);

    let refused = through_socket(&server, &["ls"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("only the operator API"), "{why}");
    tenant.delete(&format!("/v1/sandboxes/{id}")).expect("an answer");
}

#[test]
fn other_users_cannot_open_the_socket() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let socket = server.state_directory().join("operator.sock");
    let facts = std::fs::metadata(&socket).expect("it is there");
    assert_eq!((facts.mode() & 0o777, facts.uid()), (0o600, 0));
    let reaches = |uid: u32| {
        let socket = socket.clone();
        let person = std::thread::spawn(move || {
            // Only this thread changes its user, and so loses root's powers.
            set_thread_uid(Uid::from_raw(uid)).expect("root can change its uid");
            UnixStream::connect(&socket).map(drop).map_err(|error| error.kind())
        });
        person.join().expect("it does not panic")
    };
    assert_eq!(reaches(0), Ok(()));
    assert_eq!(reaches(65533), Err(ErrorKind::PermissionDenied));
}

#[test]
fn the_socket_outlives_a_server_that_dies_and_ends_with_the_supervisor() {
    let mut server = TestServer::start();
    let socket = server.state_directory().join("operator.sock");
    parse_output(&through_socket(&server, &["usage"]));
    let part = Pid::from_raw(server.part_pid("__server").cast_signed()).expect("a pid is not 0");
    kill_process(part, Signal::KILL).expect("it is our own");
    parse_output(&through_socket(&server, &["usage"]));
    server.terminate();
    assert!(!socket.exists());
}

#[test]
fn hourly_usage_covers_short_lived_sandboxes_and_restarts() {
    let mut server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done").code, Some(0));
    sandbox.delete();
    let used = |server: &TestServer| {
        let hours = parse_output(&through_socket(server, &["usage"]));
        let sum = |name: &str| -> u64 {
            let hours = hours.as_array().expect("it is a list");
            hours.iter().filter_map(|hour| hour[name].as_u64()).sum()
        };
        (sum("created"), sum("cpuMicros"), sum("aliveMillis"))
    };
    let (created, cpu, alive) = used(&server);
    assert!(created == 1 && cpu > 10_000 && alive > 10, "{created} {cpu} {alive}");
    server.terminate();
    server.restart(&ServerBuilder::new());
    assert_eq!(used(&server), (created, cpu, alive));
}

#[test]
fn a_living_sandbox_is_sampled() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let mut samples = Value::Null;
    e2e::eventually("a sample was taken", || {
        samples = parse_output(&through_socket(&server, &["usage", &sandbox.id]));
        samples.as_array().is_some_and(|samples| !samples.is_empty())
    });
    assert!(samples[0]["usage"]["memoryLimitBytes"].is_u64(), "{samples}");
}

#[test]
fn server_set_to_remove_sandboxes_removes_them_at_stop() {
    for stop in [TestServer::terminate, TestServer::interrupt_group] {
        let mut server = ServerBuilder::new().env("CORACLE_ON_STOP", "remove").start();
        let made: Vec<String> = (0..5).map(|_| server.create_sandbox().id.clone()).collect();
        assert!(made.iter().all(|id| host::agent_pid(id).is_some()));
        assert!(stop(&mut server).success());
        assert!(made.iter().all(|id| host::agent_pid(id).is_none()), "the server left sandboxes");
    }
}

#[test]
fn orphaned_sandboxes_are_removed_and_those_of_other_servers_are_not() {
    let (mut server, other) = (TestServer::start(), TestServer::start());
    let orphans: Vec<String> = (0..3).map(|_| server.create_sandbox().id.clone()).collect();
    let mut unrelated = other.create_sandbox();
    server.kill();
    for name in ["coracle.db", "coracle.db-wal", "coracle.db-shm"] {
        std::fs::remove_file(server.state_directory().join("server").join(name)).ok();
    }
    assert!(orphans.iter().all(|id| host::agent_pid(id).is_some()), "they outlive their server");
    server.restart(&ServerBuilder::new());
    // Their parent is the host's init by now, which reaps them at its own pace.
    e2e::eventually("no orphan is left", || orphans.iter().all(|id| host::agent_pid(id).is_none()));
    assert_eq!(unrelated.run("true").code, Some(0));
}

/// A tenant with a sandbox named `web` that runs a command, a snapshot and a volume.
struct Tenant {
    client: e2e::http::HttpClient,
    key: String,
    key_id: String,
    sandbox: String,
    process: String,
}

impl Tenant {
    fn of(server: &TestServer, owner: &str) -> Self {
        let made = parse_output(&through_socket(server, &["key", "create", owner]));
        let key = made["key"].as_str().expect("it is shown once").to_owned();
        let mut client = server.client();
        client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.clone())]);
        let request = json!({
            "image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["sleep", "infinity"],
            "extensions": {"coracle.key": "web"},
        });
        let answer = client.post("/v1/sandboxes", &request).expect("the server answers").json();
        let sandbox = answer["id"].as_str().expect("it has an id").to_owned();
        let key_id = made["id"].as_str().expect("it has an id").to_owned();
        let mut tenant = Self { client, key, key_id, sandbox, process: String::new() };
        let process = tenant.coracle(server, &["exec", "-d", "web", "-c", "echo from $USER; sleep 1000"]);
        tenant.process = parse_output(&process)["process"].as_str().expect("it has an id").to_owned();
        tenant
    }

    fn coracle(&self, server: &TestServer, words: &[&str]) -> Output {
        let mut command = ProgramCopies::shared().command();
        command.args(["--json", "--url", &format!("http://{}", server.address())]).args(words);
        command.env("CORACLE_API_KEY", &self.key).output().expect("the binary runs")
    }
}

/// The operator's actions, as the events of one owner show them.
fn operator_actions(server: &TestServer, tenant: &Tenant) -> Vec<String> {
    let output = tenant.coracle(server, &["events"]);
    let text = String::from_utf8(output.stdout).expect("it is text");
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON"));
    let act = |event: Value| {
        let part = |name: &str| event[name].as_str().map(str::to_owned);
        Some(format!("{} {} {}", part("operator")?, part("kind")?, part("subject")?))
    };
    events.filter_map(act).collect()
}

#[test]
fn operator_actions_on_any_owner_are_visible_to_that_owner() {
    if !testkit::needs_root() {
        return;
    }
    let server = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start();
    let (one, other) = (Tenant::of(&server, "one"), Tenant::of(&server, "other"));
    parse_output(&one.coracle(&server, &["snapshot", "create", "web", "--name", "daily"]));
    parse_output(&one.coracle(&server, &["volume", "create", "data", "--size", "64m"]));
    let operator = |words: &[&str]| through_socket(&server, words);

    let listed = parse_output(&operator(&["ls", "--all-owners"]));
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");
    let listed = parse_output(&operator(&["ls", "--owner", "one"]));
    assert_eq!((&listed[0]["owner"], &listed[0]["name"]), (&json!("one"), &json!("web")), "{listed}");
    let why = operator(&["inspect", "--all-owners", "web"]);
    let why = String::from_utf8_lossy(&why.stderr).into_owned();
    assert!(why.contains("could mean 2 sandboxes") && why.contains("other"), "{why}");
    assert_eq!(parse_output(&operator(&["inspect", "--owner", "one", "web"]))["id"], json!(one.sandbox));
    let ps = parse_output(&operator(&["ps", "--owner", "one", "web"]));
    assert!(ps.as_array().expect("a list").iter().any(|row| row["id"] == json!(one.process)), "{ps}");
    let logs = operator(&["logs", "--owner", "one", "web", &one.process]);
    assert!(String::from_utf8_lossy(&logs.stdout).contains("from root"), "{logs:?}");
    assert_eq!(parse_output(&operator(&["snapshot", "ls", "--owner", "one"]))[0]["name"], "daily");
    assert_eq!(parse_output(&operator(&["volume", "ls", "--all-owners"]))[0]["owner"], "one");
    assert_eq!(parse_output(&operator(&["volume", "ls"])), json!([]));

    parse_output(&operator(&["volume", "rm", "--owner", "one", "data"]));
    parse_output(&operator(&["snapshot", "rm", "--owner", "one", "daily"]));
    parse_output(&operator(&["rm", "--owner", "one", "web"]));
    assert_eq!(parse_output(&operator(&["ls", "--owner", "one"])), json!([]));
    let seen = operator_actions(&server, &one);
    for act in [
        "listed sandbox *".to_owned(),
        format!("inspected sandbox {}", one.sandbox),
        format!("read logs sandbox {}", one.sandbox),
        format!("removed sandbox {}", one.sandbox),
        "removed volume data".to_owned(),
    ] {
        assert!(seen.contains(&act), "{act}: {seen:?}");
    }
    assert!(seen.iter().any(|act| act.starts_with("removed snapshot ")), "{seen:?}");
    assert_eq!(operator_actions(&server, &other), Vec::<String>::new(), "nothing was done to the other");
    // Listing twice in a row is one event.
    assert_eq!(seen.iter().filter(|act| *act == "listed sandbox *").count(), 1, "{seen:?}");
    // Owners have no such access.
    let refused = other.coracle(&server, &["ls", "--all-owners"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("only the operator"), "{refused:?}");
    parse_output(&operator(&["rm", "--all", "--all-owners"]));
}

#[test]
fn operator_cannot_enter_sandboxes_of_other_owners() {
    let server = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start();
    let mut tenant = Tenant::of(&server, "one");
    let id = tenant.sandbox.clone();
    let mut operator = server.client();
    operator.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), OPERATOR.to_owned())]);
    let execd = format!("/v1/sandboxes/{id}/proxy/44772");
    let signal = format!("/coracle/v1/sandboxes/{id}/processes/{}/signal", tenant.process);
    for (method, path) in [
        ("GET", format!("/v1/sandboxes/{id}")),
        ("DELETE", format!("/v1/sandboxes/{id}")),
        ("POST", format!("/v1/sandboxes/{id}/pause")),
        ("GET", format!("/v1/sandboxes/{id}/endpoints/44772")),
        ("GET", format!("/v1/sandboxes/{id}/endpoints/8000")),
        ("POST", format!("{execd}/command")),
        ("POST", format!("{execd}/session")),
        ("POST", format!("{execd}/pty")),
        ("GET", format!("{execd}/files/info?path=/etc/passwd")),
        ("GET", format!("{execd}/files/download?path=/etc/passwd")),
        ("GET", format!("/v1/sandboxes/{id}/proxy/8000/")),
        ("POST", signal),
    ] {
        let body = if path.ends_with("/command") { json!({"command": "true"}) } else { json!({}) };
        let answer = operator.request(method, &path, "application/json", body.to_string().as_bytes());
        let answer = answer.expect("the server answers");
        assert_eq!(answer.status, 404, "{method} {path}: {}", answer.text());
    }
    let listed = operator.get("/v1/sandboxes").expect("the server answers").json();
    assert_eq!(listed["items"], json!([]), "the OpenSandbox list has the operator's own alone");
    tenant.client.delete(&format!("/v1/sandboxes/{id}")).expect("an answer");
}

#[test]
fn revoking_the_last_key_can_remove_the_owners_sandboxes() {
    let server = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start();
    let (one, mut other) = (Tenant::of(&server, "one"), Tenant::of(&server, "other"));
    let second = parse_output(&through_socket(&server, &["key", "create", "one"]));
    let second = second["id"].as_str().expect("it has an id");
    let first = parse_output(&through_socket(&server, &["key", "rm", "--and-sandboxes", &one.key_id]));
    assert_eq!(first["removedSandboxes"], json!([]), "there is another key: {first}");
    let last = parse_output(&through_socket(&server, &["key", "rm", "--and-sandboxes", second]));
    assert_eq!(last["removedSandboxes"], json!([one.sandbox]), "{last}");
    let left = parse_output(&through_socket(&server, &["ls", "--all-owners"]));
    assert_eq!((left.as_array().map(Vec::len), &left[0]["owner"]), (Some(1), &json!("other")), "{left}");
    other.client.delete(&format!("/v1/sandboxes/{}", other.sandbox)).expect("an answer");
}

#[test]
fn metrics_per_owner_are_bounded_and_off_by_default() {
    let metrics = |server: &TestServer| {
        let mut operator = server.client();
        operator.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), OPERATOR.to_owned())]);
        operator.get("/metrics").expect("the server answers").text()
    };
    let off = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start();
    assert!(!metrics(&off).contains("coracle_owner_"));
    let start = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR);
    let server =
        start.env("CORACLE_METRICS_PER_OWNER", "true").env("CORACLE_METRICS_MAX_OWNERS", "1").start();
    let mut tenants = [Tenant::of(&server, "one"), Tenant::of(&server, "two"), Tenant::of(&server, "three")];
    let text = metrics(&server);
    for line in [
        "coracle_owner_sandboxes{owner=\"one\",phase=\"running\"} 1",
        "coracle_owner_sandboxes{owner=\"_other\",phase=\"running\"} 2",
        "coracle_owner_creates_total{owner=\"one\"} 1",
        "coracle_owner_creates_total{owner=\"_other\"} 2",
        "coracle_sandboxes{phase=\"running\"} 3",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
    }
    assert!(!text.contains("\"two\"") && !text.contains("\"three\""), "{text}");
    for tenant in &mut tenants {
        tenant.client.delete(&format!("/v1/sandboxes/{}", tenant.sandbox)).expect("an answer");
    }
    // The usage of a sandbox is counted at its end at the latest, and its memory no longer.
    let text = metrics(&server);
    let value = |name: &str| {
        let series = format!("coracle_owner_{name}{{owner=\"one\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.and_then(|value| value.parse::<f64>().ok()).unwrap_or_else(|| panic!("no {name}:\n{text}"))
    };
    assert!(value("cpu_seconds_total") > 0.0, "{text}");
    assert!(value("memory_bytes") < 1.0 && value("disk_bytes") < 1.0, "{text}");
}

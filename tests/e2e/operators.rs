//! What operators do: their socket, what was used, stopping, and starting without a memory.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Output;

use e2e::binary::Programs;
use e2e::host;
use e2e::server::{Server, Start};
use rustix::process::{Pid, Signal, Uid, kill_process};
use rustix::thread::set_thread_uid;
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

fn through_socket(server: &Server, words: &[&str]) -> Output {
    let socket = server.state_directory().join("operator.sock");
    let mut command = Programs::shared().command();
    command.args(["--json", "--url", &format!("unix:{}", socket.display())]).args(words);
    command.output().expect("the binary runs")
}

fn told(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

#[test]
fn who_may_open_the_socket_is_the_operator_and_sees_everybodys_sandboxes() {
    let server = Start::new().env("CORACLE_API_KEY", OPERATOR).start();
    let key = told(&through_socket(&server, &["key", "create", "tenant"]));
    let mut tenant = server.client();
    let key = key["key"].as_str().expect("it is shown once").to_owned();
    tenant.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key)]);
    let wish = json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["sleep", "infinity"]});
    let made = tenant.post("/v1/sandboxes", &wish).expect("the server answers").json();
    let id = made["id"].as_str().expect("it has an id").to_owned();

    let seen = told(&through_socket(&server, &["top", "--once", "--every", "100ms"]));
    assert_eq!(seen[0]["id"].as_str(), Some(id.as_str()), "{seen}");
    assert_eq!(told(&through_socket(&server, &["inspect", &id]))["owner"], "tenant");
    assert_eq!(server.client().get("/coracle/v1/sandboxes").expect("an answer").status, 401);

    let refused = through_socket(&server, &["ls"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("only what operators ask"), "{why}");
    tenant.delete(&format!("/v1/sandboxes/{id}")).expect("an answer");
}

#[test]
fn nobody_else_can_open_the_socket() {
    if !testkit::needs_root() {
        return;
    }
    let server = Server::start();
    let socket = server.state_directory().join("operator.sock");
    let facts = std::fs::metadata(&socket).expect("it is there");
    assert_eq!((facts.mode() & 0o777, facts.uid()), (0o600, 0));
    let reaches = |uid: u32| {
        let socket = socket.clone();
        let person = std::thread::spawn(move || {
            // Only this thread becomes somebody else, and with that loses root's powers.
            set_thread_uid(Uid::from_raw(uid)).expect("root may become anybody");
            UnixStream::connect(&socket).map(drop).map_err(|error| error.kind())
        });
        person.join().expect("it does not panic")
    };
    assert_eq!(reaches(0), Ok(()));
    assert_eq!(reaches(65533), Err(ErrorKind::PermissionDenied));
}

#[test]
fn the_socket_outlives_a_server_that_dies_and_ends_with_the_supervisor() {
    let mut server = Server::start();
    let socket = server.state_directory().join("operator.sock");
    told(&through_socket(&server, &["usage"]));
    let part = Pid::from_raw(server.part("__server").cast_signed()).expect("a pid is not 0");
    kill_process(part, Signal::KILL).expect("it is our own");
    told(&through_socket(&server, &["usage"]));
    server.terminate();
    assert!(!socket.exists());
}

#[test]
fn what_was_used_is_told_by_the_hour_also_of_what_ended_soon_and_after_a_restart() {
    let mut server = Server::start();
    let mut sandbox = server.create();
    assert_eq!(sandbox.run("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done").code, Some(0));
    sandbox.delete();
    let used = |server: &Server| {
        let hours = told(&through_socket(server, &["usage"]));
        let sum = |name: &str| -> u64 {
            let hours = hours.as_array().expect("it is a list");
            hours.iter().filter_map(|hour| hour[name].as_u64()).sum()
        };
        (sum("created"), sum("cpuMicros"), sum("aliveMillis"))
    };
    let (created, cpu, alive) = used(&server);
    assert!(created == 1 && cpu > 10_000 && alive > 10, "{created} {cpu} {alive}");
    server.terminate();
    server.start_again(&Start::new());
    assert_eq!(used(&server), (created, cpu, alive));
}

#[test]
fn a_living_sandbox_is_sampled() {
    let server = Server::start();
    let sandbox = server.create();
    let mut samples = Value::Null;
    e2e::eventually("a sample was taken", || {
        samples = told(&through_socket(&server, &["usage", &sandbox.id]));
        samples.as_array().is_some_and(|samples| !samples.is_empty())
    });
    assert!(samples[0]["usage"]["memoryLimitBytes"].is_u64(), "{samples}");
}

#[test]
fn a_server_that_is_to_leave_nothing_removes_its_sandboxes_when_it_stops() {
    let mut server = Start::new().env("CORACLE_ON_STOP", "remove").start();
    let made: Vec<String> = (0..5).map(|_| server.create().id.clone()).collect();
    assert!(made.iter().all(|id| host::agent_of(id).is_some()));
    assert!(server.terminate().success());
    assert!(made.iter().all(|id| host::agent_of(id).is_none()), "it left sandboxes");
}

#[test]
fn n109_sandboxes_that_nobody_remembers_are_removed_and_those_of_others_are_not() {
    let (mut server, other) = (Server::start(), Server::start());
    let orphans: Vec<String> = (0..3).map(|_| server.create().id.clone()).collect();
    let mut unrelated = other.create();
    server.kill();
    for name in ["coracle.db", "coracle.db-wal", "coracle.db-shm"] {
        std::fs::remove_file(server.state_directory().join("server").join(name)).ok();
    }
    assert!(orphans.iter().all(|id| host::agent_of(id).is_some()), "they outlive their server");
    server.start_again(&Start::new());
    // Their parent is the host's first process by now, which collects them in its own time.
    e2e::eventually("no orphan is left", || orphans.iter().all(|id| host::agent_of(id).is_none()));
    assert_eq!(unrelated.run("true").code, Some(0));
}

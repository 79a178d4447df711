//! Sandboxes by name: one for each key, with concurrent clients and crashes.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::http::{HttpClient, HttpResponse};
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::crash::leftovers::{self, HostLeftovers};
use crate::crash::parts;

fn ask(client: &mut HttpClient, key: &str) -> std::io::Result<HttpResponse> {
    let request = json!({
        "image": {"uri": "host"},
        "timeout": 3600,
        "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "metadata": if key.starts_with("key-") { json!({"key": key}) } else { json!({}) },
        "extensions": {"coracle.key": key},
    });
    client.post("/v1/sandboxes", &request)
}

fn acquire(server: &TestServer, key: &str) -> String {
    let answer = ask(&mut server.client(), key).expect("the server answers");
    assert_eq!(answer.status, 202, "{}", answer.text());
    answer.json()["id"].as_str().expect("it has an id").to_owned()
}

fn kill(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("not zero");
    // The process may have ended by itself meanwhile.
    kill_process(pid, Signal::KILL).ok();
}

#[test]
fn key_survives_a_crash_and_invalid_keys_are_refused() {
    let mut server = TestServer::start();
    let first = acquire(&server, "thread/7 ü");
    server.kill();
    server.restart(&ServerBuilder::new());
    assert_eq!(acquire(&server, "thread/7 ü"), first);
    let answer = ask(&mut server.client(), &"x".repeat(300)).expect("the server answers");
    assert_eq!((answer.status, answer.json()["code"].as_str()), (400, Some("SANDBOX::INVALID_PARAMETER")));
}

#[test]
fn the_command_line_acquires_and_releases() {
    let server = TestServer::start();
    let coracle = |arguments: &[&str]| {
        let mut command: Command = ProgramCopies::shared().command();
        let url = format!("http://{}", server.address());
        let output = command.args(["--url", &url]).args(arguments).output().expect("the binary runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let (made, id) = coracle(&["create", "--key", "mine"]);
    assert!(made && id.len() == 20, "{id}");
    assert_eq!(coracle(&["create", "--key", "mine"]), (true, id.clone()));
    assert_eq!(acquire(&server, "mine"), id);
    let (released, reported) = coracle(&["--json", "release", "mine"]);
    let reported: serde_json::Value = serde_json::from_str(&reported).expect("it is JSON");
    assert_eq!((released, reported), (true, json!({"name": "mine", "released": true})));
    assert!(!coracle(&["release", "nobody"]).0);
}

#[test]
fn a_dead_sandbox_runs_again_at_the_next_use() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let id = acquire(&server, "a");
    let dead = host::agent_pid(&id).expect("its agent runs");
    kill(dead);
    assert_eq!(acquire(&server, "a"), id);
    assert_ne!(host::agent_pid(&id).expect("it runs again"), dead);
    assert_eq!(acquire(&server, "a"), id);
}

/// Clients, keys and the results of their requests.
struct LoadTest<'a> {
    server: &'a RwLock<TestServer>,
    instance: &'a str,
    over: AtomicBool,
    asked: AtomicUsize,
    errors: Mutex<Vec<String>>,
    kills: AtomicUsize,
    crashes: AtomicUsize,
}

const CLIENTS: usize = 200;
const KEYS: usize = 50;

impl LoadTest<'_> {
    fn client(&self, number: usize) {
        let mut client = self.server.read().expect("no thread panicked").client();
        for round in 0.. {
            if self.over.load(Ordering::Relaxed) {
                return;
            }
            let key = format!("key-{}", (number * 7919 + round * 104_729) % KEYS);
            let crashes = self.crashes.load(Ordering::SeqCst);
            let answer = ask(&mut client, &key);
            if answer.is_err() {
                // The thread that restarts the server holds this lock until the server answers again.
                client = self.server.read().expect("no thread panicked").client();
            }
            let problem = match answer {
                Ok(answer) if answer.status == 202 => None,
                Ok(answer) => Some(format!("{}: {}", answer.status, answer.text())),
                // While the server is down, requests fail.
                Err(_) if self.crashes.load(Ordering::SeqCst) % 2 == 1 || crashes % 2 == 1 => None,
                Err(_) if self.crashes.load(Ordering::SeqCst) != crashes => None,
                Err(error) => Some(error.to_string()),
            };
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.errors.lock().expect("no thread panicked").extend(problem);
        }
    }

    /// Kills agents, and checks that a key never has two sandboxes.
    fn kill_agents(&self) {
        for round in 0.. {
            if self.over.load(Ordering::Relaxed) {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(100));
            let mut client = self.server.read().expect("no thread panicked").client();
            let Ok(page) = client.get("/v1/sandboxes?pageSize=200&state=Running") else { continue };
            let items = page.json()["items"].as_array().cloned().unwrap_or_default();
            let mut seen = BTreeMap::new();
            for item in &items {
                *seen.entry(item["metadata"]["key"].to_string()).or_insert(0) += 1;
            }
            assert!(seen.values().all(|count| *count == 1), "two sandboxes for one key: {seen:?}");
            let victim = items.get(round * 31 % items.len().max(1)).and_then(|item| item["id"].as_str());
            if let Some(agent) = victim.and_then(host::agent_pid) {
                self.kills.fetch_add(1, Ordering::SeqCst);
                kill(agent);
            }
        }
    }

    fn crash_server(&self, every: Duration) {
        while !self.over.load(Ordering::Relaxed) {
            let kills = self.kills.load(Ordering::SeqCst);
            std::thread::park_timeout(every);
            // A slow host must make progress between two crashes.
            while self.kills.load(Ordering::SeqCst) == kills && !self.over.load(Ordering::Relaxed) {
                std::thread::park_timeout(Duration::from_millis(50));
            }
            self.crashes.fetch_add(1, Ordering::SeqCst);
            let mut server = self.server.write().expect("no thread panicked");
            let address = server.address().to_owned();
            server.kill();
            server.restart(&start(self.instance).listen(&address));
            self.crashes.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// How long the load lasts. Both loads share the processors with other tests; `CORACLE_LOAD_SECONDS` makes
/// them last longer.
fn load_seconds() -> u64 {
    std::env::var("CORACLE_LOAD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(30)
}

fn start(instance: &str) -> ServerBuilder {
    ServerBuilder::new().env("CORACLE_INSTANCE", instance)
}

/// A server that was used and ended normally once, and its remains on the host.
fn server_used_before(instance: &str) -> (TestServer, HostLeftovers) {
    let mut server = start(instance).start();
    server.create_sandbox().delete();
    assert!(server.terminate().success(), "the server did not end cleanly");
    let before = HostLeftovers::at_rest(&server.state_directory(), instance);
    server.restart(&start(instance));
    (server, before)
}

/// Removes all sandboxes and ends the server; the host then holds the same as before them.
fn check_nothing_is_left(mut server: TestServer, instance: &str, before: &HostLeftovers) {
    server.remove_all().expect("the server removes them");
    let page = server.client().get("/v1/sandboxes").expect("the server answers");
    assert_eq!(page.json()["items"].as_array().map(Vec::len), Some(0));
    let state = server.state_directory();
    e2e::eventually("no disk of a sandbox is left in the pool", || {
        let launcher = parts::launcher_of(server.pid());
        launcher.is_some_and(|launcher| leftovers::volumes(launcher, &state).is_empty())
    });
    assert!(server.terminate().success(), "the server did not end cleanly");
    before.wait_for(&state, instance);
}

fn run_load(crashing: bool) {
    if !testkit::needs_root() {
        return;
    }
    let instance = format!("load-{}-{}", u8::from(crashing), std::process::id());
    let (server, before) = server_used_before(&instance);
    let server = RwLock::new(server);
    let load = LoadTest {
        server: &server,
        instance: &instance,
        over: AtomicBool::new(false),
        asked: AtomicUsize::new(0),
        errors: Mutex::default(),
        kills: AtomicUsize::new(0),
        crashes: AtomicUsize::new(0),
    };
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            scope.spawn({
                let load = &load;
                move || load.client(number)
            });
        }
        scope.spawn(|| load.kill_agents());
        if crashing {
            scope.spawn(|| load.crash_server(Duration::from_millis(1500)));
        }
        let end = Instant::now() + Duration::from_secs(load_seconds());
        while Instant::now() < end {
            std::thread::park_timeout(end - Instant::now());
        }
        let killed = e2e::happens(|| load.kills.load(Ordering::SeqCst) > 0);
        load.over.store(true, Ordering::Relaxed);
        assert!(killed, "no process was killed");
    });
    let (asked, kills) = (load.asked.load(Ordering::Relaxed), load.kills.load(Ordering::Relaxed));
    let errors = load.errors.into_inner().expect("no thread panicked");
    assert!(asked > CLIENTS && kills > 0, "{asked} requests, {kills} kills");
    assert!(errors.len() <= kills * CLIENTS, "{} errors, {kills} kills", errors.len());
    let per_kill = errors.len() as f64 / kills as f64;
    assert!(per_kill <= 1.0, "{per_kill} errors for each kill: {:?}", &errors[..errors.len().min(5)]);
    check_nothing_is_left(server.into_inner().expect("no thread panicked"), &instance, &before);
}

#[test]
fn two_hundred_clients_and_fifty_keys_while_sandboxes_are_killed() {
    run_load(false);
}

#[test]
fn two_hundred_clients_and_fifty_keys_while_the_server_is_killed_too() {
    run_load(true);
}

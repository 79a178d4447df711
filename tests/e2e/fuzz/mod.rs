//! Ten thousand hostile requests, made from the server's own description of its routes.
//!
//! All are made from one seed: `CORACLE_TEST_FUZZ_SEED=N` sets another seed, `CORACLE_TEST_FUZZ=N` another
//! number of requests. The server must answer every request as documented, and afterwards nothing may be
//! left.

mod document;
mod fuzz_client;
mod random_source;
mod request;
mod response_check;
mod values;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Mutex;
use std::time::Instant;

use e2e::host::HostState;
use e2e::http::HttpClient;
use e2e::server::{ServerBuilder, TestServer, resident_memory};
use serde_json::{Value, json};

use document::DocumentedOperation;
use fuzz_client::FuzzClient;
use random_source::RandomSource;

const KEY: &str = "key-of-the-hostile-requests";
const WORKERS: u64 = 8;
/// The seed is fixed, so that two runs differ only by the change under test.
const SEED: u64 = 20_261_116;
/// The growth in memory that is allowed after the run.
const MAX_MEMORY_GROWTH: u64 = 96 << 20;
/// The number of additional descriptors that is allowed after the run, for thread pools and the like.
const MAX_DESCRIPTOR_GROWTH: usize = 16;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

#[test]
fn hostile_requests_get_documented_responses_and_leave_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let seed = number("CORACLE_TEST_FUZZ_SEED").unwrap_or(SEED);
    let count = number("CORACLE_TEST_FUZZ").unwrap_or(10_000);
    let server = ServerBuilder::new()
        .env("CORACLE_API_KEY", KEY)
        .env("CORACLE_LIMITS_MAX_SANDBOXES", "10")
        .env("CORACLE_LIMITS_MAX_SNAPSHOTS", "5")
        .env("CORACLE_LIMITS_MAX_VOLUMES", "5")
        .env("CORACLE_LIMITS_DISK", "64m")
        .env("CORACLE_LIMITS_MEMORY", "64m")
        .env("CORACLE_ANSWER_TIMEOUT", "2s")
        // Some requests use such names, which only the gateway answers.
        .env("CORACLE_GATEWAY_MODE", "header")
        .start();
    let operations = document::read_operations(&mut client(&server));
    let before = HeldResources::of_server(&server);
    let look = HostState::capture(&server.state_directory());
    let began = Instant::now();
    let FuzzOutcome { troubles, statuses, addressed } = send_all_requests(&server, &operations, seed, count);
    let took = began.elapsed();
    let reported: Vec<String> =
        statuses.iter().map(|(status, count)| format!("{count} × {status}")).collect();
    let (seconds, reported) = (took.as_secs(), reported.join(", "));
    testkit::print_note(&format!(
        "{count} hostile requests with the seed {seed} took {seconds} s: {reported}"
    ));
    remove_everything(&server);
    let enough = usize::try_from(count / 50).expect("few");
    assert!(addressed > enough, "seed {seed}: only {addressed} requests to AIO sandboxes succeeded");
    assert!(troubles.is_empty(), "seed {seed}: {} troubles\n{}", troubles.len(), troubles.join("\n"));
    check_log(&server, seed);
    before.check(&server, seed);
    let words = [server.state_directory().display().to_string()];
    let mut left = Vec::new();
    let same = e2e::happens(|| {
        left = HostState::capture(&server.state_directory()).mentioning(&words).added_since(&look);
        // The image store makes its directory for drafts at first use.
        left.retain(|line| !line.ends_with("/images/draft"));
        left.is_empty()
    });
    assert!(same, "seed {seed}: leftovers on the host: {left:#?}");
}

fn client(server: &TestServer) -> HttpClient {
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), KEY.to_owned())]);
    client
}

/// What became of all requests.
#[derive(Default)]
struct FuzzOutcome {
    /// The wrong responses.
    troubles: Vec<String>,
    /// How often each status was returned; 0 counts requests without a response.
    statuses: BTreeMap<u16, usize>,
    /// How many requests to the API of an AIO sandbox succeeded, which shows that their addresses were right.
    addressed: usize,
}

/// Sends all requests from several threads.
fn send_all_requests(
    server: &TestServer,
    operations: &[DocumentedOperation],
    seed: u64,
    count: u64,
) -> FuzzOutcome {
    let seen = Mutex::new(FuzzOutcome::default());
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let seen = &seen;
            scope.spawn(move || {
                let dice = RandomSource::new(seed.wrapping_mul(WORKERS).wrapping_add(worker));
                let mut visitor = FuzzClient::new(server, operations, dice);
                for _ in 0..count / WORKERS {
                    let visited = visitor.send_one();
                    let mut seen = seen.lock().expect("no thread panics while holding the lock");
                    match visited {
                        Ok(status) => *seen.statuses.entry(status).or_default() += 1,
                        Err(trouble) if seen.troubles.len() < 20 => seen.troubles.push(trouble),
                        Err(_) => {}
                    }
                }
                seen.lock().expect("no thread panics while holding the lock").addressed += visitor.addressed;
            });
        }
    });
    seen.into_inner().expect("no thread panics while holding the lock")
}

/// Removes what the requests made: pools, sandboxes, snapshots, volumes.
fn remove_everything(server: &TestServer) {
    let mut client = client(server);
    for (list, field, name) in [
        ("/v1/pools", "items", "name"),
        ("/v1/sandboxes?pageSize=200", "items", "id"),
        ("/v1/snapshots?pageSize=200", "items", "id"),
        ("/coracle/v1/volumes", "volumes", "name"),
    ] {
        let path = list.split('?').next().unwrap_or(list);
        let mut left = Vec::new();
        let cleared = e2e::happens(|| {
            let answer = client.get(list).expect("the server answers").json();
            left = answer[field].as_array().cloned().unwrap_or_default();
            for item in &left {
                let name = item[name].as_str().unwrap_or_default();
                client.delete(&format!("{path}/{name}")).expect("the server answers");
            }
            left.is_empty()
        });
        assert!(cleared, "these cannot be removed: {left:?}");
    }
}

fn check_log(server: &TestServer, seed: u64) {
    let log = server.log();
    let worst = |line: &&str| {
        let reported = serde_json::from_str::<Value>(line).unwrap_or(json!({}));
        // An error that a client received as well is judged by its response.
        let failed = reported["level"] == "ERROR" && reported["message"] != "request failed";
        failed || line.contains("process died; starting it again") || line.contains("panicked")
    };
    let lines: Vec<&str> = log.lines().filter(worst).take(10).collect();
    assert!(lines.is_empty(), "seed {seed}: the log says\n{}", lines.join("\n"));
}

/// The resources that a server holds.
struct HeldResources {
    parts: [u32; 2],
    descriptors: [usize; 2],
    memory: u64,
}

impl HeldResources {
    fn of_server(server: &TestServer) -> Self {
        let parts = [server.part_pid("__server"), server.part_pid("__launcher")];
        Self { parts, descriptors: parts.map(descriptors), memory: resident_memory(server.pid()) }
    }

    /// Checks that the same processes still run and hold about as much as before.
    fn check(&self, server: &TestServer, seed: u64) {
        let mut now = Self::of_server(server);
        assert_eq!(now.parts, self.parts, "seed {seed}: a part died and was started again");
        let settled = e2e::happens(|| {
            now = Self::of_server(server);
            now.descriptors
                .iter()
                .zip(self.descriptors)
                .all(|(now, before)| *now <= before + MAX_DESCRIPTOR_GROWTH)
        });
        assert!(settled, "seed {seed}: {:?} descriptors, before {:?}", now.descriptors, self.descriptors);
        let grown = now.memory.saturating_sub(self.memory);
        assert!(grown < MAX_MEMORY_GROWTH, "seed {seed}: the server holds {} MiB more", grown >> 20);
    }
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count).unwrap_or_default()
}

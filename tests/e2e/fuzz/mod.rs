//! Ten thousand hostile requests, made from the server's own description of its routes.
//!
//! All are made from one seed: `CORACLE_TEST_FUZZ_SEED=N` makes others, `CORACLE_TEST_FUZZ=N` another
//! number of them. Whatever is asked, the server answers as it says it
//! would, and afterwards nothing is left of it all.

mod dice;
mod document;
mod judge;
mod request;
mod values;
mod visitor;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Mutex;
use std::time::Instant;

use e2e::host::Host;
use e2e::http::Client;
use e2e::server::{Server, Start, resident};
use serde_json::{Value, json};

use dice::Dice;
use document::Operation;
use visitor::Visitor;

const KEY: &str = "key-of-the-hostile-requests";
const WORKERS: u64 = 8;
/// Always the same, so that a change is judged by what it changes.
const SEED: u64 = 20_261_116;
/// How much more memory a server may hold after it all.
const GROWTH: u64 = 96 << 20;
/// Descriptors that a server may hold more of after it all: pools of threads and the like.
const DESCRIPTORS: usize = 16;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

#[test]
fn whatever_is_asked_is_answered_as_described_and_leaves_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let seed = number("CORACLE_TEST_FUZZ_SEED").unwrap_or(SEED);
    let count = number("CORACLE_TEST_FUZZ").unwrap_or(10_000);
    let server = Start::new()
        .env("CORACLE_API_KEY", KEY)
        .env("CORACLE_LIMITS_MAX_SANDBOXES", "10")
        .env("CORACLE_LIMITS_MAX_SNAPSHOTS", "5")
        .env("CORACLE_LIMITS_MAX_VOLUMES", "5")
        .env("CORACLE_LIMITS_DISK", "64m")
        .env("CORACLE_LIMITS_MEMORY", "64m")
        .env("CORACLE_ANSWER_TIMEOUT", "2s")
        // What some of them name so is answered by nobody else.
        .env("CORACLE_GATEWAY_MODE", "header")
        .start();
    let operations = document::read(&mut client(&server));
    let before = Held::by(&server);
    let look = Host::look(&server.state_directory());
    let began = Instant::now();
    let (troubles, statuses) = storm(&server, &operations, seed, count);
    let took = began.elapsed();
    let told: Vec<String> = statuses.iter().map(|(status, count)| format!("{count} × {status}")).collect();
    let (seconds, told) = (took.as_secs(), told.join(", "));
    testkit::tell(&format!("{count} hostile requests with the seed {seed} took {seconds} s: {told}"));
    clear(&server);
    assert!(troubles.is_empty(), "seed {seed}: {} troubles\n{}", troubles.len(), troubles.join("\n"));
    check_log(&server, seed);
    before.check(&server, seed);
    let words = [server.state_directory().display().to_string()];
    let mut left = Vec::new();
    let same = e2e::happens(|| {
        left = Host::look(&server.state_directory()).mentioning(&words).left_since(&look);
        // The store of images makes its directory for drafts when it first needs one.
        left.retain(|line| !line.ends_with("/images/draft"));
        left.is_empty()
    });
    assert!(same, "seed {seed}: it left {left:#?}");
}

fn client(server: &Server) -> Client {
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), KEY.to_owned())]);
    client
}

/// Sends everything, from several sides at once. Returns what was answered wrongly, and how often
/// there was which status; 0 are those that got none.
fn storm(
    server: &Server,
    operations: &[Operation],
    seed: u64,
    count: u64,
) -> (Vec<String>, BTreeMap<u16, usize>) {
    let seen = Mutex::new((Vec::new(), BTreeMap::new()));
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let seen = &seen;
            scope.spawn(move || {
                let dice = Dice::new(seed.wrapping_mul(WORKERS).wrapping_add(worker));
                let mut visitor = Visitor::new(server, operations, dice);
                for _ in 0..count / WORKERS {
                    let visited = visitor.visit();
                    let mut seen = seen.lock().expect("nobody panics while noting what was seen");
                    match visited {
                        Ok(status) => *seen.1.entry(status).or_default() += 1,
                        Err(trouble) if seen.0.len() < 20 => seen.0.push(trouble),
                        Err(_) => {}
                    }
                }
            });
        }
    });
    seen.into_inner().expect("nobody panics while noting what was seen")
}

/// Removes what the requests made: pools, sandboxes, snapshots, volumes.
fn clear(server: &Server) {
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

fn check_log(server: &Server, seed: u64) {
    let log = server.log();
    let worst = |line: &&str| {
        let told = serde_json::from_str::<Value>(line).unwrap_or(json!({}));
        // What a client was told as well is judged by its answer.
        let failed = told["level"] == "ERROR" && told["message"] != "a request failed";
        failed || line.contains("died and is started again") || line.contains("panicked")
    };
    let lines: Vec<&str> = log.lines().filter(worst).take(10).collect();
    assert!(lines.is_empty(), "seed {seed}: the log says\n{}", lines.join("\n"));
}

/// What a server holds.
struct Held {
    parts: [u32; 2],
    descriptors: [usize; 2],
    memory: u64,
}

impl Held {
    fn by(server: &Server) -> Self {
        let parts = [server.part("__server"), server.part("__launcher")];
        Self { parts, descriptors: parts.map(descriptors), memory: resident(server.pid()) }
    }

    /// The same processes still run, and hold about what they held before.
    fn check(&self, server: &Server, seed: u64) {
        let mut now = Self::by(server);
        assert_eq!(now.parts, self.parts, "seed {seed}: a part died and was started again");
        let settled = e2e::happens(|| {
            now = Self::by(server);
            now.descriptors.iter().zip(self.descriptors).all(|(now, before)| *now <= before + DESCRIPTORS)
        });
        assert!(settled, "seed {seed}: {:?} descriptors, before {:?}", now.descriptors, self.descriptors);
        let grown = now.memory.saturating_sub(self.memory);
        assert!(grown < GROWTH, "seed {seed}: it holds {} MiB more", grown >> 20);
    }
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count).unwrap_or_default()
}

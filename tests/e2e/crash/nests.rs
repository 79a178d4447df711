//! Isolated sessions while processes are killed: those of one session end together, those of others
//! continue, and nothing is left.

use std::time::Duration;

use e2e::host;
use e2e::http::Client;
use e2e::run::User;
use e2e::sandbox::{Ran, Sandbox};
use serde_json::{Value, json};

use super::fleet::Fleet;
use super::parts::{self, Parts, Victim};
use super::random::Random;
use super::rounds::{after_peace, check_nothing_is_left, say, seed};

const ROUNDS: usize = 40;
const LATEST_MICROS: u64 = 20_000;

fn nested(client: Client) -> Sandbox {
    let extensions = json!({"bootstrap.execd.isolation": "enable"});
    Sandbox::create(client, &json!({"resourceLimits": {}, "extensions": extensions}))
}

fn open(sandbox: &mut Sandbox) -> String {
    let request = json!({"workspace": {"path": "/w", "mode": "overlay"}, "idle_timeout_seconds": 0});
    let answer = sandbox.inside("POST", "v1/isolated/session", &request);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["session_id"].as_str().expect("an id").to_owned()
}

fn run(sandbox: &mut Sandbox, session: &str, code: &str) -> Ran {
    let answer =
        sandbox.inside("POST", &format!("v1/isolated/session/{session}/run"), &json!({"code": code}));
    assert_eq!(answer.status, 200, "{code}: {}", answer.text());
    Ran::of_events(&answer.text())
}

/// Opens, uses and closes sessions until something breaks.
fn churn(mut sandbox: Sandbox) {
    let mut work = || -> Option<()> {
        for _ in 0..3 {
            let request = json!({"workspace": {"path": "/churned", "mode": "overlay"}});
            let opened = sandbox.try_inside("POST", "v1/isolated/session", &request).ok()?;
            let session = opened.json()["session_id"].as_str()?.to_owned();
            let at = format!("v1/isolated/session/{session}");
            let code = json!({"code": "echo x > f; (sleep 600 &)"});
            sandbox.try_inside("POST", &format!("{at}/run"), &code).ok()?;
            sandbox.try_inside("DELETE", &at, &Value::Null).ok()?;
        }
        Some(())
    };
    work();
}

#[test]
fn killing_any_process_leaves_sessions_whole_or_gone() {
    if !testkit::needs_root() {
        return;
    }
    let seed = seed();
    say(&format!("crash-nests: {ROUNDS} rounds, CORACLE_CRASH_SEED={seed}"));
    let mut random = Random::new(seed);
    let instance = format!("crash-nests-{}", std::process::id());
    let mut parts = Parts::start(User::Same, "off", &instance);
    let before = after_peace(&mut parts, &instance);
    let fleet = Fleet::new(parts.server.address());
    for _ in 0..ROUNDS {
        let mut sandbox = nested(fleet.client());
        let session = open(&mut sandbox);
        assert_eq!(run(&mut sandbox, &session, "echo kept > /w/f").code, Some(0));
        let victim = random.pick(&[None, Some(Victim::Server), Some(Victim::Launcher), Some(Victim::Agent)]);
        let moment = Duration::from_micros(random.below(LATEST_MICROS));
        let churned = sandbox.another(fleet.client());
        std::thread::scope(|scope| {
            let churning = scope.spawn(move || churn(churned));
            std::thread::park_timeout(moment);
            match victim {
                Some(Victim::Agent) => parts::kill(parts.agent(&sandbox.id).expect("its process runs")),
                Some(part) => {
                    let former = parts.kill_part(part);
                    parts.wait_for_successor(part, former, None);
                }
                None => parts::kill(host::nester_of(&sandbox.id).expect("its process runs")),
            }
            churning.join().expect("it does not panic");
        });
        parts.wait_until_healthy();
        if victim == Some(Victim::Agent) {
            fleet.bury(&sandbox.id);
            continue;
        }
        assert_eq!(run(&mut sandbox, &session, "cat /w/f").stdout, "kept\n", "after {victim:?}");
        fleet.delete(&sandbox.id);
    }
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

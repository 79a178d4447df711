//! Isolated sessions while processes are killed: those of one session end together, those of others
//! continue, and nothing is left.

use std::time::Duration;

use e2e::host;
use e2e::http::HttpClient;
use e2e::run::TestUser;
use e2e::sandbox::{CommandRun, RemoteSandbox};
use serde_json::{Value, json};

use super::fleet::SandboxFleet;
use super::parts::{self, KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_normal_use, check_nothing_is_left, print_progress, seed};

const ROUNDS: usize = 40;
const MAX_KILL_DELAY_MICROS: u64 = 20_000;

fn sandbox_with_isolated_sessions(client: HttpClient) -> RemoteSandbox {
    let extensions = json!({"bootstrap.execd.isolation": "enable"});
    RemoteSandbox::create(client, &json!({"resourceLimits": {}, "extensions": extensions}))
}

fn open(sandbox: &mut RemoteSandbox) -> String {
    let request = json!({"workspace": {"path": "/w", "mode": "overlay"}, "idle_timeout_seconds": 0});
    let answer = sandbox.request_inside("POST", "v1/isolated/session", &request);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["session_id"].as_str().expect("an id").to_owned()
}

fn run(sandbox: &mut RemoteSandbox, session: &str, code: &str) -> CommandRun {
    let answer =
        sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), &json!({"code": code}));
    assert_eq!(answer.status, 200, "{code}: {}", answer.text());
    CommandRun::from_events(&answer.text())
}

/// Opens, uses and closes sessions until something breaks.
fn churn_sessions(mut sandbox: RemoteSandbox) {
    let mut work = || -> Option<()> {
        for _ in 0..3 {
            let request = json!({"workspace": {"path": "/churned", "mode": "overlay"}});
            let opened = sandbox.try_request_inside("POST", "v1/isolated/session", &request).ok()?;
            let session = opened.json()["session_id"].as_str()?.to_owned();
            let at = format!("v1/isolated/session/{session}");
            let code = json!({"code": "echo x > f; (sleep 600 &)"});
            sandbox.try_request_inside("POST", &format!("{at}/run"), &code).ok()?;
            sandbox.try_request_inside("DELETE", &at, &Value::Null).ok()?;
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
    print_progress(&format!("crash-nests: {ROUNDS} rounds, CORACLE_CRASH_SEED={seed}"));
    let mut random = RandomChoices::new(seed);
    let instance = format!("crash-nests-{}", std::process::id());
    let mut parts = ServerParts::start(TestUser::Same, "off", &instance);
    let before = after_normal_use(&mut parts, &instance);
    let fleet = SandboxFleet::new(parts.server.address());
    for _ in 0..ROUNDS {
        let mut sandbox = sandbox_with_isolated_sessions(fleet.client());
        let session = open(&mut sandbox);
        assert_eq!(run(&mut sandbox, &session, "echo kept > /w/f").code, Some(0));
        let victim = random.pick(&[
            None,
            Some(KilledProcess::Server),
            Some(KilledProcess::Launcher),
            Some(KilledProcess::Agent),
        ]);
        let moment = Duration::from_micros(random.below(MAX_KILL_DELAY_MICROS));
        let churned = sandbox.with_client(fleet.client());
        std::thread::scope(|scope| {
            let churning = scope.spawn(move || churn_sessions(churned));
            std::thread::park_timeout(moment);
            match victim {
                Some(KilledProcess::Agent) => {
                    parts::kill(parts.agent(&sandbox.id).expect("its process runs"))
                }
                Some(part) => {
                    let former = parts.kill_part(part);
                    parts.wait_for_successor(part, former, None);
                }
                None => parts::kill(host::namespace_broker_pid(&sandbox.id).expect("its process runs")),
            }
            churning.join().expect("it does not panic");
        });
        parts.wait_until_healthy();
        if victim == Some(KilledProcess::Agent) {
            fleet.delete_dead_sandbox(&sandbox.id);
            continue;
        }
        assert_eq!(run(&mut sandbox, &session, "cat /w/f").stdout, "kept\n", "after {victim:?}");
        fleet.delete(&sandbox.id);
    }
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

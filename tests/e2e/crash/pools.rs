//! Kills processes while warm sandboxes are claimed: each sandbox has one owner or none, and the count
//! stays right.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::time::Duration;

use e2e::http::HttpClient;
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use serde_json::{Value, json};

use super::leftovers;
use super::parts::{KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_normal_use, print_progress, seed};

const ROUNDS: usize = 20;
const CLIENTS: usize = 6;
const LEVEL: usize = 4;
/// The kill comes this long after the creates began, at the latest.
const MAX_KILL_DELAY_MICROS: u64 = 25_000;

#[test]
fn killing_during_claims_gives_no_sandbox_to_two_clients() {
    if !testkit::needs_root() {
        return;
    }
    let seed = seed();
    print_progress(&format!("crash-pools: {ROUNDS} rounds, CORACLE_CRASH_SEED={seed}"));
    let instance = format!("crash-pools-{}", std::process::id());
    let mut parts = ServerParts::start(TestUser::Same, "off", &instance);
    let before = after_normal_use(&mut parts, &instance);
    make_pool(&mut parts.server.client());
    let mut random = RandomChoices::new(seed);
    let mut taken = 0;
    for round in 0..ROUNDS {
        until_count_is_exact(&parts, 0);
        let victim = random.pick(&[
            KilledProcess::Server,
            KilledProcess::Server,
            KilledProcess::Supervisor,
            KilledProcess::Launcher,
        ]);
        let moment = Duration::from_micros(random.below(MAX_KILL_DELAY_MICROS));
        let answers = kill_during_creates(round, &mut parts, victim, moment);
        parts.wait_until_healthy();
        taken += check(&parts, victim, &answers);
    }
    assert!(taken > 0, "no claim was answered in any round");
    let state = parts.server.state_directory();
    let answer = parts.server.client().delete("/v1/pools/crash").expect("the server answers");
    assert_eq!(answer.status, 204, "{}", answer.text());
    leftovers::wait_for_no_volumes(parts.pid(KilledProcess::Launcher), &state);
    parts.record_processes();
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    assert_eq!(parts.survivors(), Vec::<String>::new());
    assert_eq!(leftovers::count_rows(&state), 0);
    before.wait_for(&state, &instance);
}

fn make_pool(client: &mut HttpClient) {
    let request = json!({
        "name": "crash", "template": {"spec": {"containers": [{"image": "host"}]}},
        "capacitySpec": {"bufferMax": LEVEL, "bufferMin": 0, "poolMax": 1000, "poolMin": 0},
        "refill": {"perSecond": 200, "atOnce": 4},
    });
    let answer = client.post("/v1/pools", &request).expect("the server answers");
    assert_eq!(answer.status, 201, "{}", answer.text());
}

/// The client that asked, and the id of the sandbox if there was a response.
type CreateResult = (String, Option<String>);

/// Makes all clients create at once, and kills the victim meanwhile.
fn kill_during_creates(
    round: usize,
    parts: &mut ServerParts,
    victim: KilledProcess,
    moment: Duration,
) -> Vec<CreateResult> {
    let address = parts.server.address().to_owned();
    let begin = Barrier::new(CLIENTS + 1);
    std::thread::scope(|scope| {
        let create = |client: usize| {
            let (address, begin) = (&address, &begin);
            scope.spawn(move || {
                let who = format!("r{round}c{client}");
                begin.wait();
                let id = create(&mut HttpClient::new(address), &who);
                (who, id)
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(create).collect();
        begin.wait();
        std::thread::park_timeout(moment);
        match victim {
            KilledProcess::Supervisor => {
                parts.kill_supervisor();
                parts.start_again(None);
            }
            part => {
                let former = parts.kill_part(part);
                parts.wait_for_successor(part, former, None);
            }
        }
        clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
    })
}

/// `None` if the server died before it answered.
fn create(client: &mut HttpClient, who: &str) -> Option<String> {
    let request = json!({
        "timeout": 3600, "resourceLimits": {"memory": "128Mi"}, "env": {"WHO": who},
        "metadata": {"who": who}, "extensions": {"poolRef": "crash"},
    });
    let answer = client.post("/v1/sandboxes", &request).ok().filter(|answer| answer.status == 202)?;
    answer.json()["id"].as_str().map(str::to_owned)
}

/// Checks the server against its responses, removes everything, and returns how many sandboxes had been warm.
fn check(parts: &ServerParts, victim: KilledProcess, answers: &[CreateResult]) -> usize {
    let mut client = parts.server.client();
    let listed = listed(&mut client);
    let mut seen = BTreeSet::new();
    let mut warm = 0;
    for (who, id) in answers {
        let Some(id) = id else { continue };
        assert!(seen.insert(id.as_str()), "{id} was given to two clients");
        let found = listed.iter().find(|item| item["id"] == id.as_str());
        let found = found.unwrap_or_else(|| panic!("{id} of {who} was lost after {victim:?} died"));
        assert_eq!(found["metadata"]["who"], who.as_str(), "{found}");
        warm += usize::from(found["allocation"]["poolRef"] == "crash");
        let ran = RemoteSandbox::existing(parts.server.client(), id).run("echo $WHO; ls -A /root /tmp");
        assert_eq!(ran.stdout, format!("{who}\n/root:\n\n/tmp:\n"), "{ran:?}");
    }
    // A create that was not answered may have completed nevertheless.
    for stranger in listed.iter().filter(|item| !seen.contains(item["id"].as_str().unwrap_or_default())) {
        let who = stranger["metadata"]["who"].as_str().unwrap_or_default();
        assert!(answers.iter().any(|(name, id)| name == who && id.is_none()), "{stranger}");
    }
    until_count_is_exact(parts, listed.len());
    for item in &listed {
        let id = item["id"].as_str().unwrap_or_default();
        let answer = client.delete(&format!("/v1/sandboxes/{id}")).expect("the server answers");
        assert_eq!(answer.status, 204, "{}", answer.text());
    }
    warm
}

fn listed(client: &mut HttpClient) -> Vec<Value> {
    let page = client.get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
    page["items"].as_array().cloned().unwrap_or_default()
}

/// Waits until the pool is full and there is nothing else: no row, no disk.
fn until_count_is_exact(parts: &ServerParts, sandboxes: usize) {
    let state = parts.server.state_directory();
    let mut seen = (0, 0, 0);
    let exact = e2e::happens(|| {
        let pool = parts.server.client().get("/v1/pools/crash").expect("the server answers").json();
        let warm = pool["status"]["available"].as_u64().unwrap_or_default();
        let disks = leftovers::volumes(parts.pid(KilledProcess::Launcher), &state).len();
        seen = (warm, leftovers::count_rows(&state), disks);
        let all = LEVEL + sandboxes;
        seen == (LEVEL as u64, i64::try_from(all).expect("few"), all)
    });
    assert!(exact, "{seen:?} instead of {LEVEL} warm beside {sandboxes}");
}

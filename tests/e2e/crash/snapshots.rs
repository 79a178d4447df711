//! Kills processes while snapshots are taken, restored and deleted: each snapshot has its old or its new
//! state, and no sandbox stays frozen afterwards.

use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Duration;

use e2e::http::HttpClient;
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use serde_json::{Value, json};

use super::fleet::{FleetMember, SandboxFleet};
use super::parts::{self, KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_normal_use, check_nothing_is_left, environment_number, print_progress, seed};

const ROUNDS: u64 = 48;

/// The kill comes this long after the operation began, at the latest.
const MAX_KILL_DELAY_MICROS: [u64; 3] = [3_000, 15_000, 60_000];

/// A file that every snapshot contains.
const KEPT_FILE: &str = "/root/kept";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SnapshotOperation {
    Take,
    Restore,
    Forget,
}

impl SnapshotOperation {
    const ALL: [Self; 3] = [Self::Take, Self::Restore, Self::Forget];
}

#[test]
fn killing_during_snapshot_operations_leaves_no_partial_snapshot() {
    if !testkit::needs_root() {
        return;
    }
    let (seed, count) = (seed(), environment_number("CORACLE_CRASH_ROUNDS").unwrap_or(ROUNDS));
    print_progress(&format!("snapshots: {count} rounds, CORACLE_CRASH_SEED={seed}"));
    let instance = format!("crash-snapshots-{}", std::process::id());
    let mut parts = ServerParts::start(TestUser::Same, "off", &instance);
    let before = after_normal_use(&mut parts, &instance);
    let mut fleet = SandboxFleet::new(parts.server.address());
    let mut random = RandomChoices::new(seed);
    for number in 0..count {
        let victim = KilledProcess::ALL[random.index_below(KilledProcess::ALL.len())];
        let operation = random.pick(&SnapshotOperation::ALL);
        let latest = random.pick(&MAX_KILL_DELAY_MICROS);
        let moment = Duration::from_micros(random.below(latest));
        print_progress(&format!("snapshots: round {number}: {operation:?}, {victim:?} after {moment:?}"));
        play_round(&mut parts, &mut fleet, operation, victim, moment);
    }
    let all = snapshots(&mut fleet.client());
    all.iter().for_each(|id| assert_eq!(delete_snapshot(&mut fleet.client(), id), Some(204)));
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

/// Written just before the snapshot, so that flushing it takes a while.
const WRITE_LARGE_FILE: &str = "head -c 600000000 /dev/zero > /root/large";

#[test]
fn next_launcher_thaws_a_sandbox_that_a_killed_one_froze() {
    if !testkit::needs_root() {
        return;
    }
    let instance = format!("crash-still-{}", std::process::id());
    let mut parts = ServerParts::start(TestUser::Same, "off", &instance);
    let mut fleet = SandboxFleet::new(parts.server.address());
    let mut member = source(&mut fleet);
    assert_eq!(member.sandbox.run(WRITE_LARGE_FILE).code, Some(0));
    let mut client = fleet.client();
    let reported = perform(&mut client, SnapshotOperation::Take, &member.sandbox.id, None);
    let (_, id) = reported.expect("the server answers");
    wait_for_draft(&parts, &id);
    let former = parts.kill_part(KilledProcess::Launcher);
    parts.wait_for_successor(KilledProcess::Launcher, former, None);
    member.check_works();
    assert_eq!(wait_until_stable(&mut client, &id), "Ready", "the delete is retried");
    member.check_works();
    check_whole(&fleet, &id);
    fleet.delete(&member.sandbox.id);
}

#[test]
fn sandboxes_are_created_while_a_large_disk_is_flushed() {
    if !testkit::needs_root() {
        return;
    }
    let instance = format!("crash-large-{}", std::process::id());
    let parts = ServerParts::start(TestUser::Same, "off", &instance);
    let mut fleet = SandboxFleet::new(parts.server.address());
    let mut member = source(&mut fleet);
    assert_eq!(member.sandbox.run(WRITE_LARGE_FILE).code, Some(0));
    let mut client = fleet.client();
    let reported = perform(&mut client, SnapshotOperation::Take, &member.sandbox.id, None);
    let (_, id) = reported.expect("the server answers");
    let draft = wait_for_draft(&parts, &id);
    let mut other = parts.server.create_sandbox_with(&json!({"resourceLimits": {}}));
    assert!(draft.exists(), "the snapshot was taken before a sandbox was made beside it");
    assert_eq!(other.run("true").code, Some(0));
    assert_eq!(wait_until_stable(&mut client, &id), "Ready");
    member.check_works();
}

/// Waits until the launcher has recorded that it takes this snapshot.
fn wait_for_draft(parts: &ServerParts, snapshot: &str) -> PathBuf {
    let draft = parts.server.state_directory().join("snapshots").join(format!("{snapshot}.new"));
    e2e::eventually("the snapshot is begun", || draft.exists());
    draft
}

fn play_round(
    parts: &mut ServerParts,
    fleet: &mut SandboxFleet,
    operation: SnapshotOperation,
    victim: KilledProcess,
    moment: Duration,
) {
    let mut source = source(fleet);
    let existing = (operation != SnapshotOperation::Take)
        .then(|| take_snapshot(&mut fleet.client(), &source.sandbox.id));
    let agent = parts.agent(&source.sandbox.id).expect("its process runs");
    let (address, id) = (parts.server.address().to_owned(), source.sandbox.id.clone());
    let begin = Barrier::new(2);
    let reported = std::thread::scope(|scope| {
        let operating = scope.spawn(|| {
            begin.wait();
            perform(&mut HttpClient::new(&address), operation, &id, existing.as_deref())
        });
        begin.wait();
        std::thread::park_timeout(moment);
        match victim {
            KilledProcess::Supervisor => {
                parts.kill_supervisor();
                parts.start_again(None);
            }
            part @ (KilledProcess::Server | KilledProcess::Launcher | KilledProcess::Egress) => {
                let former = parts.kill_part(part);
                parts.wait_for_successor(part, former, None);
            }
            KilledProcess::Agent => parts::kill(agent),
        }
        operating.join().expect("an operation does not panic")
    });
    parts.wait_until_healthy();
    if operation == SnapshotOperation::Restore {
        check_restored(fleet, reported, &id);
    } else {
        check_response(&snapshots(&mut fleet.client()), operation, reported, existing.as_deref());
    }
    check_all(fleet);
    if victim == KilledProcess::Agent {
        fleet.delete_dead_sandbox(&id);
    } else {
        source.check_works();
        fleet.members.push(source);
    }
}

/// A sandbox in which a command keeps running and some data is not yet on the disk.
fn source(fleet: &mut SandboxFleet) -> FleetMember {
    fleet.fill(1);
    let mut member = fleet.members.remove(0);
    let text = format!("echo kept > {KEPT_FILE}; head -c 8000000 /dev/urandom > /root/unsynced");
    assert_eq!(member.sandbox.run(&text).code, Some(0));
    member
}

/// The response to the client: a status, and the id it was about.
type SnapshotResponse = Option<(u16, String)>;

fn perform(
    client: &mut HttpClient,
    operation: SnapshotOperation,
    sandbox: &str,
    snapshot: Option<&str>,
) -> SnapshotResponse {
    let answer = match (operation, snapshot) {
        (SnapshotOperation::Take, _) => {
            client.post(&format!("/v1/sandboxes/{sandbox}/snapshots"), &json!({}))
        }
        (SnapshotOperation::Restore, Some(snapshot)) => {
            client.post("/v1/sandboxes", &json!({"snapshotId": snapshot, "resourceLimits": {}}))
        }
        (SnapshotOperation::Forget, Some(snapshot)) => client.delete(&format!("/v1/snapshots/{snapshot}")),
        (_, None) => panic!("{operation:?} of nothing"),
    };
    let answer = answer.ok()?;
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    Some((answer.status, body["id"].as_str().unwrap_or_default().to_owned()))
}

/// Accepted snapshots exist, and deleted ones do not.
fn check_response(
    all: &[String],
    operation: SnapshotOperation,
    reported: SnapshotResponse,
    snapshot: Option<&str>,
) {
    match (operation, reported, snapshot) {
        (SnapshotOperation::Take, Some((202, id)), _) => {
            assert!(all.contains(&id), "{id} was accepted and is lost")
        }
        (SnapshotOperation::Forget, Some((204, _)), Some(id)) => {
            assert!(!all.contains(&id.to_owned()), "{id} was deleted and still exists");
        }
        _ => {}
    }
}

/// Every remaining snapshot reaches a stable state, makes sandboxes if it is ready, and can be deleted.
fn check_all(fleet: &SandboxFleet) {
    let mut client = fleet.client();
    for id in snapshots(&mut client) {
        if wait_until_stable(&mut client, &id) == "Ready" {
            check_whole(fleet, &id);
        }
        assert_eq!(delete_snapshot(&mut client, &id), Some(204), "{id}");
    }
}

/// A sandbox that was answered has the files; one that was not is undone, or adopted if the server died.
fn check_restored(fleet: &SandboxFleet, reported: SnapshotResponse, source: &str) {
    if let Some((202, id)) = reported
        && fleet.wait_until_stable(&id).expect("it was answered") == "Running"
    {
        let mut restored = RemoteSandbox::existing(fleet.client(), &id);
        assert_eq!(restored.run(&format!("cat {KEPT_FILE}")).stdout, "kept\n");
    }
    e2e::eventually("a restored sandbox can be removed", || {
        let restored = fleet.unknown_sandboxes().into_iter().filter(|id| id != source);
        let deleted = restored.map(|id| fleet.client().delete(&format!("/v1/sandboxes/{id}")));
        deleted.count() == 0
    });
}

/// A snapshot that is ready makes sandboxes.
fn check_whole(fleet: &SandboxFleet, id: &str) {
    let request = json!({"image": null, "entrypoint": null, "resourceLimits": {}, "snapshotId": id});
    let mut restored = RemoteSandbox::create(fleet.client(), &request);
    assert_eq!(restored.run(&format!("cat {KEPT_FILE}")).stdout, "kept\n", "snapshot {id} is not whole");
    restored.delete();
}

/// Every snapshot that the server lists.
fn snapshots(client: &mut HttpClient) -> Vec<String> {
    let page = client.get("/v1/snapshots?pageSize=200").expect("the server answers").json();
    let items = page["items"].as_array().expect("a page has items").iter();
    items.map(|item| item["id"].as_str().expect("an id is a text").to_owned()).collect()
}

/// Takes a snapshot and waits until it is ready.
fn take_snapshot(client: &mut HttpClient, sandbox: &str) -> String {
    let (status, id) = perform(client, SnapshotOperation::Take, sandbox, None).expect("the server answers");
    assert_eq!(status, 202);
    assert_eq!(wait_until_stable(client, &id), "Ready");
    id
}

/// Waits until the snapshot is no longer being taken, and returns its state.
fn wait_until_stable(client: &mut HttpClient, id: &str) -> String {
    let mut state = String::new();
    e2e::eventually("the snapshot is taken or has failed", || {
        let answer = client.get(&format!("/v1/snapshots/{id}")).expect("the server answers");
        state = answer.json()["status"]["state"].as_str().unwrap_or_default().to_owned();
        state != "Creating"
    });
    state
}

fn delete_snapshot(client: &mut HttpClient, id: &str) -> Option<u16> {
    client.delete(&format!("/v1/snapshots/{id}")).ok().map(|answer| answer.status)
}

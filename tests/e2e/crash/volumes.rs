//! Volumes while parts are killed: none is lost, partial or left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use e2e::http::HttpClient;
use e2e::run::TestUser;
use serde_json::{Value, json};

use super::leftovers::HostLeftovers;
use super::parts::{KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_normal_use, print_progress, seed};

const ROUNDS: usize = 24;
const MAX_KILL_DELAY_MICROS: u64 = 8_000;

/// The volumes in the pool, in the mount namespace of the launcher.
fn volumes_on_disk(launcher: u32, state: &Path) -> BTreeSet<String> {
    let below = state.strip_prefix("/").expect("a state directory is absolute");
    let root = Path::new("/proc").join(launcher.to_string()).join("root").join(below);
    let pool = root.join("disk/pool/named-volumes");
    let entries = fs::read_dir(pool).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn listed(client: &mut HttpClient) -> Vec<Value> {
    let page = client.get("/coracle/v1/volumes").expect("the server answers").json();
    page["items"].as_array().expect("a page has items").clone()
}

/// Makes volumes and removes them in every way, until an operation fails.
fn churn_volumes(address: &str, round: usize) {
    let mut client = HttpClient::new(address);
    let going = |name: &str| {
        json!({
            "image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"],
            "volumes": [{"name": "v", "mountPath": "/data",
                "pvc": {"claimName": name, "storage": "16Mi", "deleteOnSandboxTermination": true}}],
        })
    };
    let mut work = || {
        let name = format!("r{round}");
        client.post("/coracle/v1/volumes", &json!({"name": name, "size": "16Mi"})).ok()?;
        let made = client.post("/v1/sandboxes", &going(&format!("g{round}"))).ok()?;
        client.delete(&format!("/coracle/v1/volumes/{name}")).ok()?;
        client.delete(&format!("/v1/sandboxes/{}", made.json()["id"].as_str()?)).ok()
    };
    work();
}

#[test]
fn killing_any_part_leaves_every_volume_whole_or_gone() {
    if !testkit::needs_root() {
        return;
    }
    let seed = seed();
    print_progress(&format!("crash-volumes: {ROUNDS} rounds, CORACLE_CRASH_SEED={seed}"));
    let mut random = RandomChoices::new(seed);
    let instance = format!("crash-volumes-{}", std::process::id());
    let mut parts = ServerParts::start(TestUser::Same, "off", &instance);
    let before = after_normal_use(&mut parts, &instance);
    let kept = json!({"name": "kept", "size": "16Mi"});
    assert_eq!(parts.server.client().post("/coracle/v1/volumes", &kept).expect("answers").status, 201);
    for round in 0..ROUNDS {
        let address = parts.server.address().to_owned();
        let victim =
            random.pick(&[KilledProcess::Supervisor, KilledProcess::Server, KilledProcess::Launcher]);
        let moment =
            Duration::from_micros(random.below(MAX_KILL_DELAY_MICROS) * if round % 2 == 0 { 1 } else { 10 });
        std::thread::scope(|scope| {
            scope.spawn(|| churn_volumes(&address, round));
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
        });
        parts.wait_until_healthy();
        check_volumes(&parts, &format!("round {round}, {victim:?} after {moment:?}"));
    }
    finish(parts, &instance, &before);
}

/// The volumes on disk are the listed ones, complete, and a volume that is removed with its sandboxes has one.
fn check_volumes(parts: &ServerParts, when: &str) {
    let (state, launcher) = (parts.server.state_directory(), parts.pid(KilledProcess::Launcher));
    let mut reported = (Vec::new(), BTreeSet::new());
    let same = e2e::happens(|| {
        let volumes = listed(&mut parts.server.client());
        let ids = |volume: &Value| volume["id"].as_str().unwrap_or_default().to_owned();
        let known: BTreeSet<String> = volumes.iter().map(ids).collect();
        let orphan =
            |volume: &Value| volume["deletedWithSandboxes"] == true && volume["sandboxes"] == json!([]);
        let settled = !volumes.iter().any(orphan);
        reported = (volumes, volumes_on_disk(launcher, &state));
        settled && known == reported.1
    });
    assert!(same, "{when}: listed {:#?}, on disk {:?}", reported.0, reported.1);
    assert!(reported.0.iter().any(|volume| volume["name"] == "kept"), "{when}: a volume was lost");
}

fn finish(mut parts: ServerParts, instance: &str, before: &HostLeftovers) {
    parts.server.remove_all().expect("the server removes its sandboxes");
    let mut client = parts.server.client();
    e2e::eventually("volumes go with their sandboxes", || {
        listed(&mut client).iter().all(|volume| volume["deletedWithSandboxes"] == false)
    });
    for volume in listed(&mut client) {
        let path = format!("/coracle/v1/volumes/{}", volume["name"].as_str().unwrap_or_default());
        assert_eq!(client.delete(&path).expect("the server answers").status, 204);
    }
    let state = parts.server.state_directory();
    assert_eq!(volumes_on_disk(parts.pid(KilledProcess::Launcher), &state), BTreeSet::new());
    parts.record_processes();
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    let database = rusqlite::Connection::open(state.join("server/coracle.db")).expect("there is a database");
    let rows: i64 = database
        .query_row("SELECT count(*) FROM volumes", [], |row| row.get(0))
        .expect("there is a table of volumes");
    assert_eq!(rows, 0);
    // An open database has files beside it.
    drop(database);
    assert_eq!(parts.survivors(), Vec::<String>::new());
    before.wait_for(&state, instance);
}

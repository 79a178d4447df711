//! The store after reopening the file, killing the writer, filling the disk, and with rows of other versions.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use domain::{
    Bytes, EndCause, Entrypoint, ExitReason, GuestUser, MilliCpus, MountAccess, MountSpec, NetworkAccess,
    Owner, Phase, ProcessId, SandboxSpec,
};

use super::*;
use crate::{Enforced, Sandbox};

/// Set for the process that writes until it is killed.
const CHILD: &str = "CORACLE_TEST_STORE";

fn record(number: u64) -> SandboxRecord {
    let letters = (0..8).map(|digit| u8::try_from(number / 26_u64.pow(digit) % 26).unwrap());
    let mut entropy = [0; 20];
    entropy.iter_mut().zip(letters).for_each(|(byte, letter)| *byte = letter);
    let mut spec = SandboxSpec::with_defaults();
    spec.env.insert("NAME".to_owned(), "value \u{1f6a2} \"quoted\"".to_owned());
    let sandbox = Sandbox {
        id: SandboxId::from_entropy(entropy),
        owner: Owner::operator(),
        origin: "test".to_owned(),
        spec,
        labels: [("a".to_owned(), String::new())].into(),
        notes: vec![0, 255],
        phase: Phase::Starting,
        phase_since: UNIX_EPOCH + Duration::from_micros(number),
        created: UNIX_EPOCH + Duration::from_micros(number),
        expires: None,
        in_force: Enforced::default(),
        idle_timeout: None,
        pool: None,
        name: None,
        files: domain::FilesState::Kept,
    };
    SandboxRecord {
        key: None,
        sandbox,
        timeout: None,
        expires_boot: None,
        idle_timeout: None,
        entrypoint: None,
        epoch: 0,
        boot_id: "boot".to_owned(),
    }
}

fn hooks() -> domain::SandboxHooks {
    let command = vec!["make".to_owned(), "ready".to_owned()];
    let hook = domain::HookCommand { command, timeout: Duration::from_secs(9) };
    let periodic = domain::PeriodicHook::new("tidy", "*/5 * * * *", hook.clone()).unwrap();
    let shutdown = domain::HookCommand { timeout: Duration::from_millis(1500), ..hook.clone() };
    let shutdown = domain::ShutdownHook::new("save", -3, shutdown).unwrap();
    domain::SandboxHooks { before: Some(hook), periodic: vec![periodic], shutdown: vec![shutdown] }
}

fn policy() -> domain::NetworkPolicy {
    let rule = |action, target: &str| domain::PolicyRule { action, target: target.parse().unwrap() };
    let (allow, deny) = (domain::PolicyAction::Allow, domain::PolicyAction::Deny);
    let rules =
        vec![rule(deny, "a.example.org"), rule(allow, "*.example.org:443"), rule(allow, "[fd00::/8]:22")];
    domain::NetworkPolicy::new(rules, deny).unwrap()
}

fn full_record() -> SandboxRecord {
    let mut record = record(1);
    record.sandbox.spec = SandboxSpec {
        image: "python:3.12".to_owned(),
        resources: domain::ResourceLimits {
            memory: Some(Bytes::from_mib(64)),
            cpus: Some(MilliCpus(500)),
            pids: Some(10),
            disk: Some(Bytes(u64::MAX >> 1)),
        },
        network: NetworkAccess::Filtered,
        policy: Some(std::sync::Arc::new(policy())),
        mounts: vec![
            MountSpec {
                sub_path: Some("a/b".to_owned()),
                ..MountSpec::from_host("/srv/data", "/data", MountAccess::ReadOnly)
            },
            MountSpec::from_volume(domain::VolumeId::from_entropy([3; 20]), "/kept", MountAccess::ReadWrite),
        ],
        entrypoint: Entrypoint::Argv(vec!["sh".to_owned(), "-c".to_owned()]),
        env_file: Some("/opt/variables".to_owned()),
        id_variable: Some("ID".to_owned()),
        hooks: hooks(),
        isolated_sessions: domain::IsolatedSessions::On,
        on_death: Some(domain::OnDeath::Replace),
        ..record.sandbox.spec
    };
    record.sandbox.spec.guest.users =
        vec![GuestUser { name: "user".to_owned(), uid: 1000, gid: 1000, home: "/home/user".to_owned() }];
    record.sandbox.in_force = Enforced {
        image: "x".to_owned(),
        stand_in: Some("s".to_owned()),
        measures: vec![
            backend::Measure::Other { name: "a".to_owned(), words: "b".to_owned() },
            backend::Measure::Network(backend::NetworkState::Off { since: None }),
        ],
        degraded: vec!["w".to_owned()],
    };
    record.sandbox.expires = Some(UNIX_EPOCH + Duration::from_micros(7));
    record.expires_boot = Some(Duration::from_micros(8));
    record.timeout = Some(Duration::from_secs(60));
    record.idle_timeout = Some(Duration::from_secs(9));
    record.sandbox.idle_timeout = record.idle_timeout;
    record.entrypoint = Some(ProcessId::from_entropy([7; 16]));
    record.epoch = 3;
    record
}

fn read_back(path: &Path) -> Vec<SandboxRecord> {
    Store::open(path).unwrap().1.records
}

#[tokio::test]
async fn records_read_back_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (store, kept) = Store::open(&path).unwrap();
    assert!(kept.records.is_empty() && kept.keys.is_empty());
    let mut record = full_record();
    store.insert_sandbox(&record).await.unwrap();
    for phase in [
        Phase::Running,
        Phase::Pausing,
        Phase::Paused,
        Phase::Resuming,
        Phase::Exited(ExitReason::Code(-1)),
        Phase::Exited(ExitReason::Signal(9)),
        Phase::Exited(ExitReason::Lost),
        Phase::Failed(EndCause::Oom),
        Phase::Failed(EndCause::HostRebooted),
        // No other phase follows it.
        Phase::Stopping,
    ] {
        record.sandbox.phase = phase;
        store.update_sandbox(&record).await.unwrap();
        assert_eq!(format!("{:?}", read_back(&path)), format!("{:?}", [&record]));
    }
    store.delete_sandbox(&record.sandbox.id).await.unwrap();
    assert!(read_back(&path).is_empty());
}

#[tokio::test]
async fn row_of_another_version_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (store, _) = Store::open(&path).unwrap();
    store.insert_sandbox(&record(1)).await.unwrap();
    let spec = r#"{"image":"host","network":"off","guest":{"default_user":"root","default_directory":"/","shell":"zsh"},"unheard":[1]}"#;
    open_connection(&path)
        .unwrap()
        .execute("UPDATE sandboxes SET spec = ?1, in_force = '{}'", [spec])
        .unwrap();
    assert_eq!(read_back(&path)[0].sandbox.spec.image, "host");
}

#[test]
fn newer_database_is_refused_and_not_changed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    drop(Store::open(&path).unwrap());
    open_connection(&path).unwrap().pragma_update(None, "user_version", 999).unwrap();
    assert!(matches!(Store::open(&path), Err(StoreError::Newer(999))));
}

#[tokio::test]
async fn full_disk_fails_only_new_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let (queue, writes) = mpsc::channel(MAX_QUEUED_WRITES);
    let mut connection = open_connection(&path).unwrap();
    migrate_schema(&mut connection).unwrap();
    // SQLite then returns the same error as when the disk is full.
    connection.pragma_update(None, "max_page_count", 12).unwrap();
    writer::spawn_writer(connection, open_connection(&path).unwrap(), writes).unwrap();
    let store = Store { queue };
    let mut count = 0;
    let error = loop {
        match store.insert_sandbox(&record(count)).await {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(error.is_full() && count > 0, "{error} after {count}");
    let mut first = record(0);
    first.sandbox.phase = Phase::Running;
    store.update_sandbox(&first).await.unwrap();
    for number in 0..count {
        store.delete_sandbox(&record(number).sandbox.id).await.unwrap();
    }
    store.insert_sandbox(&record(count)).await.unwrap();
}

#[tokio::test]
async fn confirmed_writes_survive_a_killed_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "store::tests::writes_until_it_is_killed", "--include-ignored", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let answered: Vec<String> =
        lines.filter_map(|line| line.strip_prefix("kept ").map(str::to_owned)).take(700).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    let kept: Vec<String> =
        read_back(&path).into_iter().map(|record| record.sandbox.id.as_str().to_owned()).collect();
    assert_eq!(answered.len(), 700);
    assert!(answered.iter().all(|id| kept.contains(id)));
}

#[tokio::test]
#[ignore = "this is the process that another test kills"]
async fn writes_until_it_is_killed() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let (store, _) = Store::open(Path::new(&path)).unwrap();
    for number in 0.. {
        let record = record(number);
        store.insert_sandbox(&record).await.unwrap();
        writeln!(std::io::stdout(), "kept {}", record.sandbox.id).unwrap();
    }
}

#[tokio::test]
async fn retired_sandbox_stays_so_whatever_its_driver_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("coracle.db");
    let (store, _) = Store::open(&path).unwrap();
    let mut record = record(1);
    store.insert_sandbox(&record).await.unwrap();
    store.retire_sandbox(&record.sandbox.id).await.unwrap();
    record.sandbox.phase = Phase::Running;
    record.sandbox.labels.insert("later".to_owned(), String::new());
    store.update_sandbox(&record).await.unwrap();
    store.close().await;
    let (_store, stored) = Store::open(&path).unwrap();
    assert_eq!(stored.records[0].sandbox.phase, Phase::Stopping);
    assert!(stored.records[0].sandbox.labels.contains_key("later"));
}

//! Messages and records as older servers and launchers write them: a launcher adopts the sandboxes
//! and snapshots whose records an older one wrote, and both sides of the socket use the same names.
//!
//! `recorded/*.jsonl` was written before the types got their present names, one message per line. A
//! new message or field gets a new line; lines that exist do not change.

use launcher::protocol::{LauncherOp, LauncherRequest, LauncherResponse, OpResult};
use launcher::{LauncherRecord, SnapshotDraft, SnapshotRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Checks that today's type reads each line and writes it again byte for byte, so that it has lost no
/// field and renamed none. Returns what it has read.
fn check_recorded<T: Serialize + DeserializeOwned>(recorded: &str) -> Vec<T> {
    let read = |line| {
        let value: T = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(serde_json::to_string(&value).expect("it can be written"), line);
        value
    };
    recorded.lines().map(read).collect()
}

#[test]
fn launcher_requests_have_kept_their_form() {
    let requests = check_recorded::<LauncherRequest>(include_str!("recorded/requests.jsonl"));
    assert!(
        matches!(&requests[0].op, LauncherOp::Create(plan) if plan.isolated_sessions && plan.max_processes == 64)
    );
    assert!(matches!(requests[8].op, LauncherOp::Volumes));
    assert_eq!(requests.len(), 31);
}

#[test]
fn launcher_responses_have_kept_their_form() {
    let responses = check_recorded::<LauncherResponse>(include_str!("recorded/responses.jsonl"));
    assert!(matches!(responses[0].result, Ok(OpResult::Done)));
    assert!(
        matches!(&responses[1].result, Ok(OpResult::Created(plan)) if plan.degraded == ["no disk limit"])
    );
    assert!(
        matches!(&responses[20].result, Ok(OpResult::Report { degraded, .. }) if degraded == &["no disk limit"])
    );
    assert!(matches!(&responses[21].result, Err(error) if error.message == "it failed"));
}

#[test]
fn records_of_sandboxes_have_kept_their_form() {
    let records = check_recorded::<LauncherRecord>(include_str!("recorded/sandbox-records.jsonl"));
    assert_eq!(records[0].process.as_ref().map(|process| process.pid), Some(42));
    assert!(records[0].stopped && !records[1].stopped);
}

#[test]
fn records_of_snapshots_have_kept_their_form() {
    let records = check_recorded::<SnapshotRecord>(include_str!("recorded/snapshot-records.jsonl"));
    assert_eq!((records[0].size, records[0].made_of.restored), (5, 12));
    let drafts = check_recorded::<SnapshotDraft>(include_str!("recorded/snapshot-drafts.jsonl"));
    assert!(drafts[0].paused);
}

//! Checks of files that outlive processes: `stop` and `restart`.

use domain::{Cause, Files, Spec};

use super::snapshots::{fresh_snapshot, restored};
use super::{Made, Subject, found, fresh_id};
use crate::{BackendError, Condition, SharedBackend};

/// A process that runs until its sandbox ends.
const LASTING: &str = "decade02decade02decade02decade02";

async fn offers_restarts(backend: &SharedBackend) -> bool {
    backend.probe().await.expect("the host can be probed").restart
}

pub(super) async fn stopped_sandbox_restarts_with_its_files(subject: &dyn Subject) {
    let mut backend = subject.open().await;
    if !offers_restarts(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    made.run("echo kept > /root/file; echo too > /usr/local/file; chown 7:8 /root/file").await;
    made.start(LASTING, "sleep 1000 & setsid sleep 1000 & wait").await;
    // First it dies by itself; in later rounds it is stopped while it runs.
    let mut deaths = backend.deaths();
    subject.strike(&made.id).await;
    assert_eq!(deaths.recv().await.expect("the backend runs").cause, Cause::AgentDied);
    let mut made = made;
    for round in 0..3 {
        for _ in 0..2 {
            let stopped = backend.stop(&made.id).await.expect("stopping twice succeeds");
            assert_eq!(stopped.files, Files::Kept, "round {round}");
        }
        let condition = made.found().await.map(|found| (found.condition, found.files));
        assert_eq!(condition, Some((Condition::Dead, Files::Kept)), "round {round}");
        let dialled = backend.dial(&made.id).await.err();
        assert!(matches!(dialled, Some(BackendError::Gone)), "round {round}: {dialled:?}");
        if round == 1 {
            backend = subject.open().await;
            made = made.seen_by(&backend);
            let condition = made.found().await.map(|found| (found.condition, found.files));
            assert_eq!(condition, Some((Condition::Dead, Files::Kept)), "reopened");
        }
        let in_force = backend.restart(&made.id, &Spec::plain()).await.expect("the sandbox can be restarted");
        assert_eq!(in_force, made.in_force, "round {round}");
        made.ping().await;
        let ran = made.run("cat /root/file /usr/local/file; stat -c %u:%g /root/file").await;
        assert_eq!(ran.output, "kept\ntoo\n7:8\n", "round {round}");
        let again = backend.restart(&made.id, &Spec::plain()).await;
        assert!(again.is_err(), "round {round}: a running sandbox was restarted");
        made.ping().await;
        // The id of a process from before the restart is free again.
        made.start(LASTING, "sleep 1000 & setsid sleep 1000 & wait").await;
    }
    made.destroy().await;
}

pub(super) async fn failed_restart_keeps_the_files(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !offers_restarts(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    made.run("echo kept > /root/file").await;
    backend.stop(&made.id).await.expect("the sandbox can be stopped");
    let taken = backend.create(&made.id, &Spec::plain()).await;
    assert!(taken.is_err(), "another sandbox took the id of a stopped one");
    let missing = domain::Mount::host("/conformance/nowhere", "/data", domain::Access::ReadOnly);
    let spec = Spec { mounts: vec![missing], ..Spec::plain() };
    let failed = backend.restart(&made.id, &spec).await;
    assert!(failed.is_err(), "a missing mount source: {failed:?}");
    let condition = made.found().await.map(|found| (found.condition, found.files));
    assert_eq!(condition, Some((Condition::Dead, Files::Kept)));
    backend.restart(&made.id, &Spec::plain()).await.expect("the sandbox can be restarted");
    assert_eq!(made.run("cat /root/file").await.output, "kept\n");
    made.destroy().await;
}

pub(super) async fn stopped_sandbox_can_be_destroyed_and_snapshotted(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !offers_restarts(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    made.run("echo kept > /root/file").await;
    backend.stop(&made.id).await.expect("the sandbox can be stopped");
    let usage = backend.usage(&made.id).await.expect("its disk exists");
    assert!(usage.disk.is_some(), "{usage:?}");
    let snapshot = fresh_snapshot();
    backend.snapshot(&made.id, &snapshot).await.expect("a stopped sandbox can be snapshotted");
    assert_eq!(made.found().await.map(|found| found.condition), Some(Condition::Dead));
    let copy = restored(&backend, &snapshot).await;
    assert_eq!(copy.run("cat /root/file").await.output, "kept\n");
    copy.destroy().await;
    backend.forget_snapshot(&snapshot).await.expect("a snapshot can be deleted");
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.restart(&id, &Spec::plain()).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

pub(super) async fn sandbox_without_files_is_not_restarted(subject: &dyn Subject) {
    let backend = subject.open().await;
    let id = fresh_id();
    assert_eq!(backend.stop(&id).await.expect("an unknown sandbox can be stopped").files, Files::Lost);
    let never = backend.restart(&id, &Spec::plain()).await;
    assert!(matches!(never, Err(BackendError::Gone)), "{never:?}");
    assert_eq!(found(&backend, &id).await, None, "a failed restart left something behind");
    if offers_restarts(&backend).await {
        return;
    }
    let made = Made::plain(&backend).await;
    let stopped = backend.stop(&made.id).await.expect("the sandbox can be stopped");
    assert_eq!(stopped.files, Files::Lost);
    assert_eq!(made.found().await, None, "the stopped sandbox still exists");
    let lost = backend.restart(&made.id, &Spec::plain()).await;
    assert!(matches!(lost, Err(BackendError::Gone)), "{lost:?}");
}

//! Checks of files that outlive processes: `stop` and `restart`.

use domain::{EndCause, FilesState, SandboxSpec};

use super::snapshots::{create_from_snapshot, fresh_snapshot_id};
use super::{BackendUnderTest, CheckOutcome, TestSandbox, find_sandbox, fresh_id, plan_of, snapshots};
use crate::{BackendError, FoundCondition, SharedBackend};

/// A process that runs until its sandbox ends.
const LASTING_PROCESS: &str = "decade02decade02decade02decade02";

const NO_RESTARTS: CheckOutcome = CheckOutcome::Skipped("files end with their sandbox here");

async fn supports_restart(backend: &SharedBackend) -> bool {
    backend.probe().await.expect("the host can be probed").restart
}

pub(super) async fn stopped_sandbox_restarts_with_its_files(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let mut backend = subject.open().await;
    if !supports_restart(&backend).await {
        return NO_RESTARTS;
    }
    let made = TestSandbox::create_plain(&backend).await;
    made.run_script("echo kept > /root/file; echo too > /usr/local/file; chown 7:8 /root/file").await;
    made.start_script(LASTING_PROCESS, "sleep 1000 & setsid sleep 1000 & wait").await;
    // First it dies by itself; in later rounds it is stopped while it runs.
    let mut deaths = backend.watch_deaths();
    subject.kill_sandbox(&made.id).await;
    assert_eq!(deaths.recv().await.expect("the backend runs").cause, EndCause::AgentDied);
    let mut made = made;
    for round in 0..3 {
        for _ in 0..2 {
            let stopped = backend.stop(&made.id).await.expect("stopping twice succeeds");
            assert_eq!(stopped.files, FilesState::Kept, "round {round}");
        }
        let condition = made.find_listed().await.map(|found| (found.condition, found.files));
        assert_eq!(condition, Some((FoundCondition::Dead, FilesState::Kept)), "round {round}");
        let dialled = backend.dial_agent(&made.id).await.err();
        assert!(matches!(dialled, Some(BackendError::Gone)), "round {round}: {dialled:?}");
        if round == 1 {
            backend = subject.open().await;
            made = made.through_backend(&backend);
            let condition = made.find_listed().await.map(|found| (found.condition, found.files));
            assert_eq!(condition, Some((FoundCondition::Dead, FilesState::Kept)), "reopened");
        }
        let in_force = backend
            .restart(&made.id, &plan_of(&SandboxSpec::with_defaults()))
            .await
            .expect("the sandbox can be restarted");
        assert_eq!(in_force, made.in_force, "round {round}");
        made.ping().await;
        let ran = made.run_script("cat /root/file /usr/local/file; stat -c %u:%g /root/file").await;
        assert_eq!(ran.output, "kept\ntoo\n7:8\n", "round {round}");
        let again = backend.restart(&made.id, &plan_of(&SandboxSpec::with_defaults())).await;
        assert!(again.is_err(), "round {round}: a running sandbox was restarted");
        made.ping().await;
        // The id of a process from before the restart is free again.
        made.start_script(LASTING_PROCESS, "sleep 1000 & setsid sleep 1000 & wait").await;
    }
    made.destroy().await;
    CheckOutcome::Passed
}

pub(super) async fn failed_restart_keeps_the_files(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let backend = subject.open().await;
    if !supports_restart(&backend).await {
        return NO_RESTARTS;
    }
    let made = TestSandbox::create_plain(&backend).await;
    made.run_script("echo kept > /root/file").await;
    backend.stop(&made.id).await.expect("the sandbox can be stopped");
    let taken = backend.create(&made.id, &plan_of(&SandboxSpec::with_defaults())).await;
    assert!(taken.is_err(), "another sandbox took the id of a stopped one");
    let missing =
        domain::MountSpec::from_host("/conformance/nowhere", "/data", domain::MountAccess::ReadOnly);
    let spec = SandboxSpec { mounts: vec![missing], ..SandboxSpec::with_defaults() };
    let failed = backend.restart(&made.id, &plan_of(&spec)).await;
    assert!(failed.is_err(), "a missing mount source: {failed:?}");
    let condition = made.find_listed().await.map(|found| (found.condition, found.files));
    assert_eq!(condition, Some((FoundCondition::Dead, FilesState::Kept)));
    backend
        .restart(&made.id, &plan_of(&SandboxSpec::with_defaults()))
        .await
        .expect("the sandbox can be restarted");
    assert_eq!(made.run_script("cat /root/file").await.output, "kept\n");
    made.destroy().await;
    CheckOutcome::Passed
}

pub(super) async fn stopped_sandbox_can_be_destroyed_and_snapshotted(
    subject: &dyn BackendUnderTest,
) -> CheckOutcome {
    let backend = subject.open().await;
    if !supports_restart(&backend).await {
        return NO_RESTARTS;
    }
    let made = TestSandbox::create_plain(&backend).await;
    made.run_script("echo kept > /root/file").await;
    backend.stop(&made.id).await.expect("the sandbox can be stopped");
    let usage = backend.usage(&made.id).await.expect("its disk exists");
    assert!(usage.disk.is_some(), "{usage:?}");
    let snapshot = fresh_snapshot_id();
    snapshots(&backend)
        .create_snapshot(&made.id, &snapshot)
        .await
        .expect("a stopped sandbox can be snapshotted");
    assert_eq!(made.find_listed().await.map(|found| found.condition), Some(FoundCondition::Dead));
    let copy = create_from_snapshot(&backend, &snapshot).await;
    assert_eq!(copy.run_script("cat /root/file").await.output, "kept\n");
    copy.destroy().await;
    snapshots(&backend).delete_snapshot(&snapshot).await.expect("a snapshot can be deleted");
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.restart(&id, &plan_of(&SandboxSpec::with_defaults())).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
    CheckOutcome::Passed
}

pub(super) async fn destroyed_sandbox_is_replaced_at_once(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let made = TestSandbox::create_plain(&backend).await;
    for round in 0..10 {
        made.run_script("echo old > /root/file").await;
        backend.destroy(&made.id).await.expect("a sandbox can be destroyed");
        let plan = plan_of(&SandboxSpec::with_defaults());
        let in_force = backend.create(&made.id, &plan).await;
        assert_eq!(in_force.as_ref().ok(), Some(&made.in_force), "round {round}: {in_force:?}");
        let ran = made.run_script("test -e /root/file || echo none").await;
        assert_eq!(ran.output, "none\n", "round {round}");
    }
    made.destroy().await;
}

pub(super) async fn sandbox_without_files_is_not_restarted(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let id = fresh_id();
    assert_eq!(backend.stop(&id).await.expect("an unknown sandbox can be stopped").files, FilesState::Lost);
    let never = backend.restart(&id, &plan_of(&SandboxSpec::with_defaults())).await;
    assert!(matches!(never, Err(BackendError::Gone)), "{never:?}");
    assert_eq!(find_sandbox(&backend, &id).await, None, "a failed restart left something behind");
    if !supports_restart(&backend).await {
        let made = TestSandbox::create_plain(&backend).await;
        let stopped = backend.stop(&made.id).await.expect("the sandbox can be stopped");
        assert_eq!(stopped.files, FilesState::Lost);
        assert_eq!(made.find_listed().await, None, "the stopped sandbox still exists");
        let lost = backend.restart(&made.id, &plan_of(&SandboxSpec::with_defaults())).await;
        assert!(matches!(lost, Err(BackendError::Gone)), "{lost:?}");
    }
}

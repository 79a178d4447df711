//! The checks, each named after the fact that it verifies.

use std::time::Duration;

use domain::volume::VolumeLifetime;
use domain::{
    Bytes, EndCause, MilliCpus, MountAccess, MountSpec, NetworkAccess, Owner, ResourceLimits, SandboxSpec,
    Volume, VolumeId, VolumeName,
};
use wire::process::ExitReason;

use super::edits::{
    edits_are_taken_back_after_the_backend_was_reopened, edits_in_isolated_sessions_have_their_own_history,
};
use super::filters::{filtered_sandbox_is_created_with_its_policy, network_is_filtered_later_or_rejected};
use super::restarts::{
    destroyed_sandbox_is_replaced_at_once, failed_restart_keeps_the_files,
    sandbox_without_files_is_not_restarted, stopped_sandbox_can_be_destroyed_and_snapshotted,
    stopped_sandbox_restarts_with_its_files,
};
use super::snapshots::{
    failed_snapshot_or_restore_leaves_nothing_behind, snapshot_and_sandbox_outlive_each_other,
    snapshot_saves_files_and_commands_continue,
};
use super::{
    BackendUnderTest, Check, CheckOutcome, DEFAULT_LIMITS, Feature, TestSandbox, find_sandbox, fresh_id,
    images, plan_of, reconfigure, volumes,
};
use crate::enforced::{Measure, find_network};
use crate::{BackendError, FoundCondition, LimitName, LimitPlan, MountFault};

/// A process that runs until its sandbox ends.
const LASTING_PROCESS: &str = "decade00decade00decade00decade00";

/// How long a paused sandbox is observed for output.
const PAUSE_OBSERVATION_TIME: Duration = Duration::from_millis(300);

macro_rules! checks {
    ($($feature:ident: $($name:ident),* $(,)?;)*) => {
        pub(super) const ALL: &[Check] = &[$($(Check {
            name: stringify!($name),
            feature: Feature::$feature,
            run: |subject| Box::pin(async move { CheckOutcome::from($name(subject).await) }),
        }),*),*];
    };
}

checks![
    Sandboxes:
        probe_lists_each_limit_once,
        created_sandbox_runs_commands,
        limits_in_force_are_reported,
        explicit_limit_is_enforced_or_rejected,
        exceeding_the_memory_limit_is_an_oom,
        failed_create_leaves_nothing_behind,
        duplicate_id_is_rejected_and_the_sandbox_survives,
        paused_sandbox_runs_nothing_and_its_agent_replies,
        usage_is_reported_for_existing_sandboxes,
        destroy_twice_succeeds,
        reopened_backend_adopts_its_sandboxes,
        death_of_an_adopted_sandbox_is_reported,
        stopped_sandbox_restarts_with_its_files,
        failed_restart_keeps_the_files,
        destroyed_sandbox_is_replaced_at_once,
        sandbox_without_files_is_not_restarted,
        edits_are_taken_back_after_the_backend_was_reopened,
        edits_in_isolated_sessions_have_their_own_history;
    Images:
        image_is_found_by_the_name_that_create_takes,
        missing_images_are_not_found_or_removed;
    Volumes:
        volume_outlives_its_sandboxes_or_is_rejected;
    Snapshots:
        snapshot_saves_files_and_commands_continue,
        snapshot_and_sandbox_outlive_each_other,
        failed_snapshot_or_restore_leaves_nothing_behind,
        stopped_sandbox_can_be_destroyed_and_snapshotted;
    Reconfigure:
        running_commands_see_attached_mounts,
        failed_attach_leaves_no_mount,
        limits_of_a_running_sandbox_can_change,
        unsupported_limit_changes_are_rejected,
        network_is_connected_later_or_rejected,
        network_is_filtered_later_or_rejected,
        filtered_sandbox_is_created_with_its_policy;
];

async fn probe_lists_each_limit_once(subject: &dyn BackendUnderTest) {
    let offered = subject.open().await.probe().await.expect("the host can be probed");
    for (index, limit) in offered.limits.iter().enumerate() {
        assert!(!offered.limits[..index].contains(limit), "`{}` is listed twice", limit.as_str());
    }
    let missing = LimitName::ALL.len() - offered.limits.len();
    assert!(
        offered.degraded.len() >= missing,
        "{missing} limits are not enforced and not reported: {offered:?}"
    );
}

async fn created_sandbox_runs_commands(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let mut spec = SandboxSpec::with_defaults();
    spec.env.insert("GIVEN".to_owned(), "yes".to_owned());
    let made = TestSandbox::create_from_spec(&backend, &spec).await;
    made.ping().await;
    let ran = made.run_script("echo given: $GIVEN; echo more >&2; exit 7").await;
    assert_eq!(ran.exit, ExitReason::Code(7), "{ran:?}");
    assert!(ran.output.contains("given: yes") && ran.output.contains("more"), "{ran:?}");
    assert_eq!(made.find_listed().await.map(|found| found.condition), Some(FoundCondition::Alive));
    made.destroy().await;
}

async fn limits_in_force_are_reported(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = TestSandbox::create_plain(&backend).await;
    assert_eq!(made.in_force.image, "host");
    for limit in LimitName::ALL {
        let held = offered.limits.contains(&limit);
        let reported = made.in_force.measures.iter().any(|measure| measure.name() == limit.as_str());
        assert_eq!(reported, held, "{limit:?}: {:?} of {offered:?}", made.in_force);
    }
    let missing = LimitName::ALL.len() - offered.limits.len();
    assert!(made.in_force.degraded.len() >= missing, "{:?}", made.in_force);
    made.destroy().await;
}

fn limits_of(named: &ResourceLimits) -> LimitPlan {
    LimitPlan::new(named, DEFAULT_LIMITS, false)
}

fn spec_with_limit(limit: LimitName) -> SandboxSpec {
    let mut resources = ResourceLimits::default();
    match limit {
        LimitName::Memory => resources.memory = Some(Bytes::from_mib(64)),
        LimitName::Cpus => resources.cpus = Some(MilliCpus(500)),
        LimitName::Pids => resources.pids = Some(32),
        LimitName::Disk => resources.disk = Some(Bytes::from_mib(32)),
    }
    SandboxSpec { resources, ..SandboxSpec::with_defaults() }
}

async fn explicit_limit_is_enforced_or_rejected(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    for limit in LimitName::ALL {
        if offered.limits.contains(&limit) {
            let made = TestSandbox::create_from_spec(&backend, &spec_with_limit(limit)).await;
            made.ping().await;
            made.destroy().await;
            continue;
        }
        let id = fresh_id();
        let refused = backend.create(&id, &plan_of(&spec_with_limit(limit))).await;
        let Err(BackendError::Unsupported { hint: Some(_), .. }) = &refused else {
            panic!("a limit on {limit:?} that cannot be enforced: {refused:?}")
        };
        assert_eq!(find_sandbox(&backend, &id).await, None, "a failed create left something behind");
    }
}

async fn exceeding_the_memory_limit_is_an_oom(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    if !offered.limits.contains(&LimitName::Memory) {
        return CheckOutcome::Skipped("memory is not limited here");
    }
    let made = TestSandbox::create_from_spec(&backend, &spec_with_limit(LimitName::Memory)).await;
    // `tail` buffers a last line that never ends.
    let ran = made.run_script("exec tail -n 1 /dev/zero").await;
    assert_eq!(ran.exit, ExitReason::Oom, "{ran:?}");
    let usage = backend.usage(&made.id).await.expect("the sandbox still exists");
    assert_eq!(usage.memory_limit, Some(Bytes::from_mib(64)));
    assert!(usage.oom_kills.is_some_and(|count| count > 0), "{usage:?}");
    made.ping().await;
    made.destroy().await;
    CheckOutcome::Passed
}

async fn failed_create_leaves_nothing_behind(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let id = fresh_id();
    let spec = SandboxSpec { image: "conformance/no-such-image".to_owned(), ..SandboxSpec::with_defaults() };
    let refused = backend.create(&id, &plan_of(&spec)).await;
    assert!(matches!(refused, Err(BackendError::NoImage { .. })), "a missing image: {refused:?}");
    assert_eq!(find_sandbox(&backend, &id).await, None, "a failed create left something behind");
    let offered = backend.probe().await.expect("the host can be probed");
    for (network, is_offered) in
        [(NetworkAccess::On, offered.network), (NetworkAccess::Filtered, offered.filtered)]
    {
        match backend.create(&id, &plan_of(&SandboxSpec { network, ..SandboxSpec::with_defaults() })).await {
            Ok(_) => drop(backend.destroy(&id).await.expect("a sandbox can be destroyed")),
            Err(BackendError::Unsupported { .. }) if !is_offered => {}
            Err(error) => panic!("network {network:?}, offered {is_offered}: {error:?}"),
        }
        assert_eq!(find_sandbox(&backend, &id).await, None, "network {network:?} left something behind");
    }
}

async fn duplicate_id_is_rejected_and_the_sandbox_survives(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let made = TestSandbox::create_plain(&backend).await;
    let again = backend.create(&made.id, &plan_of(&SandboxSpec::with_defaults())).await;
    assert!(again.is_err(), "two sandboxes have one id");
    made.ping().await;
    made.destroy().await;
}

async fn paused_sandbox_runs_nothing_and_its_agent_replies(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = TestSandbox::create_plain(&backend).await;
    let mut lasting = made.start_script(LASTING_PROCESS, "while :; do echo on; sleep 0.01; done").await;
    lasting.next_output().await;
    let paused = backend.pause(&made.id).await;
    assert_eq!(paused.is_ok(), offered.pause, "{paused:?}");
    if offered.pause {
        assert_eq!(made.find_listed().await.map(|found| found.condition), Some(FoundCondition::Frozen));
        let before = made.output_length(LASTING_PROCESS).await;
        tokio::time::sleep(PAUSE_OBSERVATION_TIME).await;
        assert_eq!(
            made.output_length(LASTING_PROCESS).await,
            before,
            "the command runs while the sandbox is paused"
        );
        backend.resume(&made.id).await.expect("a paused sandbox can be resumed");
        assert_eq!(made.find_listed().await.map(|found| found.condition), Some(FoundCondition::Alive));
        made.follow_process(LASTING_PROCESS, before).await.next_output().await;
    }
    // A paused sandbox can be destroyed as well.
    backend.pause(&made.id).await.err();
    made.destroy().await;
}

async fn running_commands_see_attached_mounts(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = TestSandbox::create_plain(&backend).await;
    let waits = "echo waiting; until cat /given/here/greeting 2>/dev/null; do sleep 0.01; done";
    let mut lasting = made.start_script(LASTING_PROCESS, waits).await;
    lasting.next_output().await;
    let mounts = [
        MountSpec::from_host(subject.shared_directory(), "/given/here", MountAccess::ReadOnly),
        MountSpec::from_host(subject.shared_directory(), "/given/there", MountAccess::ReadWrite),
    ];
    match reconfigure(&backend).attach_mounts(&made.id, &mounts).await {
        Ok(measures) => {
            assert!(offered.attach, "attach works but is not listed as a capability");
            assert!(measures.iter().any(|measure| measure.name() == "mount /given/here"), "{measures:?}");
            assert_eq!(lasting.next_output().await, b"hello\n", "a running command does not see the mount");
            let ran = made
                .run_script("echo no > /given/here/new; echo yes > /given/there/new; cat /given/here/new")
                .await;
            assert!(ran.output.contains("yes") && !ran.output.contains("no\n"), "{ran:?}");
        }
        Err(BackendError::Unsupported { hint: Some(_), .. }) => {
            assert!(!offered.attach, "attach is listed as a capability but fails")
        }
        Err(error) => panic!("an allowed mount: {error:?}"),
    }
    made.destroy().await;
    let gone = reconfigure(&backend).attach_mounts(&fresh_id(), &mounts).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn failed_attach_leaves_no_mount(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let backend = subject.open().await;
    if !backend.probe().await.expect("the host can be probed").attach {
        return CheckOutcome::Skipped("mounts cannot be attached here");
    }
    for wrong in ["/link/there/deep", "/file/there/deep", "/proc/there/deep"] {
        let made = TestSandbox::create_plain(&backend).await;
        let prepare = "mkdir /real && ln -s /real /link && touch /file && echo ready";
        made.start_script(LASTING_PROCESS, prepare).await.next_output().await;
        let good = MountSpec::from_host(subject.shared_directory(), "/given", MountAccess::ReadOnly);
        let mounts = [good, MountSpec::from_host(subject.shared_directory(), wrong, MountAccess::ReadOnly)];
        let refused = reconfigure(&backend).attach_mounts(&made.id, &mounts).await;
        assert!(refused.is_err(), "`{wrong}` is not a valid target: {refused:?}");
        let ran = made.run_script("ls /real /given; grep -c given /proc/self/mounts").await;
        assert!(ran.output.trim_end().ends_with('0') && !ran.output.contains("greeting"), "{wrong}: {ran:?}");
        made.destroy().await;
    }
    CheckOutcome::Passed
}

async fn volume_outlives_its_sandboxes_or_is_rejected(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed").volumes;
    let volume = Volume {
        id: VolumeId::parse(fresh_id().as_str()).expect("a sandbox id is a valid volume id"),
        owner: Owner::from_valid_name("conformance"),
        name: VolumeName::parse("data").expect("a valid volume name"),
        size: Bytes::from_mib(16),
        lifetime: VolumeLifetime::Kept,
    };
    let made = volumes(&backend).create_volume(&volume).await;
    if !offered {
        assert!(matches!(made, Err(BackendError::Unsupported { hint: Some(_), .. })), "{made:?}");
        assert_eq!(volumes(&backend).list_volumes().await.expect("volumes can be listed"), Vec::new());
        return;
    }
    made.expect("a volume can be created");
    volumes(&backend).create_volume(&volume).await.expect("an existing volume is left unchanged");
    let mounts = vec![MountSpec::from_volume(volume.id.clone(), "/data", MountAccess::ReadWrite)];
    let spec = SandboxSpec { mounts, ..SandboxSpec::with_defaults() };
    let first = TestSandbox::create_from_spec(&backend, &spec).await;
    assert_eq!(first.run_script("echo kept > /data/file").await.exit, ExitReason::Code(0));
    first.destroy().await;
    let backend = subject.open().await;
    let found = volumes(&backend).list_volumes().await.expect("volumes can be listed");
    assert_eq!(found.iter().map(|found| &found.volume).collect::<Vec<_>>(), [&volume]);
    let unknown = VolumeId::parse(fresh_id().as_str()).expect("a sandbox id is a valid volume id");
    let held =
        volumes(&backend).volume_sizes(&[unknown, volume.id.clone()]).await.expect("volumes can be measured");
    assert_eq!(held.iter().map(|(id, _)| id).collect::<Vec<_>>(), [&volume.id]);
    let second = TestSandbox::create_from_spec(&backend, &spec).await;
    assert_eq!(second.run_script("cat /data/file").await.output.trim(), "kept");
    second.destroy().await;
    volumes(&backend).remove_volume(&volume.id).await.expect("a volume can be removed");
    volumes(&backend).remove_volume(&volume.id).await.expect("a missing volume can be removed");
    assert_eq!(volumes(&backend).list_volumes().await.expect("volumes can be listed"), Vec::new());
    let missing = backend.create(&fresh_id(), &plan_of(&spec)).await;
    assert!(matches!(missing, Err(BackendError::Mount { fault: MountFault::NoVolume, .. })), "{missing:?}");
}

async fn usage_is_reported_for_existing_sandboxes(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let held = |limit| offered.limits.contains(&limit);
    let made = TestSandbox::create_plain(&backend).await;
    made.run_script("true").await;
    let usage = backend.usage(&made.id).await.expect("the sandbox exists");
    assert_eq!(usage.memory_limit.is_some(), held(LimitName::Memory), "{usage:?}");
    assert_eq!(usage.cpu_limit.is_some(), held(LimitName::Cpus), "{usage:?}");
    assert_eq!(usage.pids_limit.is_some(), held(LimitName::Pids), "{usage:?}");
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.usage(&id).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn limits_of_a_running_sandbox_can_change(subject: &dyn BackendUnderTest) -> CheckOutcome {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let held = |limit| offered.limits.contains(&limit);
    if !held(LimitName::Memory) || !held(LimitName::Pids) {
        return CheckOutcome::Skipped("memory or processes are not limited here");
    }
    let made = TestSandbox::create_plain(&backend).await;
    let less =
        ResourceLimits { memory: Some(Bytes::from_mib(64)), pids: Some(40), ..ResourceLimits::default() };
    let more = ResourceLimits {
        memory: Some(Bytes::from_mib(128)),
        cpus: Some(MilliCpus(1500)),
        ..ResourceLimits::default()
    };
    let mut in_force = made.in_force.clone();
    // Up, down, and the same limit again: a former limit must not get in the way.
    for resources in [&more, &less, &less] {
        let measures = reconfigure(&backend)
            .resize(&made.id, &limits_of(resources))
            .await
            .expect("limits can be changed");
        in_force.replace_measures(measures);
    }
    let reported = in_force.measures.iter().filter(|measure| measure.name() == "memory").collect::<Vec<_>>();
    let is_less = |measure: &Measure| matches!(measure, Measure::Limit(held) if Bytes(held.amount) == Bytes::from_mib(64));
    assert!(matches!(&reported[..], [measure] if is_less(measure)), "{reported:?}");
    let usage = backend.usage(&made.id).await.expect("the sandbox exists");
    assert_eq!(usage.memory_limit, Some(Bytes::from_mib(64)));
    let ran = made.run_script("exec tail -n 1 /dev/zero").await;
    assert_eq!(ran.exit, ExitReason::Oom, "{ran:?}");
    // A reopened backend knows the new limit too.
    let backend = subject.open().await;
    let made = made.through_backend(&backend);
    let usage = backend.usage(&made.id).await.expect("the sandbox exists");
    assert_eq!(usage.memory_limit, Some(Bytes::from_mib(64)));
    made.destroy().await;
    CheckOutcome::Passed
}

async fn unsupported_limit_changes_are_rejected(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = TestSandbox::create_plain(&backend).await;
    for limit in LimitName::ALL {
        let resized =
            reconfigure(&backend).resize(&made.id, &limits_of(&spec_with_limit(limit).resources)).await;
        match resized {
            Ok(measures) => {
                assert!(offered.limits.contains(&limit), "{limit:?} is not enforced");
                assert!(measures.iter().any(|measure| measure.name() == limit.as_str()), "{measures:?}");
            }
            Err(BackendError::Unsupported { .. }) => {}
            Err(error) => panic!("{limit:?}: {error:?}"),
        }
    }
    let id = made.id.clone();
    made.destroy().await;
    let gone = reconfigure(&backend).resize(&id, &limits_of(&ResourceLimits::default())).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn image_is_found_by_the_name_that_create_takes(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let made = TestSandbox::create_plain(&backend).await;
    let found = images(&backend).find(&SandboxSpec::with_defaults().image).await;
    let found = found.expect("images can be found").expect("the image was just used");
    assert_eq!(found.name, made.in_force.image);
    made.destroy().await;
    let missing = images(&backend).find("conformance/no-such-image").await;
    assert_eq!(missing.expect("images can be looked for"), None);
    images(&backend).host_software().await.expect("the software of the host can be read");
}

/// Succeeds if the sandbox has a default route.
const HAS_DEFAULT_ROUTE: &str = "awk '$2 == \"00000000\" { found = 1 } END { exit !found }' /proc/net/route";

async fn network_is_connected_later_or_rejected(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = TestSandbox::create_plain(&backend).await;
    let asked = reconfigure(&backend).connect_network(&made.id, NetworkAccess::On).await;
    let network_of = |measures: &crate::EnforcedMeasures| find_network(measures).cloned();
    if offered.network {
        let state = asked.ok().as_ref().and_then(network_of).expect("the network in force is returned");
        assert!(state.is_on(), "{state:?}");
        assert!(
            reconfigure(&backend).connect_network(&made.id, NetworkAccess::Auto).await.is_ok(),
            "connecting again changes nothing"
        );
        assert_eq!(
            made.run_script(HAS_DEFAULT_ROUTE).await.exit,
            ExitReason::Code(0),
            "network `on` has no default route"
        );
    } else {
        let Err(BackendError::Unsupported { hint: Some(_), .. }) = &asked else {
            panic!("a network that is not supported: {asked:?}")
        };
        let open = reconfigure(&backend)
            .connect_network(&made.id, NetworkAccess::Auto)
            .await
            .ok()
            .as_ref()
            .and_then(network_of);
        assert!(open.is_some_and(|state| !state.is_on()), "`auto` is not an error");
        assert_eq!(
            made.run_script(HAS_DEFAULT_ROUTE).await.exit,
            ExitReason::Code(1),
            "network `off` has a default route"
        );
    }
    let id = made.id.clone();
    made.destroy().await;
    let gone = reconfigure(&backend).connect_network(&id, NetworkAccess::On).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn destroy_twice_succeeds(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let made = TestSandbox::create_plain(&backend).await;
    let id = made.id.clone();
    made.start_script(LASTING_PROCESS, "sleep 1000 & setsid sleep 1000 & wait").await;
    made.destroy().await;
    backend.destroy(&id).await.expect("a missing sandbox can be destroyed");
    backend.destroy(&fresh_id()).await.expect("an unknown sandbox can be destroyed");
    let dialled = backend.dial_agent(&id).await.err();
    assert!(matches!(dialled, Some(BackendError::Gone)), "{dialled:?}");
}

async fn reopened_backend_adopts_its_sandboxes(subject: &dyn BackendUnderTest) {
    let before = subject.open().await;
    let made = TestSandbox::create_plain(&before).await;
    let mut lasting =
        made.start_script(LASTING_PROCESS, "echo first; while :; do sleep 0.1; echo on; done").await;
    lasting.next_output().await;
    drop((lasting, before));
    let backend = subject.open().await;
    let made = made.through_backend(&backend);
    assert_eq!(made.find_listed().await.map(|found| found.condition), Some(FoundCondition::Alive));
    let printed = made.follow_process(LASTING_PROCESS, 0).await.next_output().await;
    assert!(printed.starts_with(b"first"), "{:?}", String::from_utf8_lossy(&printed));
    backend.usage(&made.id).await.expect("the sandbox exists");
    made.destroy().await;
}

async fn death_of_an_adopted_sandbox_is_reported(subject: &dyn BackendUnderTest) {
    let mut backend = subject.open().await;
    for adopted in [false, true] {
        let made = TestSandbox::create_plain(&backend).await;
        if adopted {
            backend = subject.open().await;
        }
        let made = made.through_backend(&backend);
        let mut deaths = backend.watch_deaths();
        assert!(made.find_listed().await.is_some());
        subject.kill_sandbox(&made.id).await;
        let death = deaths.recv().await.expect("the backend runs");
        assert_eq!((&death.id, death.cause), (&made.id, EndCause::AgentDied), "adopted: {adopted}");
        let condition = made.find_listed().await.map(|found| found.condition);
        assert_eq!(condition, Some(FoundCondition::Dead), "adopted: {adopted}");
        made.destroy().await;
        backend = subject.open().await;
    }
}

async fn missing_images_are_not_found_or_removed(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let images = images(&backend);
    let name = "nobody/has:this";
    assert_eq!(images.find(name).await.expect("images can be searched"), None);
    assert!(images.list().await.expect("images can be listed").iter().all(|image| image.name != name));
    assert!(matches!(images.remove(name).await, Err(BackendError::NoImage { .. })));
    assert_eq!(images.collect_unused().await.expect("there is nothing to collect").layers, 0);
    assert!(!images.may_pull(name), "the registry is not allowed");
    let pulled = images.pull(crate::ImagePull { name, credentials: None, progress: &|_| {} }).await;
    assert!(matches!(pulled, Err(BackendError::Pull { .. })), "{pulled:?}");
}

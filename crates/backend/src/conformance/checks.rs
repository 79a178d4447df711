//! The checks, each named by the fact that it holds a backend to.

use std::time::Duration;

use domain::volume::Lifetime;
use domain::{
    Access, Bytes, Cause, Cpus, Mount, Network, Owner, Resources, Spec, Volume, VolumeId, VolumeName,
};
use wire::process::Exit;

use super::restarts::{
    a_restart_that_fails_keeps_the_files, a_stopped_sandbox_is_restarted_with_its_files,
    what_is_stopped_can_be_destroyed_and_snapshotted, what_lost_its_files_is_not_restarted,
};
use super::snapshots::{
    a_snapshot_keeps_the_files_of_one_moment_and_commands_go_on,
    a_snapshot_outlives_its_sandbox_and_a_sandbox_its_snapshot,
    what_cannot_be_kept_or_restored_is_refused_and_leaves_nothing,
};
use super::{Check, Made, Subject, found, fresh_id};
use crate::{BackendError, Condition, MountFault};

/// Every name in `Capabilities::limits`.
const LIMITS: [&str; 4] = ["memory", "cpus", "pids", "disk"];

/// A process that goes on until its sandbox ends.
const LASTING: &str = "decade00decade00decade00decade00";

/// How long nothing may happen in a paused sandbox to be believed.
const STILL: Duration = Duration::from_millis(300);

macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        pub(super) const ALL: &[(&str, Check)] = &[$((stringify!($name), |subject| Box::pin($name(subject)))),*];
    };
}

checks![
    the_probe_names_limits_that_exist,
    a_created_sandbox_has_an_agent_that_runs_commands,
    what_is_in_force_is_told_of_every_limit,
    a_named_limit_is_held_or_refused,
    memory_past_its_limit_is_an_oom,
    what_cannot_be_made_is_refused_and_leaves_nothing,
    an_id_that_is_taken_is_refused_and_its_sandbox_lives_on,
    a_paused_sandbox_stands_still_and_its_agent_answers,
    what_is_attached_is_seen_by_what_runs_already,
    mounts_that_cannot_all_be_attached_leave_none,
    a_volume_outlives_its_sandboxes_or_is_refused,
    usage_is_told_of_a_sandbox_that_exists,
    a_living_sandbox_gets_other_limits,
    limits_that_cannot_be_changed_are_refused,
    a_name_of_an_image_is_resolved_as_at_a_create,
    a_network_is_given_late_or_refused,
    images_that_are_not_there_are_neither_found_nor_removed,
    destroying_twice_is_no_error,
    a_backend_that_was_opened_anew_adopts_its_sandboxes,
    a_death_is_reported_also_of_an_adopted_sandbox,
    a_snapshot_keeps_the_files_of_one_moment_and_commands_go_on,
    a_snapshot_outlives_its_sandbox_and_a_sandbox_its_snapshot,
    what_cannot_be_kept_or_restored_is_refused_and_leaves_nothing,
    a_stopped_sandbox_is_restarted_with_its_files,
    a_restart_that_fails_keeps_the_files,
    what_is_stopped_can_be_destroyed_and_snapshotted,
    what_lost_its_files_is_not_restarted,
];

async fn the_probe_names_limits_that_exist(subject: &dyn Subject) {
    let offered = subject.open().await.probe().await.expect("the host can be probed");
    for limit in &offered.limits {
        assert!(LIMITS.contains(&limit.as_str()), "`{limit}` is no limit");
    }
    let missing = LIMITS.len() - offered.limits.len();
    assert!(offered.weaker.len() >= missing, "{missing} limits are not held and it is not said: {offered:?}");
}

async fn a_created_sandbox_has_an_agent_that_runs_commands(subject: &dyn Subject) {
    let backend = subject.open().await;
    let mut spec = Spec::plain();
    spec.env.insert("GIVEN".to_owned(), "yes".to_owned());
    let made = Made::of(&backend, &spec).await;
    made.ping().await;
    let ran = made.run("echo given: $GIVEN; echo more >&2; exit 7").await;
    assert_eq!(ran.exit, Exit::Code(7), "{ran:?}");
    assert!(ran.output.contains("given: yes") && ran.output.contains("more"), "{ran:?}");
    assert_eq!(made.found().await.map(|found| found.condition), Some(Condition::Alive));
    made.destroy().await;
}

async fn what_is_in_force_is_told_of_every_limit(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = Made::plain(&backend).await;
    assert_eq!(made.in_force.image, "host");
    for limit in LIMITS {
        let held = offered.limits.iter().any(|name| name == limit);
        let told = made.in_force.measures.iter().any(|(name, _)| name == limit);
        assert_eq!(told, held, "`{limit}`: {:?} of {offered:?}", made.in_force);
    }
    let missing = LIMITS.len() - offered.limits.len();
    assert!(made.in_force.weaker.len() >= missing, "{:?}", made.in_force);
    made.destroy().await;
}

fn with(limit: &str) -> Spec {
    let mut resources = Resources::default();
    match limit {
        "memory" => resources.memory = Some(Bytes::mib(64)),
        "cpus" => resources.cpus = Some(Cpus(500)),
        "pids" => resources.pids = Some(32),
        _ => resources.disk = Some(Bytes::mib(32)),
    }
    Spec { resources, ..Spec::plain() }
}

async fn a_named_limit_is_held_or_refused(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    for limit in LIMITS {
        if offered.limits.iter().any(|name| name == limit) {
            let made = Made::of(&backend, &with(limit)).await;
            made.ping().await;
            made.destroy().await;
            continue;
        }
        let id = fresh_id();
        let refused = backend.create(&id, &with(limit)).await;
        let Err(BackendError::Unsupported { hint: Some(_), .. }) = &refused else {
            panic!("a limit on {limit} that cannot be held: {refused:?}")
        };
        assert_eq!(found(&backend, &id).await, None, "a refused create left something");
    }
}

async fn memory_past_its_limit_is_an_oom(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    if !offered.limits.iter().any(|name| name == "memory") {
        return;
    }
    let made = Made::of(&backend, &with("memory")).await;
    // It keeps a last line that never ends.
    let ran = made.run("exec tail -n 1 /dev/zero").await;
    assert_eq!(ran.exit, Exit::Oom, "{ran:?}");
    let usage = backend.usage(&made.id).await.expect("it still exists");
    assert_eq!(usage.memory_limit, Some(Bytes::mib(64)));
    assert!(usage.oom_kills.is_some_and(|count| count > 0), "{usage:?}");
    made.ping().await;
    made.destroy().await;
}

async fn what_cannot_be_made_is_refused_and_leaves_nothing(subject: &dyn Subject) {
    let backend = subject.open().await;
    let id = fresh_id();
    let spec = Spec { image: "conformance/no-such-image".to_owned(), ..Spec::plain() };
    let refused = backend.create(&id, &spec).await;
    assert!(matches!(refused, Err(BackendError::NoImage { .. })), "an image that is not there: {refused:?}");
    assert_eq!(found(&backend, &id).await, None, "a refused create left something");
    for network in [Network::On, Network::Filtered] {
        match backend.create(&id, &Spec { network, ..Spec::plain() }).await {
            Ok(_) => drop(backend.destroy(&id).await.expect("a sandbox can be destroyed")),
            Err(BackendError::Unsupported { .. }) => {}
            Err(error) => panic!("network {network:?}: {error:?}"),
        }
        assert_eq!(found(&backend, &id).await, None, "network {network:?} left something");
    }
}

async fn an_id_that_is_taken_is_refused_and_its_sandbox_lives_on(subject: &dyn Subject) {
    let backend = subject.open().await;
    let made = Made::plain(&backend).await;
    let again = backend.create(&made.id, &Spec::plain()).await;
    assert!(again.is_err(), "two sandboxes have one id");
    made.ping().await;
    made.destroy().await;
}

async fn a_paused_sandbox_stands_still_and_its_agent_answers(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = Made::plain(&backend).await;
    let mut lasting = made.start(LASTING, "while :; do echo on; sleep 0.01; done").await;
    lasting.output().await;
    let paused = backend.pause(&made.id).await;
    assert_eq!(paused.is_ok(), offered.pause, "{paused:?}");
    if offered.pause {
        assert_eq!(made.found().await.map(|found| found.condition), Some(Condition::Frozen));
        let before = made.written(LASTING).await;
        tokio::time::sleep(STILL).await;
        assert_eq!(made.written(LASTING).await, before, "it goes on while it is paused");
        backend.resume(&made.id).await.expect("what was paused can be resumed");
        assert_eq!(made.found().await.map(|found| found.condition), Some(Condition::Alive));
        made.follow(LASTING, before).await.output().await;
    }
    // A paused sandbox can be destroyed as well.
    backend.pause(&made.id).await.err();
    made.destroy().await;
}

async fn what_is_attached_is_seen_by_what_runs_already(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = Made::plain(&backend).await;
    let waits = "echo waiting; until cat /given/here/greeting 2>/dev/null; do sleep 0.01; done";
    let mut lasting = made.start(LASTING, waits).await;
    lasting.output().await;
    let mounts = [
        Mount::host(subject.shared(), "/given/here", Access::ReadOnly),
        Mount::host(subject.shared(), "/given/there", Access::ReadWrite),
    ];
    match backend.attach(&made.id, &mounts).await {
        Ok(measures) => {
            assert!(offered.attach, "it attaches and does not offer to");
            assert!(measures.iter().any(|(name, _)| name == "mount /given/here"), "{measures:?}");
            assert_eq!(lasting.output().await, b"hello\n", "what ran already does not see it");
            let ran =
                made.run("echo no > /given/here/new; echo yes > /given/there/new; cat /given/here/new").await;
            assert!(ran.output.contains("yes") && !ran.output.contains("no\n"), "{ran:?}");
        }
        Err(BackendError::Unsupported { hint: Some(_), .. }) => {
            assert!(!offered.attach, "it offers to attach")
        }
        Err(error) => panic!("a mount that is allowed: {error:?}"),
    }
    made.destroy().await;
    let gone = backend.attach(&fresh_id(), &mounts).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn mounts_that_cannot_all_be_attached_leave_none(subject: &dyn Subject) {
    let backend = subject.open().await;
    if !backend.probe().await.expect("the host can be probed").attach {
        return;
    }
    for wrong in ["/link/there/deep", "/file/there/deep", "/proc/there/deep"] {
        let made = Made::plain(&backend).await;
        let prepare = "mkdir /real && ln -s /real /link && touch /file && echo ready";
        made.start(LASTING, prepare).await.output().await;
        let good = Mount::host(subject.shared(), "/given", Access::ReadOnly);
        let mounts = [good, Mount::host(subject.shared(), wrong, Access::ReadOnly)];
        let refused = backend.attach(&made.id, &mounts).await;
        assert!(refused.is_err(), "`{wrong}` leads elsewhere: {refused:?}");
        let ran = made.run("ls /real /given; grep -c given /proc/self/mounts").await;
        assert!(ran.output.trim_end().ends_with('0') && !ran.output.contains("greeting"), "{wrong}: {ran:?}");
        made.destroy().await;
    }
}

async fn a_volume_outlives_its_sandboxes_or_is_refused(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed").volumes;
    let volume = Volume {
        id: VolumeId::parse(fresh_id().as_str()).expect("both have one form"),
        owner: Owner::named("conformance"),
        name: VolumeName::parse("data").expect("it is one"),
        size: Bytes::mib(16),
        lifetime: Lifetime::Kept,
    };
    let made = backend.make_volume(&volume).await;
    if !offered {
        assert!(matches!(made, Err(BackendError::Unsupported { hint: Some(_), .. })), "{made:?}");
        assert_eq!(backend.volumes().await.expect("volumes can be listed"), Vec::new());
        return;
    }
    made.expect("a volume can be made");
    backend.make_volume(&volume).await.expect("one that is there already stays");
    let mounts = vec![Mount::volume(volume.id.clone(), "/data", Access::ReadWrite)];
    let spec = Spec { mounts, ..Spec::plain() };
    let first = Made::of(&backend, &spec).await;
    assert_eq!(first.run("echo kept > /data/file").await.exit, Exit::Code(0));
    first.destroy().await;
    let backend = subject.open().await;
    let found = backend.volumes().await.expect("volumes can be listed");
    assert_eq!(found.iter().map(|found| &found.volume).collect::<Vec<_>>(), [&volume]);
    let unknown = VolumeId::parse(fresh_id().as_str()).expect("both have one form");
    let held = backend.volumes_hold(&[unknown, volume.id.clone()]).await.expect("volumes are measured");
    assert_eq!(held.iter().map(|(id, _)| id).collect::<Vec<_>>(), [&volume.id]);
    let second = Made::of(&backend, &spec).await;
    assert_eq!(second.run("cat /data/file").await.output.trim(), "kept");
    second.destroy().await;
    backend.remove_volume(&volume.id).await.expect("a volume can be removed");
    backend.remove_volume(&volume.id).await.expect("one that is gone already can be removed");
    assert_eq!(backend.volumes().await.expect("volumes can be listed"), Vec::new());
    let missing = backend.create(&fresh_id(), &spec).await;
    assert!(matches!(missing, Err(BackendError::Mount { fault: MountFault::NoVolume, .. })), "{missing:?}");
}

async fn usage_is_told_of_a_sandbox_that_exists(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let held = |name: &str| offered.limits.iter().any(|limit| limit == name);
    let made = Made::plain(&backend).await;
    made.run("true").await;
    let usage = backend.usage(&made.id).await.expect("it exists");
    assert_eq!(usage.memory_limit.is_some(), held("memory"), "{usage:?}");
    assert_eq!(usage.cpu_limit.is_some(), held("cpus"), "{usage:?}");
    assert_eq!(usage.pids_limit.is_some(), held("pids"), "{usage:?}");
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.usage(&id).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn a_living_sandbox_gets_other_limits(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let held = |name: &str| offered.limits.iter().any(|limit| limit == name);
    if !held("memory") || !held("pids") {
        return;
    }
    let made = Made::plain(&backend).await;
    let less = Resources { memory: Some(Bytes::mib(64)), pids: Some(40), ..Resources::default() };
    let more = Resources { memory: Some(Bytes::mib(128)), cpus: Some(Cpus(1500)), ..Resources::default() };
    let mut in_force = made.in_force.clone();
    // Up and down again, and the same once more: nothing of the former limit is in the way.
    for resources in [&more, &less, &less] {
        let measures = backend.resize(&made.id, resources).await.expect("limits can be changed");
        in_force.replace(measures);
    }
    let told = in_force.measures.iter().filter(|(name, _)| name == "memory").collect::<Vec<_>>();
    assert!(matches!(&told[..], [(_, value)] if value.contains("64Mi")), "{told:?}");
    let usage = backend.usage(&made.id).await.expect("it exists");
    assert_eq!(usage.memory_limit, Some(Bytes::mib(64)));
    let ran = made.run("exec tail -n 1 /dev/zero").await;
    assert_eq!(ran.exit, Exit::Oom, "{ran:?}");
    // Who comes later knows it too.
    let backend = subject.open().await;
    let made = made.seen_by(&backend);
    let usage = backend.usage(&made.id).await.expect("it exists");
    assert_eq!(usage.memory_limit, Some(Bytes::mib(64)));
    made.destroy().await;
}

async fn limits_that_cannot_be_changed_are_refused(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = Made::plain(&backend).await;
    for limit in LIMITS {
        let resized = backend.resize(&made.id, &with(limit).resources).await;
        match resized {
            Ok(measures) => {
                assert!(offered.limits.iter().any(|name| name == limit), "{limit} is not held");
                assert!(measures.iter().any(|(name, _)| name == limit), "{measures:?}");
            }
            Err(BackendError::Unsupported { .. }) => {}
            Err(error) => panic!("{limit}: {error:?}"),
        }
    }
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.resize(&id, &Resources::default()).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn a_name_of_an_image_is_resolved_as_at_a_create(subject: &dyn Subject) {
    let backend = subject.open().await;
    let made = Made::plain(&backend).await;
    let resolved = backend.resolve(&Spec::plain().image).await.expect("it was just used");
    assert_eq!(resolved.name, made.in_force.image);
    made.destroy().await;
    let missing = backend.resolve("conformance/no-such-image").await;
    assert!(matches!(missing, Err(BackendError::NoImage { .. })), "{missing:?}");
}

/// Says whether a way leads out of the sandbox.
const WAY_OUT: &str = "awk '$2 == \"00000000\" { found = 1 } END { exit !found }' /proc/net/route";

async fn a_network_is_given_late_or_refused(subject: &dyn Subject) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed");
    let made = Made::plain(&backend).await;
    let asked = backend.connect(&made.id, Network::On).await;
    let told = |measures: &crate::Measures| measures.iter().find(|(name, _)| name == "network").cloned();
    if offered.network {
        let (_, value) = asked.ok().as_ref().and_then(told).expect("it is told what is in force");
        assert!(value.starts_with("on"), "{value}");
        assert!(backend.connect(&made.id, Network::Auto).await.is_ok(), "asking again changes nothing");
        assert_eq!(made.run(WAY_OUT).await.exit, Exit::Code(0), "network `on` has no way out");
    } else {
        let Err(BackendError::Unsupported { hint: Some(_), .. }) = &asked else {
            panic!("a network that cannot be given: {asked:?}")
        };
        let open = backend.connect(&made.id, Network::Auto).await.ok().as_ref().and_then(told);
        assert!(open.is_some_and(|(_, value)| value.starts_with("off")), "`auto` is not an error");
        assert_eq!(made.run(WAY_OUT).await.exit, Exit::Code(1), "network `off` has a way out");
    }
    let id = made.id.clone();
    made.destroy().await;
    let gone = backend.connect(&id, Network::On).await;
    assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
}

async fn destroying_twice_is_no_error(subject: &dyn Subject) {
    let backend = subject.open().await;
    let made = Made::plain(&backend).await;
    let id = made.id.clone();
    made.start(LASTING, "sleep 1000 & setsid sleep 1000 & wait").await;
    made.destroy().await;
    backend.destroy(&id).await.expect("what is gone already can be destroyed");
    backend.destroy(&fresh_id()).await.expect("what never was can be destroyed");
    let dialled = backend.dial(&id).await.err();
    assert!(matches!(dialled, Some(BackendError::Gone)), "{dialled:?}");
}

async fn a_backend_that_was_opened_anew_adopts_its_sandboxes(subject: &dyn Subject) {
    let before = subject.open().await;
    let made = Made::plain(&before).await;
    let mut lasting = made.start(LASTING, "echo first; while :; do sleep 0.1; echo on; done").await;
    lasting.output().await;
    drop((lasting, before));
    let backend = subject.open().await;
    let made = made.seen_by(&backend);
    assert_eq!(made.found().await.map(|found| found.condition), Some(Condition::Alive));
    let printed = made.follow(LASTING, 0).await.output().await;
    assert!(printed.starts_with(b"first"), "{:?}", String::from_utf8_lossy(&printed));
    backend.usage(&made.id).await.expect("it exists");
    made.destroy().await;
}

async fn a_death_is_reported_also_of_an_adopted_sandbox(subject: &dyn Subject) {
    let mut backend = subject.open().await;
    for adopted in [false, true] {
        let made = Made::plain(&backend).await;
        if adopted {
            backend = subject.open().await;
        }
        let made = made.seen_by(&backend);
        let mut deaths = backend.deaths();
        assert!(made.found().await.is_some());
        subject.strike(&made.id).await;
        let death = deaths.recv().await.expect("the backend lives");
        assert_eq!((&death.id, death.cause), (&made.id, Cause::AgentDied), "adopted: {adopted}");
        let condition = made.found().await.map(|found| found.condition);
        assert_eq!(condition, Some(Condition::Dead), "adopted: {adopted}");
        made.destroy().await;
        backend = subject.open().await;
    }
}

async fn images_that_are_not_there_are_neither_found_nor_removed(subject: &dyn Subject) {
    let backend = subject.open().await;
    let Some(images) = backend.images() else { return };
    let name = "nobody/has:this";
    assert_eq!(images.find(name).await.expect("it looks"), None);
    assert!(images.list().await.expect("it looks").iter().all(|image| image.name != name));
    assert!(matches!(images.remove(name).await, Err(BackendError::NoImage { .. })));
    assert_eq!(images.collect().await.expect("there is nothing to collect").layers, 0);
    assert!(!images.may_fetch(name), "nobody allowed it");
    let pulled = images.pull(crate::Pull { name, credentials: None, progress: &|_| {} }).await;
    assert!(matches!(pulled, Err(BackendError::Pull { .. })), "{pulled:?}");
}

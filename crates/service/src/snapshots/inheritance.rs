//! The settings that a snapshot records besides the files, how a sandbox that is made from the snapshot inherits them,
//! and what a sandbox inherits from the dead one that it replaces.
//!
//! The rule: a value that the caller sets wins; for a value that it leaves open, the value of the snapshot's or the
//! dead sandbox is used, never a default that might be weaker. From a snapshot, mounts, the entrypoint, hooks,
//! isolated sessions and the name are not inherited; from a dead sandbox they are.

use std::time::Duration;

use domain::{
    IsolatedSessions, MilliCpus, ResourceLimits, SandboxHooks, SandboxSettings, SnapshotId, SnapshotState,
};

use crate::core::Core;
use crate::sandboxes::registry::SandboxHandle;
use crate::{CreateSandboxRequest, DefaultedPart, ImageSource, SandboxUsage};

/// The settings of a running sandbox. A limit that was not set but applies as the server's default is recorded as well:
/// the default may have changed before the next fork.
pub(super) fn record_settings(handle: &SandboxHandle, in_force: &SandboxUsage) -> SandboxSettings {
    let sandbox = handle.current_state();
    let named = &sandbox.spec.resources;
    SandboxSettings {
        network: sandbox.spec.network,
        policy: sandbox.spec.policy,
        resources: ResourceLimits {
            memory: named.memory.or(in_force.memory_limit),
            cpus: named.cpus.or(in_force.cpu_limit.map(MilliCpus)),
            pids: named.pids.or(in_force.pids_limit),
            disk: None,
        },
        timeout: handle.timeout,
        idle_timeout: handle.idle_timeout,
        on_death: sandbox.spec.on_death,
        env: sandbox.spec.env,
        env_file: sandbox.spec.env_file,
        guest: sandbox.spec.guest,
        labels: sandbox.labels,
        origin: sandbox.origin,
        notes: sandbox.notes,
    }
}

/// Fills in the settings that the caller left open. A recorded time to live that is longer than the server allows now
/// is shortened to the longest allowed.
pub(super) fn inherit_settings(
    create: &mut CreateSandboxRequest,
    settings: SandboxSettings,
    longest_timeout: Option<Duration>,
) {
    create.notes = (create.merge_notes)(&create.notes, &settings);
    let spec = &mut create.spec;
    for part in &create.defaulted {
        match part {
            DefaultedPart::Image => {}
            DefaultedPart::Network => {
                (spec.network, spec.policy) = (settings.network, settings.policy.clone());
            }
            DefaultedPart::Guest => spec.guest = settings.guest.clone(),
            DefaultedPart::EnvironmentFile(variable) => {
                spec.env.remove(*variable);
                spec.env_file = settings.env_file.clone();
            }
        }
    }
    let (limits, recorded) = (&mut spec.resources, settings.resources);
    limits.memory = limits.memory.or(recorded.memory);
    limits.cpus = limits.cpus.or(recorded.cpus);
    limits.pids = limits.pids.or(recorded.pids);
    spec.on_death = spec.on_death.or(settings.on_death);
    let mut env = settings.env;
    env.append(&mut spec.env);
    spec.env = env;
    let mut labels = settings.labels;
    labels.append(&mut create.labels);
    create.labels = labels;
    let granted = |timeout: Duration| longest_timeout.map_or(timeout, |longest| timeout.min(longest));
    create.timeout = create.timeout.or(settings.timeout.map(granted));
    create.idle_timeout = create.idle_timeout.or(settings.idle_timeout);
}

impl Core {
    /// Fills in what the caller left open from the dead sandbox whose place the new one takes. Its
    /// disk is empty, but it has the same volumes and is confined in the same way.
    pub(crate) fn inherit_from_former(&self, former: &SandboxHandle, create: &mut CreateSandboxRequest) {
        // A limit that was not named is the server's default, now as then.
        let settings = record_settings(former, &SandboxUsage::default());
        inherit_settings(create, settings, self.config().max_timeout);
        let old = former.current_state().spec;
        let spec = &mut create.spec;
        spec.resources.disk = spec.resources.disk.or(old.resources.disk);
        let named = std::mem::take(&mut spec.mounts);
        let is_named = |target: &str| named.iter().any(|mount| mount.target == target);
        spec.mounts = old.mounts.into_iter().filter(|mount| !is_named(&mount.target)).collect();
        spec.mounts.extend(named);
        if spec.hooks == SandboxHooks::default() {
            spec.hooks = old.hooks;
        }
        if spec.isolated_sessions == IsolatedSessions::Off {
            spec.isolated_sessions = old.isolated_sessions;
        }
        let names_image = matches!(&create.source, ImageSource::Named { name, .. } if *name == old.image);
        let inherits_image = create.defaulted.contains(&DefaultedPart::Image)
            && !matches!(create.source, ImageSource::Pool(_));
        if inherits_image {
            // It begins as its predecessor did, unless the snapshot was deleted meanwhile.
            let is_ready = |id: &SnapshotId| {
                let snapshot = self.catalog.snapshots.find(&former.owner, id);
                snapshot.is_some_and(|snapshot| snapshot.state == SnapshotState::Ready)
            };
            create.source = match old.snapshot.filter(is_ready) {
                Some(snapshot) => ImageSource::Snapshot(snapshot),
                None => ImageSource::from_name(old.image),
            };
        }
        // The values of the dead sandbox are decided now; the snapshot that it began with must not
        // replace them with its own.
        create.defaulted.clear();
        // The entrypoint of another image need not exist in this one.
        if spec.entrypoint.is_idle() && (inherits_image || names_image) {
            spec.entrypoint = old.entrypoint;
        }
    }
}

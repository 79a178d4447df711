//! What a snapshot records of its sandbox besides the files, and how a sandbox that is made from
//! the snapshot inherits it.
//!
//! The rule: a value that the caller names wins; one that it leaves open is that of the snapshot's
//! sandbox, never a default that might be weaker. Mounts, the entrypoint, hooks, nesting and the
//! name are not inherited.

use std::time::Duration;

use domain::{Cpus, Resources, SandboxSettings};

use crate::registry::Handle;
use crate::{Create, Defaulted, Usage};

/// The settings of a running sandbox. A limit that was not named but holds, because it is the
/// server's default, is recorded as well: the default may have changed before the next fork.
pub(super) fn record_settings(handle: &Handle, in_force: &Usage) -> SandboxSettings {
    let sandbox = handle.current();
    let named = &sandbox.spec.resources;
    SandboxSettings {
        network: sandbox.spec.network,
        resources: Resources {
            memory: named.memory.or(in_force.memory_limit),
            cpus: named.cpus.or(in_force.cpu_limit.map(Cpus)),
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

/// Fills in what the caller left open. A recorded time to live that is longer than the server
/// grants by now is cut to what it grants.
pub(super) fn inherit_settings(
    create: &mut Create,
    settings: SandboxSettings,
    longest_timeout: Option<Duration>,
) {
    let spec = &mut create.spec;
    for part in &create.defaulted {
        match part {
            Defaulted::Network => spec.network = settings.network,
            Defaulted::Guest => spec.guest = settings.guest.clone(),
            Defaulted::EnvironmentFile(variable) => {
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

//! Hooks as part of a spec's column.

use std::time::Duration;

use domain::{HookCommand, HookSchedule, PeriodicHook, SandboxHooks, ShutdownHook};
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize)]
pub(super) struct HooksJson {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    before: Option<HookJson>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    periodic: Vec<PeriodicJson>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shutdown: Vec<ShutdownJson>,
}

#[derive(Serialize, Deserialize)]
struct HookJson {
    command: Vec<String>,
    /// In seconds.
    timeout: u64,
}

#[derive(Serialize, Deserialize)]
struct PeriodicJson {
    name: String,
    schedule: String,
    hook: HookJson,
}

#[derive(Serialize, Deserialize)]
struct ShutdownJson {
    name: String,
    priority: i64,
    command: Vec<String>,
    /// In milliseconds.
    timeout: u64,
}

impl HooksJson {
    pub(super) fn is_empty(&self) -> bool {
        self.before.is_none() && self.periodic.is_empty() && self.shutdown.is_empty()
    }

    pub(super) fn from_domain(hooks: &SandboxHooks) -> Self {
        let periodic = |periodic: &PeriodicHook| PeriodicJson {
            name: periodic.name.clone(),
            schedule: periodic.schedule.as_str().to_owned(),
            hook: HookJson::from_domain(&periodic.hook),
        };
        Self {
            before: hooks.before.as_ref().map(HookJson::from_domain),
            periodic: hooks.periodic.iter().map(periodic).collect(),
            shutdown: hooks.shutdown.iter().map(ShutdownJson::from_domain).collect(),
        }
    }

    /// A hook whose schedule can no longer be parsed is dropped: it can never be due.
    pub(super) fn into_domain(self) -> SandboxHooks {
        let periodic = self.periodic.into_iter().filter_map(|periodic| {
            let schedule = HookSchedule::parse(&periodic.schedule).ok()?;
            Some(PeriodicHook { name: periodic.name, schedule, hook: periodic.hook.into_domain() })
        });
        SandboxHooks {
            before: self.before.map(HookJson::into_domain),
            periodic: periodic.collect(),
            shutdown: self.shutdown.into_iter().map(ShutdownJson::into_domain).collect(),
        }
    }
}

impl ShutdownJson {
    fn from_domain(shutdown: &ShutdownHook) -> Self {
        let ShutdownHook { name, priority, hook } = shutdown;
        Self {
            name: name.clone(),
            priority: *priority,
            command: hook.command.clone(),
            timeout: u64::try_from(hook.timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn into_domain(self) -> ShutdownHook {
        let hook = HookCommand { command: self.command, timeout: Duration::from_millis(self.timeout) };
        ShutdownHook { name: self.name, priority: self.priority, hook }
    }
}

impl HookJson {
    fn from_domain(hook: &HookCommand) -> Self {
        Self { command: hook.command.clone(), timeout: hook.timeout.as_secs() }
    }

    fn into_domain(self) -> HookCommand {
        HookCommand { command: self.command, timeout: Duration::from_secs(self.timeout) }
    }
}

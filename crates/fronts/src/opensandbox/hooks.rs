//! The hooks of a create request, with the time limits of this API.

use std::time::Duration;

use domain::hook::HookError;
use domain::{HookCommand, PeriodicHook, SandboxHooks};

use super::problem::Problem;
use super::types::LifecycleBody;

/// The longest time limit of the hook before the entrypoint.
const MAX_PRE_START_TIMEOUT: Duration = Duration::from_secs(10_800);

/// The longest time limit of a periodic hook.
const MAX_PERIODIC_TIMEOUT: Duration = Duration::from_secs(300);

/// The time limit of a hook that names none.
const DEFAULT_HOOK_TIMEOUT: Duration = Duration::from_secs(60);

/// Why the hooks are refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum LifecycleError {
    #[error(transparent)]
    Hook(#[from] HookError),
    #[error("a hook timeout must be 1 to {0} seconds")]
    Timeout(u64),
}

pub(super) fn parse_hooks(given: Option<LifecycleBody>) -> Result<SandboxHooks, Problem> {
    let Some(given) = given else { return Ok(SandboxHooks::default()) };
    convert_hooks(given).map_err(|error| Problem::invalid(format!("`lifecycle`: {error}")))
}

fn convert_hooks(given: LifecycleBody) -> Result<SandboxHooks, LifecycleError> {
    let before =
        given.pre_start.map(|hook| hook_command(hook.command, hook.timeout_seconds, MAX_PRE_START_TIMEOUT));
    let periodic = given.periodic.unwrap_or_default().into_iter().map(|periodic| {
        let hook = hook_command(periodic.command, periodic.timeout_seconds, MAX_PERIODIC_TIMEOUT)?;
        Ok(PeriodicHook::new(&periodic.name, &periodic.schedule, hook)?)
    });
    let before = before.transpose()?;
    let periodic = periodic.collect::<Result<_, LifecycleError>>()?;
    let hooks = SandboxHooks { before, periodic, ..SandboxHooks::default() };
    hooks.check()?;
    Ok(hooks)
}

fn hook_command(
    command: Vec<String>,
    timeout: Option<i64>,
    longest: Duration,
) -> Result<HookCommand, LifecycleError> {
    let hook = HookCommand::new(command, DEFAULT_HOOK_TIMEOUT)?;
    let timeout = match timeout.map(u64::try_from) {
        None => DEFAULT_HOOK_TIMEOUT,
        Some(Ok(seconds)) if (1..=longest.as_secs()).contains(&seconds) => Duration::from_secs(seconds),
        Some(_) => return Err(LifecycleError::Timeout(longest.as_secs())),
    };
    Ok(HookCommand { timeout, ..hook })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(lifecycle: Value) -> Result<SandboxHooks, LifecycleError> {
        convert_hooks(serde_json::from_value(lifecycle).expect("a lifecycle"))
    }

    fn periodic(timeout: Value) -> Value {
        json!({"periodic": [{"name": "n", "schedule": "@hourly", "command": ["true"], "timeoutSeconds": timeout}]})
    }

    #[test]
    fn timeouts_have_a_default_and_limits() {
        for (given, expected) in [(Value::Null, 60), (json!(1), 1), (json!(300), 300)] {
            let hooks = parse(periodic(given)).expect("valid hooks");
            assert_eq!(hooks.periodic[0].hook.timeout, Duration::from_secs(expected));
        }
        for wrong in [0, -1, 301, i64::MAX] {
            assert_eq!(parse(periodic(json!(wrong))), Err(LifecycleError::Timeout(300)), "{wrong}");
        }
        let before = |seconds: u64| json!({"preStart": {"command": ["a"], "timeoutSeconds": seconds}});
        assert_eq!(
            parse(before(10_800)).expect("valid").before.expect("a hook").timeout,
            MAX_PRE_START_TIMEOUT
        );
        assert_eq!(parse(before(10_801)), Err(LifecycleError::Timeout(10_800)));
    }

    #[test]
    fn invalid_command_is_reported_before_its_timeout() {
        let both = json!({"preStart": {"command": [], "timeoutSeconds": 0}});
        assert_eq!(parse(both), Err(LifecycleError::Hook(HookError::Command)));
    }
}

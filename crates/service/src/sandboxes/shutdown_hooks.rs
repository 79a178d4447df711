//! Hooks that run when a sandbox is removed.
//!
//! The driver runs them after the sandbox has left its use and before its processes end. All together have
//! [`SHUTDOWN_HOOKS_TIMEOUT`]: what runs then ends with the sandbox, and what has not begun is left out. A failure is
//! logged and stops nothing, because a sandbox must not prevent its own removal.

use domain::hook::SHUTDOWN_HOOKS_TIMEOUT;
use domain::{ExitReason, ShutdownHook};
use futures_util::future::join_all;

use super::hooks::{HOOK_TAG_PREFIX, describe_exit, run_hook};
use crate::agent::client::AgentClient;
use crate::core::new_process_id;
use crate::sandboxes::driver::DriverCommand;
use crate::{SandboxRef, ServiceError};

/// Runs all hooks, those of the lowest priority first and those of equal priority at the same time.
pub(crate) async fn run_shutdown_hooks(agent: &AgentClient, hooks: &[ShutdownHook]) {
    if hooks.is_empty() {
        return;
    }
    let run_groups = async {
        for group in group_by_priority(hooks) {
            join_all(group.into_iter().map(|hook| run_shutdown_hook(agent, hook))).await;
        }
    };
    if tokio::time::timeout(SHUTDOWN_HOOKS_TIMEOUT, run_groups).await.is_err() {
        tracing::info!(sandbox = %agent.id(), "shutdown hooks took too long; removing the sandbox");
    }
}

fn group_by_priority(hooks: &[ShutdownHook]) -> Vec<Vec<&ShutdownHook>> {
    let mut sorted: Vec<_> = hooks.iter().collect();
    sorted.sort_by_key(|hook| hook.priority);
    sorted.chunk_by(|one, other| one.priority == other.priority).map(<[_]>::to_vec).collect()
}

async fn run_shutdown_hook(agent: &AgentClient, shutdown: &ShutdownHook) {
    let (sandbox, hook) = (agent.id(), &shutdown.name);
    let tag = format!("{HOOK_TAG_PREFIX}{hook}");
    let ran = match new_process_id() {
        Ok(id) => run_hook(agent, &id, &shutdown.hook, &tag).await,
        Err(error) => Err(error),
    };
    match ran {
        Ok((ExitReason::Code(0), _)) => {}
        // Its output may contain secrets of the sandbox, so it is not logged.
        Ok((exit, _output)) => {
            tracing::info!(%sandbox, hook, ended = describe_exit(exit, ""), "shutdown hook failed");
        }
        Err(error) => tracing::info!(%sandbox, hook, %error, "failed to run shutdown hook"),
    }
}

impl SandboxRef {
    pub fn shutdown_hooks(&self) -> Vec<ShutdownHook> {
        self.read_state(|sandbox| sandbox.spec.hooks.shutdown.clone())
    }

    /// Adds a shutdown hook, or replaces the one with its name. It is stored when this returns.
    pub async fn put_shutdown_hook(&self, hook: ShutdownHook) -> Result<(), ServiceError> {
        self.core.send_command(&self.handle, |answer| DriverCommand::PutShutdownHook(hook, answer)).await
    }

    /// Removes a shutdown hook; returns whether there was one.
    pub async fn remove_shutdown_hook(&self, name: &str) -> Result<bool, ServiceError> {
        let name = name.to_owned();
        self.core.send_command(&self.handle, |answer| DriverCommand::RemoveShutdownHook(name, answer)).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use domain::HookCommand;

    use super::*;

    #[test]
    fn hooks_of_equal_priority_are_one_group() {
        let hook = HookCommand { command: vec!["x".to_owned()], timeout: Duration::from_secs(1) };
        let hooks = [("c", 100), ("a", -5), ("d", 100), ("b", 7)];
        let hooks =
            hooks.map(|(name, priority)| ShutdownHook::new(name, priority, hook.clone()).expect("a hook"));
        let groups = group_by_priority(&hooks);
        let names: Vec<Vec<&str>> =
            groups.iter().map(|group| group.iter().map(|hook| hook.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["a"], vec!["b"], vec!["c", "d"]]);
    }
}

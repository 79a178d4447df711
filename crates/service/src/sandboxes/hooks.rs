//! Hooks: the command before the entrypoint, and periodic commands.
//!
//! Each periodic hook has a task, which belongs to the sandbox's driver. It sleeps until the hook is due, runs it if
//! the sandbox runs, and only then computes when it is due next. So runs of one hook never overlap, and runs that were
//! missed (because the sandbox was paused, the last run took too long or no server ran) are not made up for.
//!
//! The agent keeps the last run of each hook as a process with the hook's tag. The next server finds it there, and
//! waits for a run that is still active before it starts another.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use domain::hook::{HookCommand, PeriodicHook};
use domain::process::{CommandLine, ProcessSpec};
use domain::{ExitReason, OutputRetention, Phase, ProcessId};
use wire::{AgentReply, AgentRequest, Frame};

use crate::agent::client::{AgentClient, AgentError, parse_answer};
use crate::agent::reply::ProcessStarted;
use crate::agent::{faults, translate};
use crate::core::{Core, new_process_id};
use crate::sandboxes::registry::SandboxHandle;
use crate::{ProcessStatus, SandboxRef, ServiceError};

/// The prefix of the tags of hook runs, which distinguishes them from other processes.
pub(super) const HOOK_TAG_PREFIX: &str = "hook:";

/// The tag of the hook before the entrypoint; no hook name can contain a line break.
const BEFORE_HOOK_TAG: &str = "hook:\n";

/// How many bytes of a hook's last output are kept and reported.
const MAX_TAIL_BYTES: usize = 4096;

/// The longest single sleep, so that a change of the wall clock is noticed.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// How much longer than its timeout the end of a hook is waited for: the agent ends the hook, and an agent may lie.
const HOOK_END_GRACE: Duration = Duration::from_secs(15);

/// How long to wait when an agent cannot be asked.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// A periodic hook and its last run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookReport {
    pub name: String,
    pub schedule: String,
    pub last: Option<HookRun>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookRun {
    pub began: SystemTime,
    /// How the run ended, if it has.
    pub exit: Option<ExitReason>,
    /// The end of its output.
    pub tail: String,
}

/// Whether a process is a run of a hook.
pub(crate) fn is_hook_run(status: &ProcessStatus) -> bool {
    status.tag.as_deref().is_some_and(|tag| tag.starts_with(HOOK_TAG_PREFIX))
}

/// Runs the hook before the entrypoint. Any result but success is an error that contains the end of the hook's output.
pub(crate) async fn run_before_hook(agent: &AgentClient, hook: &HookCommand) -> Result<(), ServiceError> {
    let id = new_process_id()?;
    let not_run = |error| ServiceError::Hook { ended: "could not be run".to_owned(), source: Some(error) };
    let (exit, tail) =
        run_hook(agent, &id, hook, BEFORE_HOOK_TAG).await.map_err(|error| not_run(Box::new(error)))?;
    forget_run(agent, &id).await;
    match exit {
        ExitReason::Code(0) => Ok(()),
        exit => Err(ServiceError::Hook { ended: describe_exit(exit, &tail), source: None }),
    }
}

/// Describes how a hook ended, with the end of its output.
pub(super) fn describe_exit(exit: ExitReason, tail: &str) -> String {
    let ended = match exit {
        ExitReason::Code(code) => format!("exited with code {code}"),
        ExitReason::Signal(signal) => format!("was killed by signal {signal}"),
        ExitReason::Oom => "was killed because the memory limit was reached".to_owned(),
        ExitReason::Deadline => "was killed at its timeout".to_owned(),
        ExitReason::Lost => "ended with an unknown status".to_owned(),
    };
    match tail.trim() {
        "" => ended,
        tail => format!("{ended}: {tail}"),
    }
}

/// Runs one periodic hook until its sandbox dies. The task is dropped with the driver.
pub(crate) async fn run_periodic_hook(core: Arc<Core>, handle: Arc<SandboxHandle>, periodic: PeriodicHook) {
    let tag = format!("{HOOK_TAG_PREFIX}{}", periodic.name);
    let most = periodic.hook.timeout + HOOK_END_GRACE;
    let mut last = wait_for_active_run(&core, &handle, &tag, most).await;
    let mut seen = core.clock.now().wall;
    loop {
        // A clock that was set back makes no hook due again.
        let Some(due) = periodic.schedule.next_after(core.clock.now().wall.max(seen)) else { return };
        sleep_until_due(&core, due).await;
        seen = due;
        if handle.current_state().phase != Phase::Running {
            continue;
        }
        let Ok(id) = new_process_id() else { continue };
        match run_hook(&handle.agent, &id, &periodic.hook, &tag).await {
            Ok((exit, tail)) => {
                if exit != ExitReason::Code(0) {
                    let (sandbox, hook) = (&handle.id, &periodic.name);
                    tracing::info!(%sandbox, hook, ended = describe_exit(exit, &tail), "hook failed");
                }
            }
            Err(error) => {
                tracing::info!(sandbox = %handle.id, hook = periodic.name, %error, "failed to run hook");
                // If only the connection broke, the hook may run nevertheless.
                wait_for_active_run(&core, &handle, &tag, most).await;
            }
        }
        if let Some(former) = last.replace(id) {
            forget_run(&handle.agent, &former).await;
        }
    }
}

/// Waits until no run of the hook is active, and returns the last run.
async fn wait_for_active_run(
    core: &Core,
    handle: &SandboxHandle,
    tag: &str,
    most: Duration,
) -> Option<ProcessId> {
    loop {
        match core.read_processes(&handle.agent).await {
            Ok(processes) => {
                let last = processes.into_iter().rfind(|status| status.tag.as_deref() == Some(tag))?;
                let (agent, run) = (&handle.agent, &last.process);
                if last.ended.is_some() || follow_with_timeout(agent, run, u64::MAX, most).await.is_ok() {
                    return Some(last.process);
                }
            }
            Err(error) => {
                tracing::debug!(sandbox = %handle.id, %error, "failed to list hook runs; retrying before the next run")
            }
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

async fn sleep_until_due(core: &Core, due: SystemTime) {
    while let Ok(left) = due.duration_since(core.clock.now().wall)
        && left > Duration::ZERO
    {
        tokio::time::sleep(left.min(CLOCK_CHECK_INTERVAL)).await;
    }
}

/// Starts a hook and waits for its end.
pub(super) async fn run_hook(
    agent: &AgentClient,
    id: &ProcessId,
    hook: &HookCommand,
    tag: &str,
) -> Result<(ExitReason, String), ServiceError> {
    let process = ProcessSpec {
        tag: Some(tag.to_owned()),
        deadline: Some(hook.timeout),
        retention: OutputRetention { first: 0, last: MAX_TAIL_BYTES as u64 * 4 },
        ..ProcessSpec::new(CommandLine::Argv(hook.command.clone()))
    };
    let start = wire::process::StartProcess { follow: false, ..translate::wire_start(id, process) };
    match agent.request(AgentRequest::Start(start)).await? {
        Ok(ProcessStarted) => follow_with_timeout(agent, id, 0, hook.timeout + HOOK_END_GRACE).await,
        Err(fault) => Err(faults::file_error(agent, fault)),
    }
}

/// Waits for the end of a process for a limited time, and returns the end of its output.
async fn follow_with_timeout(
    agent: &AgentClient,
    id: &ProcessId,
    from: u64,
    most: Duration,
) -> Result<(ExitReason, String), ServiceError> {
    let late = || {
        Err(agent.agent_error("send the output of a process", AgentError::TooSlow("wait for a hook to end")))
    };
    tokio::time::timeout(most, follow_to_end(agent, id, from)).await.unwrap_or_else(|_elapsed| late())
}

async fn follow_to_end(
    agent: &AgentClient,
    id: &ProcessId,
    from: u64,
) -> Result<(ExitReason, String), ServiceError> {
    let mut connection =
        agent.open_request(AgentRequest::Follow { process: id.as_str().to_owned(), from }).await?;
    let status = agent.first_answer::<wire::process::ProcessStatus>(&mut connection).await?;
    status.map_err(|fault| faults::process_error(agent, id, fault))?;
    let broken = |source| agent.agent_error("send the output of a process", source);
    let mut tail = Vec::new();
    loop {
        let frame = connection.next_frame().await.map_err(broken)?;
        match frame.ok_or(AgentError::EndedEarly).map_err(broken)? {
            Frame::Output { bytes, .. } => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(MAX_TAIL_BYTES));
            }
            frame => match parse_answer(&frame).map_err(broken)? {
                Ok(AgentReply::Ended(ended)) => {
                    return Ok((
                        translate::process_end(&ended).exit,
                        String::from_utf8_lossy(&tail).into_owned(),
                    ));
                }
                Ok(AgentReply::Gap { .. }) => {}
                Ok(_) => return Err(agent.unexpected_reply()),
                Err(fault) => return Err(faults::process_error(agent, id, fault)),
            },
        }
    }
}

/// Drops a run that is no longer needed. If that fails, the agent drops it later with its oldest processes.
async fn forget_run(agent: &AgentClient, id: &ProcessId) {
    let request = AgentRequest::Forget { process: id.as_str().to_owned() };
    if let Err(error) = agent.request::<AgentReply>(request).await {
        tracing::debug!(sandbox = %agent.id(), %error, "failed to drop a finished hook run; the agent drops it later");
    }
}

impl SandboxRef {
    /// The periodic hooks. Their last runs are included if the sandbox runs.
    pub async fn list_hooks(&self) -> Result<Vec<HookReport>, ServiceError> {
        let handle = &self.handle;
        let sandbox = handle.current_state();
        let periodic = &sandbox.spec.hooks.periodic;
        if periodic.is_empty() || sandbox.phase != Phase::Running {
            return Ok(periodic.iter().map(|hook| hook_report(hook, None)).collect());
        }
        let processes = self.core.read_processes(&handle.agent).await?;
        let mut reports = Vec::new();
        for hook in periodic {
            let tag = format!("{HOOK_TAG_PREFIX}{}", hook.name);
            let last = processes.iter().rfind(|status| status.tag.as_deref() == Some(&tag));
            let run = match last {
                Some(status) => Some(read_last_run(&handle.agent, status).await?),
                None => None,
            };
            reports.push(hook_report(hook, run));
        }
        Ok(reports)
    }
}

fn hook_report(hook: &PeriodicHook, last: Option<HookRun>) -> HookReport {
    HookReport { name: hook.name.clone(), schedule: hook.schedule.as_str().to_owned(), last }
}

/// For a run that is still active, no output is returned.
async fn read_last_run(agent: &AgentClient, status: &ProcessStatus) -> Result<HookRun, ServiceError> {
    let (exit, tail) = match &status.ended {
        None => (None, String::new()),
        Some(_) => {
            let (exit, tail) = follow_with_timeout(agent, &status.process, 0, HOOK_END_GRACE).await?;
            (Some(exit), tail)
        }
    };
    Ok(HookRun { began: status.started, exit, tail })
}

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

use domain::hook::{Hook, Periodic};
use domain::process::{Command, Process};
use domain::{Exit, Owner, Phase, ProcessId, Retention, SandboxId};
use wire::{Frame, Reply, Request};

use crate::agent_client::{Agent, AgentError, read_answer};
use crate::core::{Core, new_process_id};
use crate::registry::Handle;
use crate::{ProcessStatus, Service, ServiceError, faults, translate};

/// The prefix of the tags of hook runs, which distinguishes them from other processes.
const TAG: &str = "hook:";

/// The tag of the hook before the entrypoint; no hook name can contain a line break.
const BEFORE: &str = "hook:\n";

/// How many bytes of a hook's last output are kept and reported.
const TAIL: usize = 4096;

/// The longest single sleep, so that a change of the wall clock is noticed.
const LOOK: Duration = Duration::from_secs(30);

/// How much longer than its timeout the end of a hook is waited for: the agent ends the hook, and an agent may lie.
const SLACK: Duration = Duration::from_secs(15);

/// How long to wait when an agent cannot be asked.
const RETRY: Duration = Duration::from_secs(5);

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
    pub exit: Option<Exit>,
    /// The end of its output.
    pub tail: String,
}

/// Whether a process is a run of a hook.
pub(crate) fn is_run(status: &ProcessStatus) -> bool {
    status.tag.as_deref().is_some_and(|tag| tag.starts_with(TAG))
}

/// Runs the hook before the entrypoint. Any result but success is an error that contains the end of the hook's output.
pub(crate) async fn run_before(agent: &Agent, hook: &Hook) -> Result<(), ServiceError> {
    let id = new_process_id()?;
    let not_run = |error| ServiceError::Hook { ended: "could not be run".to_owned(), source: Some(error) };
    let (exit, tail) = run(agent, &id, hook, BEFORE).await.map_err(|error| not_run(Box::new(error)))?;
    forget(agent, &id).await;
    match exit {
        Exit::Code(0) => Ok(()),
        exit => Err(ServiceError::Hook { ended: told(exit, &tail), source: None }),
    }
}

/// Describes how a hook ended, with the end of its output.
fn told(exit: Exit, tail: &str) -> String {
    let ended = match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Signal(signal) => format!("was killed by signal {signal}"),
        Exit::Oom => "was killed because the memory limit was reached".to_owned(),
        Exit::Deadline => "was killed at its timeout".to_owned(),
        Exit::Lost => "ended with an unknown status".to_owned(),
    };
    match tail.trim() {
        "" => ended,
        tail => format!("{ended}: {tail}"),
    }
}

/// Runs one periodic hook until its sandbox dies. The task is dropped with the driver.
pub(crate) async fn tend(core: Arc<Core>, handle: Arc<Handle>, periodic: Periodic) {
    let tag = format!("{TAG}{}", periodic.name);
    let most = periodic.hook.timeout + SLACK;
    let mut last = settle(&core, &handle, &tag, most).await;
    let mut seen = core.clock.now().wall;
    loop {
        // A clock that was set back makes no hook due again.
        let Some(due) = periodic.schedule.next_after(core.clock.now().wall.max(seen)) else { return };
        sleep_until(&core, due).await;
        seen = due;
        if handle.current().phase != Phase::Running {
            continue;
        }
        let Ok(id) = new_process_id() else { continue };
        match run(&handle.agent, &id, &periodic.hook, &tag).await {
            Ok((exit, tail)) => {
                if exit != Exit::Code(0) {
                    let (sandbox, hook) = (&handle.id, &periodic.name);
                    tracing::info!(%sandbox, hook, ended = told(exit, &tail), "hook failed");
                }
            }
            Err(error) => {
                tracing::info!(sandbox = %handle.id, hook = periodic.name, %error, "failed to run hook");
                // If only the connection broke, the hook may run nevertheless.
                settle(&core, &handle, &tag, most).await;
            }
        }
        if let Some(former) = last.replace(id) {
            forget(&handle.agent, &former).await;
        }
    }
}

/// Waits until no run of the hook is active, and returns the last run.
async fn settle(core: &Core, handle: &Handle, tag: &str, most: Duration) -> Option<ProcessId> {
    loop {
        match core.processes_of(&handle.agent).await {
            Ok(processes) => {
                let last = processes.into_iter().rfind(|status| status.tag.as_deref() == Some(tag))?;
                let (agent, run) = (&handle.agent, &last.process);
                if last.ended.is_some() || follow(agent, run, u64::MAX, most).await.is_ok() {
                    return Some(last.process);
                }
            }
            Err(error) => {
                tracing::debug!(sandbox = %handle.id, %error, "failed to list hook runs; retrying before the next run")
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn sleep_until(core: &Core, due: SystemTime) {
    while let Ok(left) = due.duration_since(core.clock.now().wall)
        && left > Duration::ZERO
    {
        tokio::time::sleep(left.min(LOOK)).await;
    }
}

/// Starts a hook and waits for its end.
async fn run(agent: &Agent, id: &ProcessId, hook: &Hook, tag: &str) -> Result<(Exit, String), ServiceError> {
    let process = Process {
        tag: Some(tag.to_owned()),
        deadline: Some(hook.timeout),
        retention: Retention { first: 0, last: TAIL as u64 * 4 },
        ..Process::new(Command::Argv(hook.command.clone()))
    };
    let start = wire::process::Start { follow: false, ..translate::start(id, process) };
    match agent.ask(Request::Start(start)).await? {
        Ok(Reply::Started { .. }) => follow(agent, id, 0, hook.timeout + SLACK).await,
        Ok(_) => Err(agent.unexpected()),
        Err(fault) => Err(faults::of_file(agent, fault)),
    }
}

/// Waits for the end of a process for a limited time, and returns the end of its output.
async fn follow(
    agent: &Agent,
    id: &ProcessId,
    from: u64,
    most: Duration,
) -> Result<(Exit, String), ServiceError> {
    let late =
        || Err(agent.failed("send the output of a process", AgentError::TooSlow("wait for a hook to end")));
    tokio::time::timeout(most, follow_to_end(agent, id, from)).await.unwrap_or_else(|_elapsed| late())
}

async fn follow_to_end(agent: &Agent, id: &ProcessId, from: u64) -> Result<(Exit, String), ServiceError> {
    let mut connection = agent.call(Request::Follow { process: id.as_str().to_owned(), from }).await?;
    match agent.first_answer(&mut connection).await? {
        Ok(Reply::Status(_)) => {}
        Ok(_) => return Err(agent.unexpected()),
        Err(fault) => return Err(faults::of_process(agent, id, fault)),
    }
    let broken = |source| agent.failed("send the output of a process", source);
    let mut tail = Vec::new();
    loop {
        let frame = connection.frame().await.map_err(broken)?;
        match frame.ok_or(AgentError::EndedEarly).map_err(broken)? {
            Frame::Output { bytes, .. } => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(TAIL));
            }
            frame => match read_answer(&frame).map_err(broken)? {
                Ok(Reply::Ended(ended)) => {
                    return Ok((translate::ended(&ended).exit, String::from_utf8_lossy(&tail).into_owned()));
                }
                Ok(Reply::Gap { .. }) => {}
                Ok(_) => return Err(agent.unexpected()),
                Err(fault) => return Err(faults::of_process(agent, id, fault)),
            },
        }
    }
}

/// Drops a run that is no longer needed. If that fails, the agent drops it later with its oldest processes.
async fn forget(agent: &Agent, id: &ProcessId) {
    if let Err(error) = agent.ask(Request::Forget { process: id.as_str().to_owned() }).await {
        tracing::debug!(sandbox = %agent.id(), %error, "failed to drop a finished hook run; the agent drops it later");
    }
}

impl Service {
    /// The periodic hooks of a sandbox of one owner, or of any owner. Their last runs are included if the sandbox runs.
    pub async fn hooks(
        &self,
        owner: Option<&Owner>,
        id: &SandboxId,
    ) -> Result<Vec<HookReport>, ServiceError> {
        let handle = self.0.visible(owner, id)?;
        let sandbox = handle.current();
        let periodic = &sandbox.spec.hooks.periodic;
        if periodic.is_empty() || sandbox.phase != Phase::Running {
            return Ok(periodic.iter().map(|hook| report(hook, None)).collect());
        }
        let processes = self.0.processes_of(&handle.agent).await?;
        let mut reports = Vec::new();
        for hook in periodic {
            let tag = format!("{TAG}{}", hook.name);
            let last = processes.iter().rfind(|status| status.tag.as_deref() == Some(&tag));
            let run = match last {
                Some(status) => Some(last_run(&handle.agent, status).await?),
                None => None,
            };
            reports.push(report(hook, run));
        }
        Ok(reports)
    }
}

fn report(hook: &Periodic, last: Option<HookRun>) -> HookReport {
    HookReport { name: hook.name.clone(), schedule: hook.schedule.as_str().to_owned(), last }
}

/// For a run that is still active, no output is returned.
async fn last_run(agent: &Agent, status: &ProcessStatus) -> Result<HookRun, ServiceError> {
    let (exit, tail) = match &status.ended {
        None => (None, String::new()),
        Some(_) => {
            let (exit, tail) = follow(agent, &status.process, 0, SLACK).await?;
            (Some(exit), tail)
        }
    };
    Ok(HookRun { began: status.started, exit, tail })
}

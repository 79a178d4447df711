//! One task per sandbox, the only writer of its phase.
//!
//! ```text
//!  service, reaper ── Command ──►┐
//!  backend's deaths ── Cause ───►├─ driver ─► store, backend ─► watch ─► readers
//!  the entrypoint's end ── Exit ►┘
//! ```
//! It writes its intent to the store, acts, and then publishes the new state. Orders wait in a bounded mailbox and are
//! carried out one after the other, so no two of them overlap.

mod bind;
mod commands;
mod network;
mod restart;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use domain::{EndCause, ExitReason, LifecycleRequest, MountSpec, Phase, PolicyEdit, ShutdownHook, Verdict};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::agent::client::AgentClient;
use crate::core::Core;
use crate::error::error_chain;
use crate::exec::command_slots::CommandSlots;
use crate::pools::ClaimedWarm;
use crate::sandboxes::activity::SandboxActivity;
use crate::sandboxes::lease::SandboxLease;
use crate::sandboxes::reaper::DueReason;
use crate::sandboxes::registry::SandboxHandle;
use crate::sandboxes::{entrypoint, hooks, shutdown_hooks};
use crate::store::SandboxRecord;
use crate::telemetry::cpu_share::CpuMeter;
use crate::telemetry::create_stages::CreateStages;
use crate::telemetry::service_metrics;
use crate::tenancy::quota::ResourceCost;
use crate::{Outcome, PolicyChange, ResumeOutcome, Sandbox, ServiceError};

/// How many commands may wait in one driver's mailbox.
const MAX_QUEUED_COMMANDS: usize = 16;

/// How long a backend may take to make a sandbox.
pub(crate) const CREATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The shortest and the longest time before a failed removal is tried again.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

pub(crate) type CommandReply<T> = oneshot::Sender<Result<T, ServiceError>>;

/// A command to a driver.
pub(crate) enum DriverCommand {
    Pause(CommandReply<Outcome>),
    Resume(CommandReply<Outcome>),
    /// Restart a sandbox that has died.
    Restart(CommandReply<ResumeOutcome>),
    Destroy(CommandReply<Outcome>),
    /// Like `Destroy`, for a cause inside the server.
    End(EndCause, CommandReply<()>),
    /// End its processes and keep its files, as if it had died.
    Fail(EndCause, CommandReply<()>),
    PatchLabels(BTreeMap<String, Option<String>>, CommandReply<Sandbox>),
    Renew(SystemTime, CommandReply<Sandbox>),
    Attach(Vec<MountSpec>, CommandReply<Sandbox>),
    /// Change what it may reach.
    EditPolicy(PolicyEdit, CommandReply<PolicyChange>),
    /// Add a shutdown hook, or replace the one with its name.
    PutShutdownHook(ShutdownHook, CommandReply<()>),
    /// Remove a shutdown hook; replies whether there was one.
    RemoveShutdownHook(String, CommandReply<bool>),
    /// The sandbox may have expired: check, and end it if so.
    Expire,
    /// The sandbox may be idle: check, and end it if so.
    Idle,
    /// The wall clock was set: recompute the expiry in wall time.
    ClockSet,
}

/// A new sandbox on its way to the caller that asked for it. If it does not arrive because the client has disconnected,
/// the sandbox is destroyed.
pub(crate) struct SandboxHandover {
    sandbox: Option<Sandbox>,
    abandoned: CancellationToken,
}

impl SandboxHandover {
    pub(crate) fn into_sandbox(mut self) -> Sandbox {
        self.sandbox.take().expect("a claim is consumed once, by value")
    }
}

impl Drop for SandboxHandover {
    fn drop(&mut self) {
        if self.sandbox.is_some() {
            self.abandoned.cancel();
        }
    }
}

pub(crate) struct Driver {
    core: Arc<Core>,
    handle: Arc<SandboxHandle>,
    record: SandboxRecord,
    state: watch::Sender<Sandbox>,
    mailbox: mpsc::Receiver<DriverCommand>,
    death: watch::Receiver<Option<EndCause>>,
    /// Resolves when the main process ends.
    entrypoint: Option<AbortOnDropHandle<ExitReason>>,
    /// One task for each periodic hook.
    hooks: Vec<AbortOnDropHandle<()>>,
    /// Set while the backend has failed to remove remains, with the time of the next attempt.
    pending_cleanup: Option<PendingCleanup>,
    /// Why the sandbox is being removed.
    cause: Option<EndCause>,
}

#[derive(Clone, Copy)]
struct PendingCleanup {
    next: Instant,
    pause: Duration,
}

enum DriverEvent {
    Command(DriverCommand),
    Died,
    Exited(ExitReason),
    Abandoned,
    Retry,
    Stop,
}

impl Driver {
    pub(crate) fn new(core: &Arc<Core>, record: SandboxRecord) -> (Arc<SandboxHandle>, Self) {
        let (commands, mailbox) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let (state, published) = watch::channel(record.sandbox.clone());
        let (dying, death) = watch::channel(None);
        let handle = Arc::new(SandboxHandle {
            id: record.sandbox.id.clone(),
            owner: record.sandbox.owner.clone(),
            created: record.sandbox.created,
            epoch: record.epoch,
            key: record.key.clone(),
            pool: record.sandbox.pool.clone(),
            lease: SandboxLease::default(),
            cost: ResourceCost::from_limits(&record.sandbox.spec.resources, core.config().default_limits),
            timeout: record.timeout,
            idle_timeout: record.idle_timeout,
            entrypoint: record.entrypoint.clone(),
            agent: AgentClient::new(Arc::clone(&core.host.backend), record.sandbox.id.clone()),
            activity: SandboxActivity::new(core.clock.clone()),
            commands: CommandSlots::new(core.config().commands_per_sandbox),
            cpu_meter: CpuMeter::default(),
            mailbox: commands,
            parsed_notes: OnceLock::new(),
            state: published,
            abandoned: CancellationToken::new(),
            death: dying,
        });
        let core = Arc::clone(core);
        let driver = Self {
            core,
            handle: Arc::clone(&handle),
            record,
            state,
            mailbox,
            death,
            entrypoint: None,
            hooks: Vec::new(),
            pending_cleanup: None,
            cause: None,
        };
        (handle, driver)
    }

    /// Makes the sandbox, from a warm one if given, hands it over, and drives it to its end. `cause` is published with
    /// its start if it replaces a sandbox that died.
    pub(crate) async fn create(
        mut self,
        warm: Option<ClaimedWarm>,
        cause: Option<EndCause>,
        reply: oneshot::Sender<Result<SandboxHandover, ServiceError>>,
    ) {
        service_metrics::record_phase_change(None, Some(Phase::Starting));
        self.publish_event(cause);
        let made = match warm {
            Some(warm) => self.bind_warm(warm).await,
            None => {
                let mut stages = CreateStages::start();
                if let Err(source) = self.core.store.insert_sandbox(&self.record).await {
                    self.finish_removal();
                    // The caller may have disconnected; nothing was made.
                    reply.send(Err(ServiceError::Store { action: "record the new sandbox", source })).ok();
                    return;
                }
                stages.end_stage("store");
                self.create_and_start(stages).await
            }
        };
        let made = made.map(|()| self.hand_over());
        if let Err(error) = &made {
            tracing::warn!(sandbox = %self.handle.id, error = %error_chain(error), "failed to create sandbox; removing its remains");
            // If the removal fails, it is scheduled again and retried below.
            self.end_sandbox(EndCause::NotCreated).await.ok();
        }
        // A claim that cannot be delivered is dropped here, which cancels `abandoned` and so notifies this driver.
        reply.send(made).ok();
        self.run().await;
    }

    /// Drives a sandbox that a former server made.
    pub(crate) async fn adopt(mut self) {
        service_metrics::record_phase_change(None, Some(self.phase()));
        self.publish_event_if_new();
        self.schedule_deadlines();
        self.start_metering(false);
        if matches!(self.phase(), Phase::Running | Phase::Paused) {
            self.watch_entrypoint();
            self.run_periodic_hooks();
        }
        if matches!(self.phase(), Phase::Stopping | Phase::Failed(_)) {
            self.schedule_cleanup();
        }
        self.run().await;
    }

    async fn create_and_start(&mut self, mut stages: CreateStages) -> Result<(), ServiceError> {
        self.create_in_backend().await?;
        stages.end_stage("launcher");
        self.start_metering(true);
        self.handle.agent.ping().await?;
        stages.end_stage("ping");
        self.start_entrypoint().await?;
        stages.end_stage("entrypoint");
        stages.log(&self.handle.id);
        Ok(())
    }

    async fn create_in_backend(&mut self) -> Result<(), ServiceError> {
        let spec = self.record.sandbox.spec.clone();
        let made = self.core.create_in_backend(&self.handle.id, spec);
        self.record.sandbox.in_force =
            self.core.host.ask_backend("create", &self.handle.id, CREATE_TIMEOUT, made).await?;
        Ok(())
    }

    /// Starts the processes of a sandbox that is complete, and records that it runs.
    async fn start_entrypoint(&mut self) -> Result<(), ServiceError> {
        self.run_before_hook().await?;
        if let Some(id) = &self.record.entrypoint {
            let words = self.record.sandbox.spec.entrypoint.to_words();
            let retention = self.core.config().output.retention;
            entrypoint::launch_entrypoint(&self.handle.agent, id, words, retention).await?;
        }
        self.watch_entrypoint();
        self.handle.activity.touch();
        self.schedule_deadlines();
        self.enter_phase(Phase::Running);
        // The row is written before anyone hears of the sandbox: a sandbox that was returned to a client must be found
        // again even if server and agent die at once, and a row that says "starting" is treated as one that no client
        // has heard of.
        let noted = self.core.store.update_sandbox(&self.record).await;
        noted.map_err(|source| ServiceError::Store { action: "record that the sandbox runs", source })?;
        self.run_periodic_hooks();
        Ok(())
    }

    /// Runs the hook before the entrypoint. It may take hours, so it is given up when the client disconnects, when the
    /// sandbox is deleted, and when the server stops.
    async fn run_before_hook(&self) -> Result<(), ServiceError> {
        let Some(hook) = &self.record.sandbox.spec.hooks.before else { return Ok(()) };
        tokio::select! {
            ran = hooks::run_before_hook(&self.handle.agent, hook) => ran,
            () = self.handle.abandoned.cancelled() => Err(ServiceError::Stopping),
            () = self.core.tasks.cancelled() => Err(ServiceError::Stopping),
        }
    }

    fn run_periodic_hooks(&mut self) {
        let tend = |periodic: &domain::PeriodicHook| {
            let tending =
                hooks::run_periodic_hook(Arc::clone(&self.core), Arc::clone(&self.handle), periodic.clone());
            AbortOnDropHandle::new(self.core.tasks.spawn(tending))
        };
        self.hooks = self.record.sandbox.spec.hooks.periodic.iter().map(tend).collect();
    }

    /// Starts recording the usage of the sandbox.
    fn start_metering(&self, fresh: bool) {
        self.core.telemetry.history.begin_metering(
            &self.handle.id,
            &self.handle.owner,
            self.core.clock.now(),
            fresh,
        );
    }

    fn hand_over(&self) -> SandboxHandover {
        let sandbox = Some(self.record.sandbox.clone());
        SandboxHandover { sandbox, abandoned: self.handle.abandoned.clone() }
    }

    async fn run(mut self) {
        while self.phase() != Phase::Stopped {
            match self.next_event().await {
                DriverEvent::Command(command) => self.handle_command(command).await,
                DriverEvent::Died => self.handle_death().await,
                DriverEvent::Exited(exit) => self.record_exit(exit).await,
                DriverEvent::Abandoned => {
                    tracing::info!(sandbox = %self.handle.id, "client disconnected before the sandbox was handed over; removing it");
                    self.end_or_retry_later(EndCause::NotCreated).await;
                }
                DriverEvent::Retry => self.retry_cleanup().await,
                DriverEvent::Stop => return,
            }
        }
    }

    /// Every branch may be dropped without losing anything: the awaited events stay pending.
    async fn next_event(&mut self) -> DriverEvent {
        let running = self.phase() == Phase::Running;
        let ending = matches!(self.phase(), Phase::Stopping | Phase::Failed(_));
        let owed = self.pending_cleanup.map(|owed| owed.next);
        tokio::select! {
            biased;
            () = self.handle.abandoned.cancelled(), if !ending => DriverEvent::Abandoned,
            Some(command) = self.mailbox.recv() => DriverEvent::Command(command),
            Ok(()) = self.death.changed() => DriverEvent::Died,
            exit = wait_for_exit(&mut self.entrypoint), if running => DriverEvent::Exited(exit),
            () = sleep_until(owed.unwrap_or_else(Instant::now)), if owed.is_some() => DriverEvent::Retry,
            () = self.core.tasks.cancelled() => DriverEvent::Stop,
        }
    }

    async fn handle_command(&mut self, command: DriverCommand) {
        match command {
            DriverCommand::Pause(answer) => send_reply(answer, self.pause().await),
            DriverCommand::Resume(answer) => send_reply(answer, self.resume().await),
            DriverCommand::Restart(answer) => send_reply(answer, self.restart().await),
            DriverCommand::Destroy(answer) => send_reply(answer, self.destroy().await),
            DriverCommand::End(cause, answer) => send_reply(answer, self.end_sandbox(cause).await),
            DriverCommand::Fail(cause, answer) => send_reply(answer, self.fail_sandbox(cause).await),
            DriverCommand::PatchLabels(patch, answer) => send_reply(answer, self.patch_labels(patch).await),
            DriverCommand::Renew(expires, answer) => send_reply(answer, self.renew_expiry(expires).await),
            DriverCommand::Attach(mounts, answer) => send_reply(answer, self.attach_mounts(mounts).await),
            DriverCommand::EditPolicy(edit, answer) => send_reply(answer, self.edit_policy(&edit).await),
            DriverCommand::PutShutdownHook(hook, answer) => {
                send_reply(answer, self.put_shutdown_hook(hook).await)
            }
            DriverCommand::RemoveShutdownHook(name, answer) => {
                send_reply(answer, self.remove_shutdown_hook(&name).await)
            }
            DriverCommand::Expire => self.end_if_expired().await,
            DriverCommand::Idle => self.end_if_idle().await,
            DriverCommand::ClockSet => self.refresh_wall_expiry().await,
        }
    }

    async fn handle_death(&mut self) {
        let Some(cause) = *self.death.borrow_and_update() else { return };
        if matches!(self.phase(), Phase::Stopping | Phase::Stopped | Phase::Failed(_)) {
            return;
        }
        // A death notice of an earlier life may arrive when the sandbox runs again.
        if self.core.is_agent_alive(&self.handle).await {
            return;
        }
        self.record_death(cause).await;
    }

    /// Ends the processes of the sandbox for a cause that its owner can see. Its files stay.
    async fn fail_sandbox(&mut self, cause: EndCause) -> Result<(), ServiceError> {
        if !matches!(self.phase(), Phase::Stopping | Phase::Stopped | Phase::Failed(_)) {
            self.record_death(cause).await;
        }
        Ok(())
    }

    /// Records that the sandbox has died, and releases everything it had except its files.
    async fn record_death(&mut self, cause: EndCause) {
        tracing::warn!(sandbox = %self.handle.id, cause = cause.name(), "sandbox died");
        service_metrics::count_death(cause);
        self.entrypoint = None;
        self.hooks.clear();
        self.enter_phase(Phase::Failed(cause));
        self.core.store.update_sandbox_later(&self.record).await;
        self.retry_cleanup().await;
    }

    async fn record_exit(&mut self, exit: ExitReason) {
        tracing::info!(sandbox = %self.handle.id, ?exit, "entrypoint ended");
        self.entrypoint = None;
        self.enter_phase(Phase::Exited(exit));
        self.core.store.update_sandbox_later(&self.record).await;
    }

    async fn end_or_retry_later(&mut self, cause: EndCause) {
        if let Err(error) = self.end_sandbox(cause).await {
            tracing::error!(sandbox = %self.handle.id, error = %error_chain(&error), "failed to remove sandbox; retrying later");
        }
    }

    /// Removes the sandbox and everything that belongs to it. A failed removal is retried until it succeeds, by a later
    /// call or by the driver itself.
    async fn end_sandbox(&mut self, cause: EndCause) -> Result<(), ServiceError> {
        self.cause.get_or_insert(cause);
        self.entrypoint = None;
        self.hooks.clear();
        if self.phase() != Phase::Stopping {
            // Only here, so hooks run once: neither a retry nor the next server runs them again. No request reaches the
            // sandbox while they run.
            let answers = matches!(self.phase(), Phase::Running | Phase::Exited(_));
            self.enter_phase(Phase::Stopping);
            if let Err(error) = self.core.store.update_sandbox(&self.record).await {
                // Even if the store cannot be written, a full disk must not keep a sandbox alive.
                tracing::warn!(sandbox = %self.handle.id, error = %error_chain(&error), "failed to record that the sandbox is stopping; removing it anyway");
            }
            let hooks = &self.record.sandbox.spec.hooks.shutdown;
            // Others wait for what an evicted sandbox, or the one with the most open files, occupies.
            let is_urgent = matches!(cause, EndCause::Evicted | EndCause::TooManyFiles);
            if answers && !is_urgent && cause != EndCause::NotCreated {
                shutdown_hooks::run_shutdown_hooks(&self.handle.agent, hooks).await;
            }
        }
        self.remove_remains().await?;
        if let Err(error) = self.core.store.delete_sandbox(&self.handle.id).await {
            tracing::warn!(sandbox = %self.handle.id, error = %error_chain(&error), "failed to delete the row of a removed sandbox; the next start removes it");
        }
        tracing::info!(sandbox = %self.handle.id, cause = cause.name(), "sandbox ended");
        self.finish_removal();
        Ok(())
    }

    async fn retry_cleanup(&mut self) {
        if self.phase() == Phase::Stopping {
            self.end_or_retry_later(EndCause::Destroyed).await;
        } else if let Err(error) = self.stop_remains().await {
            tracing::error!(sandbox = %self.handle.id, error = %error_chain(&error), "failed to stop a dead sandbox; retrying later");
        }
    }

    async fn remove_remains(&mut self) -> Result<(), ServiceError> {
        let removed = self.core.destroy_in_backend(&self.handle.id).await;
        self.schedule_cleanup_on_error(removed)
    }

    /// Ends the remaining processes of the sandbox. Its files stay.
    async fn stop_remains(&mut self) -> Result<(), ServiceError> {
        let stopped = self.core.stop_in_backend(&self.handle.id).await;
        if let Ok(files) = &stopped {
            self.record.sandbox.files = *files;
            self.publish_state();
        }
        self.schedule_cleanup_on_error(stopped.map(drop))
    }

    fn schedule_cleanup_on_error(&mut self, removed: Result<(), ServiceError>) -> Result<(), ServiceError> {
        self.pending_cleanup = removed.is_err().then(|| {
            let pause =
                self.pending_cleanup.map_or(MIN_RETRY_DELAY, |owed| (owed.pause * 2).min(MAX_RETRY_DELAY));
            PendingCleanup { next: Instant::now() + pause, pause }
        });
        removed
    }

    /// Schedules an immediate attempt to remove the remains.
    fn schedule_cleanup(&mut self) {
        self.pending_cleanup = Some(PendingCleanup { next: Instant::now(), pause: MIN_RETRY_DELAY });
    }

    fn finish_removal(&mut self) {
        let last = self.phase();
        self.record.sandbox.phase = Phase::Stopped;
        self.publish_state();
        self.publish_event(self.cause);
        service_metrics::record_phase_change(Some(last), None);
        self.core.lifecycle.schedule.forget_sandbox(&self.handle.id);
        self.core.lifecycle.registry.remove(&self.handle);
        self.core.vaults.remove(&self.handle.id);
        self.core.catalog.pools.wake_keepers();
        self.core.release_volumes(&self.handle.id);
        if let Some(key) = &self.handle.key {
            self.core.lifecycle.names.forget_sandbox(key, &self.handle.id);
        }
    }

    fn phase(&self) -> Phase {
        self.record.sandbox.phase
    }

    fn enter_phase(&mut self, phase: Phase) {
        self.enter_phase_because(phase, if let Phase::Failed(cause) = phase { Some(cause) } else { None });
    }

    fn enter_phase_because(&mut self, phase: Phase, cause: Option<EndCause>) {
        service_metrics::record_phase_change(Some(self.phase()), Some(phase));
        self.record.sandbox.phase = phase;
        self.record.sandbox.phase_since = self.core.clock.now().wall;
        self.publish_state();
        self.publish_event(cause);
        self.core.lifecycle.registry.set_phase(&self.handle, phase);
    }

    /// Publishes an event for the present phase.
    fn publish_event(&self, cause: Option<EndCause>) {
        let (time, handle) = (self.core.clock.now().wall, &self.handle);
        self.core.telemetry.events.publish_phase(time, &handle.owner, &handle.id, self.phase(), cause);
    }

    /// Publishes an event for a phase that a former server left, unless the feed has it: the last events before a crash
    /// may not have been stored.
    fn publish_event_if_new(&self) {
        let last = self.core.telemetry.events.sandbox_events(&self.handle.owner, &self.handle.id, 1).pop();
        if last.is_none_or(|event| event.phase != self.phase()) {
            self.publish_event(if let Phase::Failed(cause) = self.phase() { Some(cause) } else { None });
        }
    }

    fn publish_state(&self) -> Sandbox {
        self.state.send_replace(self.record.sandbox.clone());
        self.record.sandbox.clone()
    }

    fn schedule_deadlines(&self) {
        self.schedule_expiry();
        if let Some(limit) = self.record.idle_timeout {
            let due = self.core.clock.now().boot.saturating_add(limit);
            self.core.lifecycle.schedule.set_due(&self.handle.id, DueReason::Idle, due);
        }
    }

    fn schedule_expiry(&self) {
        if let Some(expires) = self.record.expires_boot {
            self.core.lifecycle.schedule.set_due(&self.handle.id, DueReason::Expiry, expires);
        }
    }

    fn watch_entrypoint(&mut self) {
        self.entrypoint = self.record.entrypoint.clone().map(|id| {
            let watching = entrypoint::wait_for_end(self.handle.agent.clone(), id);
            AbortOnDropHandle::new(self.core.tasks.spawn(watching))
        });
    }

    fn check_request(&self, request: LifecycleRequest) -> Result<Verdict, ServiceError> {
        match self.phase().judge(request) {
            Verdict::Deny => {
                let (id, phase) = (self.handle.id.clone(), self.phase());
                Err(ServiceError::Denied { id, request, phase })
            }
            verdict => Ok(verdict),
        }
    }
}

/// The caller may have disconnected; the command stays carried out.
fn send_reply<T>(answer: CommandReply<T>, outcome: Result<T, ServiceError>) {
    answer.send(outcome).ok();
}

/// Never returns if there is no main process.
async fn wait_for_exit(entrypoint: &mut Option<AbortOnDropHandle<ExitReason>>) -> ExitReason {
    match entrypoint {
        // A watcher task that was lost saw no exit.
        Some(watching) => watching.await.unwrap_or(ExitReason::Lost),
        None => std::future::pending().await,
    }
}

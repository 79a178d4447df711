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
mod orders;
mod restart;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use domain::{Cause, Exit, Mount, Phase, Request, Verdict};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::activity::Activity;
use crate::agent_client::Agent;
use crate::commands::Commands;
use crate::core::Core;
use crate::error::chain;
use crate::hold::Hold;
use crate::pools::Claimed;
use crate::quota::Cost;
use crate::reaper::Why;
use crate::registry::Handle;
use crate::store::Record;
use crate::{Outcome, Resumed, Sandbox, ServiceError, entrypoint, hooks, measure};

/// How many orders may wait in one driver's mailbox.
const MAILBOX: usize = 16;

/// How long a backend may take to make a sandbox.
pub(crate) const CREATE: Duration = Duration::from_secs(60);

/// The shortest and the longest time before a failed removal is tried again.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

pub(crate) type Answer<T> = oneshot::Sender<Result<T, ServiceError>>;

/// An order to a driver.
pub(crate) enum Command {
    Pause(Answer<Outcome>),
    Resume(Answer<Outcome>),
    /// Restart a sandbox that has died.
    Restart(Answer<Resumed>),
    Destroy(Answer<Outcome>),
    /// Like `Destroy`, for a cause inside the server.
    End(Cause, Answer<()>),
    PatchLabels(BTreeMap<String, Option<String>>, Answer<Sandbox>),
    Renew(SystemTime, Answer<Sandbox>),
    Attach(Vec<Mount>, Answer<Sandbox>),
    /// The sandbox may have expired: check, and end it if so.
    Expire,
    /// The sandbox may be idle: check, and end it if so.
    Idle,
    /// The wall clock was set: recompute the expiry in wall time.
    ClockSet,
}

/// A new sandbox on its way to the caller that asked for it. If it does not arrive because the client has disconnected,
/// the sandbox is destroyed.
pub(crate) struct Claim {
    sandbox: Option<Sandbox>,
    abandoned: CancellationToken,
}

impl Claim {
    pub(crate) fn take(mut self) -> Sandbox {
        self.sandbox.take().expect("a claim is consumed once, by value")
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.sandbox.is_some() {
            self.abandoned.cancel();
        }
    }
}

pub(crate) struct Driver {
    core: Arc<Core>,
    handle: Arc<Handle>,
    record: Record,
    state: watch::Sender<Sandbox>,
    mailbox: mpsc::Receiver<Command>,
    death: watch::Receiver<Option<Cause>>,
    /// Resolves when the main process ends.
    entrypoint: Option<AbortOnDropHandle<Exit>>,
    /// One task for each periodic hook.
    hooks: Vec<AbortOnDropHandle<()>>,
    /// Set while the backend has failed to remove remains, with the time of the next attempt.
    owed: Option<Owed>,
    /// Why the sandbox is being removed.
    cause: Option<Cause>,
}

#[derive(Clone, Copy)]
struct Owed {
    next: Instant,
    pause: Duration,
}

enum Next {
    Command(Command),
    Died,
    Exited(Exit),
    Abandoned,
    Retry,
    Stop,
}

impl Driver {
    pub(crate) fn new(core: &Arc<Core>, record: Record) -> (Arc<Handle>, Self) {
        let (orders, mailbox) = mpsc::channel(MAILBOX);
        let (state, published) = watch::channel(record.sandbox.clone());
        let (dying, death) = watch::channel(None);
        let handle = Arc::new(Handle {
            id: record.sandbox.id.clone(),
            owner: record.sandbox.owner.clone(),
            created: record.sandbox.created,
            epoch: record.epoch,
            key: record.key.clone(),
            pool: record.sandbox.pool.clone(),
            hold: Hold::default(),
            cost: Cost::of(&record.sandbox.spec.resources, &core.config().usual),
            timeout: record.timeout,
            idle_timeout: record.idle_timeout,
            entrypoint: record.entrypoint.clone(),
            agent: Agent::new(Arc::clone(&core.backend), record.sandbox.id.clone()),
            activity: Activity::new(core.clock.clone()),
            commands: Commands::new(core.config().commands_per_sandbox),
            mailbox: orders,
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
            owed: None,
            cause: None,
        };
        (handle, driver)
    }

    /// Makes the sandbox, from a warm one if given, hands it over, and drives it to its end. `cause` is published with
    /// its start if it replaces a sandbox that died.
    pub(crate) async fn create(
        mut self,
        warm: Option<Claimed>,
        cause: Option<Cause>,
        reply: oneshot::Sender<Result<Claim, ServiceError>>,
    ) {
        measure::moved(None, Some(Phase::Starting));
        self.tell(cause);
        let made = match warm {
            Some(warm) => self.bind(warm).await,
            None => {
                if let Err(source) = self.core.store.insert(&self.record).await {
                    self.leave();
                    // The caller may have disconnected; nothing was made.
                    reply.send(Err(ServiceError::Store { action: "record the new sandbox", source })).ok();
                    return;
                }
                self.bring_up().await
            }
        };
        let made = made.map(|()| self.claim());
        if let Err(error) = &made {
            tracing::warn!(sandbox = %self.handle.id, error = %chain(error), "failed to create sandbox; removing its remains");
            // If the removal fails, it is scheduled again and retried below.
            self.end(Cause::NotCreated).await.ok();
        }
        // A claim that cannot be delivered is dropped here, which cancels `abandoned` and so notifies this driver.
        reply.send(made).ok();
        self.run().await;
    }

    /// Drives a sandbox that a former server made.
    pub(crate) async fn adopt(mut self) {
        measure::moved(None, Some(self.phase()));
        self.tell_if_new();
        self.schedule();
        self.meter(false);
        if matches!(self.phase(), Phase::Running | Phase::Paused) {
            self.watch_entrypoint();
            self.tend_hooks();
        }
        if matches!(self.phase(), Phase::Stopping | Phase::Failed(_)) {
            self.owe();
        }
        self.run().await;
    }

    async fn bring_up(&mut self) -> Result<(), ServiceError> {
        self.create_in_backend().await?;
        self.meter(true);
        self.handle.agent.ping().await?;
        self.begin_life().await
    }

    async fn create_in_backend(&mut self) -> Result<(), ServiceError> {
        let spec = self.record.sandbox.spec.clone();
        let made = self.core.backend.create(&self.handle.id, &spec);
        self.record.sandbox.in_force = self.core.ask_backend("create", &self.handle.id, CREATE, made).await?;
        Ok(())
    }

    /// Starts the processes of a sandbox that is complete, and records that it runs.
    async fn begin_life(&mut self) -> Result<(), ServiceError> {
        self.prepare_life().await?;
        if let Some(id) = &self.record.entrypoint {
            let words = &self.record.sandbox.spec.entrypoint;
            let retention = self.core.config().output.retention;
            entrypoint::launch(&self.handle.agent, id, words, retention).await?;
        }
        self.watch_entrypoint();
        self.handle.activity.touch();
        self.schedule();
        self.enter(Phase::Running);
        // The row is written before anyone hears of the sandbox: a sandbox that was returned to a client must be found
        // again even if server and agent die at once, and a row that says "starting" is treated as one that no client
        // has heard of.
        let noted = self.core.store.update(&self.record).await;
        noted.map_err(|source| ServiceError::Store { action: "record that the sandbox runs", source })?;
        self.tend_hooks();
        Ok(())
    }

    /// Runs the hook before the entrypoint. It may take hours, so it is given up when the client disconnects, when the
    /// sandbox is deleted, and when the server stops.
    async fn prepare_life(&self) -> Result<(), ServiceError> {
        let Some(hook) = &self.record.sandbox.spec.hooks.before else { return Ok(()) };
        tokio::select! {
            ran = hooks::run_before(&self.handle.agent, hook) => ran,
            () = self.handle.abandoned.cancelled() => Err(ServiceError::Stopping),
            () = self.core.stop.cancelled() => Err(ServiceError::Stopping),
        }
    }

    fn tend_hooks(&mut self) {
        let tend = |periodic: &domain::Periodic| {
            let tending = hooks::tend(Arc::clone(&self.core), Arc::clone(&self.handle), periodic.clone());
            AbortOnDropHandle::new(self.core.tasks.spawn(tending))
        };
        self.hooks = self.record.sandbox.spec.hooks.periodic.iter().map(tend).collect();
    }

    /// Starts recording the usage of the sandbox.
    fn meter(&self, fresh: bool) {
        self.core.history.begin(&self.handle.id, &self.handle.owner, self.core.clock.now(), fresh);
    }

    fn claim(&self) -> Claim {
        let sandbox = Some(self.record.sandbox.clone());
        Claim { sandbox, abandoned: self.handle.abandoned.clone() }
    }

    async fn run(mut self) {
        while self.phase() != Phase::Stopped {
            match self.next().await {
                Next::Command(command) => self.obey(command).await,
                Next::Died => self.die().await,
                Next::Exited(exit) => self.exit(exit).await,
                Next::Abandoned => {
                    tracing::info!(sandbox = %self.handle.id, "client disconnected before the sandbox was handed over; removing it");
                    self.end_or_owe(Cause::NotCreated).await;
                }
                Next::Retry => self.retry().await,
                Next::Stop => return,
            }
        }
    }

    /// Every branch may be dropped without losing anything: the awaited events stay pending.
    async fn next(&mut self) -> Next {
        let running = self.phase() == Phase::Running;
        let ending = matches!(self.phase(), Phase::Stopping | Phase::Failed(_));
        let owed = self.owed.map(|owed| owed.next);
        tokio::select! {
            biased;
            () = self.handle.abandoned.cancelled(), if !ending => Next::Abandoned,
            Some(command) = self.mailbox.recv() => Next::Command(command),
            Ok(()) = self.death.changed() => Next::Died,
            exit = end_of(&mut self.entrypoint), if running => Next::Exited(exit),
            () = sleep_until(owed.unwrap_or_else(Instant::now)), if owed.is_some() => Next::Retry,
            () = self.core.stop.cancelled() => Next::Stop,
        }
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Pause(answer) => reply(answer, self.pause().await),
            Command::Resume(answer) => reply(answer, self.resume().await),
            Command::Restart(answer) => reply(answer, self.restart().await),
            Command::Destroy(answer) => reply(answer, self.destroy().await),
            Command::End(cause, answer) => reply(answer, self.end(cause).await),
            Command::PatchLabels(patch, answer) => reply(answer, self.patch_labels(patch).await),
            Command::Renew(expires, answer) => reply(answer, self.renew(expires).await),
            Command::Attach(mounts, answer) => reply(answer, self.attach(mounts).await),
            Command::Expire => self.end_if_expired().await,
            Command::Idle => self.end_if_idle().await,
            Command::ClockSet => self.tell_expiry_anew().await,
        }
    }

    async fn die(&mut self) {
        let Some(cause) = *self.death.borrow_and_update() else { return };
        if matches!(self.phase(), Phase::Stopping | Phase::Stopped | Phase::Failed(_)) {
            return;
        }
        // A death notice of an earlier life may arrive when the sandbox runs again.
        if self.core.lives(&self.handle).await {
            return;
        }
        self.die_of(cause).await;
    }

    /// Records that the sandbox has died, and releases everything it had except its files.
    async fn die_of(&mut self, cause: Cause) {
        tracing::warn!(sandbox = %self.handle.id, cause = cause.name(), "sandbox died");
        measure::died(cause);
        self.entrypoint = None;
        self.hooks.clear();
        self.enter(Phase::Failed(cause));
        self.core.store.update_later(&self.record).await;
        self.retry().await;
    }

    async fn exit(&mut self, exit: Exit) {
        tracing::info!(sandbox = %self.handle.id, ?exit, "entrypoint ended");
        self.entrypoint = None;
        self.enter(Phase::Exited(exit));
        self.core.store.update_later(&self.record).await;
    }

    async fn end_or_owe(&mut self, cause: Cause) {
        if let Err(error) = self.end(cause).await {
            tracing::error!(sandbox = %self.handle.id, error = %chain(&error), "failed to remove sandbox; retrying later");
        }
    }

    /// Removes the sandbox and everything that belongs to it. A failed removal is retried until it succeeds, by a later
    /// call or by the driver itself.
    async fn end(&mut self, cause: Cause) -> Result<(), ServiceError> {
        self.cause.get_or_insert(cause);
        self.entrypoint = None;
        self.hooks.clear();
        if self.phase() != Phase::Stopping {
            self.enter(Phase::Stopping);
            if let Err(error) = self.core.store.update(&self.record).await {
                // Even if the store cannot be written, a full disk must not keep a sandbox alive.
                tracing::warn!(sandbox = %self.handle.id, error = %chain(&error), "failed to record that the sandbox is stopping; removing it anyway");
            }
        }
        self.remove_remains().await?;
        if let Err(error) = self.core.store.delete(&self.handle.id).await {
            tracing::warn!(sandbox = %self.handle.id, error = %chain(&error), "failed to delete the row of a removed sandbox; the next start removes it");
        }
        tracing::info!(sandbox = %self.handle.id, cause = cause.name(), "sandbox ended");
        self.leave();
        Ok(())
    }

    async fn retry(&mut self) {
        if self.phase() == Phase::Stopping {
            self.end_or_owe(Cause::Destroyed).await;
        } else if let Err(error) = self.stop_remains().await {
            tracing::error!(sandbox = %self.handle.id, error = %chain(&error), "failed to stop a dead sandbox; retrying later");
        }
    }

    async fn remove_remains(&mut self) -> Result<(), ServiceError> {
        let removed = self.core.destroy(&self.handle.id).await;
        self.owe_unless_done(removed)
    }

    /// Ends the remaining processes of the sandbox. Its files stay.
    async fn stop_remains(&mut self) -> Result<(), ServiceError> {
        let stopped = self.core.stop(&self.handle.id).await;
        if let Ok(files) = &stopped {
            self.record.sandbox.files = *files;
            self.publish();
        }
        self.owe_unless_done(stopped.map(drop))
    }

    fn owe_unless_done(&mut self, removed: Result<(), ServiceError>) -> Result<(), ServiceError> {
        self.owed = removed.is_err().then(|| {
            let pause = self.owed.map_or(FIRST_RETRY, |owed| (owed.pause * 2).min(LAST_RETRY));
            Owed { next: Instant::now() + pause, pause }
        });
        removed
    }

    /// Schedules an immediate attempt to remove the remains.
    fn owe(&mut self) {
        self.owed = Some(Owed { next: Instant::now(), pause: FIRST_RETRY });
    }

    fn leave(&mut self) {
        let last = self.phase();
        self.record.sandbox.phase = Phase::Stopped;
        self.publish();
        self.tell(self.cause);
        measure::moved(Some(last), None);
        self.core.schedule.forget(&self.handle.id);
        self.core.registry.remove(&self.handle);
        self.core.pools.look_again();
        self.core.release_volumes(&self.handle.id);
        if let Some(key) = &self.handle.key {
            self.core.names.forget(key, &self.handle.id);
        }
    }

    fn phase(&self) -> Phase {
        self.record.sandbox.phase
    }

    fn enter(&mut self, phase: Phase) {
        self.enter_because(phase, if let Phase::Failed(cause) = phase { Some(cause) } else { None });
    }

    fn enter_because(&mut self, phase: Phase, cause: Option<Cause>) {
        measure::moved(Some(self.phase()), Some(phase));
        self.record.sandbox.phase = phase;
        self.record.sandbox.phase_since = self.core.clock.now().wall;
        self.publish();
        self.tell(cause);
        self.core.registry.set_phase(&self.handle, phase);
    }

    /// Publishes an event for the present phase.
    fn tell(&self, cause: Option<Cause>) {
        let (time, handle) = (self.core.clock.now().wall, &self.handle);
        self.core.events.tell(time, &handle.owner, &handle.id, self.phase(), cause);
    }

    /// Publishes an event for a phase that a former server left, unless the feed has it: the last events before a crash
    /// may not have been stored.
    fn tell_if_new(&self) {
        let last = self.core.events.of(&self.handle.owner, &self.handle.id, 1).pop();
        if last.is_none_or(|event| event.phase != self.phase()) {
            self.tell(if let Phase::Failed(cause) = self.phase() { Some(cause) } else { None });
        }
    }

    fn publish(&self) -> Sandbox {
        self.state.send_replace(self.record.sandbox.clone());
        self.record.sandbox.clone()
    }

    fn schedule(&self) {
        self.schedule_expiry();
        if let Some(limit) = self.record.idle_timeout {
            let due = self.core.clock.now().boot.saturating_add(limit);
            self.core.schedule.set(&self.handle.id, Why::Idle, due);
        }
    }

    fn schedule_expiry(&self) {
        if let Some(expires) = self.record.expires_boot {
            self.core.schedule.set(&self.handle.id, Why::Expiry, expires);
        }
    }

    fn watch_entrypoint(&mut self) {
        self.entrypoint = self.record.entrypoint.clone().map(|id| {
            let watching = entrypoint::ended(self.handle.agent.clone(), id);
            AbortOnDropHandle::new(self.core.tasks.spawn(watching))
        });
    }

    fn judge(&self, request: Request) -> Result<Verdict, ServiceError> {
        match self.phase().judge(request) {
            Verdict::Deny => {
                let (id, phase) = (self.handle.id.clone(), self.phase());
                Err(ServiceError::Denied { id, request, phase })
            }
            verdict => Ok(verdict),
        }
    }
}

/// The caller may have disconnected; the order stays carried out.
fn reply<T>(answer: Answer<T>, outcome: Result<T, ServiceError>) {
    answer.send(outcome).ok();
}

/// Never returns if there is no main process.
async fn end_of(entrypoint: &mut Option<AbortOnDropHandle<Exit>>) -> Exit {
    match entrypoint {
        // A watcher task that was lost saw no exit.
        Some(watching) => watching.await.unwrap_or(Exit::Lost),
        None => std::future::pending().await,
    }
}

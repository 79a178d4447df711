//! One process that the supervisor keeps running: starting it, starting it again, updating and stopping it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ::launcher::identity::ServerIdentity;
use anyhow::{Context, Result, anyhow};
use tokio::net::unix::pipe::{Receiver, Sender, pipe};
use tokio::process::{Child, Command};

use super::child_settings::{ChildSettings, PassToChild, ReadyAnnouncement};
use super::{notify, server, update};
use crate::config::Config;
use crate::output::WithHint;

/// A part that ran this many times longer than the pause before its start is healthy, and its next death
/// counts as the first. So the pauses of a part that keeps dying take a tenth of the time at most.
const HEALTHY_RUN_FACTOR: u32 = 10;
const MIN_RESTART_DELAY: Duration = Duration::from_millis(50);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(5);

/// How long a process that could not start may take to print its reason and end.
const FAILED_START_TIMEOUT: Duration = Duration::from_secs(5);

/// The properties in which supervised processes differ.
pub(crate) struct ProcessRole {
    /// The name in logs and errors.
    pub(super) name: &'static str,
    /// The hidden command that runs it.
    pub(super) subcommand: &'static str,
    pub(super) start: StartRule,
    /// How long it may take to end after it was asked to.
    pub(super) stop_grace: fn(&Config) -> Duration,
    /// Opens the descriptors that it gets besides those that all processes get.
    pub(super) descriptors: Box<dyn Fn() -> Result<Vec<OwnedFd>>>,
    /// Chooses what it is told of the settings, as JSON.
    pub(super) settings: Box<dyn Fn(ChildSettings) -> Result<Vec<u8>>>,
    pub(super) environment: RoleEnvironment,
}

/// The variables that a process inherits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoleEnvironment {
    All,
    /// These alone. Such a process gets no new settings through its pipe either.
    Only(&'static [&'static str]),
}

/// When a process counts as started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartRule {
    /// When it is ready: those after it in the list need it.
    WhenReady,
    /// At once. It reports later that it is ready, and it may end with
    /// [`EXIT_CANNOT_START`](server::EXIT_CANNOT_START) until it was ready for the first time.
    AtOnce,
}

/// An event in the life of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildEvent {
    /// It has become ready.
    Ready,
    /// It has ended and must be started again.
    Died,
    /// It has ended at its first start and asks not to be started again.
    CannotStart,
}

/// A running process.
pub(super) struct ChildProcess {
    role: Rc<ProcessRole>,
    child: Child,
    started_at: Instant,
    restart_delay: Duration,
    /// The process writes one byte here when it is ready, and one for each update that it applied.
    ready: Receiver,
    /// Whether it has reported that it is ready.
    is_ready: bool,
    /// Whether it or a former process of the same role was ready.
    was_ever_ready: bool,
    /// Whether its end of the pipe is closed, so that it cannot report any more.
    ready_closed: bool,
    /// The pipe through which it gets new settings.
    updates: Sender,
}

impl ChildProcess {
    /// Starts a process for the first time.
    pub(super) async fn start(
        role: Rc<ProcessRole>,
        config: &Config,
        identity: &ServerIdentity,
    ) -> Result<Self> {
        Self::start_after(role, config, identity, MIN_RESTART_DELAY, false).await
    }

    async fn start_after(
        role: Rc<ProcessRole>,
        config: &Config,
        identity: &ServerIdentity,
        restart_delay: Duration,
        was_ever_ready: bool,
    ) -> Result<Self> {
        let (ready_writer, ready) = pipe()?;
        let (updates, updated) = pipe()?;
        let announce = match role.start {
            StartRule::AtOnce if !was_ever_ready => ReadyAnnouncement::Yes,
            StartRule::AtOnce | StartRule::WhenReady => ReadyAnnouncement::No,
        };
        let settings = (role.settings)(ChildSettings::new(config, identity, announce))?;
        let mut passed =
            vec![settings_memfd(&settings)?, ready_writer.into_blocking_fd()?, updated.into_blocking_fd()?];
        passed.extend((role.descriptors)()?);
        let child = spawn_role(role.subcommand, &passed, role.environment)?;
        // Our copy of the pipe's end must be closed: a process that dies before it is ready is noticed by
        // the end of file.
        drop(passed);
        let mut started = Self {
            role,
            child,
            started_at: Instant::now(),
            restart_delay,
            ready,
            is_ready: false,
            was_ever_ready,
            ready_closed: false,
            updates,
        };
        if started.role.start == StartRule::WhenReady {
            started.wait_until_ready().await?;
        }
        Ok(started)
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let heard = tokio::io::AsyncReadExt::read(&mut self.ready, &mut [0]).await?;
        if heard == 0 {
            // It closes the pipe before it prints its reason, and it is killed when this process ends.
            if tokio::time::timeout(FAILED_START_TIMEOUT, self.child.wait()).await.is_err() {
                tracing::warn!(
                    part = self.role.name,
                    "process that could not start has not ended; killing it"
                );
            }
            return Err(anyhow!("the {} could not start", self.role.name))
                .with_hint("its reason stands above; `coracle doctor` says what this host lacks");
        }
        self.started_at = Instant::now();
        self.is_ready = true;
        self.was_ever_ready = true;
        Ok(())
    }

    /// Starts the process again after it has died, as often as necessary. Meanwhile sandboxes keep running and
    /// the other processes wait.
    pub(super) async fn restart(&mut self, config: &Config, identity: &ServerIdentity) -> Self {
        let mut pause = self.wait_before_restart().await;
        loop {
            let role = Rc::clone(&self.role);
            match Self::start_after(role, config, identity, pause, self.was_ever_ready).await {
                Ok(started) => return started,
                Err(error) => {
                    let (part, error) = (self.role.name, format!("{error:#}"));
                    tracing::error!(part, error, "process could not be started; retrying")
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RESTART_DELAY);
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.role.name
    }

    /// Returns the pid, until the end of the process was noticed.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until the process becomes ready or ends. Nothing is lost if this future is dropped.
    pub(super) async fn next_event(&mut self) -> ChildEvent {
        loop {
            let waits_for_ready = !self.is_ready && !self.ready_closed;
            tokio::select! {
                status = self.child.wait() => {
                    // At first, a process that cannot start ends the supervisor; later, the start is retried.
                    let refused =
                        status.is_ok_and(|status| status.code() == Some(server::EXIT_CANNOT_START));
                    self.check_ready();
                    return if refused && !self.was_ever_ready {
                        ChildEvent::CannotStart
                    } else {
                        ChildEvent::Died
                    };
                }
                _ = self.ready.readable(), if waits_for_ready => {
                    if self.check_ready() {
                        return ChildEvent::Ready;
                    }
                }
            }
        }
    }

    /// Logs that the process died, waits longer each time it dies young, and returns the next pause.
    async fn wait_before_restart(&self) -> Duration {
        let pause = if self.started_at.elapsed() > self.restart_delay * HEALTHY_RUN_FACTOR {
            MIN_RESTART_DELAY
        } else {
            self.restart_delay
        };
        tracing::warn!(part = self.role.name, "process died; starting it again");
        tokio::time::sleep(pause).await;
        (pause * 2).min(MAX_RESTART_DELAY)
    }

    /// Whether the process has become ready, even if it has ended since.
    fn check_ready(&mut self) -> bool {
        match self.ready.try_read(&mut [0]) {
            Ok(0) => self.ready_closed = true,
            Ok(_) => {
                self.is_ready = true;
                self.was_ever_ready = true;
            }
            // It may arrive later.
            Err(_) => {}
        }
        self.is_ready
    }

    /// Makes the process apply new settings, if it takes any.
    pub(super) async fn send_update(&mut self, settings: &ChildSettings) -> Result<()> {
        if self.role.environment != RoleEnvironment::All {
            return Ok(());
        }
        let expected = if self.is_ready { 1 } else { 2 };
        update::send_settings(&mut self.updates, &mut self.ready, settings, expected).await?;
        self.is_ready = true;
        self.was_ever_ready = true;
        Ok(())
    }

    /// Asks the process to end and waits; if it does not end in time, it is killed.
    pub(super) async fn stop(&mut self, config: &Config) {
        let pid = self.child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?));
        let Some(pid) = pid else { return };
        if rustix::process::kill_process(pid, rustix::process::Signal::TERM).is_err() {
            return;
        }
        let part = self.role.name;
        if tokio::time::timeout((self.role.stop_grace)(config), self.child.wait()).await.is_err() {
            tracing::warn!(part, "process did not end in time; killing it");
            if let Err(error) = self.child.kill().await {
                tracing::warn!(part, %error, "failed to kill process");
            }
        }
    }
}

/// Runs a role of this program to its end.
pub(crate) async fn run_to_end(
    subcommand: &str,
    config: &Config,
    identity: &ServerIdentity,
    limit: Duration,
) -> Result<()> {
    let settings = ChildSettings::new(config, identity, ReadyAnnouncement::No);
    let (ready, _unused) = pipe()?;
    let (_updates, updated) = pipe()?;
    let settings = serde_json::to_vec(&settings)?;
    let passed = [settings_memfd(&settings)?, ready.into_blocking_fd()?, updated.into_blocking_fd()?];
    let mut child = spawn_role(subcommand, &passed, RoleEnvironment::All)?;
    drop(passed);
    match tokio::time::timeout(limit, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(status) => Err(anyhow!("`{subcommand}` failed: {}", status?)),
        Err(_elapsed) => {
            child.kill().await?;
            Err(anyhow!("`{subcommand}` took longer than {} s", limit.as_secs()))
        }
    }
}

/// Starts this program in another role, with descriptors whose numbers are its arguments.
fn spawn_role(role: &str, descriptors: &[OwnedFd], environment: RoleEnvironment) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("coracle").arg(role).arg(std::process::id().to_string());
    // In a group of its own, so that an interrupt on the terminal reaches only the supervisor, which ends its children
    // in order: the server needs the launcher to remove sandboxes.
    command.process_group(0);
    if let RoleEnvironment::Only(names) = environment {
        command.env_clear();
        command.envs(names.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    }
    // Only the supervisor notifies the service manager.
    command.env_remove(notify::NOTIFY_VARIABLE);
    for descriptor in descriptors {
        command.arg(descriptor.pass_to_child()?);
    }
    command.spawn().with_context(|| format!("could not start `{role}`"))
}

/// The settings are passed in memory: arguments and variables are visible to others.
fn settings_memfd(settings: &[u8]) -> Result<OwnedFd> {
    use std::io::{Seek, Write};
    let mut file = File::from(rustix::fs::memfd_create("settings", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(settings)?;
    file.rewind()?;
    Ok(file.into())
}

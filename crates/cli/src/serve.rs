//! `coracle serve`: the supervisor.
//!
//! It holds what must survive a restart of the other processes: the lock on the state directory
//! and the listening socket. It starts the launcher and the server, restarts each when it dies,
//! and is the parent of sandboxes whose launcher died.
//!
//! ```text
//! supervisor ──► launcher   privileged, single-threaded, no network
//!            └─► server     network-facing, its own uid, confined to `server/` in the state directory
//! ```

pub(crate) mod child_settings;
pub(crate) mod launcher;
mod notify;
pub(crate) mod server;
pub(crate) mod state;
mod update;

use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::fs::FlockOperation;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::net::unix::pipe::{Receiver, Sender, pipe};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::ServeArgs;
use crate::config::{Config, ConfigReload, OnStop, SettingChange};
use crate::output::WithHint;
use ::launcher::identity::ServerIdentity;
use child_settings::{ChildSettings, PassToChild, ReadyAnnouncement};
use notify::ServiceManager;
use state::StateDir;
pub(crate) use state::{lock_file, make_state_dir, server_dir, state_dir_hint};

/// A part that ran this many times longer than the pause before its start is healthy, and its next death
/// counts as the first. So the pauses of a part that keeps dying take a tenth of the time at most.
const HEALTHY_RUN_FACTOR: u32 = 10;
const MIN_RESTART_DELAY: Duration = Duration::from_millis(50);
const MAX_RESTART_DELAY: Duration = Duration::from_secs(5);
/// How long the parts may take to end after they were asked to.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// As above, for a server that has to remove its sandboxes first.
const REMOVAL_GRACE: Duration = Duration::from_secs(300);

pub(crate) fn run_supervisor(args: &ServeArgs) -> Result<ExitCode> {
    let config = Config::for_server(args)?;
    crate::tracing_output::start_logging(&config.log);
    let state = StateDir::examine(&config)?;
    drop(lock_server(&config)?);
    let listener = bind_listener(config.listen)?;
    listener.set_nonblocking(true)?;
    // From here on, the state directory is changed.
    let (lock, identity) = state.prepare(&config)?;
    let listeners = ServerListeners { network: listener, operators: bind_operator_socket(&config)? };
    let divided = make_cgroup_room();
    linux::namespaces::adopt_orphans().context("could not become the parent of orphans")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(supervise_children(args, config.clone(), &identity, listeners))?;
    if divided && let Err(error) = ::launcher::leave_leaf_group() {
        tracing::info!(%error, "failed to restore our control group");
    }
    if let Err(error) = fs::remove_file(config.state_dir.join(OPERATOR_SOCKET)) {
        tracing::info!(%error, "failed to remove the operators' socket; the next start removes it");
    }
    drop(lock);
    Ok(code)
}

fn bind_listener(address: SocketAddr) -> Result<TcpListener> {
    let bound = TcpListener::bind(address);
    let hint = match bound.as_ref().map_err(io::Error::kind) {
        Err(io::ErrorKind::AddrInUse) => {
            let port = address.port();
            format!(
                "another program listens there, perhaps another server: `ss -ltnp sport = :{port}` shows it; \
                 choose another address with --listen 127.0.0.1:PORT"
            )
        }
        Err(io::ErrorKind::AddrNotAvailable) => {
            "this host has no such address: choose one of its own with --listen, or 0.0.0.0 for all"
                .to_owned()
        }
        Err(io::ErrorKind::PermissionDenied) => {
            "ports below 1024 are for root: choose another with --listen".to_owned()
        }
        _ => return bound.with_context(|| format!("could not listen on {address}")),
    };
    bound.with_context(|| format!("could not listen on {address}")).with_hint(hint)
}

/// The sockets of the server. Both outlive it.
struct ServerListeners {
    network: TcpListener,
    operators: UnixListener,
}

/// The name of the operators' socket in the state directory.
pub(crate) const OPERATOR_SOCKET: &str = "operator.sock";

/// Listens for operators; the mode of the socket decides who may connect. A socket that a killed
/// supervisor left is replaced: no other process can be using it, since we have the lock.
fn bind_operator_socket(config: &Config) -> Result<UnixListener> {
    let path = config.state_dir.join(OPERATOR_SOCKET);
    let failed = || format!("could not listen on `{}`", path.display());
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error).with_context(failed),
        _ => {}
    }
    // Through a descriptor: the path may be longer than the kernel accepts.
    let directory = File::open(&config.state_dir).with_context(failed)?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(OPERATOR_SOCKET);
    // The umask closes the socket to others from the moment it is created.
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(short);
    rustix::process::umask(mask);
    let listener = listener.with_context(failed)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The control groups of an ordinary user are inside the one we were started in. The launcher can set
/// limits there only if it contains no processes, so we leave it before we start any. Returns whether
/// there is such a group.
fn make_cgroup_room() -> bool {
    if rustix::process::geteuid().is_root() {
        return false;
    }
    let room = ::launcher::move_to_leaf_group();
    if let Err(error) = &room {
        tracing::info!(%error, "no control group was delegated to us");
    }
    room.is_ok()
}

/// Takes the lock that a server holds from start to end. So this also waits for the server of a killed
/// supervisor: it dies shortly after its supervisor, and until then it has the address.
fn lock_server(config: &Config) -> Result<File> {
    lock_file(&config.state_dir.join("server.lock"), FlockOperation::LockExclusive)
        .context("could not lock `server.lock`")
}

/// One of the two processes, and its state.
struct ChildProcess {
    name: &'static str,
    child: Child,
    started_at: Instant,
    restart_delay: Duration,
    /// The part writes one byte here when it is ready, and one for each update that it applied.
    ready: Receiver,
    /// Whether it has reported that it is ready.
    is_ready: bool,
    /// Whether its end of the pipe is closed, so that it cannot report any more.
    ready_closed: bool,
    /// The pipe through which it gets new settings.
    updates: Sender,
}

async fn supervise_children(
    args: &ServeArgs,
    mut config: Config,
    identity: &ServerIdentity,
    listeners: ServerListeners,
) -> Result<ExitCode> {
    let manager = ServiceManager::from_environment();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut ended = signal(SignalKind::child())?;
    let mut launcher = start_launcher(&config, identity, MIN_RESTART_DELAY).await?;
    let mut announce = ReadyAnnouncement::Yes;
    let mut server = start_server(&config, identity, &listeners, announce, MIN_RESTART_DELAY)?;
    loop {
        reap_orphans(&[launcher.child.id(), server.child.id()]);
        tokio::select! {
            _ = launcher.child.wait() => tokio::select! {
                started = restart_launcher(&config, identity, &launcher) => launcher = started,
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            },
            status = server.child.wait() => {
                if server.check_ready() {
                    announce = ReadyAnnouncement::No;
                }
                // At first, a server that cannot start ends the supervisor; later, the start is retried.
                let refused = status.is_ok_and(|status| status.code() == Some(server::EXIT_CANNOT_START));
                if refused && announce == ReadyAnnouncement::Yes {
                    return Ok(ExitCode::FAILURE);
                }
                let pause = server.wait_before_restart().await;
                server = start_server(&config, identity, &listeners, announce, pause)?;
            }
            _ = server.ready.readable(), if !server.is_ready && !server.ready_closed => {
                if server.check_ready() {
                    announce = ReadyAnnouncement::No;
                    manager.notify_ready();
                }
            }
            _ = hangup.recv() => {
                manager.notify_reloading();
                reload_config(args, &mut config, identity, [&mut launcher, &mut server]).await;
                manager.notify_ready();
            }
            // Ended processes are collected at the beginning of the next iteration.
            _ = ended.recv() => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    manager.notify_stopping();
    // The server ends first: while it runs, it uses the launcher.
    stop_child(&mut server, if config.on_stop == OnStop::Remove { REMOVAL_GRACE } else { STOP_GRACE }).await;
    stop_child(&mut launcher, STOP_GRACE).await;
    Ok(ExitCode::SUCCESS)
}

/// Reads the configuration again and lets the parts apply what can change now. An invalid configuration
/// changes nothing.
async fn reload_config(
    args: &ServeArgs,
    config: &mut Config,
    identity: &ServerIdentity,
    parts: [&mut ChildProcess; 2],
) {
    let reload = match Config::for_server(args).and_then(|read| config.reload(&read)) {
        Ok(reload) => reload,
        Err(error) => {
            let error = format!("{error:#}");
            return tracing::error!(error, "configuration not reloaded; the former settings stay in force");
        }
    };
    let ConfigReload { config: reloaded, applied, postponed } = reload;
    *config = reloaded;
    crate::tracing_output::set_log_level(&config.log.level);
    let settings = ChildSettings::new(config, identity, ReadyAnnouncement::No);
    for part in parts {
        if let Err(error) = part.send_update(&settings).await {
            let error = format!("{error:#}");
            tracing::error!(
                part = part.name,
                error,
                "part not updated; it gets the settings at its next start"
            );
        }
    }
    for SettingChange { name, from, to } in &applied {
        tracing::info!(setting = name, from, to, "setting changed");
    }
    for SettingChange { name, from, to } in &postponed {
        tracing::warn!(setting = name, from, to, "setting differs and needs a restart of the server");
    }
    tracing::info!(changed = applied.len(), need_restart = postponed.len(), "configuration reloaded");
}

impl ChildProcess {
    /// Logs that the part died, waits longer each time it dies young, and returns the next pause.
    async fn wait_before_restart(&self) -> Duration {
        let pause = if self.started_at.elapsed() > self.restart_delay * HEALTHY_RUN_FACTOR {
            MIN_RESTART_DELAY
        } else {
            self.restart_delay
        };
        tracing::warn!(part = self.name, "process died; starting it again");
        tokio::time::sleep(pause).await;
        (pause * 2).min(MAX_RESTART_DELAY)
    }

    /// Whether the part has become ready, even if it has ended since.
    fn check_ready(&mut self) -> bool {
        match self.ready.try_read(&mut [0]) {
            Ok(0) => self.ready_closed = true,
            Ok(_) => self.is_ready = true,
            // It may arrive later.
            Err(_) => {}
        }
        self.is_ready
    }

    /// Makes the part apply new settings.
    async fn send_update(&mut self, settings: &ChildSettings) -> Result<()> {
        let expected = if self.is_ready { 1 } else { 2 };
        update::send_settings(&mut self.updates, &mut self.ready, settings, expected).await?;
        self.is_ready = true;
        Ok(())
    }
}

/// Starts the launcher and waits until it listens.
async fn start_launcher(config: &Config, identity: &ServerIdentity, pause: Duration) -> Result<ChildProcess> {
    let (ready_writer, mut ready) = pipe()?;
    let (updates, updated) = pipe()?;
    let settings = ChildSettings::new(config, identity, ReadyAnnouncement::No);
    let passed = [settings_memfd(&settings)?, ready_writer.into_blocking_fd()?, updated.into_blocking_fd()?];
    let child = spawn_role("__launcher", &passed)?;
    // Our copy of the pipe's end must be closed: a launcher that dies before it is ready is noticed by
    // the end of file.
    drop(passed);
    let mut byte = [0];
    let heard = tokio::io::AsyncReadExt::read(&mut ready, &mut byte).await?;
    if heard == 0 {
        return Err(anyhow!("the launcher could not start"))
            .with_hint("its reason stands above; `coracle doctor` says what this host lacks");
    }
    Ok(ChildProcess {
        name: "launcher",
        child,
        started_at: Instant::now(),
        restart_delay: pause,
        ready,
        is_ready: true,
        ready_closed: false,
        updates,
    })
}

/// Restarts the launcher after `former` has died, as often as necessary. Meanwhile sandboxes keep
/// running and the server waits.
async fn restart_launcher(config: &Config, identity: &ServerIdentity, former: &ChildProcess) -> ChildProcess {
    let mut pause = former.wait_before_restart().await;
    loop {
        match start_launcher(config, identity, pause).await {
            Ok(launcher) => return launcher,
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "the launcher could not be started; retrying")
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(MAX_RESTART_DELAY);
    }
}

fn start_server(
    config: &Config,
    identity: &ServerIdentity,
    listeners: &ServerListeners,
    announce: ReadyAnnouncement,
    pause: Duration,
) -> Result<ChildProcess> {
    let (ready_writer, ready) = pipe()?;
    let (updates, updated) = pipe()?;
    let settings = ChildSettings::new(config, identity, announce);
    // The lock comes before the listeners: the kernel releases them in the opposite order.
    let lock = OwnedFd::from(lock_server(config)?);
    let operators = listeners.operators.as_fd().try_clone_to_owned()?;
    let network = listeners.network.as_fd().try_clone_to_owned()?;
    let (ready_writer, updated) = (ready_writer.into_blocking_fd()?, updated.into_blocking_fd()?);
    let passed = [settings_memfd(&settings)?, ready_writer, updated, lock, operators, network];
    let child = spawn_role("__server", &passed)?;
    Ok(ChildProcess {
        name: "server",
        child,
        started_at: Instant::now(),
        restart_delay: pause,
        ready,
        is_ready: false,
        ready_closed: false,
        updates,
    })
}

/// Starts this program in another role, with descriptors whose numbers are its arguments.
fn spawn_role(role: &str, descriptors: &[OwnedFd]) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("coracle").arg(role).arg(std::process::id().to_string());
    // Only the supervisor notifies the service manager.
    command.env_remove(notify::NOTIFY_VARIABLE);
    for descriptor in descriptors {
        command.arg(descriptor.pass_to_child()?);
    }
    command.spawn().with_context(|| format!("could not start `{role}`"))
}

/// The settings are passed in memory: arguments and variables are visible to others.
fn settings_memfd(settings: &ChildSettings) -> Result<OwnedFd> {
    use std::io::{Seek, Write};
    let mut file = File::from(rustix::fs::memfd_create("settings", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(settings)?)?;
    file.rewind()?;
    Ok(file.into())
}

/// Asks a part to end and waits; if it does not end in time, it is killed.
async fn stop_child(part: &mut ChildProcess, grace: Duration) {
    let Some(pid) = part.child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?))
    else {
        return;
    };
    if rustix::process::kill_process(pid, rustix::process::Signal::TERM).is_err() {
        return;
    }
    if tokio::time::timeout(grace, part.child.wait()).await.is_err() {
        tracing::warn!(part = part.name, "process did not end in time; killing it");
        if let Err(error) = part.child.kill().await {
            tracing::warn!(part = part.name, %error, "failed to kill process");
        }
    }
}

/// Collects sandboxes that became our children when their launcher died. Our own two children are left
/// to the code that waits for them.
fn reap_orphans(ours: &[Option<u32>]) {
    while let Ok(Some(pid)) = linux::spawn::peek_ended_child() {
        if ours.contains(&u32::try_from(pid.as_raw_pid()).ok()) {
            return;
        }
        if waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).is_err() {
            return;
        }
    }
}

//! `coracle serve`: the supervisor.
//!
//! It holds what must survive a restart of the other processes: the lock on the state directory,
//! the listening sockets, and the sockets of sandboxes whose connections egress carries. It starts a list of processes, restarts each when it dies, and is the parent of
//! sandboxes whose launcher died.
//!
//! ```text
//! supervisor ──► egress     carries connections of sandboxes, its own uid, no file to write
//!            ├─► launcher   privileged, single-threaded, no network
//!            └─► server     network-facing, its own uid, confined to `server/` in the state directory
//! ```

pub(crate) mod child_process;
pub(crate) mod child_settings;
pub(crate) mod egress;
pub(crate) mod keeper;
pub(crate) mod launcher;
mod notify;
mod own_sandbox;
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
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::select_all;
use rustix::fs::FlockOperation;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::ServeArgs;
use crate::config::{Config, ConfigReload, OnStop, SettingChange};
use crate::output::WithHint;
use ::launcher::identity::ServerIdentity;
use ::launcher::role_filters::{self, FilterRole};
pub(crate) use child_process::ProcessRole;
use child_process::{ChildEvent, ChildProcess, RoleEnvironment, StartRule};
use child_settings::{ChildSettings, ReadyAnnouncement};
pub(crate) use keeper::SocketKeeper;
use notify::ServiceManager;
use state::StateDir;
pub(crate) use state::{lock_file, make_state_dir, server_dir, state_dir_hint};

/// How long the parts may take to end after they were asked to.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// As above, for a server that has to remove its sandboxes first.
const REMOVAL_GRACE: Duration = Duration::from_secs(300);

pub(crate) fn run_supervisor(args: &ServeArgs) -> Result<ExitCode> {
    let config = Config::for_server(args)?;
    crate::tracing_output::start_logging(&config.log);
    let state = StateDir::examine(&config)?;
    drop(lock_server(&config.state_dir)?);
    let listener = bind_listener(config.listen, "--listen 127.0.0.1:PORT")?;
    // From here on, the state directory is changed.
    let (lock, identity) = state.prepare(&config)?;
    let listeners = ServerListeners { network: listener, operators: bind_operator_socket(&config)? };
    let group = become_supervisor()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let keeper = SocketKeeper::new(egress::egress_settings(&config))?;
    let roles = vec![
        egress::egress_role(keeper.clone(), egress::bind_egress_socket(&config, &identity)?),
        launcher_role(keeper.clone()),
        server_role(&config, listeners),
    ];
    let code = runtime.block_on(supervise(Some(args), config.clone(), &identity, roles, &keeper))?;
    group.restore();
    for socket in [OPERATOR_SOCKET, egress_protocol::EGRESS_SOCKET] {
        if let Err(error) = fs::remove_file(config.state_dir.join(socket)) {
            tracing::info!(socket, %error, "failed to remove a socket; the next start removes it");
        }
    }
    drop(lock);
    Ok(code)
}

/// Prepares this process to start and watch the others: they inherit its filter and its capabilities.
pub(crate) fn become_supervisor() -> Result<SupervisorGroup> {
    let is_divided = make_cgroup_room();
    linux::namespaces::adopt_orphans().context("could not become the parent of orphans")?;
    role_filters::drop_unneeded_capabilities()?;
    FilterRole::Supervisor.load_filter()?;
    Ok(SupervisorGroup { is_divided })
}

/// The control group that we were started in.
pub(crate) struct SupervisorGroup {
    /// Whether we left it for one below.
    is_divided: bool,
}

impl SupervisorGroup {
    /// Returns to the group, once all other processes have ended.
    pub(crate) fn restore(self) {
        if self.is_divided
            && let Err(error) = ::launcher::leave_leaf_group()
        {
            tracing::info!(%error, "failed to restore our control group");
        }
    }
}

/// Listens at an address. `flag` is how the user chooses another one.
pub(crate) fn bind_listener(address: SocketAddr, flag: &str) -> Result<OwnedFd> {
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(OwnedFd::from(listener))
    });
    let hint = match bound.as_ref().map_err(io::Error::kind) {
        Err(io::ErrorKind::AddrInUse) => {
            let port = address.port();
            format!(
                "another program listens there, perhaps another server: `ss -ltnp sport = :{port}` shows it; \
                 choose another address with {flag}"
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
pub(crate) struct ServerListeners {
    /// A TCP socket or, in a server of one's own, perhaps a Unix socket.
    pub(crate) network: OwnedFd,
    pub(crate) operators: UnixListener,
}

/// The name of the operators' socket in the state directory.
pub(crate) const OPERATOR_SOCKET: &str = "operator.sock";

/// The name of the lock that a server holds, in the state directory.
const SERVER_LOCK: &str = "server.lock";

/// Listens for operators; the mode of the socket decides who may connect. A socket that a killed
/// supervisor left is replaced: no other process can be using it, since we have the lock.
pub(crate) fn bind_operator_socket(config: &Config) -> Result<UnixListener> {
    let path = config.state_dir.join(OPERATOR_SOCKET);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("could not listen on `{}`", path.display()));
        }
        _ => {}
    }
    bind_private_socket(&path)
}

/// Listens on a new socket that only its user may open.
pub(crate) fn bind_private_socket(path: &Path) -> Result<UnixListener> {
    let failed = || format!("could not listen on `{}`", path.display());
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)).with_context(failed);
    };
    // Through a descriptor: the path may be longer than the kernel accepts.
    let directory = File::open(directory).with_context(failed)?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
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
    if linux::privileges::is_host_root() {
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
pub(crate) fn lock_server(state_dir: &Path) -> Result<File> {
    lock_file(&state_dir.join(SERVER_LOCK), FlockOperation::LockExclusive)
        .context("could not lock `server.lock`")
}

/// Like [`lock_server`], for a server that need not end: fails if it still has the lock at `end`.
pub(crate) fn lock_server_until(state_dir: &Path, end: Instant) -> Result<File> {
    state::lock_until(&state_dir.join(SERVER_LOCK), end).context("could not lock `server.lock`")
}

/// The process that makes sandboxes. The server needs it.
pub(crate) fn launcher_role(keeper: SocketKeeper) -> ProcessRole {
    let open_files = keeper.started_with_files();
    ProcessRole {
        name: "launcher",
        subcommand: "__launcher",
        start: StartRule::WhenReady,
        stop_grace: |_| STOP_GRACE,
        descriptors: Box::new(move || Ok(vec![keeper.connect_launcher()?])),
        settings: Box::new(move |settings| {
            Ok(serde_json::to_vec(&ChildSettings { open_files, ..settings })?)
        }),
        environment: RoleEnvironment::All,
    }
}

/// The process that serves clients, on sockets that outlive it.
pub(crate) fn server_role(config: &Config, listeners: ServerListeners) -> ProcessRole {
    let state_dir = config.state_dir.clone();
    let descriptors = move || {
        // The lock comes before the listeners: the kernel releases them in the opposite order.
        let lock = OwnedFd::from(lock_server(&state_dir)?);
        let operators = listeners.operators.as_fd().try_clone_to_owned()?;
        let network = listeners.network.as_fd().try_clone_to_owned()?;
        Ok(vec![lock, operators, network])
    };
    ProcessRole {
        name: "server",
        subcommand: "__server",
        start: StartRule::AtOnce,
        stop_grace: |config| if config.on_stop == OnStop::Remove { REMOVAL_GRACE } else { STOP_GRACE },
        descriptors: Box::new(descriptors),
        settings: Box::new(|settings| Ok(serde_json::to_vec(&settings)?)),
        environment: RoleEnvironment::All,
    }
}

/// Starts processes in the order of the list, keeps them running until a signal asks us to end, and stops them
/// in the opposite order: each may use those before it.
///
/// `reload` names the configuration that a hangup reads again; without it, a hangup changes nothing.
pub(crate) async fn supervise(
    reload: Option<&ServeArgs>,
    mut config: Config,
    identity: &ServerIdentity,
    roles: Vec<ProcessRole>,
    keeper: &SocketKeeper,
) -> Result<ExitCode> {
    let manager = ServiceManager::from_environment();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut ended = signal(SignalKind::child())?;
    let mut children = Vec::new();
    for role in roles {
        match ChildProcess::start(Rc::new(role), &config, identity).await {
            Ok(child) => children.push(child),
            Err(error) => {
                stop_children(&mut children, &config, identity).await;
                return Err(error);
            }
        }
    }
    let mut code = ExitCode::SUCCESS;
    loop {
        reap_orphans(&children);
        tokio::select! {
            (index, event) = next_event(&mut children) => match event {
                ChildEvent::Ready => manager.notify_ready(),
                ChildEvent::CannotStart => {
                    code = ExitCode::FAILURE;
                    break;
                }
                ChildEvent::Died => tokio::select! {
                    restarted = children[index].restart(&config, identity) => children[index] = restarted,
                    _ = terminate.recv() => break,
                    _ = interrupt.recv() => break,
                },
            },
            _ = hangup.recv() => if let Some(args) = reload {
                manager.notify_reloading();
                reload_config(args, &mut config, identity, &mut children).await;
                keeper.configure(egress::egress_settings(&config));
                manager.notify_ready();
            },
            // Ended processes are collected at the beginning of the next iteration.
            _ = ended.recv() => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    manager.notify_stopping();
    stop_children(&mut children, &config, identity).await;
    Ok(code)
}

/// Stops all processes, and removes what a launcher leaves that died or was killed before it could do so.
async fn stop_children(children: &mut [ChildProcess], config: &Config, identity: &ServerIdentity) {
    for child in children.iter_mut().rev() {
        child.stop(config).await;
    }
    // We have the lock of the state directory, so no other server uses these groups.
    if linux::privileges::is_host_root()
        && let Err(error) = ::launcher::remove_empty_groups(&identity.instance)
    {
        tracing::warn!(%error, "failed to remove empty control groups; the next stop of a server with this state directory retries");
    }
}

/// Waits for the next event of any process, and returns the index of that process.
async fn next_event(children: &mut [ChildProcess]) -> (usize, ChildEvent) {
    let events = children.iter_mut().map(|child| Box::pin(child.next_event()));
    let (event, index, _) = select_all(events).await;
    (index, event)
}

/// Reads the configuration again and lets the parts apply what can change now. An invalid configuration
/// changes nothing.
async fn reload_config(
    args: &ServeArgs,
    config: &mut Config,
    identity: &ServerIdentity,
    parts: &mut [ChildProcess],
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
                part = part.name(),
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

/// Collects sandboxes that became our children when their launcher died. Our own children are left to
/// the code that waits for them.
fn reap_orphans(children: &[ChildProcess]) {
    while let Ok(Some(pid)) = linux::spawn::peek_ended_child() {
        let pid_number = u32::try_from(pid.as_raw_pid()).ok();
        if children.iter().any(|child| child.pid() == pid_number) {
            return;
        }
        if waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).is_err() {
            return;
        }
    }
}

//! A server of one's own: one sandbox, served in the API of one front, for as long as this command runs.
//!
//! It is the supervisor, launcher and server of `coracle serve` with other settings: a temporary state directory, a
//! socket that only its user may open unless a port is asked for, and nothing left at the end. What a killed one leaves
//! is removed by the next start.
//!
//! ```text
//! plan ─► settings ─► directory ─► leftovers removed ─► supervise … signal or failure ─► sandboxes, then files removed
//! ```

pub(crate) mod aio;
mod state;

use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use fronts::{FrontSandboxRequest, RequestedNetwork, RootAccess, RootSandbox, RootVariables, SettingValues};
use launcher::identity::ServerIdentity;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use self::state::OwnServersDir;
use crate::args::{NetworkChoice, OwnServerArgs};
use crate::config::{AnnouncementFormat, Config, OwnListener, OwnServerConfig};
use crate::output::{Printer, WithHint};
use crate::serve::child_process::run_to_end;
use crate::serve::launcher::REMOVAL_SUBCOMMAND;
use crate::serve::state::StateDir;
use crate::serve::{self, ServerListeners, SocketKeeper, egress};

/// How long the sandboxes of one directory may take to end.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the servers of killed supervisors may take to end, all together. Other starts wait meanwhile.
const LEFTOVERS_TIMEOUT: Duration = Duration::from_secs(5);
/// The name of the socket in the temporary state directory.
const SOCKET_NAME: &str = "api.sock";

/// A server that was described and checked, but not started.
pub(crate) struct OwnServer {
    host: Config,
    front: &'static str,
    settings: SettingValues,
    sandbox: FrontSandboxRequest,
    listener: RequestedListener,
    announcement: AnnouncementFormat,
}

/// Where the user wants the server to listen.
enum RequestedListener {
    Socket(Option<PathBuf>),
    Network(SocketAddr),
}

/// The context of an error: sandboxes could not be removed.
#[derive(Debug)]
struct SandboxesLeft;

impl fmt::Display for SandboxesLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("could not remove the sandboxes; the next start tries again")
    }
}

/// A directory of a killed server, locked.
struct LeftoverState {
    config: Config,
    identity: ServerIdentity,
    _lock: std::fs::File,
}

impl OwnServer {
    /// Reads the variables, prints those that have no effect, and checks where to listen. Values of variables are checked
    /// when they are used.
    pub(crate) fn plan(front: &'static str, args: OwnServerArgs, printer: &Printer) -> Result<Self> {
        let host = Config::for_host(&args.state)?;
        let given = args.env.into_iter().collect();
        let read = fronts::read_root_variables(front, std::env::vars_os(), given).map_err(|error| {
            let hint = error.hint;
            let error = anyhow::Error::from(error);
            match hint {
                Some(hint) => with_hint(error, hint),
                None => error,
            }
        })?;
        let RootVariables { settings, env, ignored, access } = read;
        if !ignored.is_empty() {
            let named: Vec<_> = ignored.iter().map(|(name, why)| format!("{name} ({why})")).collect();
            printer.remark(format!("these variables have no effect: {}", named.join(", ")));
        }
        let listener = match (args.port, args.listen) {
            (Some(port), _) => RequestedListener::Network((Ipv4Addr::LOCALHOST, port).into()),
            (None, Some(address)) => RequestedListener::Network(address),
            (None, None) => RequestedListener::Socket(args.socket),
        };
        if let RequestedListener::Network(address) = listener
            && !address.ip().is_loopback()
            && access != Some(RootAccess::Credential)
        {
            return Err(anyhow!("`{address}` can be reached from other hosts, and no credential is set"))
                .with_hint("set SANDBOX_API_KEY or JWT_PUBLIC_KEY, or listen on 127.0.0.1");
        }
        let announcement =
            if printer.is_json() { AnnouncementFormat::Json } else { AnnouncementFormat::Text };
        let sandbox = FrontSandboxRequest {
            image: args.image,
            network: args.network.map(requested_network),
            memory_bytes: args.limits.memory.map(|bytes| bytes.0),
            cpu_millis: args.limits.cpus.map(|cpus| cpus.0),
            pids: args.limits.pids,
            disk_bytes: args.limits.disk.map(|bytes| bytes.0),
            env,
            ..FrontSandboxRequest::default()
        };
        Ok(Self { host, front, settings, sandbox, listener, announcement })
    }

    /// Runs the server until a signal asks it to end, and removes everything.
    pub(crate) fn run(self) -> Result<ExitCode> {
        let turn = OwnServersDir::open(&self.host.state_dir)?;
        let leftovers = turn.find_leftovers()?;
        wait_for_killed_servers(&leftovers);
        // Before the server's own directory is made: the address is the likeliest thing to be taken.
        let network = match &self.listener {
            RequestedListener::Network(address) => Some(serve::bind_listener(*address, "--port PORT")?),
            RequestedListener::Socket(_) => None,
        };
        let directory = turn.create()?;
        let outcome = self.run_in(&directory, network, leftovers, turn);
        // The next start needs the records of sandboxes that are left.
        if !outcome.as_ref().is_err_and(|error| error.is::<SandboxesLeft>()) {
            state::remove_state(&directory);
        }
        outcome
    }

    fn run_in(
        self,
        directory: &Path,
        network: Option<OwnedFd>,
        leftovers: Vec<PathBuf>,
        turn: OwnServersDir,
    ) -> Result<ExitCode> {
        let (config, bound) = self.bind(directory, network)?;
        crate::tracing_output::start_logging(&config.log);
        let state = StateDir::examine(&config)?;
        let leftovers: Vec<_> =
            leftovers.into_iter().filter_map(|path| lock_leftover(&config, path)).collect();
        drop(turn);
        let (lock, identity) = state.prepare(&config)?;
        let listeners = ServerListeners { network: bound, operators: serve::bind_operator_socket(&config)? };
        let group = serve::become_supervisor()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let code = runtime.block_on(async {
            for leftover in leftovers {
                remove_leftover(leftover).await;
            }
            let keeper = SocketKeeper::new(egress::egress_settings(&config))?;
            let roles = vec![
                egress::egress_role(keeper.clone(), egress::bind_egress_socket(&config, &identity)?),
                serve::launcher_role(keeper.clone()),
                serve::server_role(&config, listeners),
            ];
            let code = serve::supervise(None, config.clone(), &identity, roles, &keeper).await;
            // The server has removed its sandbox, unless it failed or was killed.
            remove_sandboxes(&config, &identity).await?;
            code
        })?;
        group.restore();
        if let Some(OwnServerConfig { listener: OwnListener::Socket(path), .. }) = &config.own_server
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(socket = %path.display(), %error, "socket was not removed; the next server replaces it");
        }
        drop(lock);
        Ok(code)
    }

    /// Opens the listener and completes the settings.
    fn bind(self, directory: &Path, network: Option<OwnedFd>) -> Result<(Config, OwnedFd)> {
        let (listener, bound) = match (self.listener, network) {
            (RequestedListener::Network(address), Some(bound)) => (OwnListener::Network(address), bound),
            (RequestedListener::Socket(Some(path)), _) => bind_socket(&path)?,
            (RequestedListener::Socket(None) | RequestedListener::Network(_), _) => {
                bind_socket(&directory.join(SOCKET_NAME))?
            }
        };
        let own = OwnServerConfig {
            root: RootSandbox { front: self.front.to_owned() },
            sandbox: self.sandbox,
            listener,
            image_state: self.host.state_dir.clone(),
            announcement: self.announcement,
        };
        let config = self.host.into_own_server(own, self.settings, directory.to_owned())?;
        Ok((config, bound))
    }
}

/// Listens on a socket that only its user may open. One that a killed server left is replaced.
fn bind_socket(path: &Path) -> Result<(OwnListener, OwnedFd)> {
    let path = std::path::absolute(path).context("could not resolve the path of the socket")?;
    let is_socket = fs::symlink_metadata(&path).is_ok_and(|facts| facts.file_type().is_socket());
    if is_socket && has_no_listener(&path) {
        fs::remove_file(&path).with_context(|| format!("could not replace `{}`", path.display()))?;
    }
    let bound = serve::bind_private_socket(&path)
        .with_hint("choose another path with --socket, or a port with --port")?;
    Ok((OwnListener::Socket(path), bound.into()))
}

/// Whether nobody listens on a socket. It does not wait: the kernel returns EAGAIN if the queue of a listener is full
/// (connect(2)), and the listener may belong to another user who accepts nothing.
fn has_no_listener(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connected = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?));
    connected == Err(Errno::CONNREFUSED)
}

/// Waits until the servers of killed supervisors have ended. Each dies shortly after its supervisor and listens until
/// then, perhaps on the very address that is wanted now. One that does not end in time is left to [`lock_leftover`].
fn wait_for_killed_servers(leftovers: &[PathBuf]) {
    let end = Instant::now() + LEFTOVERS_TIMEOUT;
    for directory in leftovers {
        drop(serve::lock_server_until(directory, end));
    }
}

/// Locks what a killed server left. One that cannot be used is left to the next start.
fn lock_leftover(config: &Config, directory: PathBuf) -> Option<LeftoverState> {
    let config = config.with_state_dir(directory);
    // Its server has usually ended, see `wait_for_killed_servers`, but a system call of it may hang.
    let locked = serve::lock_server_until(&config.state_dir, Instant::now())
        .and_then(|_server| StateDir::examine(&config)?.prepare(&config));
    match locked {
        Ok((lock, identity)) => Some(LeftoverState { config, identity, _lock: lock }),
        Err(error) => {
            let (directory, error) = (config.state_dir.display().to_string(), format!("{error:#}"));
            tracing::warn!(
                directory,
                error,
                "state of a killed server was not removed; the next start retries"
            );
            None
        }
    }
}

async fn remove_leftover(leftover: LeftoverState) {
    let LeftoverState { config, identity, _lock } = leftover;
    match remove_sandboxes(&config, &identity).await {
        Ok(()) => state::remove_state(&config.state_dir),
        Err(error) => {
            let (directory, error) = (config.state_dir.display().to_string(), format!("{error:#}"));
            tracing::warn!(
                directory,
                error,
                "sandboxes of a killed server were not removed; the next start retries"
            );
        }
    }
}

/// Removes all sandboxes of a state directory, in a process that may.
async fn remove_sandboxes(config: &Config, identity: &ServerIdentity) -> Result<()> {
    let removed = run_to_end(REMOVAL_SUBCOMMAND, config, identity, REMOVAL_TIMEOUT).await;
    removed.context(SandboxesLeft)
}

fn requested_network(network: NetworkChoice) -> RequestedNetwork {
    match network {
        NetworkChoice::Off => RequestedNetwork::Off,
        NetworkChoice::On => RequestedNetwork::On,
        NetworkChoice::Auto => RequestedNetwork::Auto,
        NetworkChoice::Filtered => RequestedNetwork::Filtered,
    }
}

fn with_hint(error: anyhow::Error, hint: &'static str) -> anyhow::Error {
    Err::<(), _>(error).with_hint(hint).expect_err("it is an error")
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    use rustix::fs::FlockOperation;
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn socket_with_a_full_queue_has_a_listener_and_no_wait_is_needed() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let mut queue = Vec::new();
        loop {
            let kind = SocketType::STREAM;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::NONBLOCK, None).unwrap();
            match rustix::net::connect(&socket, &address) {
                Ok(()) => queue.push(socket),
                Err(error) => {
                    assert_eq!(error, Errno::AGAIN);
                    break;
                }
            }
        }
        let (send, receive) = mpsc::channel();
        let asked = path.clone();
        std::thread::spawn(move || send.send(has_no_listener(&asked)));
        assert_eq!(receive.recv_timeout(Duration::from_secs(30)), Ok(false));
        drop((listener, queue));
        assert!(has_no_listener(&path));
    }

    #[test]
    fn lock_of_a_server_that_does_not_end_is_given_up() {
        let directory = TempDir::new().unwrap();
        let lock = directory.path().join("server.lock");
        let held = serve::lock_file(&lock, FlockOperation::LockExclusive).unwrap();
        let (send, receive) = mpsc::channel();
        let asked = directory.path().to_owned();
        let end = Instant::now() + Duration::from_millis(50);
        std::thread::spawn(move || send.send(serve::lock_server_until(&asked, end).is_ok()));
        assert_eq!(receive.recv_timeout(Duration::from_secs(30)), Ok(false));
        drop(held);
        serve::lock_server_until(directory.path(), end).unwrap();
    }
}

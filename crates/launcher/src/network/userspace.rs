//! The network of an ordinary user's sandbox: a program that forwards its packets.
//!
//! ```text
//!  launcher ─ starts ─► keeper (`coracle __network`) ─► pasta or slirp4netns ─ tap in the sandbox
//!                         └─ leaves a child that watches the sandbox's first process
//! ```
//!
//! The watching child outlives the launcher, as the sandbox does, and ends the program with the
//! sandbox, so nothing has to be recovered after a crash. Neither program can be configured with the
//! addresses that a sandbox must not reach. So the keeper first installs the guard in the sandbox's own
//! namespace, which code inside cannot change.

use std::fs;
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use linux::namespaces::{self, NamespaceSet};
use linux::netlink::route::RoutingSocket;
use linux::spawn::{self, ForkResult, ProcessExit, SingleThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::settings::NetworkSettings;
use super::{NetworkError, guard};
use crate::process::record::ProcessIdentity;
use domain::AddressPrefix;

/// The internal subcommand that runs this binary as a keeper.
pub const KEEPER_SUBCOMMAND: &str = "__network";

/// How long a program may take until it forwards packets.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A program that can forward packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketForwarder {
    kind: ForwarderKind,
    path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum ForwarderKind {
    Pasta,
    Slirp,
}

/// The configuration of a keeper, sent to its standard input.
#[derive(Serialize, Deserialize)]
struct KeeperConfig {
    sandbox: ProcessIdentity,
    program: PacketForwarder,
    settings: NetworkSettings,
}

impl PacketForwarder {
    /// Finds the best program on this host that can work.
    pub fn find() -> Result<Self, NetworkError> {
        let found = [(ForwarderKind::Pasta, "pasta"), (ForwarderKind::Slirp, "slirp4netns")]
            .into_iter()
            .find_map(|(kind, name)| Some(Self { kind, path: find_in_path(name)? }))
            .ok_or(NetworkError::NoProgram)?;
        let tun = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
        tun.map_err(NetworkError::NoTun).map(|_| found)
    }

    /// Returns the name server address for a sandbox; the program forwards to the host's name servers.
    fn resolver_address(&self) -> IpAddr {
        match self.kind {
            // An address that is reserved for documentation, so no machine has it: pasta answers for it.
            ForwarderKind::Pasta => IpAddr::from([192, 0, 2, 53]),
            ForwarderKind::Slirp => IpAddr::from([10, 0, 2, 3]),
        }
    }

    pub fn resolv_conf(&self) -> String {
        format!("nameserver {}\n", self.resolver_address())
    }

    /// Describes what connects a sandbox that uses the program.
    pub fn describe(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("{name} in user space")
    }

    /// Starts a keeper for a sandbox and waits until packets are forwarded.
    pub fn start_keeper(&self, sandbox: &ProcessIdentity, settings: &NetworkSettings) -> io::Result<()> {
        let job =
            KeeperConfig { sandbox: sandbox.clone(), program: self.clone(), settings: settings.clone() };
        let mut keeper = Command::new("/proc/self/exe")
            .arg(KEEPER_SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Signals from a terminal are only for the command inside.
            .process_group(0)
            .spawn()?;
        let (Some(mut input), Some(output), Some(messages)) =
            (keeper.stdin.take(), keeper.stdout.take(), keeper.stderr.take())
        else {
            return Err(io::Error::other("the keeper has no pipes"));
        };
        input.write_all(&serde_json::to_vec(&job)?)?;
        drop(input);
        let ready = OwnedFd::from(output);
        if wait_readable(&ready)? && rustix::io::read(&ready, &mut [0; 1])? == 1 {
            // The process that keeps watching is a child of the keeper.
            return keeper.wait().map(drop);
        }
        // The keeper failed or took too long; it is killed with everything that it started.
        match kill_process_group(Pid::from_child(&keeper), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        keeper.wait()?;
        Err(io::Error::other(read_messages(&OwnedFd::from(messages))?))
    }

    fn build_command(&self, pid: i32) -> Command {
        let mut command = Command::new(&self.path);
        match self.kind {
            ForwarderKind::Pasta => command
                .args(["--config-net", "--no-map-gw", "--quiet", "--ns-ifname", "eth0", "--dns-forward"])
                .arg(self.resolver_address().to_string())
                // No ports are forwarded in either direction.
                .args(["--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none"])
                .arg(pid.to_string()),
            ForwarderKind::Slirp => command
                .args(["--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox"])
                .args(["--enable-seccomp", "--ready-fd=1"])
                .args([pid.to_string(), "eth0".to_owned()]),
        };
        command.stdin(Stdio::null());
        command
    }
}

/// Returns the messages in the pipe so far. Other processes may still have the pipe open, so this does
/// not wait for its end.
fn read_messages(pipe: &OwnedFd) -> io::Result<String> {
    rustix::io::ioctl_fionbio(pipe, true)?;
    let mut buffer = [0; 4096];
    let length = match rustix::io::read(pipe, &mut buffer) {
        Err(rustix::io::Errno::AGAIN) => 0,
        read => read?,
    };
    let reason = String::from_utf8_lossy(&buffer[..length]).trim().to_owned();
    Ok(if reason.is_empty() { "the network keeper did not start in time".to_owned() } else { reason })
}

fn find_in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
    let executable = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(executable)
}

/// Runs the keeper: installs the guard, starts the program, reports that on standard output, and ends
/// the program with the sandbox.
pub fn run_keeper() -> io::Result<()> {
    let thread = SingleThread::prove()?;
    let mut input = Vec::new();
    io::stdin().lock().take(1 << 20).read_to_end(&mut input)?;
    let KeeperConfig { sandbox, program, settings } = serde_json::from_slice(&input)?;
    let first = sandbox.open_pidfd().ok_or_else(|| io::Error::other("the sandbox has ended"))?;
    // A program that moves to the background then becomes our child.
    namespaces::adopt_orphans()?;
    let here: Vec<AddressPrefix> =
        RoutingSocket::open()?.list_addresses()?.into_iter().map(AddressPrefix::from).collect();
    install_guard(&thread, &first, &settings, &here, program.resolver_address())?;
    let carrier = start_forwarder(&program, sandbox.pid)?;
    rustix::io::write(rustix::stdio::stdout(), b"1")?;
    match thread.fork(NamespaceSet::NONE, None)? {
        ForkResult::Parent { .. } => Ok(()),
        ForkResult::Child => spawn::exit_now(i32::from(end_with_sandbox(&first, &carrier).is_err())),
    }
}

/// Ends the program with the sandbox.
fn end_with_sandbox(first: &OwnedFd, carrier: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(first, PollFlags::IN), PollFd::new(carrier, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
    match pidfd_send_signal(carrier, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn install_guard(
    thread: &SingleThread,
    first: &OwnedFd,
    settings: &NetworkSettings,
    here: &[AddressPrefix],
    resolver: IpAddr,
) -> io::Result<()> {
    match thread.fork(NamespaceSet::NONE, None)? {
        ForkResult::Child => {
            let done = namespaces::enter_namespace(first.as_fd(), NamespaceSet::USER.and(NamespaceSet::NET))
                .and_then(|()| guard::build_sandbox_table(settings, here, &[resolver]).install());
            if let Err(error) = &done {
                writeln!(io::stderr(), "could not install the guard in the sandbox: {error}").ok();
            }
            spawn::exit_now(i32::from(done.is_err()))
        }
        ForkResult::Parent { pidfd, .. } => match spawn::wait_for_child(pidfd.as_fd())? {
            ProcessExit::Code(0) => Ok(()),
            ProcessExit::Code(_) | ProcessExit::Signal(_) => {
                Err(io::Error::other("could not install the guard in the sandbox"))
            }
        },
    }
}

/// Starts the program and returns when it forwards packets.
fn start_forwarder(program: &PacketForwarder, pid: i32) -> io::Result<OwnedFd> {
    let mut command = program.build_command(pid);
    match program.kind {
        ForwarderKind::Pasta => {
            // Pasta moves to the background when it is ready, and becomes our child.
            let mut starter = command.stdout(Stdio::null()).spawn()?;
            if !starter.wait()?.success() {
                return Err(io::Error::other("pasta did not start"));
            }
            let own = std::process::id();
            let children = fs::read_to_string(format!("/proc/self/task/{own}/children"))?;
            let child = children.split_whitespace().find_map(|word| Pid::from_raw(word.parse().ok()?));
            Ok(pidfd_open(child.ok_or_else(|| io::Error::other("pasta ended early"))?, PidfdFlags::empty())?)
        }
        ForwarderKind::Slirp => {
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
            let carrier = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
            let ready = child.stdout.take().map(OwnedFd::from);
            let started = match &ready {
                Some(ready) => wait_readable(ready)? && rustix::io::read(ready, &mut [0; 1])? == 1,
                None => false,
            };
            if started { Ok(carrier) } else { Err(end_failed_start(child)) }
        }
    }
}

fn end_failed_start(mut child: Child) -> io::Error {
    let ended = child.kill().and_then(|()| child.wait());
    ended.err().unwrap_or_else(|| io::Error::other("slirp4netns did not start"))
}

fn wait_readable(descriptor: &OwnedFd) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: START_TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
    let mut watched = [PollFd::new(descriptor, PollFlags::IN)];
    Ok(rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))? > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_while_the_pipe_is_still_open() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let reader = OwnedFd::from(reader);
        assert_eq!(read_messages(&reader).expect("read"), "the network keeper did not start in time");
        (&writer).write_all(b"no tun\n").expect("written");
        assert_eq!(read_messages(&reader).expect("read"), "no tun");
    }
}

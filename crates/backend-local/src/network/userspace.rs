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

use linux::namespaces::{self, Namespaces};
use linux::netlink::route::Routing;
use linux::spawn::{self, End, Forked, SingleThread};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::address::Prefix;
use super::settings::NetworkSettings;
use super::{Down, guard};
use crate::launcher::record::Process;

/// The internal subcommand that runs this binary as a keeper.
pub const WORD: &str = "__network";

/// How long a program may take until it forwards packets.
const PATIENCE: Duration = Duration::from_secs(10);

/// A program that can forward packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    kind: Kind,
    path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Pasta,
    Slirp,
}

/// The configuration of a keeper, sent to its standard input.
#[derive(Serialize, Deserialize)]
struct Job {
    sandbox: Process,
    program: Program,
    settings: NetworkSettings,
}

impl Program {
    /// Finds the best program on this host that can work.
    pub fn find() -> Result<Self, Down> {
        let found = [(Kind::Pasta, "pasta"), (Kind::Slirp, "slirp4netns")]
            .into_iter()
            .find_map(|(kind, name)| Some(Self { kind, path: in_path(name)? }))
            .ok_or(Down::NoProgram)?;
        let tun = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
        tun.map_err(Down::NoTun).map(|_| found)
    }

    /// Returns the name server address for a sandbox; the program forwards to the host's name servers.
    fn resolver(&self) -> IpAddr {
        match self.kind {
            // An address that is reserved for documentation, so no machine has it: pasta answers for it.
            Kind::Pasta => IpAddr::from([192, 0, 2, 53]),
            Kind::Slirp => IpAddr::from([10, 0, 2, 3]),
        }
    }

    pub fn resolv_conf(&self) -> String {
        format!("nameserver {}\n", self.resolver())
    }

    /// Describes the network of a sandbox that uses the program.
    pub fn describe(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("on, by {name} in user space")
    }

    /// Starts a keeper for a sandbox and waits until packets are forwarded.
    pub fn start(&self, sandbox: &Process, settings: &NetworkSettings) -> io::Result<()> {
        let job = Job { sandbox: sandbox.clone(), program: self.clone(), settings: settings.clone() };
        let mut keeper = Command::new("/proc/self/exe")
            .arg(WORD)
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
        if wait_for(&ready)? && rustix::io::read(&ready, &mut [0; 1])? == 1 {
            // The process that keeps watching is a child of the keeper.
            return keeper.wait().map(drop);
        }
        // The keeper failed or took too long; it is killed with everything that it started.
        match kill_process_group(Pid::from_child(&keeper), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        keeper.wait()?;
        Err(io::Error::other(last_words(&OwnedFd::from(messages))?))
    }

    fn command(&self, pid: i32) -> Command {
        let mut command = Command::new(&self.path);
        match self.kind {
            Kind::Pasta => command
                .args(["--config-net", "--no-map-gw", "--quiet", "--ns-ifname", "eth0", "--dns-forward"])
                .arg(self.resolver().to_string())
                // No ports are forwarded in either direction.
                .args(["--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none"])
                .arg(pid.to_string()),
            Kind::Slirp => command
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
fn last_words(pipe: &OwnedFd) -> io::Result<String> {
    rustix::io::ioctl_fionbio(pipe, true)?;
    let mut buffer = [0; 4096];
    let length = match rustix::io::read(pipe, &mut buffer) {
        Err(rustix::io::Errno::AGAIN) => 0,
        read => read?,
    };
    let reason = String::from_utf8_lossy(&buffer[..length]).trim().to_owned();
    Ok(if reason.is_empty() { "the network keeper did not start in time".to_owned() } else { reason })
}

fn in_path(name: &str) -> Option<PathBuf> {
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
pub fn keep() -> io::Result<()> {
    let thread = SingleThread::prove()?;
    let mut input = Vec::new();
    io::stdin().lock().take(1 << 20).read_to_end(&mut input)?;
    let Job { sandbox, program, settings } = serde_json::from_slice(&input)?;
    let first = sandbox.open().ok_or_else(|| io::Error::other("the sandbox has ended"))?;
    // A program that moves to the background then becomes our child.
    namespaces::adopt_orphans()?;
    let here: Vec<Prefix> = Routing::open()?.addresses()?.into_iter().map(Prefix::from).collect();
    put_up_guard(&thread, &first, &settings, &here, program.resolver())?;
    let carrier = start(&program, sandbox.pid)?;
    rustix::io::write(rustix::stdio::stdout(), b"1")?;
    match thread.fork(Namespaces::NONE, None)? {
        Forked::Parent { .. } => Ok(()),
        Forked::Child => spawn::exit_now(i32::from(watch(&first, &carrier).is_err())),
    }
}

/// Ends the program with the sandbox.
fn watch(first: &OwnedFd, carrier: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(first, PollFlags::IN), PollFd::new(carrier, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut watched, None))?;
    match pidfd_send_signal(carrier, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn put_up_guard(
    thread: &SingleThread,
    first: &OwnedFd,
    settings: &NetworkSettings,
    here: &[Prefix],
    resolver: IpAddr,
) -> io::Result<()> {
    match thread.fork(Namespaces::NONE, None)? {
        Forked::Child => {
            let done = namespaces::enter(first.as_fd(), Namespaces::USER.and(Namespaces::NET))
                .and_then(|()| guard::for_sandbox(settings, here, &[resolver]).install());
            if let Err(error) = &done {
                writeln!(io::stderr(), "could not install the guard in the sandbox: {error}").ok();
            }
            spawn::exit_now(i32::from(done.is_err()))
        }
        Forked::Parent { pidfd, .. } => match spawn::wait(pidfd.as_fd())? {
            End::Code(0) => Ok(()),
            End::Code(_) | End::Signal(_) => {
                Err(io::Error::other("could not install the guard in the sandbox"))
            }
        },
    }
}

/// Starts the program and returns when it forwards packets.
fn start(program: &Program, pid: i32) -> io::Result<OwnedFd> {
    let mut command = program.command(pid);
    match program.kind {
        Kind::Pasta => {
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
        Kind::Slirp => {
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
            let carrier = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
            let ready = child.stdout.take().map(OwnedFd::from);
            let started = match &ready {
                Some(ready) => wait_for(ready)? && rustix::io::read(ready, &mut [0; 1])? == 1,
                None => false,
            };
            if started { Ok(carrier) } else { Err(gave_up(child)) }
        }
    }
}

fn gave_up(mut child: Child) -> io::Error {
    let ended = child.kill().and_then(|()| child.wait());
    ended.err().unwrap_or_else(|| io::Error::other("slirp4netns did not start"))
}

fn wait_for(descriptor: &OwnedFd) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
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
        assert_eq!(last_words(&reader).expect("read"), "the network keeper did not start in time");
        (&writer).write_all(b"no tun\n").expect("written");
        assert_eq!(last_words(&reader).expect("read"), "no tun");
    }
}

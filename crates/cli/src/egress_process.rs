//! `coracle __egress`: the process that carries the connections of sandboxes without a link, and how `coracle run` starts
//! it.
//!
//! It reads what programs inside and servers outside send: queries, TLS handshakes and HTTP. So it gives up every
//! privilege before it reads anything. Settings, sockets and policies come over the descriptors that it inherits.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use egress_protocol::{EgressReply, EgressReplyBody, EgressRequest, EgressRequestBody};
use launcher::role_filters::{self, FilterRole};
use linux::caps::CapSet;
use linux::landlock::TcpAccess;
use linux::namespaces::{self, SetgroupsPolicy};
use linux::packet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, Resource, set_dumpable_behavior};

use crate::config::{Config, LogSettings};
use crate::pull_process::{CERTIFICATE_VARIABLES, NETWORK_FILES};
use crate::serve::child_settings::{self, PassToChild, ReceivedStartup};
use crate::serve::egress::EgressStart;

/// The internal subcommand that runs this binary as egress.
pub(crate) const EGRESS_SUBCOMMAND: &str = "__egress";

/// The variables that it inherits: where certificates lie, and what shows the cause of a crash.
pub(crate) const EGRESS_VARIABLES: [&str; 3] = ["SSL_CERT_FILE", "SSL_CERT_DIR", "RUST_BACKTRACE"];

pub(crate) fn run_egress(arguments: &[String]) -> Result<ExitCode> {
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
    let startup: ReceivedStartup<EgressStart> = child_settings::receive_startup(arguments)?;
    let ReceivedStartup { settings, ready, others, .. } = startup;
    let mut others = others.into_iter();
    let Some(keeper) = others.next() else { bail!("the connection to the keeper of sockets was not passed") };
    linux::descriptors::raise_open_file_limit().context("could not raise the limit on open files")?;
    crate::tracing_output::start_logging(&settings.log);
    if let Some(instance) = &settings.group {
        join_group(instance);
    }
    drop_privileges(&settings)?;
    // The kernel clears the parent death signal when ids change.
    child_settings::end_with_supervisor(parent.context("the supervisor is gone")?)?;
    FilterRole::Egress.load_filter()?;
    File::from(ready).write_all(b"r").context("the supervisor is gone")?;
    let options = egress::EgressOptions {
        keeper,
        server_listener: others.next(),
        // The supervisor does not pass a key yet, so sealed values die with this process.
        sealing_key: None,
        roots: egress::vault::TrustedRoots::load_from_host(),
    };
    egress::run(options).context("egress broke")?;
    Ok(ExitCode::SUCCESS)
}

/// Bounds the memory of this process, where the host offers that.
fn join_group(instance: &str) {
    if let Err(error) = launcher::join_egress_group(instance) {
        tracing::warn!(%error, "failed to bound the memory of egress; it has no limit of its own");
    }
}

fn drop_privileges(settings: &EgressStart) -> Result<()> {
    if let Some(uid) = settings.uid {
        role_filters::empty_bounding_set()?;
        namespaces::switch_ids(uid, uid, SetgroupsPolicy::Allow).context("could not take on another uid")?;
    }
    // Without a uid of its own the process may still have capabilities: those of root in a container.
    linux::caps::set_capabilities(CapSet::NONE).context("could not drop capabilities")?;
    // It holds secrets, which no core file and no process of the same user may show.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    namespaces::set_resource_limit(Resource::Core, 0)?;
    linux::set_no_new_privs()?;
    let named: Vec<OsString> = CERTIFICATE_VARIABLES.iter().filter_map(std::env::var_os).collect();
    let readable = NETWORK_FILES.iter().map(Path::new).chain(named.iter().map(Path::new));
    let readable: Vec<&Path> = readable.collect();
    let enforced = linux::landlock::confine_process(&readable, &[], TcpAccess::Connect);
    if !enforced.context("could not confine the egress process")? {
        bail!("this kernel has no Landlock, so nothing would confine the egress process");
    }
    Ok(())
}

/// The uid of the egress process of `coracle run` as root, in the range that is reserved for servers.
const COMMAND_LINE_UID: u32 = 0xfffe;
/// How long it may take to reply; it waits for nothing.
const REPLY_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// An egress process that `coracle run` has started, and the connection to it. It ends with this value.
pub(crate) struct CommandLineEgress {
    child: Child,
    connection: OwnedFd,
    number: u64,
}

impl CommandLineEgress {
    /// Starts an egress process and waits until it is ready.
    pub(crate) fn start(config: &Config) -> Result<Self> {
        let start = EgressStart {
            // Its standard error is that of the command.
            log: LogSettings { level: "error".to_owned(), ..config.log.clone() },
            uid: linux::privileges::is_host_root().then(|| config.uid_base + COMMAND_LINE_UID),
            group: None,
        };
        let mut settings = File::from(rustix::fs::memfd_create("settings", MemfdFlags::CLOEXEC)?);
        settings.write_all(&serde_json::to_vec(&start)?)?;
        settings.rewind()?;
        let (connection, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let (mut ready, is_ready) = io::pipe()?;
        let (updates, _) = io::pipe()?;
        let passed: [OwnedFd; 4] = [settings.into(), is_ready.into(), updates.into(), other];
        let mut command = Command::new("/proc/self/exe");
        command.arg0("coracle").arg(EGRESS_SUBCOMMAND).arg(std::process::id().to_string()).env_clear();
        command.envs(EGRESS_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        for descriptor in &passed {
            command.arg(descriptor.pass_to_child()?);
        }
        // Signals from a terminal are only for the command inside.
        command.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().context("could not start the egress process")?;
        drop(passed);
        let started = Self { child, connection, number: 0 };
        let heard = ready.read(&mut [0])?;
        if heard == 0 { Err(anyhow!("the egress process could not start")) } else { Ok(started) }
    }

    /// Returns a connection for the launcher.
    pub(crate) fn connection(&self) -> Result<OwnedFd> {
        Ok(self.connection.try_clone()?)
    }

    /// Sends a request and waits for its reply. A refusal is an error.
    pub(crate) fn request(&mut self, body: EgressRequestBody) -> Result<EgressReplyBody> {
        self.number += 1;
        let request = EgressRequest { number: self.number, body };
        packet::send_message(self.connection.as_fd(), &request, None)?;
        loop {
            let mut watched = [PollFd::new(&self.connection, PollFlags::IN)];
            let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&REPLY_TIMEOUT)))?;
            if ready == 0 {
                bail!("egress does not reply");
            }
            let reply: Option<(EgressReply, _)> = packet::receive_with_descriptors(self.connection.as_fd())?;
            match reply.context("the egress process has ended")?.0 {
                EgressReply { number, .. } if number != request.number => {}
                EgressReply { body: EgressReplyBody::Refused { message }, .. } => {
                    bail!("egress refused a request: {message}")
                }
                EgressReply { body, .. } => return Ok(body),
            }
        }
    }
}

impl Drop for CommandLineEgress {
    fn drop(&mut self) {
        // It may have ended already; either way there is nothing left to do.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

//! `coracle __pull`: the process that fetches one image from a registry, and how the command line starts it.
//!
//! It gives up every privilege before it reads anything. It is the only process of ours that speaks TLS and
//! HTTP to registries, and has neither the server's files nor its keys: the name of the image, credentials
//! for its registry and the image itself pass through the one descriptor that it inherits.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use launcher::role_filters::{self, FilterRole};
use launcher::{PULLER_SUBCOMMAND, PULLER_VARIABLES};
use linux::caps::CapSet;
use linux::landlock::TcpAccess;
use linux::namespaces::{self, SetgroupsPolicy};
use rustix::process::Resource;

/// The files needed to use the network: for resolving host names, and the trusted certificates. All users may read these.
pub(crate) const NETWORK_FILES: &[&str] = &[
    "/etc/hosts",
    "/etc/resolv.conf",
    "/run/systemd/resolve",
    "/etc/ssl/certs",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    // A static program cannot look up `getrandom` at run time. The library that tries this, while
    // resolving names, then reads these files instead, and panics if it may not.
    "/dev/random",
    "/dev/urandom",
];
/// Where the operator may have put other certificates.
pub(crate) const CERTIFICATE_VARIABLES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Limits of the process. A manifest is read into memory as a whole, and parsed.
const MAX_MEMORY: u64 = 1 << 30;
const MAX_OPEN_FILES: u64 = 256;

/// The argument that stands for the present uid.
const SAME_UID: &str = "-";
/// The uid of a puller that root starts from the command line, in the range that is reserved for servers.
const COMMAND_LINE_UID: u32 = 0xffff;

pub(crate) fn run_puller(arguments: &[String]) -> Result<ExitCode> {
    let [uid] = arguments else {
        bail!("this command is for `coracle serve` and `coracle image pull` alone")
    };
    // The command line may have inherited descriptors that are none of a puller's business.
    linux::descriptors::close_all_except_these(std::iter::empty())?;
    let connection = std::io::stdin().as_fd().try_clone_to_owned()?;
    drop_privileges(uid)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(registry::serve_pull(connection))?;
    Ok(ExitCode::SUCCESS)
}

fn drop_privileges(uid: &str) -> Result<()> {
    if uid != SAME_UID {
        let uid: u32 = uid.parse().context("a uid is a number")?;
        role_filters::empty_bounding_set()?;
        namespaces::switch_ids(uid, uid, SetgroupsPolicy::Allow).context("could not take on another uid")?;
    }
    // Without a uid of its own the process may still have capabilities: those of root in a container.
    linux::caps::set_capabilities(CapSet::NONE).context("could not drop capabilities")?;
    namespaces::die_with_parent()?;
    namespaces::set_resource_limit(Resource::Core, 0)?;
    namespaces::set_resource_limit(Resource::Fsize, 0)?;
    namespaces::set_resource_limit(Resource::As, MAX_MEMORY)?;
    namespaces::set_resource_limit(Resource::Nofile, MAX_OPEN_FILES)?;
    linux::set_no_new_privs()?;
    let named: Vec<OsString> = CERTIFICATE_VARIABLES.iter().filter_map(std::env::var_os).collect();
    let readable = NETWORK_FILES.iter().map(Path::new).chain(named.iter().map(Path::new));
    let readable: Vec<&Path> = readable.collect();
    let enforced = linux::landlock::confine_process(&readable, &[], TcpAccess::Connect);
    if !enforced.context("could not confine the process that fetches images")? {
        bail!("this kernel has no Landlock, so nothing would confine the process that fetches images");
    }
    FilterRole::Puller.load_filter()?;
    Ok(())
}

/// A puller that this process has started, and the connection to it. It ends with this value.
pub(crate) struct CommandLinePuller {
    child: Child,
}

impl CommandLinePuller {
    /// Starts a puller without a server; as root it gets another uid, of the range from `uid_base`.
    pub(crate) fn start(uid_base: u32) -> Result<(Self, OwnedFd)> {
        let (own, other) = UnixStream::pair().context("could not make a connection to a puller")?;
        let uid = if linux::privileges::is_host_root() {
            (uid_base + COMMAND_LINE_UID).to_string()
        } else {
            SAME_UID.to_owned()
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("coracle").arg(PULLER_SUBCOMMAND).arg(uid).env_clear();
        command.envs(PULLER_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.stdin(OwnedFd::from(other)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().context("could not start the process that fetches images")?;
        Ok((Self { child }, own.into()))
    }
}

impl Drop for CommandLinePuller {
    fn drop(&mut self) {
        // It may have ended already; either way there is nothing left to do.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

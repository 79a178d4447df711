//! Starting the process that fetches an image from a registry (`coracle __pull`).
//!
//! The launcher only starts it, with one descriptor and no settings; the server at the other end says what
//! to fetch. The process drops its privileges before it reads anything. Its parent is the supervisor, which
//! reaps it, so it does not end with the launcher.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;

use linux::descriptors::PreparedExec;
use linux::namespaces::NamespaceSet;
use linux::spawn::{self, ExecStrings, ForkResult};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::Launcher;
use super::serve::step_error;
use crate::protocol::{OpError, OpErrorKind, OpResult};
use crate::settings::LauncherSettings;

/// The internal subcommand that runs this binary as a puller.
pub const PULLER_SUBCOMMAND: &str = "__pull";

/// The variables that a puller inherits: proxies, and where certificates lie.
pub const PULLER_VARIABLES: [&str; 10] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

/// The largest number of pullers at once.
const MAX_PULLERS: usize = 16;

/// The pullers that may still run.
#[derive(Default)]
pub(super) struct RunningPullers(Vec<OwnedFd>);

impl RunningPullers {
    /// Starts a puller that serves `connection`.
    pub(super) fn start(
        &mut self,
        launcher: &Launcher,
        connection: Option<OwnedFd>,
    ) -> Result<OpResult, OpError> {
        let connection =
            connection.ok_or_else(|| OpError::unsupported("the request has no connection", None))?;
        self.0.retain(is_running);
        if self.0.len() >= MAX_PULLERS {
            let message = format!("limit of concurrent pulls reached ({MAX_PULLERS})");
            return Err(OpError { kind: OpErrorKind::Exhausted, message, hint: None });
        }
        let started = launcher.start_puller(connection);
        self.0.push(started.map_err(|error| step_error("start a puller", &error))?);
        Ok(OpResult::Done)
    }
}

fn is_running(pidfd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ended| ended == 0)
}

impl Launcher {
    fn start_puller(&self, connection: OwnedFd) -> io::Result<OwnedFd> {
        let program = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let null = || OpenOptions::new().read(true).write(true).open("/dev/null").map(OwnedFd::from);
        let report = connection.try_clone()?;
        let prepared = PreparedExec::prepare(program, vec![connection, null()?, null()?], report)?;
        let uid = puller_uid(&self.settings).map_or_else(|| "-".to_owned(), |uid| uid.to_string());
        let words = ["coracle", PULLER_SUBCOMMAND, &uid];
        let arguments = ExecStrings::new(words.map(CString::new).into_iter().collect::<Result<_, _>>()?);
        let variables = PULLER_VARIABLES.iter().filter_map(|name| {
            let value = std::env::var_os(name)?.into_string().ok()?;
            CString::new(format!("{name}={value}")).ok()
        });
        let environment = ExecStrings::new(variables.collect());
        match self.thread.fork_sibling(NamespaceSet::NONE, None)? {
            ForkResult::Parent { pidfd, .. } => Ok(pidfd),
            // The other end takes whatever it reads instead of a frame for the end of the puller.
            ForkResult::Child => match linux::signals::unblock_all() {
                Ok(()) => prepared.exec_or_exit(&arguments, &environment, |_| Vec::new()),
                Err(_) => spawn::exit_now(2),
            },
        }
    }
}

/// The uid of a puller: one of the range that is reserved for servers, beside the server's own.
fn puller_uid(settings: &LauncherSettings) -> Option<u32> {
    settings.server_uid.map(|server| settings.uid_base + ((server - settings.uid_base) ^ 1))
}

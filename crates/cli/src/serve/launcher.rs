//! `coracle __launcher`: the privileged process behind a server.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::{Context, Result};
use launcher::Launcher;
use launcher::LauncherLoop;
use launcher::role_filters::FilterRole;
use linux::namespaces::{self, NamespaceSet};
use linux::signals::{self, SignalFd};
use rustix::fs::FlockOperation;

use super::child_settings::{self, ChildSettings, ReceivedStartup};
use super::update;
use crate::embedded_programs;

/// The role that removes every sandbox of a state directory, and ends.
pub(crate) const REMOVAL_SUBCOMMAND: &str = "__remove-sandboxes";

/// Removes all sandboxes, and everything outside of the state directory that belongs to it.
pub(crate) fn run_removal(arguments: &[String]) -> Result<ExitCode> {
    let StartedLauncher { settings, lock, .. } = begin_launcher(arguments)?;
    let mut launcher = Launcher::open(settings.launcher_settings(), embedded_programs::ALL_PROGRAMS)?;
    for found in launcher.list_sandboxes().context("could not list the sandboxes")? {
        let removed = launcher.destroy_and_wait(&found.id);
        removed.with_context(|| format!("could not remove sandbox `{}`", found.id))?;
    }
    launcher.close().context("could not remove control groups and networks")?;
    drop(lock);
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_launcher(arguments: &[String]) -> Result<ExitCode> {
    let StartedLauncher { settings, lock, ready, updates, keeper } = begin_launcher(arguments)?;
    let stop =
        SignalFd::watch(&[signals::SIGTERM, signals::SIGINT]).context("could not watch for signals")?;
    let mut launcher = Launcher::open(settings.launcher_settings(), embedded_programs::ALL_PROGRAMS)?;
    if let Some(keeper) = keeper {
        launcher.connect_keeper(keeper).context("could not take over the sockets of sandboxes")?;
    }
    launcher.warn_of_missing_network();
    // A server of one's own reports what its one sandbox lacks.
    let unenforced = launcher.unenforced_reason().filter(|_| settings.config.own_server.is_none());
    if let Some(reason) = unenforced {
        warn_of_missing_limits(reason, settings.config.require_limits);
    }
    let serving = LauncherLoop::open(launcher, stop.into_descriptor()).context("could not listen")?;
    let mut ready = std::fs::File::from(ready);
    ready.write_all(b"r").context("the supervisor is gone")?;
    let read = |pipe: &OwnedFd| {
        let settings = update::read_settings_blocking(pipe)?;
        crate::tracing_output::set_log_level(&settings.config.log.level);
        Some(settings.launcher_settings())
    };
    // If the supervisor is gone, this process is about to end too.
    let mut serving =
        serving.with_settings_updates(updates, read, move || ready.write_all(b"u").unwrap_or_default());
    serving.run().context("the launcher's loop broke")?;
    drop(lock);
    Ok(ExitCode::SUCCESS)
}

/// What a launcher starts with.
struct StartedLauncher {
    settings: ChildSettings,
    lock: File,
    ready: OwnedFd,
    updates: OwnedFd,
    /// The connection to the supervisor, which keeps the sockets of sandboxes whose connections egress carries.
    keeper: Option<OwnedFd>,
}

/// Receives the settings, waits for a predecessor, and gives up what a launcher does not need.
fn begin_launcher(arguments: &[String]) -> Result<StartedLauncher> {
    let ReceivedStartup { settings, ready, updates, others } =
        child_settings::receive_startup::<ChildSettings>(arguments)?;
    let keeper = others.into_iter().next();
    crate::tracing_output::start_logging(&settings.config.log);
    // A killed predecessor may still be ending; everything it held must be released first.
    let lock =
        super::lock_file(&settings.config.state_dir.join("launcher.lock"), FlockOperation::LockExclusive)?;
    if linux::privileges::is_host_root() {
        // Disks of sandboxes are mounted only in this mount namespace.
        namespaces::unshare_namespaces(NamespaceSet::MOUNT).context("could not make a mount namespace")?;
        linux::mounts::make_private().context("could not make mounts private")?;
    }
    FilterRole::Launcher.load_filter()?;
    Ok(StartedLauncher { settings, lock, ready, updates, keeper })
}

/// Reports at the start what users would otherwise learn from the first refused create.
fn warn_of_missing_limits(reason: &str, required: bool) {
    if required {
        tracing::warn!(
            reason,
            "limits cannot be enforced, so every sandbox is refused; start the server in a delegated control \
             group (`systemd-run --user --scope -p Delegate=yes coracle serve`), as root, or with \
             CORACLE_REQUIRE_LIMITS=false"
        );
    } else {
        tracing::warn!(
            reason,
            "not all limits can be enforced, so sandboxes run without them; `coracle doctor` says how to get them"
        );
    }
}

//! `coracle __launcher`: the privileged process behind a server.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use backend_local::launcher::Launcher;
use backend_local::launcher::serve::Loop;
use linux::namespaces::{self, Namespaces};
use linux::signals::{self, Signals};
use rustix::fs::FlockOperation;

use super::handover::{self, Received};

pub(crate) fn launcher(arguments: &[String]) -> Result<ExitCode> {
    let Received { handover, ready, .. } = handover::receive(arguments)?;
    crate::tracing_output::start();
    // A predecessor that was killed may still be going; what it held must be let go first.
    let lock = super::lock(&handover.state_dir.join("launcher.lock"), FlockOperation::LockExclusive)?;
    if rustix::process::geteuid().is_root() {
        // Disks of sandboxes are mounted here and nowhere else.
        namespaces::unshare(Namespaces::MOUNT).context("could not make a mount namespace")?;
        linux::mounts::make_private().context("could not make mounts private")?;
    }
    let stop =
        Signals::watch(&[signals::TERMINATE, signals::INTERRUPT]).context("could not watch for signals")?;
    let launcher = Launcher::open(handover.settings())?;
    if let Some(reason) = launcher.shortfall() {
        tracing::warn!(reason, "not all limits can be held; `coracle doctor` says how to get them");
    }
    let mut serving = Loop::open(launcher, stop.into_descriptor()).context("could not listen")?;
    std::fs::File::from(ready).write_all(b"r").context("the supervisor is gone")?;
    serving.run().context("the launcher's loop broke")?;
    drop(lock);
    Ok(ExitCode::SUCCESS)
}

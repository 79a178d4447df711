//! The subcommands that are clients of a server, and those that work on the images of this host.

#[cfg(feature = "whole")]
pub(crate) mod backup;
#[cfg(feature = "whole")]
pub(crate) mod config;
#[cfg(feature = "whole")]
pub(crate) mod copy;
pub(crate) mod exec;
#[cfg(feature = "whole")]
pub(crate) mod image;
#[cfg(feature = "whole")]
pub(crate) mod key;
#[cfg(feature = "whole")]
pub(crate) mod lifecycle;
#[cfg(feature = "whole")]
pub(crate) mod logs;
#[cfg(feature = "whole")]
pub(crate) mod monitor;
#[cfg(feature = "whole")]
pub(crate) mod network;
#[cfg(feature = "whole")]
pub(crate) mod pool;
#[cfg(feature = "whole")]
pub(crate) mod processes;
#[cfg(feature = "whole")]
pub(crate) mod sandboxes;
pub(crate) mod shell;
#[cfg(feature = "whole")]
pub(crate) mod snapshot;
#[cfg(feature = "whole")]
pub(crate) mod volume;

use std::fmt;
use std::process::ExitCode;

use anyhow::{Context, Result};

/// The exit code when a command could not be run at all, as other runners use it.
pub(crate) const EXIT_NOT_RUN: u8 = 125;

const EXIT_PROGRAM_MISSING: u8 = 127;

/// The program of a command could not be started. Our exit code then says why, as with env(1) and
/// shells.
#[derive(Debug)]
pub(crate) struct ProgramStartError {
    why: String,
    pub(crate) code: u8,
    hint: Option<&'static str>,
}

impl ProgramStartError {
    pub(crate) fn missing(why: String) -> Self {
        Self { why, code: EXIT_PROGRAM_MISSING, hint: None }
    }

    pub(crate) fn not_executable(why: String) -> Self {
        Self { why, code: 126, hint: None }
    }
}

impl ProgramStartError {
    /// Replaces the general advice with better advice for this case.
    pub(crate) fn with_hint(self, hint: &'static str) -> Self {
        Self { hint: Some(hint), ..self }
    }

    /// Advice about what the user can do.
    pub(crate) fn hint(&self) -> &'static str {
        if let Some(hint) = self.hint {
            hint
        } else if self.code == EXIT_PROGRAM_MISSING {
            "only what is in the image is inside: `run --mount` shows a directory of this host, `cp` copies files"
        } else {
            "it must be a program, or a script that begins with `#!`, with the permission to be executed"
        }
    }
}

impl fmt::Display for ProgramStartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for ProgramStartError {}

/// Runs the client's part of the command line to its end.
///
/// One thread is enough for one connection. Standard input may still be blocked in a read at the end, so
/// the runtime does not wait for it.
pub(crate) fn block_on(future: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("could not start the event loop")?;
    let outcome = runtime.block_on(future);
    // This program ends now, so the kernel frees everything at once.
    std::mem::forget(runtime);
    outcome
}

/// Held by a test that sends a signal to its own process, which every test of that process would receive.
#[cfg(test)]
static SIGNAL_TESTS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

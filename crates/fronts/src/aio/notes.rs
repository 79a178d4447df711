//! The notes that this front stores with each of its sandboxes.

use std::sync::Arc;

use domain::SandboxSettings;
use serde::{Deserialize, Serialize};
use service::SandboxRef;

use super::ORIGIN;

/// How many shell sessions a sandbox may have unless its creator asks for another number.
pub(super) const DEFAULT_SHELL_SESSIONS: u32 = 50;

/// The notes of a sandbox. A sandbox that another front created has the defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct AioNotes {
    /// Drawn at random when the sandbox is created, and inherited by the successor of a crashed one. Addresses cover it.
    pub(super) epoch: u64,
    pub(super) file_errors: FileErrors,
    pub(super) max_shell_sessions: u32,
    pub(super) user_id: Option<String>,
    pub(super) thread_id: Option<String>,
}

/// How the file API reports errors of the filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FileErrors {
    /// 200 with `success: false` and the details in `data`, as AIO's image does.
    #[default]
    Structured,
    /// The same body with an error status.
    Http,
}

impl Default for AioNotes {
    fn default() -> Self {
        Self {
            epoch: 0,
            file_errors: FileErrors::default(),
            max_shell_sessions: DEFAULT_SHELL_SESSIONS,
            user_id: None,
            thread_id: None,
        }
    }
}

impl AioNotes {
    pub(super) fn of_sandbox(sandbox: &SandboxRef) -> Arc<Self> {
        if sandbox.read_state(|state| state.origin != ORIGIN) {
            return Arc::default();
        }
        sandbox.parsed_notes(|notes| serde_json::from_slice(notes).unwrap_or_default())
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("notes are texts and numbers")
    }

    /// The successor of a crashed sandbox keeps the epoch, so addresses stay valid.
    pub(super) fn inherit_epoch(own: &[u8], former: &SandboxSettings) -> Vec<u8> {
        let mut own: Self = serde_json::from_slice(own).unwrap_or_default();
        if former.origin == ORIGIN {
            let former: Self = serde_json::from_slice(&former.notes).unwrap_or_default();
            own.epoch = former.epoch;
        }
        own.to_bytes()
    }
}

/// An epoch that no earlier sandbox had. Guessing one does not help: addresses are signed.
pub(super) fn draw_epoch() -> u64 {
    let digits = crate::server::request_log::unique_hex();
    u64::from_str_radix(&digits[..16], 16).expect("sixteen hexadecimal digits fit")
}

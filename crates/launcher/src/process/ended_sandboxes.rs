//! Sandboxes whose processes have ended and of which nothing is kept. Their control groups, disk and ids are
//! removed after the client got its response.
//!
//! ```text
//! kill ─► death ─► the record gets another name ─► response ─► remains are removed ─► record is removed
//! ```
//! Once its record has the other name, the sandbox is not listed, and a launcher that starts after a crash continues with
//! it. A launcher that stops removes all of them first. A sandbox that replaces one of them has the same id, so it is made
//! when the remains are gone.

use std::collections::VecDeque;
use std::io;

use domain::SandboxId;

use super::Launcher;
use super::end::{KeptParts, sleep_one_millisecond};
use super::serve::send_response;
use crate::client_connection::ClientSocket;
use crate::jail::plan::DiskPlan;
use crate::protocol::{LauncherOp, LauncherRequest, OpError};

/// How many sandboxes may wait. With more, one is removed after each event, even if the loop is busy.
const MAX_WAITING: usize = 32;
/// How often a launcher that stops tries to remove one sandbox, with a millisecond between.
const MAX_ATTEMPTS_AT_STOP: usize = 2000;

/// The sandboxes whose remains wait to be removed.
#[derive(Debug)]
pub(super) struct EndedSandboxes {
    waiting: VecDeque<SandboxId>,
    /// Requests to make sandboxes with the ids of those that wait.
    replacements: Vec<QueuedReplacement>,
    /// Whether the kernel did not release the groups of the sandbox that was tried last.
    blocked: bool,
}

#[derive(Debug)]
struct QueuedReplacement {
    id: SandboxId,
    client: ClientSocket,
    request: LauncherRequest,
}

impl EndedSandboxes {
    /// Takes over those of an earlier launcher.
    pub(super) fn open(launcher: &Launcher) -> io::Result<Self> {
        Ok(Self { waiting: launcher.records.list_ended()?.into(), replacements: Vec::new(), blocked: false })
    }

    pub(super) fn push(&mut self, id: SandboxId) {
        // It is marked again by a second request to destroy it.
        if !self.waiting.contains(&id) {
            self.waiting.push_back(id);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether one must be removed even if the loop is busy.
    pub(super) fn is_removal_due(&self) -> bool {
        self.waiting.len() > MAX_WAITING || !self.replacements.is_empty()
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Keeps a request to make a sandbox until the remains of the former one with its id are removed; returns any other
    /// request. One to end the sandbox cancels what is kept.
    pub(super) fn queue_if_replacement(
        &mut self,
        client: ClientSocket,
        request: LauncherRequest,
    ) -> Option<(ClientSocket, LauncherRequest)> {
        let id = match &request.op {
            LauncherOp::Create(plan) if plan.disk == DiskPlan::New => plan.id.clone(),
            LauncherOp::Destroy { id } | LauncherOp::Stop { id } => {
                self.cancel_replacements(id);
                return Some((client, request));
            }
            _ => return Some((client, request)),
        };
        let Some(index) = self.waiting.iter().position(|waiting| *waiting == id) else {
            return Some((client, request));
        };
        // There is at most one for each sandbox.
        self.cancel_replacements(&id);
        // It is removed next.
        self.waiting.swap(0, index);
        self.replacements.push(QueuedReplacement { id, client, request });
        None
    }

    fn cancel_replacements(&mut self, id: &SandboxId) {
        for queued in self.replacements.extract_if(.., |queued| queued.id == *id) {
            send_response(&queued.client, queued.request.number, Err(OpError::gone()), None);
        }
    }

    /// Returns a request whose sandbox can be made now.
    pub(super) fn take_ready_replacement(&mut self) -> Option<(ClientSocket, LauncherRequest)> {
        let ready = self.replacements.iter().position(|queued| !self.waiting.contains(&queued.id))?;
        let QueuedReplacement { client, request, .. } = self.replacements.swap_remove(ready);
        Some((client, request))
    }

    /// Removes the remains of one sandbox, or moves it to the end if the kernel still uses them.
    pub(super) fn remove_next(&mut self, launcher: &mut Launcher) {
        let Some(id) = self.waiting.pop_front() else { return };
        self.blocked = false;
        match launcher.remove_dead_sandbox(&id, None, KeptParts::Nothing) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = true;
                self.waiting.push_back(id);
            }
            Err(error) => {
                tracing::warn!(%id, %error, "failed to remove the remains of a sandbox; the next start retries");
            }
        }
    }

    /// Removes all remains. What the kernel does not release in time is left to the next start.
    pub(super) fn remove_all(&mut self, launcher: &mut Launcher) -> io::Result<()> {
        let mut attempts = 0;
        while !self.is_empty() && attempts < MAX_ATTEMPTS_AT_STOP {
            self.remove_next(launcher);
            if self.blocked {
                attempts += 1;
                sleep_one_millisecond()?;
            }
        }
        Ok(())
    }
}

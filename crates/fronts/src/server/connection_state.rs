//! What a connection and its requests know about each other: whether it has presented a key, and the slots
//! that it holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use domain::Owner;

use crate::server::owner_slots::{OwnerSlot, OwnerSlots, SlotRefusal, SoleOwner};
use crate::server::peer_limits::AddressSlot;

/// Shared by a connection and its requests. The slots are given back when the last of them is gone.
#[derive(Clone)]
pub(crate) struct ConnectionState(Arc<StateFields>);

struct StateFields {
    /// Whether the limits for peers without a key do not apply to this peer.
    trusted: bool,
    write_timeout: Duration,
    /// Whether a request on this connection was authenticated.
    authenticated: AtomicBool,
    /// Whether the owner has too many connections, so that this one closes after its response.
    closing: AtomicBool,
    /// Whether a long stream of an authenticated request is open. Its client may stop reading.
    streaming: AtomicBool,
    slots: Mutex<ConnectionSlots>,
}

#[derive(Default)]
struct ConnectionSlots {
    /// Until the connection is authenticated.
    address: Option<AddressSlot>,
    /// Once it is.
    owner: Option<OwnerSlot>,
    /// Of the protocol that the connection was upgraded to.
    upgraded: Option<StreamSlot>,
}

/// How long an authenticated client may pause a download.
const AUTHENTICATED_WRITE_TIMEOUT: Duration = Duration::from_secs(600);

/// The slot of a long stream. While it is held, the connection may be blocked on writing.
pub(crate) struct StreamSlot {
    _slot: OwnerSlot,
    /// Weak, because an upgraded connection holds its own slot.
    connection: std::sync::Weak<StateFields>,
}

impl ConnectionState {
    /// The state of a new connection. A peer without an `address` slot is trusted.
    pub(crate) fn new(address: Option<AddressSlot>, write_timeout: Duration) -> Self {
        Self(Arc::new(StateFields {
            trusted: address.is_none(),
            write_timeout,
            authenticated: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            streaming: AtomicBool::new(false),
            slots: Mutex::new(ConnectionSlots { address, ..ConnectionSlots::default() }),
        }))
    }

    /// Counts the connection for its owner instead of its address. If the owner has too many, the request is to be
    /// refused, and the connection stays counted for its address and closes after the response.
    pub(crate) fn authenticate(
        &self,
        connections: &Arc<OwnerSlots>,
        owner: &Owner,
        sole: SoleOwner,
    ) -> Result<(), SlotRefusal> {
        if self.0.authenticated.load(Ordering::Relaxed) {
            return Ok(());
        }
        let taken = connections.try_take(owner, sole);
        self.0.closing.store(taken.is_err(), Ordering::Relaxed);
        let slot = taken?;
        self.0.authenticated.store(true, Ordering::Relaxed);
        let mut slots = self.slots();
        slots.owner = Some(slot);
        slots.address = None;
        Ok(())
    }

    /// Whether the head of a request may have more than the size allowed to peers without a key.
    pub(crate) fn may_send_large_heads(&self) -> bool {
        self.0.trusted || self.0.authenticated.load(Ordering::Relaxed)
    }

    /// Whether the connection closes after its current response.
    pub(crate) fn is_closing(&self) -> bool {
        self.0.closing.load(Ordering::Relaxed)
    }

    /// How long the client may leave output unread. A trusted peer may do so for ever: a user may stop the
    /// program that reads the output of `coracle`.
    pub(crate) fn write_timeout(&self) -> Option<Duration> {
        let state = &self.0;
        if state.trusted || state.streaming.load(Ordering::Relaxed) {
            return None;
        }
        let authenticated = state.authenticated.load(Ordering::Relaxed);
        let least = if authenticated { AUTHENTICATED_WRITE_TIMEOUT } else { Duration::ZERO };
        Some(state.write_timeout.max(least))
    }

    /// Marks a long stream, until the returned slot is dropped.
    pub(crate) fn begin_stream(&self, slot: OwnerSlot) -> StreamSlot {
        let authenticated = self.0.authenticated.load(Ordering::Relaxed);
        self.0.streaming.store(authenticated, Ordering::Relaxed);
        StreamSlot { _slot: slot, connection: Arc::downgrade(&self.0) }
    }

    /// Keeps the slot of a stream until the connection ends.
    pub(crate) fn keep_upgraded(&self, slot: StreamSlot) {
        self.slots().upgraded = Some(slot);
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, ConnectionSlots> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.upgrade() {
            connection.streaming.store(false, Ordering::Relaxed);
        }
    }
}

//! What the event loop waits for, descriptors and alarms, and the counter behind all handles.

use std::io;

use crate::event_loop::alarms::AlarmQueue;
use crate::event_loop::poll::Epoll;

/// Every other part of the agent gets its handles, its events and its alarms from here.
pub(crate) struct EventSources {
    pub(crate) poll: Epoll,
    pub(crate) alarms: AlarmQueue,
    last_number: u64,
}

impl EventSources {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { poll: Epoll::new()?, alarms: AlarmQueue::default(), last_number: 0 })
    }

    /// Returns a handle whose number no other object has or will have.
    pub(crate) fn next_handle<H: From<u64>>(&mut self) -> H {
        self.last_number += 1;
        self.last_number.into()
    }
}

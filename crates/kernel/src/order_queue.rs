//! Reads orders in a thread, and checks whether one has arrived.
//!
//! An interrupt is meant for the order sent before it, but may overtake that order: different
//! threads receive the two. The handler of an interrupt therefore checks for a waiting order first.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::mpsc;

use crate::line_protocol::{OrderReader, RunOrder};

pub(crate) struct OrderQueue {
    orders: mpsc::UnboundedReceiver<RunOrder>,
    descriptor: OwnedFd,
    /// Held while an order moves from the descriptor to the channel, so that it is never in
    /// neither.
    taking: Arc<Mutex<()>>,
}

impl OrderQueue {
    /// Starts a thread that reads the orders, because their descriptor may be of any kind.
    pub(crate) fn start_reading(mut orders: OrderReader) -> Result<Self> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (descriptor, watched) = (orders.clone_descriptor()?, orders.clone_descriptor()?);
        let taking = Arc::new(Mutex::new(()));
        let held = Arc::clone(&taking);
        let read = move || {
            while orders.is_buffered() || wait_readable(&watched, None).is_ok() {
                let _taking = held.lock().unwrap_or_else(PoisonError::into_inner);
                match orders.read_next() {
                    Ok(Some(order)) => order.into_iter().for_each(|order| drop(sender.send(order))),
                    Ok(None) | Err(_) => return,
                }
            }
        };
        thread::Builder::new().name("orders".to_owned()).spawn(read).context("could not start a thread")?;
        Ok(Self { orders: receiver, descriptor, taking })
    }

    /// The next order; `None` when there will be no more.
    pub(crate) async fn next_order(&mut self) -> Option<RunOrder> {
        self.orders.recv().await
    }

    /// Whether [`Self::next_order`] would return an order at once, or nearly so.
    pub(crate) fn has_order(&self) -> bool {
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        !self.orders.is_empty()
            || wait_readable(&self.descriptor, Some(&Timespec::default())).unwrap_or(false)
    }
}

/// Waits until the descriptor is readable, at most for `time`, and returns whether it is.
fn wait_readable(descriptor: &OwnedFd, time: Option<&Timespec>) -> io::Result<bool> {
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)], time) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn sent_order_is_known_before_it_is_read() {
        let (read, write) = rustix::pipe::pipe().expect("a pipe");
        let mut incoming =
            OrderQueue::start_reading(OrderReader::from_file(File::from(read))).expect("a thread");
        let mut write = File::from(write);
        for number in 0..200 {
            assert!(!incoming.has_order());
            writeln!(write, "run k{number} {{\"code\":\"1\"}}").expect("the thread reads");
            assert!(incoming.has_order(), "{number}");
            assert_eq!(incoming.next_order().await.expect("an order").key, format!("k{number}"));
        }
        writeln!(write, "no order").expect("the thread reads");
        drop(write);
        assert_eq!(incoming.next_order().await, None);
    }
}

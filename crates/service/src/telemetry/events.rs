//! The feed of events of sandboxes, in order, for any number of readers.
//!
//! Events are kept in one ring buffer. A reader has only a position in it, so readers cost nothing, none can delay
//! another or a sandbox, and a reader that is too slow gets the exact range it missed. A separate task keeps a durable
//! copy, so that a reader can continue after a server restart.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{EndCause, Owner, Phase, SandboxId};
use tokio::sync::watch;

use crate::core::Core;
use crate::{OperatorActionKind, OperatorObjectKind, RevivalKind};

/// How many events are remembered.
pub(crate) const MAX_EVENTS: usize = 10_000;

/// How many numbers are skipped at a start: the last events before a crash may not have been stored, and a number must
/// never be used twice.
const SKIPPED_EVENT_IDS: u64 = 1_000;

/// A sandbox entered another phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifecycleEvent {
    /// Increases; numbers may be missing, but none is used twice.
    pub id: u64,
    pub time: SystemTime,
    pub owner: Owner,
    pub sandbox: SandboxId,
    pub phase: Phase,
    /// Why the sandbox ended, or, for a starting sandbox, why it is restarted.
    pub cause: Option<EndCause>,
}

impl LifecycleEvent {
    /// How a dead sandbox was revived, if this event is its restart or the start of its successor.
    pub fn revival_kind(&self) -> Option<RevivalKind> {
        match (self.phase, self.cause) {
            (Phase::Starting, Some(EndCause::Replaced)) => Some(RevivalKind::Replaced),
            (Phase::Starting, Some(EndCause::FilesLost)) => Some(RevivalKind::FilesLost),
            (Phase::Starting, Some(_)) => Some(RevivalKind::Restarted),
            _ => None,
        }
    }
}

/// The operator acted on an object of another owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorEvent {
    /// As in [`LifecycleEvent`].
    pub id: u64,
    pub time: SystemTime,
    /// The owner of the object.
    pub owner: Owner,
    pub act: OperatorAction,
}

/// An action of the operator and its object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OperatorAction {
    pub kind: OperatorActionKind,
    pub thing: OperatorObjectKind,
    /// An id or a name; `*` for a list.
    pub subject: String,
}

/// An event as it is kept in the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FeedRecord {
    Life(LifecycleEvent),
    Operator(OperatorEvent),
}

impl FeedRecord {
    pub(crate) fn id(&self) -> u64 {
        match self {
            Self::Life(event) => event.id,
            Self::Operator(event) => event.id,
        }
    }

    fn owner(&self) -> &Owner {
        match self {
            Self::Life(event) => &event.owner,
            Self::Operator(event) => &event.owner,
        }
    }
}

impl From<FeedRecord> for FeedItem {
    fn from(recorded: FeedRecord) -> Self {
        match recorded {
            FeedRecord::Life(event) => Self::Event(event),
            FeedRecord::Operator(event) => Self::Operator(event),
        }
    }
}

/// An item that a reader of events gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedItem {
    Event(LifecycleEvent),
    Operator(OperatorEvent),
    /// Events after `after` up to and including `through` are no longer kept.
    Missed {
        after: u64,
        through: u64,
    },
}

pub(crate) struct FeedBuffer {
    ring: Mutex<EventRing>,
    /// The number of the newest event.
    newest: watch::Sender<u64>,
}

struct EventRing {
    events: VecDeque<FeedRecord>,
    next: u64,
    /// The highest number that was dropped from the ring.
    forgotten: u64,
}

impl FeedBuffer {
    /// Continues after the stored events, which are sorted oldest first.
    pub(crate) fn new(kept: Vec<FeedRecord>) -> Self {
        let last = kept.last().map_or(0, FeedRecord::id);
        let forgotten = kept.first().map_or(0, |event| event.id().saturating_sub(1));
        let next = if last == 0 { 1 } else { last + SKIPPED_EVENT_IDS };
        Self {
            ring: Mutex::new(EventRing { events: kept.into(), next, forgotten }),
            newest: watch::Sender::new(last),
        }
    }

    pub(crate) fn publish_phase(
        &self,
        time: SystemTime,
        owner: &Owner,
        sandbox: &SandboxId,
        phase: Phase,
        cause: Option<EndCause>,
    ) {
        let (owner, sandbox) = (owner.clone(), sandbox.clone());
        self.push_record(|id| FeedRecord::Life(LifecycleEvent { id, time, owner, sandbox, phase, cause }));
    }

    pub(crate) fn record_action(&self, time: SystemTime, owner: &Owner, act: OperatorAction) {
        let owner = owner.clone();
        self.push_record(|id| FeedRecord::Operator(OperatorEvent { id, time, owner, act }));
    }

    fn push_record(&self, event: impl FnOnce(u64) -> FeedRecord) {
        let mut ring = self.lock();
        let id = ring.next;
        ring.next += 1;
        if ring.events.len() >= MAX_EVENTS
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.forgotten = oldest.id();
        }
        ring.events.push_back(event(id));
        drop(ring);
        self.newest.send_replace(id);
    }

    pub(crate) fn newest_id(&self) -> u64 {
        *self.newest.borrow()
    }

    /// The highest number that any event can have had until now. The last events before a crash may have had higher
    /// numbers than the newest stored event.
    fn last_issued_id(&self) -> u64 {
        self.lock().next - 1
    }

    /// The events after `after`, at most `most`.
    fn read_after(&self, after: u64, most: usize) -> Vec<FeedItem> {
        let ring = self.lock();
        let mut items = Vec::new();
        if after < ring.forgotten {
            items.push(FeedItem::Missed { after, through: ring.forgotten });
        }
        let first = ring.events.partition_point(|event| event.id() <= after);
        items.extend(ring.events.iter().skip(first).take(most).cloned().map(FeedItem::from));
        items
    }

    /// The number after which the last `count` events of one owner, or of all, begin.
    pub(crate) fn id_before_last(&self, owner: Option<&Owner>, count: usize) -> u64 {
        let ring = self.lock();
        let seen = |event: &&FeedRecord| owner.is_none_or(|owner| event.owner() == owner);
        match count.checked_sub(1).map(|back| ring.events.iter().rev().filter(seen).nth(back)) {
            None => ring.next - 1,
            Some(Some(first)) => first.id() - 1,
            // There are fewer; events that were dropped do not count.
            Some(None) => ring.forgotten,
        }
    }

    /// The last events of one sandbox, at most `most`, oldest first.
    pub(crate) fn sandbox_events(
        &self,
        owner: &Owner,
        sandbox: &SandboxId,
        most: usize,
    ) -> Vec<LifecycleEvent> {
        let ring = self.lock();
        let life = ring.events.iter().rev().filter_map(|event| match event {
            FeedRecord::Life(event) => Some(event),
            FeedRecord::Operator(_) => None,
        });
        let own = life.filter(|event| event.sandbox == *sandbox && event.owner == *owner);
        let mut own: Vec<LifecycleEvent> = own.take(most).cloned().collect();
        own.reverse();
        own
    }

    fn lock(&self) -> MutexGuard<'_, EventRing> {
        self.ring.lock().expect("no thread panics while adding an event")
    }
}

/// A reader's position in the feed.
pub struct FeedReader {
    core: Arc<Core>,
    newest: watch::Receiver<u64>,
    after: u64,
    /// The owner whose events are returned; `None` means all owners.
    owner: Option<Owner>,
}

/// How many events are copied at once.
const MAX_BATCH: usize = 256;

impl FeedReader {
    /// A position after an event. If `after` is a number that was never used, for example one of another server, the
    /// reader gets the events from now on.
    pub(crate) fn new(core: &Arc<Core>, owner: Option<Owner>, after: u64) -> Self {
        let newest = core.telemetry.events.newest.subscribe();
        let after = after.min(core.telemetry.events.last_issued_id());
        Self { core: Arc::clone(core), newest, after, owner }
    }

    /// Returns the events that exist already, without waiting. The result is empty only if there are none: events of
    /// other owners, however many, do not hide later ones.
    pub fn take_ready(&mut self) -> Vec<FeedItem> {
        self.newest.mark_unchanged();
        loop {
            let mut items = self.core.telemetry.events.read_after(self.after, MAX_BATCH);
            let Some(last) = items.last() else { return items };
            self.after = match last {
                FeedItem::Event(event) => event.id,
                FeedItem::Operator(event) => event.id,
                FeedItem::Missed { through, .. } => *through,
            };
            if let Some(owner) = &self.owner {
                items.retain(|item| match item {
                    FeedItem::Event(event) => event.owner == *owner,
                    FeedItem::Operator(event) => event.owner == *owner,
                    FeedItem::Missed { .. } => true,
                });
            }
            if !items.is_empty() {
                return items;
            }
        }
    }

    /// Waits until there are events; `None` when the server stops.
    pub async fn next_batch(&mut self) -> Option<Vec<FeedItem>> {
        loop {
            let items = self.take_ready();
            if !items.is_empty() {
                return Some(items);
            }
            tokio::select! {
                changed = self.newest.changed() => changed.ok()?,
                () = self.core.tasks.cancelled() => return None,
            }
        }
    }
}

/// Stores a durable copy of the events until the service stops.
pub(crate) async fn persist_events(core: Arc<Core>) {
    let mut events = FeedReader::new(&core, None, core.telemetry.events.newest_id());
    while let Some(items) = events.next_batch().await {
        store_items(&core, items).await;
    }
    loop {
        let items = events.take_ready();
        if items.is_empty() {
            return;
        }
        store_items(&core, items).await;
    }
}

async fn store_items(core: &Core, items: Vec<FeedItem>) {
    let events = items.into_iter().filter_map(|item| match item {
        FeedItem::Event(event) => Some(FeedRecord::Life(event)),
        FeedItem::Operator(event) => Some(FeedRecord::Operator(event)),
        FeedItem::Missed { .. } => None,
    });
    core.store.queue_events(events.collect()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish_events(feed: &FeedBuffer, times: usize) {
        for _ in 0..times {
            let id = SandboxId::from_entropy([1; 20]);
            feed.publish_phase(SystemTime::UNIX_EPOCH, &Owner::operator(), &id, Phase::Running, None);
        }
    }

    #[test]
    fn reader_gets_events_after_its_position_in_order() {
        let feed = FeedBuffer::new(Vec::new());
        publish_events(&feed, 5);
        let ids: Vec<u64> = feed
            .read_after(2, 100)
            .iter()
            .map(|item| match item {
                FeedItem::Event(event) => event.id,
                FeedItem::Operator(_) | FeedItem::Missed { .. } => 0,
            })
            .collect();
        assert_eq!(ids, [3, 4, 5]);
        assert_eq!(feed.read_after(5, 100), []);
    }

    #[test]
    fn late_reader_gets_the_missed_range() {
        let feed = FeedBuffer::new(Vec::new());
        publish_events(&feed, MAX_EVENTS + 7);
        let items = feed.read_after(3, 1);
        assert_eq!(items[0], FeedItem::Missed { after: 3, through: 7 });
        assert!(matches!(&items[1], FeedItem::Event(event) if event.id == 8));
        assert!(matches!(&feed.read_after(7, 1)[0], FeedItem::Event(event) if event.id == 8));
    }

    #[test]
    fn last_events_of_one_sandbox_are_found_among_others() {
        let feed = FeedBuffer::new(Vec::new());
        let other = SandboxId::from_entropy([2; 20]);
        publish_events(&feed, 2);
        feed.publish_phase(SystemTime::UNIX_EPOCH, &Owner::operator(), &other, Phase::Running, None);
        publish_events(&feed, 2);
        let ids = |sandbox, most| -> Vec<u64> {
            feed.sandbox_events(&Owner::operator(), &sandbox, most).iter().map(|event| event.id).collect()
        };
        assert_eq!(ids(SandboxId::from_entropy([1; 20]), 3), [2, 4, 5]);
        assert_eq!(ids(other, 3), [3]);
        assert_eq!(
            feed.sandbox_events(&Owner::from_valid_name("stranger"), &SandboxId::from_entropy([1; 20]), 9),
            []
        );
    }

    #[test]
    fn last_events_count_only_the_owners_events() {
        let feed = FeedBuffer::new(Vec::new());
        let other = Owner::from_valid_name("other");
        publish_events(&feed, 3);
        feed.publish_phase(
            SystemTime::UNIX_EPOCH,
            &other,
            &SandboxId::from_entropy([2; 20]),
            Phase::Running,
            None,
        );
        assert_eq!(feed.id_before_last(None, 2), 2);
        assert_eq!(feed.id_before_last(Some(&Owner::operator()), 2), 1);
        assert_eq!(feed.id_before_last(Some(&other), 9), 0);
        assert_eq!(feed.id_before_last(None, 0), 4);
    }

    #[test]
    fn event_numbers_are_not_reused_after_a_restart() {
        let feed = FeedBuffer::new(Vec::new());
        publish_events(&feed, 3);
        let kept = feed.lock().events.iter().take(2).cloned().collect();
        let again = FeedBuffer::new(kept);
        publish_events(&again, 1);
        assert!(again.newest_id() > feed.newest_id());
        assert_eq!(again.read_after(0, 100).len(), 3);
    }
}

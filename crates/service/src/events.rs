//! What became of sandboxes, in order, for everybody who wants to follow.
//!
//! Events stand in one ring. A reader has only a place in it, so any number of readers cost
//! nothing, none can hold up another or a sandbox, and one that is too slow is told exactly what
//! it missed. A task of its own keeps a durable copy, so that a reader can go on after a restart.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use domain::{Cause, Owner, Phase, SandboxId};
use tokio::sync::watch;

use crate::core::Core;
use crate::{ActKind, Revived, ThingKind};

/// How many events are remembered.
pub(crate) const REMEMBERED: usize = 10_000;

/// So many numbers are left out at a start: the last ones before a crash may not have been kept,
/// and a number must never mean two things.
const SKIPPED: u64 = 1_000;

/// A sandbox went into another phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LifeEvent {
    /// Rises; numbers may be missing, but none is used twice.
    pub id: u64,
    pub time: SystemTime,
    pub owner: Owner,
    pub sandbox: SandboxId,
    pub phase: Phase,
    /// Why it ended, or, of one that starts, why it is started again.
    pub cause: Option<Cause>,
}

impl LifeEvent {
    /// What becomes of a sandbox that had died, if this event is the start of it or of its successor.
    pub fn restart(&self) -> Option<Revived> {
        match (self.phase, self.cause) {
            (Phase::Starting, Some(Cause::Replaced)) => Some(Revived::Replaced),
            (Phase::Starting, Some(Cause::FilesLost)) => Some(Revived::FilesLost),
            (Phase::Starting, Some(_)) => Some(Revived::Restarted),
            _ => None,
        }
    }
}

/// The operator did something with a thing of another owner's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorEvent {
    /// As in [`LifeEvent`].
    pub id: u64,
    pub time: SystemTime,
    /// Whose thing it is.
    pub owner: Owner,
    pub act: Act,
}

/// What was done, to what.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Act {
    pub kind: ActKind,
    pub thing: ThingKind,
    /// An id or a name; `*` if it was a list.
    pub subject: String,
}

/// An event as it is remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    Life(LifeEvent),
    Operator(OperatorEvent),
}

impl Recorded {
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

impl From<Recorded> for Told {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::Life(event) => Self::Event(event),
            Recorded::Operator(event) => Self::Operator(event),
        }
    }
}

/// What a reader of events is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Event(LifeEvent),
    Operator(OperatorEvent),
    /// Events after `after` up to this one are no longer remembered.
    Missed {
        after: u64,
        through: u64,
    },
}

pub(crate) struct Feed {
    ring: Mutex<Ring>,
    /// The number of the newest event.
    newest: watch::Sender<u64>,
}

struct Ring {
    events: VecDeque<Recorded>,
    next: u64,
    /// The highest number that was forgotten.
    forgotten: u64,
}

impl Feed {
    /// Goes on after what was kept, the oldest first.
    pub(crate) fn new(kept: Vec<Recorded>) -> Self {
        let last = kept.last().map_or(0, Recorded::id);
        let forgotten = kept.first().map_or(0, |event| event.id().saturating_sub(1));
        let next = if last == 0 { 1 } else { last + SKIPPED };
        Self {
            ring: Mutex::new(Ring { events: kept.into(), next, forgotten }),
            newest: watch::Sender::new(last),
        }
    }

    pub(crate) fn tell(
        &self,
        time: SystemTime,
        owner: &Owner,
        sandbox: &SandboxId,
        phase: Phase,
        cause: Option<Cause>,
    ) {
        let (owner, sandbox) = (owner.clone(), sandbox.clone());
        self.push(|id| Recorded::Life(LifeEvent { id, time, owner, sandbox, phase, cause }));
    }

    pub(crate) fn record_act(&self, time: SystemTime, owner: &Owner, act: Act) {
        let owner = owner.clone();
        self.push(|id| Recorded::Operator(OperatorEvent { id, time, owner, act }));
    }

    fn push(&self, event: impl FnOnce(u64) -> Recorded) {
        let mut ring = self.lock();
        let id = ring.next;
        ring.next += 1;
        if ring.events.len() >= REMEMBERED
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.forgotten = oldest.id();
        }
        ring.events.push_back(event(id));
        drop(ring);
        self.newest.send_replace(id);
    }

    pub(crate) fn newest(&self) -> u64 {
        *self.newest.borrow()
    }

    /// The highest number that any event can have had until now. Those of the last before a crash may
    /// be higher than the newest that was kept.
    fn last_given(&self) -> u64 {
        self.lock().next - 1
    }

    /// What stands after `after`, at most so many.
    fn read(&self, after: u64, most: usize) -> Vec<Told> {
        let ring = self.lock();
        let mut told = Vec::new();
        if after < ring.forgotten {
            told.push(Told::Missed { after, through: ring.forgotten });
        }
        let first = ring.events.partition_point(|event| event.id() <= after);
        told.extend(ring.events.iter().skip(first).take(most).cloned().map(Told::from));
        told
    }

    /// The number after which the last `count` events of one owner's, or of all, stand.
    pub(crate) fn before_last(&self, owner: Option<&Owner>, count: usize) -> u64 {
        let ring = self.lock();
        let seen = |event: &&Recorded| owner.is_none_or(|owner| event.owner() == owner);
        match count.checked_sub(1).map(|back| ring.events.iter().rev().filter(seen).nth(back)) {
            None => ring.next - 1,
            Some(Some(first)) => first.id() - 1,
            // There are fewer, and what is forgotten is no part of them.
            Some(None) => ring.forgotten,
        }
    }

    /// The last events of one sandbox, at most so many, the oldest first.
    pub(crate) fn of(&self, owner: &Owner, sandbox: &SandboxId, most: usize) -> Vec<LifeEvent> {
        let ring = self.lock();
        let life = ring.events.iter().rev().filter_map(|event| match event {
            Recorded::Life(event) => Some(event),
            Recorded::Operator(_) => None,
        });
        let own = life.filter(|event| event.sandbox == *sandbox && event.owner == *owner);
        let mut own: Vec<LifeEvent> = own.take(most).cloned().collect();
        own.reverse();
        own
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().expect("nobody panics while noting an event")
    }
}

/// A place in the events.
pub struct Events {
    core: Arc<Core>,
    newest: watch::Receiver<u64>,
    after: u64,
    /// Whose events are told; `None` is everybody's.
    owner: Option<Owner>,
}

/// How many events are copied at once.
const BATCH: usize = 256;

impl Events {
    /// A place after an event. After one that never was, as of another server's, comes what happens
    /// from now on.
    pub(crate) fn new(core: &Arc<Core>, owner: Option<Owner>, after: u64) -> Self {
        let newest = core.events.newest.subscribe();
        let after = after.min(core.events.last_given());
        Self { core: Arc::clone(core), newest, after, owner }
    }

    /// What is there already, without waiting; nothing only if there is nothing. Others' events,
    /// however many, do not hide what comes behind them.
    pub fn ready(&mut self) -> Vec<Told> {
        self.newest.mark_unchanged();
        loop {
            let mut told = self.core.events.read(self.after, BATCH);
            let Some(last) = told.last() else { return told };
            self.after = match last {
                Told::Event(event) => event.id,
                Told::Operator(event) => event.id,
                Told::Missed { through, .. } => *through,
            };
            if let Some(owner) = &self.owner {
                told.retain(|told| match told {
                    Told::Event(event) => event.owner == *owner,
                    Told::Operator(event) => event.owner == *owner,
                    Told::Missed { .. } => true,
                });
            }
            if !told.is_empty() {
                return told;
            }
        }
    }

    /// Waits until there is something to tell; `None` when the server stops.
    pub async fn next(&mut self) -> Option<Vec<Told>> {
        loop {
            let told = self.ready();
            if !told.is_empty() {
                return Some(told);
            }
            tokio::select! {
                changed = self.newest.changed() => changed.ok()?,
                () = self.core.stop.cancelled() => return None,
            }
        }
    }
}

/// Keeps a durable copy of the events until the service stops.
pub(crate) async fn keep(core: Arc<Core>) {
    let mut events = Events::new(&core, None, core.events.newest());
    while let Some(told) = events.next().await {
        store(&core, told).await;
    }
    loop {
        let told = events.ready();
        if told.is_empty() {
            return;
        }
        store(&core, told).await;
    }
}

async fn store(core: &Core, told: Vec<Told>) {
    let events = told.into_iter().filter_map(|told| match told {
        Told::Event(event) => Some(Recorded::Life(event)),
        Told::Operator(event) => Some(Recorded::Operator(event)),
        Told::Missed { .. } => None,
    });
    core.store.keep_events(events.collect()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tell(feed: &Feed, times: usize) {
        for _ in 0..times {
            let id = SandboxId::from_entropy([1; 20]);
            feed.tell(SystemTime::UNIX_EPOCH, &Owner::single(), &id, Phase::Running, None);
        }
    }

    #[test]
    fn a_reader_gets_what_comes_after_its_place_in_order() {
        let feed = Feed::new(Vec::new());
        tell(&feed, 5);
        let ids: Vec<u64> = feed
            .read(2, 100)
            .iter()
            .map(|told| match told {
                Told::Event(event) => event.id,
                Told::Operator(_) | Told::Missed { .. } => 0,
            })
            .collect();
        assert_eq!(ids, [3, 4, 5]);
        assert_eq!(feed.read(5, 100), []);
    }

    #[test]
    fn who_is_too_late_is_told_what_was_missed() {
        let feed = Feed::new(Vec::new());
        tell(&feed, REMEMBERED + 7);
        let told = feed.read(3, 1);
        assert_eq!(told[0], Told::Missed { after: 3, through: 7 });
        assert!(matches!(&told[1], Told::Event(event) if event.id == 8));
        assert!(matches!(&feed.read(7, 1)[0], Told::Event(event) if event.id == 8));
    }

    #[test]
    fn the_last_events_of_one_sandbox_are_found_among_others() {
        let feed = Feed::new(Vec::new());
        let other = SandboxId::from_entropy([2; 20]);
        tell(&feed, 2);
        feed.tell(SystemTime::UNIX_EPOCH, &Owner::single(), &other, Phase::Running, None);
        tell(&feed, 2);
        let ids = |sandbox, most| -> Vec<u64> {
            feed.of(&Owner::single(), &sandbox, most).iter().map(|event| event.id).collect()
        };
        assert_eq!(ids(SandboxId::from_entropy([1; 20]), 3), [2, 4, 5]);
        assert_eq!(ids(other, 3), [3]);
        assert_eq!(feed.of(&Owner::named("somebody"), &SandboxId::from_entropy([1; 20]), 9), []);
    }

    #[test]
    fn last_events_are_counted_among_those_of_the_owner() {
        let feed = Feed::new(Vec::new());
        let other = Owner::named("other");
        tell(&feed, 3);
        feed.tell(SystemTime::UNIX_EPOCH, &other, &SandboxId::from_entropy([2; 20]), Phase::Running, None);
        assert_eq!(feed.before_last(None, 2), 2);
        assert_eq!(feed.before_last(Some(&Owner::single()), 2), 1);
        assert_eq!(feed.before_last(Some(&other), 9), 0);
        assert_eq!(feed.before_last(None, 0), 4);
    }

    #[test]
    fn numbers_are_not_used_again_after_a_restart() {
        let feed = Feed::new(Vec::new());
        tell(&feed, 3);
        let kept = feed.lock().events.iter().take(2).cloned().collect();
        let again = Feed::new(kept);
        tell(&again, 1);
        assert!(again.newest() > feed.newest());
        assert_eq!(again.read(0, 100).len(), 3);
    }
}

//! Watches that outlive a request. Each has a task that collects the events of the sandbox.
//!
//! ```text
//! sandbox ─► task of the watch: waits for further events, drops repetitions ─► EventHistory ─► poll, SSE
//! ```
//! A watch ends when it is deleted, when its sandbox ends, or when no client has used it for a time: a forgotten one
//! would keep its sandbox busy.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::SandboxId;
use service::{FileChange, FileWatch, ServiceError, WatchEvent};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::watch_events::{EventFilter, EventHistory, EventPage, FileEventBody};
use crate::server::request_log::unique_hex;

/// How many watches a sandbox may have.
pub(super) const MAX_WATCHES: usize = 32;
/// How long a watch that no client uses is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// How many events wait for others at most, and how many bytes of paths in them.
const MAX_PENDING_EVENTS: usize = 1024;
const MAX_PENDING_BYTES: usize = 256 << 10;

/// The watches of all sandboxes.
#[derive(Default)]
pub(crate) struct WatchRegistry {
    watches: Mutex<HashMap<(SandboxId, String), Arc<FileWatcher>>>,
}

/// The settings of a watch, as a client chose them.
pub(super) struct WatchOptions {
    pub(super) path: String,
    pub(super) recursive: bool,
    pub(super) debounce: Duration,
    pub(super) filter: EventFilter,
}

/// A watch with an id.
pub(super) struct FileWatcher {
    pub(super) id: String,
    pub(super) path: String,
    pub(super) recursive: bool,
    shared: Arc<SharedEvents>,
    /// The number of the last event; closed when the task ends.
    numbers: watch::Receiver<u64>,
    task: JoinHandle<()>,
}

/// The sandbox has as many watches as it may have.
#[derive(Debug)]
pub(super) struct TooManyWatches;

/// The state that the task shares with requests.
struct SharedEvents {
    history: Mutex<EventHistory>,
    last_use: Mutex<Instant>,
}

impl WatchRegistry {
    /// Starts to collect the events of a watch.
    pub(super) fn add_watch(
        &self,
        sandbox: &SandboxId,
        events: FileWatch,
        options: WatchOptions,
    ) -> Result<Arc<FileWatcher>, TooManyWatches> {
        let mut watches = self.lock();
        watches.retain(|_, watcher| !watcher.is_over());
        if watches.keys().filter(|(owner, _)| owner == sandbox).count() >= MAX_WATCHES {
            return Err(TooManyWatches);
        }
        let watcher = Arc::new(FileWatcher::start(events, options));
        watches.insert((sandbox.clone(), watcher.id.clone()), Arc::clone(&watcher));
        Ok(watcher)
    }

    /// Finds a watch and counts that as use.
    pub(super) fn find_watch(&self, sandbox: &SandboxId, id: &str) -> Option<Arc<FileWatcher>> {
        let watcher = self.lock().get(&(sandbox.clone(), id.to_owned())).cloned()?;
        if watcher.is_over() {
            return None;
        }
        watcher.count_use();
        Some(watcher)
    }

    pub(super) fn list_watches(&self, sandbox: &SandboxId) -> Vec<Arc<FileWatcher>> {
        let watches = self.lock();
        let own = watches.iter().filter(|((owner, _), watcher)| owner == sandbox && !watcher.is_over());
        let mut own: Vec<_> = own.map(|(_, watcher)| Arc::clone(watcher)).collect();
        own.sort_by(|a, b| a.id.cmp(&b.id));
        own
    }

    /// Returns whether there was such a watch.
    pub(super) fn remove_watch(&self, sandbox: &SandboxId, id: &str) -> bool {
        let removed = self.lock().remove(&(sandbox.clone(), id.to_owned()));
        removed.is_some_and(|watcher| {
            // Requests that still use it must see its end.
            watcher.task.abort();
            true
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(SandboxId, String), Arc<FileWatcher>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileWatcher {
    fn start(events: FileWatch, options: WatchOptions) -> Self {
        let (sender, numbers) = watch::channel(0);
        let shared =
            Arc::new(SharedEvents { history: Mutex::default(), last_use: Mutex::new(Instant::now()) });
        let (path, recursive) = (options.path.clone(), options.recursive);
        let task = tokio::spawn(collect_events(events, options, Arc::clone(&shared), sender));
        Self { id: unique_hex()[..16].to_owned(), path, recursive, shared, numbers, task }
    }

    fn is_over(&self) -> bool {
        self.numbers.has_changed().is_err()
    }

    /// Postpones the end of the watch.
    pub(super) fn count_use(&self) {
        *lock(&self.shared.last_use) = Instant::now();
    }

    pub(super) fn read_page(&self, cursor: u64, limit: usize) -> EventPage {
        lock(&self.shared.history).read_page(cursor, limit)
    }

    /// Returns when there is an event behind the cursor; false if the watch has ended.
    pub(super) async fn wait_for_event(&self, cursor: u64) -> bool {
        let mut numbers = self.numbers.clone();
        numbers.wait_for(|last| *last > cursor).await.is_ok()
    }
}

impl Drop for FileWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Collects events until the watch ends.
async fn collect_events(
    mut events: FileWatch,
    options: WatchOptions,
    shared: Arc<SharedEvents>,
    numbers: watch::Sender<u64>,
) {
    let mut pending = PendingEvents::default();
    loop {
        let idle_end = *lock(&shared.last_use) + IDLE_TIMEOUT;
        let publish_at = pending.since.map_or(idle_end, |since| since + options.debounce);
        // Both branches are safe to drop: an event that was not received completely stays with the connection.
        let received = tokio::select! {
            received = events.next() => Some(received),
            () = tokio::time::sleep_until(publish_at.min(idle_end)) => None,
        };
        match received {
            Some(Ok(Some(event))) => pending.add_event(event, &options),
            Some(ended) => {
                pending.publish(&shared, &numbers);
                report_end(ended);
                return;
            }
            None => {}
        }
        let now = Instant::now();
        if pending.is_due(now, options.debounce) {
            pending.publish(&shared, &numbers);
        }
        if now >= *lock(&shared.last_use) + IDLE_TIMEOUT {
            return;
        }
    }
}

fn report_end(ended: Result<Option<WatchEvent>, ServiceError>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a file watch ended");
    }
}

/// Events that wait for others, so that repetitions can be left out.
#[derive(Default)]
struct PendingEvents {
    events: Vec<FileEventBody>,
    overflow: bool,
    since: Option<Instant>,
}

impl PendingEvents {
    fn add_event(&mut self, event: WatchEvent, options: &WatchOptions) {
        if event.change == FileChange::Overflow {
            self.overflow = true;
        } else {
            let Some(event) = FileEventBody::from_event(event, &options.path) else { return };
            if !options.filter.accepts(&event) {
                return;
            }
            self.events.retain(|pending| !event.repeats(pending));
            self.events.push(event);
        }
        self.since.get_or_insert_with(Instant::now);
    }

    fn is_due(&self, now: Instant, debounce: Duration) -> bool {
        let path_bytes: usize = self.events.iter().map(FileEventBody::path_bytes).sum();
        let is_full = self.events.len() >= MAX_PENDING_EVENTS || path_bytes >= MAX_PENDING_BYTES;
        is_full || self.since.is_some_and(|since| now >= since + debounce)
    }

    fn publish(&mut self, shared: &SharedEvents, numbers: &watch::Sender<u64>) {
        let Self { events, overflow, .. } = std::mem::take(self);
        let last = {
            let mut history = lock(&shared.history);
            for event in events {
                history.add_event(event);
            }
            if overflow {
                history.add_overflow();
            }
            history.last()
        };
        numbers.send_replace(last);
    }
}

//! The bounded log of one sandbox: its connections and denied queries.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use egress_protocol::{ActionMessage, LogKind, LogPage, LogRecord};
use tokio::sync::Notify;

/// How many records of a sandbox are kept.
const MAX_LOG_RECORDS: usize = 2048;
/// How many records one reply carries.
const MAX_PAGE_RECORDS: usize = 512;
const MAX_TEXT_BYTES: usize = 512;

/// A record without its number and time.
#[derive(Clone, Debug)]
pub(crate) struct LogEntry {
    pub(crate) kind: LogKind,
    pub(crate) name: Option<String>,
    pub(crate) address: Option<SocketAddr>,
    pub(crate) verdict: ActionMessage,
    pub(crate) reason: String,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
}

/// The last records of a sandbox. It takes no memory before the first.
#[derive(Debug)]
pub(crate) struct ConnectionLog {
    ring: Mutex<LogRing>,
    grown: Notify,
}

#[derive(Debug)]
struct LogRing {
    records: VecDeque<LogRecord>,
    /// The number before that of the first record.
    base: u64,
    /// The number of the last record that was written.
    last: u64,
}

impl Default for ConnectionLog {
    /// Numbers begin at the time in microseconds, so that a log after a restart of egress never uses one again.
    fn default() -> Self {
        let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::starting_after(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX / 2))
    }
}

impl ConnectionLog {
    fn starting_after(base: u64) -> Self {
        let ring = LogRing { records: VecDeque::new(), base, last: base };
        Self { ring: Mutex::new(ring), grown: Notify::new() }
    }

    pub(crate) fn append(&self, entry: LogEntry) {
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis());
        let mut ring = self.lock();
        ring.last += 1;
        let record = LogRecord {
            number: ring.last,
            unix_ms: u64::try_from(unix_ms).unwrap_or(u64::MAX),
            kind: entry.kind,
            name: entry.name.map(bounded),
            address: entry.address,
            verdict: entry.verdict,
            reason: bounded(entry.reason),
            bytes_sent: entry.bytes_sent,
            bytes_received: entry.bytes_received,
        };
        if ring.records.len() == MAX_LOG_RECORDS {
            ring.records.pop_front();
        }
        ring.records.push_back(record);
        drop(ring);
        self.grown.notify_waiters();
    }

    /// Returns the records above `after`, the oldest first.
    pub(crate) fn read(&self, after: u64, limit: u32) -> LogPage {
        let ring = self.lock();
        let limit = usize::try_from(limit).unwrap_or(MAX_PAGE_RECORDS).min(MAX_PAGE_RECORDS);
        let first = ring.records.front().map_or(ring.last + 1, |record| record.number);
        let skipped = usize::try_from(after.saturating_add(1).saturating_sub(first)).unwrap_or(usize::MAX);
        let records = ring.records.iter().skip(skipped).take(limit).cloned().collect();
        // What an earlier egress process recorded is gone and not counted.
        let next = after.max(ring.base).saturating_add(1);
        LogPage { records, dropped: first.saturating_sub(next) }
    }

    /// Waits until there is a record above `after`.
    pub(crate) async fn wait_beyond(&self, after: u64) {
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            let has_grown = {
                let ring = self.lock();
                ring.last > after.max(ring.base)
            };
            if has_grown {
                return;
            }
            grown.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, LogRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shortens text that is longer than any name or rule.
fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(reason: &str) -> LogEntry {
        LogEntry {
            kind: LogKind::Query,
            name: Some("a.org".into()),
            address: None,
            verdict: ActionMessage::Deny,
            reason: reason.into(),
            bytes_sent: 0,
            bytes_received: 0,
        }
    }

    fn numbers(page: &LogPage) -> Vec<u64> {
        page.records.iter().map(|record| record.number).collect()
    }

    #[test]
    fn records_are_read_in_order_from_any_number() {
        let log = ConnectionLog::starting_after(0);
        assert_eq!(log.read(0, 10), LogPage::default());
        for _ in 0..5 {
            log.append(entry("default"));
        }
        assert_eq!(numbers(&log.read(0, 10)), [1, 2, 3, 4, 5]);
        assert_eq!(numbers(&log.read(2, 2)), [3, 4]);
        assert_eq!(log.read(5, 10), LogPage::default());
        assert_eq!(log.read(9, 10), LogPage::default());
    }

    #[test]
    fn dropped_records_are_counted_exactly() {
        let log = ConnectionLog::starting_after(0);
        for _ in 0..MAX_LOG_RECORDS + 10 {
            log.append(entry("default"));
        }
        let page = log.read(0, 1);
        assert_eq!((page.dropped, numbers(&page)), (10, vec![11]));
        let page = log.read(4, 1);
        assert_eq!((page.dropped, numbers(&page)), (6, vec![11]));
        let page = log.read(10, 1);
        assert_eq!((page.dropped, numbers(&page)), (0, vec![11]));
        assert_eq!(log.read(0, u32::MAX).records.len(), MAX_PAGE_RECORDS);
    }

    #[test]
    fn long_texts_are_shortened() {
        let log = ConnectionLog::starting_after(0);
        log.append(entry(&"ü".repeat(1000)));
        assert_eq!(log.read(0, 1).records[0].reason.len(), MAX_TEXT_BYTES);
    }

    #[tokio::test]
    async fn reader_waits_for_the_next_record() {
        let log = std::sync::Arc::new(ConnectionLog::starting_after(0));
        log.append(entry("first"));
        log.wait_beyond(0).await;
        let waiting = tokio::spawn({
            let log = log.clone();
            async move { log.wait_beyond(1).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        log.append(entry("second"));
        waiting.await.expect("it does not panic");
    }
}

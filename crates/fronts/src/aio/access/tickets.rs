//! Tickets: credentials for addresses that a browser opens, where no header can be set.
//!
//! A ticket works once and for a short time. The store keeps only hashes, so a lookup takes the same time whatever was
//! presented, and a dump of the memory opens nothing.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::StatusCode;
use ring::rand::{SecureRandom, SystemRandom};

use crate::aio::problem::AioProblem;

/// How many unused tickets there may be at once.
const MAX_TICKETS: usize = 1024;
const TICKET_BYTES: usize = 32;
/// A longer text is no ticket, and is not hashed.
const MAX_PRESENTED_BYTES: usize = 128;

#[derive(Debug, Default)]
pub(super) struct TicketStore {
    /// The end of each unused ticket, by its hash.
    unused: Mutex<HashMap<[u8; 32], Instant>>,
}

impl TicketStore {
    pub(super) fn issue(&self, ttl: Duration) -> Result<String, AioProblem> {
        self.issue_at(Instant::now(), ttl)
    }

    /// Uses up a ticket; false if it was never given out, was used before or has expired.
    pub(super) fn redeem(&self, ticket: &str) -> bool {
        self.redeem_at(Instant::now(), ticket)
    }

    fn issue_at(&self, now: Instant, ttl: Duration) -> Result<String, AioProblem> {
        let ticket = draw_ticket()?;
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        if unused.len() >= MAX_TICKETS {
            unused.retain(|_, end| *end > now);
        }
        if unused.len() >= MAX_TICKETS {
            let message = format!("limit of unused tickets reached ({MAX_TICKETS})");
            let problem = AioProblem::new(StatusCode::TOO_MANY_REQUESTS, message);
            return Err(AioProblem { retry_after: Some(1), ..problem });
        }
        unused.insert(*blake3::hash(ticket.as_bytes()).as_bytes(), now + ttl);
        Ok(ticket)
    }

    fn redeem_at(&self, now: Instant, ticket: &str) -> bool {
        if ticket.len() > MAX_PRESENTED_BYTES {
            return false;
        }
        let hash = blake3::hash(ticket.as_bytes());
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        unused.remove(hash.as_bytes()).is_some_and(|end| end > now)
    }
}

/// Draws 256 random bits.
pub(super) fn draw_ticket() -> Result<String, AioProblem> {
    let mut bytes = [0; TICKET_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|error| {
        tracing::error!(%error, "failed to read random bytes for a ticket");
        AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error")
    })?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[test]
    fn ticket_works_once_and_not_late() {
        let (store, now) = (TicketStore::default(), Instant::now());
        let ticket = store.issue_at(now, TTL).unwrap();
        assert!(!store.redeem_at(now, "other"));
        assert!(store.redeem_at(now, &ticket));
        assert!(!store.redeem_at(now, &ticket));
        let late = store.issue_at(now, TTL).unwrap();
        assert!(!store.redeem_at(now + TTL, &late));
        assert!(!store.redeem_at(now, &late));
    }

    #[test]
    fn number_of_unused_tickets_is_limited() {
        let (store, now) = (TicketStore::default(), Instant::now());
        for _ in 0..MAX_TICKETS {
            store.issue_at(now, TTL).unwrap();
        }
        assert_eq!(store.issue_at(now, TTL).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        // Expired ones make room.
        assert!(store.issue_at(now + TTL, TTL).is_ok());
        assert_eq!(store.unused.lock().unwrap().len(), 1);
    }
}

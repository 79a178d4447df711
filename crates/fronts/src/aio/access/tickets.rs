//! Tickets: credentials for addresses that a browser opens, where no header can be set.
//!
//! A ticket works once and for a short time. The store keeps only hashes, so the time of a lookup reveals nothing about a
//! ticket, and a dump of the memory opens nothing.

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

/// The path of the only connection that the ticket of a terminal's page opens.
const TERMINAL_SOCKET_PATH: &str = "/v1/shell/ws";

#[derive(Debug, Default)]
pub(super) struct TicketStore {
    /// Unused tickets by their hashes.
    unused: Mutex<HashMap<[u8; 32], UnusedTicket>>,
}

#[derive(Clone, Copy, Debug)]
struct UnusedTicket {
    scope: TicketScope,
    end: Instant,
}

/// What a ticket opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TicketScope {
    Everything,
    /// The connection of a terminal's page.
    TerminalSocket,
}

impl TicketStore {
    pub(super) fn issue(&self, scope: TicketScope, ttl: Duration) -> Result<String, AioProblem> {
        self.issue_at(Instant::now(), scope, ttl)
    }

    /// Uses up a ticket for a request to `path`; false if it was never given out, was used before, has expired or does not
    /// open that path.
    pub(super) fn redeem(&self, ticket: &str, path: &str) -> bool {
        self.redeem_at(Instant::now(), ticket, path)
    }

    fn issue_at(&self, now: Instant, scope: TicketScope, ttl: Duration) -> Result<String, AioProblem> {
        let ticket = draw_ticket()?;
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        if unused.len() >= MAX_TICKETS {
            unused.retain(|_, ticket| ticket.end > now);
        }
        if unused.len() >= MAX_TICKETS {
            let message = format!("limit of unused tickets reached ({MAX_TICKETS})");
            let problem = AioProblem::new(StatusCode::TOO_MANY_REQUESTS, message);
            return Err(AioProblem { retry_after: Some(1), ..problem });
        }
        unused.insert(*blake3::hash(ticket.as_bytes()).as_bytes(), UnusedTicket { scope, end: now + ttl });
        Ok(ticket)
    }

    fn redeem_at(&self, now: Instant, ticket: &str, path: &str) -> bool {
        if ticket.len() > MAX_PRESENTED_BYTES {
            return false;
        }
        let hash = blake3::hash(ticket.as_bytes());
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        let found = unused.remove(hash.as_bytes()).filter(|ticket| ticket.end > now);
        found.is_some_and(|ticket| match ticket.scope {
            TicketScope::Everything => true,
            TicketScope::TerminalSocket => path == TERMINAL_SOCKET_PATH,
        })
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
        let ticket = store.issue_at(now, TicketScope::Everything, TTL).unwrap();
        assert!(!store.redeem_at(now, "other", "/x"));
        assert!(store.redeem_at(now, &ticket, "/x"));
        assert!(!store.redeem_at(now, &ticket, "/x"));
        let late = store.issue_at(now, TicketScope::Everything, TTL).unwrap();
        assert!(!store.redeem_at(now + TTL, &late, "/x"));
        assert!(!store.redeem_at(now, &late, "/x"));
    }

    #[test]
    fn ticket_of_a_terminal_opens_only_its_connection() {
        let (store, now) = (TicketStore::default(), Instant::now());
        for (path, expected) in [("/v1/shell/ws", true), ("/terminal", false), ("/v1/shell/exec", false)] {
            let ticket = store.issue_at(now, TicketScope::TerminalSocket, TTL).unwrap();
            assert_eq!(store.redeem_at(now, &ticket, path), expected, "{path}");
            assert!(!store.redeem_at(now, &ticket, "/v1/shell/ws"), "{path}");
        }
    }

    #[test]
    fn number_of_unused_tickets_is_limited() {
        let (store, now) = (TicketStore::default(), Instant::now());
        for _ in 0..MAX_TICKETS {
            store.issue_at(now, TicketScope::Everything, TTL).unwrap();
        }
        assert_eq!(
            store.issue_at(now, TicketScope::Everything, TTL).unwrap_err().status,
            StatusCode::TOO_MANY_REQUESTS
        );
        // Expired ones make room.
        assert!(store.issue_at(now + TTL, TicketScope::Everything, TTL).is_ok());
        assert_eq!(store.unused.lock().unwrap().len(), 1);
    }
}

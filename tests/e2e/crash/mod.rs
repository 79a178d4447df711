//! Kills every process of ours at arbitrary moments.
//!
//! A round begins two operations, kills one process some milliseconds later, lets the others recover, and
//! then checks the server against everything it had reported to its clients. At the end nothing may be
//! left.
//!
//! `rounds` is that test; `operations` are the client requests, `fleet` is what clients were promised,
//! `parts` are the processes, `remains` is what the host holds. `endings` has the other ways in which a
//! server or a client ends; `snapshots`, `volumes`, `pools` and `nests` have their own rounds for those, and
//! `aio_rounds` those of the AIO API with its sessions, and `filtered` those of filtered networks.

mod aio_member;
mod aio_rounds;
mod endings;
mod filtered;
mod fleet;
mod isolated_sessions;
pub(crate) mod leftovers;
mod operations;
pub(crate) mod parts;
mod pools;
mod random;
mod rounds;
mod snapshots;
mod volumes;

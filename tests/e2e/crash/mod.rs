//! Every process of ours, killed at any instant.
//!
//! A round begins two operations, kills one process some milliseconds later, lets the others
//! recover, and then holds the server to everything it had told its clients. In the end nothing
//! may be left.
//!
//! `rounds` is that test; `operations` are what clients do, `fleet` is what they were told,
//! `parts` are the processes, `remains` is what the host holds. `endings` has the other ways in
//! which a server or a client goes away; `snapshots`, `volumes`, `pools` and `nests` have rounds of their own
//! for those.

mod endings;
mod fleet;
mod nests;
mod operations;
pub(crate) mod parts;
mod pools;
mod random;
pub(crate) mod remains;
mod rounds;
mod snapshots;
mod volumes;

//! Calls to the agent in a sandbox: the client, the replies that it may send, the conversion of its types, and
//! its faults as errors.

pub(crate) mod client;
pub(crate) mod faults;
pub(crate) mod reply;
pub(crate) mod translate;

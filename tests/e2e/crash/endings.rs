//! Other ways in which a server, a `run` or a client goes away.

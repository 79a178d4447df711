//! Handles: the numbers by which the agent's parts refer to each other's entries.
//!
//! They all come from one counter and are never reused, so a late event finds nothing. Each table
//! has its own type, so that a handle cannot be used to look something up in another table.

/// Defines the type of the keys of one table.
macro_rules! handle {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) struct $name(u64);

        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                Self(number)
            }
        }

        impl From<$name> for u64 {
            fn from(handle: $name) -> Self {
                handle.0
            }
        }
    };
}

handle! {
    /// A connection from a server.
    ConnectionId
}

handle! {
    /// A process with a name and a journal: a command, or a run in a session.
    ProcessHandle
}

handle! {
    /// A running command with its pipes, which belongs to a process or a session, or has outlived
    /// both.
    RunningHandle
}

handle! {
    /// A session, whether or not its shell runs.
    SessionHandle
}

handle! {
    /// A tunnel to a port, from the dial on.
    TunnelId
}

handle! {
    /// A port that the agent reserves.
    ReservedPortId
}

handle! {
    /// The control group of one command, whose name is this number.
    GroupId
}

impl std::fmt::Display for GroupId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

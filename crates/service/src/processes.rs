//! Commands and shells in a sandbox: start, follow, feed, signal.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use domain::process::{Directory, Process, Size};
use domain::{Exit, Identity, Owner, Position, ProcessId, Retention, SandboxId, SessionId};

use crate::{Following, Input, Service, ServiceError};

/// How a process ended, and what it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub exit: Exit,
    /// The overall offset behind the last byte it printed.
    pub written: u64,
    pub ended: SystemTime,
    pub duration: Duration,
    pub user: Duration,
    pub system: Duration,
    pub max_rss: domain::Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub process: ProcessId,
    pub tag: Option<String>,
    /// The session it is a run of.
    pub session: Option<SessionId>,
    /// The shell text, or the words joined by blanks; cut after 4 KiB.
    pub command: String,
    pub started: SystemTime,
    pub written: u64,
    /// `None` while it runs.
    pub ended: Option<Ended>,
}

/// Whom a signal reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The process's group, as a terminal would.
    Group,
    /// Everything the process ever started.
    Tree,
}

/// A shell to keep open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSession {
    pub identity: Identity,
    pub directory: Option<Directory>,
    pub env: BTreeMap<String, String>,
    /// On a terminal of this size instead of pipes.
    pub terminal: Option<Size>,
}

/// Text for an open shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub text: String,
    /// Only for this run to start in.
    pub directory: Option<Directory>,
    pub deadline: Option<Duration>,
    pub retention: Retention,
    pub busy: Busy,
}

/// What happens while another run of the session is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Busy {
    Refuse,
    Queue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    pub session: SessionId,
    pub busy: bool,
    pub terminal: bool,
}

impl Service {
    /// Starts a process; what it prints can be followed from the first byte.
    pub async fn launch(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: Process,
    ) -> Result<Following, ServiceError> {
        todo!()
    }

    pub async fn follow(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        from: Position,
    ) -> Result<Following, ServiceError> {
        todo!()
    }

    pub async fn status(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<ProcessStatus, ServiceError> {
        todo!()
    }

    pub async fn processes(&self, owner: &Owner, id: &SandboxId) -> Result<Vec<ProcessStatus>, ServiceError> {
        todo!()
    }

    pub async fn signal(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        signal: i32,
        reach: Reach,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    pub async fn input(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<Input, ServiceError> {
        todo!()
    }

    pub async fn resize(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
        size: Size,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    /// Drops a finished process and what it printed.
    pub async fn forget(
        &self,
        owner: &Owner,
        id: &SandboxId,
        process: &ProcessId,
    ) -> Result<(), ServiceError> {
        todo!()
    }

    pub async fn open_session(
        &self,
        owner: &Owner,
        id: &SandboxId,
        wish: OpenSession,
    ) -> Result<SessionId, ServiceError> {
        todo!()
    }

    pub async fn run(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
        run: Run,
    ) -> Result<Following, ServiceError> {
        todo!()
    }

    pub async fn sessions(&self, owner: &Owner, id: &SandboxId) -> Result<Vec<SessionStatus>, ServiceError> {
        todo!()
    }

    pub async fn close_session(
        &self,
        owner: &Owner,
        id: &SandboxId,
        session: &SessionId,
    ) -> Result<(), ServiceError> {
        todo!()
    }
}

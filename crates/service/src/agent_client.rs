//! Speaks `wire` with the agent in a sandbox.

use crate::ErrorKind;

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct AgentError(String);

impl AgentError {
    pub(crate) fn kind(&self) -> ErrorKind {
        ErrorKind::Internal
    }
}

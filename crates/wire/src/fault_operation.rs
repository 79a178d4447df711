//! The operation in a fault: an enum for those that a receiver acts on, and text that is only shown for all others. In
//! messages each is a text, so that either side may be older than the other.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An operation that was attempted, shown as a lower-case verb such as `open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum FaultOperation {
    BecomeUser,
    Exec,
    FindSession,
    FindIsolatedSession,
    OpenSession,
    StartKernel,
    Other(String),
}

impl FaultOperation {
    pub fn as_str(&self) -> &str {
        match self {
            Self::BecomeUser => "become user",
            Self::Exec => "exec",
            Self::FindSession => "find session",
            Self::FindIsolatedSession => "find isolated session",
            Self::OpenSession => "open session",
            Self::StartKernel => "start kernel",
            Self::Other(text) => text,
        }
    }
}

impl From<String> for FaultOperation {
    fn from(text: String) -> Self {
        match text.as_str() {
            "become user" => Self::BecomeUser,
            "exec" => Self::Exec,
            "find session" => Self::FindSession,
            "find isolated session" => Self::FindIsolatedSession,
            "open session" => Self::OpenSession,
            "start kernel" => Self::StartKernel,
            _ => Self::Other(text),
        }
    }
}

impl From<&str> for FaultOperation {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<FaultOperation> for String {
    fn from(operation: FaultOperation) -> Self {
        match operation {
            FaultOperation::Other(text) => text,
            named => named.as_str().to_owned(),
        }
    }
}

impl fmt::Display for FaultOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_read_from_the_text_that_it_is_written_as() {
        for operation in [
            FaultOperation::BecomeUser,
            FaultOperation::Exec,
            FaultOperation::FindSession,
            FaultOperation::FindIsolatedSession,
            FaultOperation::OpenSession,
            FaultOperation::StartKernel,
            FaultOperation::Other("open".to_owned()),
        ] {
            assert_eq!(FaultOperation::from(operation.as_str()), operation);
            assert_eq!(String::from(operation.clone()), operation.to_string());
        }
    }
}

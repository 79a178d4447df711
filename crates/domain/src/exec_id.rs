//! The ids of what runs in a sandbox: processes, sessions and contexts.
//!
//! All three have the same form, 32 hexadecimal digits that the service draws, because the agent keeps them in one
//! place. They are different types, so that one cannot be passed for another by mistake.

use std::fmt;

/// The error for text that is not such an id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("an id is 32 hexadecimal digits")]
pub struct ExecIdError;

/// Defines one kind of id.
macro_rules! exec_id {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            pub fn from_entropy(entropy: [u8; 16]) -> Self {
                Self(entropy.iter().map(|byte| format!("{byte:02x}")).collect())
            }

            pub fn parse(text: &str) -> Result<Self, ExecIdError> {
                is_valid(text).then(|| Self(text.to_owned())).ok_or(ExecIdError)
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

exec_id! {
    /// The id of a command, or of a run in a session, drawn before it starts.
    ProcessId
}

exec_id! {
    /// The id of a shell that is kept open.
    SessionId
}

exec_id! {
    /// The id of a context, which keeps the state of a language.
    ContextId
}

/// The name that a client chose for a session: any text of 1 to 256 bytes without zero bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName(String);

/// The error for text that cannot be the name of a session.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of a session has 1 to 256 bytes, none of them zero")]
pub struct SessionNameError;

impl SessionName {
    /// The longest name.
    pub const MAX_BYTES: usize = 256;

    pub fn parse(text: &str) -> Result<Self, SessionNameError> {
        let valid = (1..=Self::MAX_BYTES).contains(&text.len()) && !text.contains('\0');
        valid.then(|| Self(text.to_owned())).ok_or(SessionNameError)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl ContextId {
    /// The session by which the agent keeps this context.
    pub fn to_session(&self) -> SessionId {
        SessionId(self.0.clone())
    }
}

impl ProcessId {
    /// The session with the same digits, for protocols in which the id of a session stands for the process that runs
    /// in it.
    pub fn to_session(&self) -> SessionId {
        SessionId(self.0.clone())
    }
}

fn is_valid(text: &str) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 32 && text.bytes().all(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_32_lower_case_hexadecimal_digits() {
        assert_eq!(SessionId::parse(&"0f".repeat(16)), Ok(SessionId::from_entropy([15; 16])));
        for text in ["", "0f", &"0F".repeat(16), &"0g".repeat(16), &"0f".repeat(17)] {
            assert_eq!(SessionId::parse(text), Err(ExecIdError), "{text}");
        }
    }

    #[test]
    fn session_may_have_any_short_name() {
        for text in ["a", "sub-agent/1 ü\n", &"x".repeat(256)] {
            assert_eq!(SessionName::parse(text).map(|name| name.as_str().to_owned()), Ok(text.to_owned()));
        }
        for text in ["", "a\0b", &"x".repeat(257)] {
            assert_eq!(SessionName::parse(text), Err(SessionNameError), "{text}");
        }
    }

    #[test]
    fn context_and_its_session_have_the_same_digits() {
        let context = ContextId::from_entropy([7; 16]);
        assert_eq!(context.to_session().as_str(), context.as_str());
    }
}

//! The frames of a command's connection after the first. Frames that begin with a byte are binary; the
//! named ones are JSON text.

use domain::StreamKind;
use serde::{Deserialize, Serialize};
use service::{OutputEvent, ServiceError};

use crate::kit::command_ending::{CommandEnding, exit_code};
use crate::kit::socket::{SocketMessage, tagged_message};

pub(super) const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// Text frames of the client after the first.
#[derive(Deserialize)]
#[serde(tag = "type")]
pub(super) enum ClientFrame {
    /// The first frame again: a proxy removed the header of the response that accepted it.
    #[serde(rename = "coracle.start")]
    Start,
    #[serde(rename = "coracle.stdin-end")]
    StdinEnd,
    #[serde(rename = "signal")]
    Signal { signal: String },
    #[serde(rename = "resize")]
    Resize {
        #[serde(default)]
        cols: u16,
        #[serde(default)]
        rows: u16,
    },
    #[serde(rename = "ping")]
    Ping,
}

/// Text frames to the client.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum ServerFrame {
    #[serde(rename = "connected")]
    Connected { session_id: String, mode: &'static str },
    #[serde(rename = "coracle.credit")]
    Credit { bytes: usize },
    /// The command no longer reads its input.
    #[serde(rename = "coracle.stdin-closed")]
    StdinClosed,
    /// The output from `from` up to, not including, `to` is no longer retained.
    #[serde(rename = "coracle.gap")]
    Gap { from: u64, to: u64 },
    #[serde(rename = "exit")]
    Exit {
        exit_code: i32,
        #[serde(skip_serializing_if = "Option::is_none")]
        coracle: Option<CommandEnding>,
    },
    #[serde(rename = "error")]
    Error {
        code: &'static str,
        error: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        coracle: Option<CommandEnding>,
    },
    #[serde(rename = "pong")]
    Pong,
}

impl ServerFrame {
    pub(super) fn to_message(&self) -> SocketMessage {
        let json = serde_json::to_string(self).expect("frames contain only strings and numbers");
        SocketMessage::Text(json)
    }
}

/// The message for an event of the command, or for the error that ended its output.
pub(super) fn event_message(event: Result<OutputEvent, ServiceError>) -> SocketMessage {
    let frame = match event {
        Ok(OutputEvent::Output { stream, bytes, .. }) => {
            return tagged_message(if stream == StreamKind::Stderr { STDERR } else { STDOUT }, &bytes);
        }
        Ok(OutputEvent::Gap { from, to, .. }) => ServerFrame::Gap { from: from.0, to: to.0 },
        Ok(OutputEvent::Ended(end)) => {
            ServerFrame::Exit { exit_code: exit_code(end.exit), coracle: CommandEnding::from_exit(end.exit) }
        }
        Err(error) => ServerFrame::Error {
            code: "SESSION_GONE",
            error: error.to_string(),
            coracle: Some(CommandEnding::Lost),
        },
    };
    frame.to_message()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_documented_names() {
        let frame = |text: &str| serde_json::from_str::<ClientFrame>(text);
        assert!(matches!(frame(r#"{"type":"coracle.stdin-end"}"#), Ok(ClientFrame::StdinEnd)));
        assert!(matches!(frame(r#"{"type":"resize","cols":80,"rows":24}"#), Ok(ClientFrame::Resize { .. })));
        assert!(matches!(frame(r#"{"type":"coracle.start","argv":["true"]}"#), Ok(ClientFrame::Start)));
        assert!(frame(r#"{"type":"coracle.other"}"#).is_err());
        let json = |frame: &ServerFrame| serde_json::to_string(frame).unwrap();
        assert_eq!(json(&ServerFrame::Gap { from: 1, to: 5 }), r#"{"type":"coracle.gap","from":1,"to":5}"#);
        assert_eq!(
            json(&ServerFrame::Exit { exit_code: 3, coracle: None }),
            r#"{"type":"exit","exit_code":3}"#
        );
        let oom = ServerFrame::Exit { exit_code: -1, coracle: Some(CommandEnding::Oom) };
        assert_eq!(json(&oom), r#"{"type":"exit","exit_code":-1,"coracle":{"ending":"oom"}}"#);
    }
}

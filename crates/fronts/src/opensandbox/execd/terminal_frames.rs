//! The frames of a terminal's WebSocket.
//!
//! ```text
//! to the client:    [0x03 offset bytes]  connected  (0x01|0x02 bytes)…  exit  close 1000
//! from the client:  0x00 bytes · stdin · signal · resize · ping
//! ```
//! Frames that begin with a byte are binary; the named ones are JSON text.

use domain::StreamKind;
use serde::{Deserialize, Serialize};

use crate::kit::command_ending::exit_code;
use crate::kit::socket::{CLOSE_FAILED, CLOSE_NORMAL, CloseReason, SocketMessage, tagged_message};
use crate::kit::terminal_socket::{
    TerminalAction, TerminalCodec, TerminalEnding, TerminalEvent, TerminalFault, signal_number,
};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const REPLAY: u8 = 3;

const CLOSE_TAKEN_OVER: u16 = 4001;

pub(super) static TERMINAL_CODEC: TerminalCodec =
    TerminalCodec { decode: decode_message, encode: encode_event, close: close_reason, ping: None };

/// Text frames from the client.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TerminalClientFrame {
    Stdin {
        data: String,
    },
    Signal {
        signal: String,
    },
    Resize {
        #[serde(default)]
        cols: u16,
        #[serde(default)]
        rows: u16,
    },
    Ping,
}

/// Text frames to the client.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum TerminalServerFrame<'a> {
    Connected { session_id: &'a str, mode: &'a str },
    Exit { exit_code: i32 },
    Error { code: &'a str, error: &'a str },
    Pong,
}

fn decode_message(message: &SocketMessage) -> Result<TerminalAction, String> {
    let frame = match message {
        SocketMessage::Text(text) => serde_json::from_str(text).map_err(|error| error.to_string())?,
        SocketMessage::Binary(bytes) => match bytes.split_first() {
            Some((&STDIN, input)) => return Ok(TerminalAction::Input(input.to_vec())),
            _ => return Err("a binary frame must begin with a zero byte".to_owned()),
        },
        _ => return Err("a frame must be text or binary".to_owned()),
    };
    match frame {
        TerminalClientFrame::Stdin { data } => Ok(TerminalAction::Input(data.into_bytes())),
        TerminalClientFrame::Signal { signal } => {
            signal_number(&signal).map(TerminalAction::Signal).ok_or_else(|| "unknown signal".to_owned())
        }
        TerminalClientFrame::Resize { cols, rows } => Ok(TerminalAction::Resize { columns: cols, rows }),
        TerminalClientFrame::Ping => Ok(TerminalAction::Ping),
    }
}

fn encode_event(event: &TerminalEvent<'_>) -> SocketMessage {
    let frame = match *event {
        TerminalEvent::Replay(missed) => {
            return tagged_message(REPLAY, &[&missed.start.to_be_bytes()[..], &missed.bytes].concat());
        }
        TerminalEvent::Output { stream: StreamKind::Stderr, bytes } => return tagged_message(STDERR, bytes),
        TerminalEvent::Output { bytes, .. } => return tagged_message(STDOUT, bytes),
        TerminalEvent::Connected { name, mode } => {
            TerminalServerFrame::Connected { session_id: name, mode: mode.name() }
        }
        TerminalEvent::Exited(exit) => TerminalServerFrame::Exit { exit_code: exit_code(exit) },
        TerminalEvent::Fault { kind, message } => {
            TerminalServerFrame::Error { code: fault_code(kind), error: message }
        }
        TerminalEvent::Pong => TerminalServerFrame::Pong,
    };
    let text = serde_json::to_string(&frame).expect("frames contain only strings and numbers");
    SocketMessage::Text(text)
}

fn fault_code(kind: TerminalFault) -> &'static str {
    match kind {
        TerminalFault::StartFailed => "START_FAILED",
        TerminalFault::InvalidMessage => "INVALID_FRAME",
        TerminalFault::InputFailed => "STDIN_WRITE_FAILED",
        TerminalFault::RequestFailed => "RUNTIME_ERROR",
        TerminalFault::TerminalGone => "SESSION_GONE",
        TerminalFault::TakenOver => "TAKEN_OVER",
    }
}

fn close_reason(ending: TerminalEnding) -> CloseReason {
    match ending {
        TerminalEnding::ClientGone => CloseReason::new(CLOSE_NORMAL, ""),
        TerminalEnding::Exited => CloseReason::new(CLOSE_NORMAL, "process exited"),
        TerminalEnding::StartFailed => CloseReason::new(CLOSE_FAILED, "the shell could not be started"),
        TerminalEnding::TerminalGone => CloseReason::new(CLOSE_FAILED, "the terminal is gone"),
        TerminalEnding::TakenOver => CloseReason::new(CLOSE_TAKEN_OVER, "TAKEN_OVER"),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use domain::ExitReason;
    use service::{MissedOutput, TerminalMode};

    use super::*;

    fn check_decoded(message: SocketMessage, expected: TerminalAction) {
        assert_eq!(decode_message(&message).as_ref(), Ok(&expected), "{message:?}");
    }

    #[test]
    fn client_frames_become_actions() {
        let text = |text: &str| SocketMessage::Text(text.to_owned());
        check_decoded(
            text(r#"{"type":"resize","cols":80,"rows":24}"#),
            TerminalAction::Resize { columns: 80, rows: 24 },
        );
        check_decoded(text(r#"{"type":"resize"}"#), TerminalAction::Resize { columns: 0, rows: 0 });
        check_decoded(text(r#"{"type":"ping"}"#), TerminalAction::Ping);
        check_decoded(text(r#"{"type":"signal","signal":"SIGINT"}"#), TerminalAction::Signal(2));
        check_decoded(text(r#"{"type":"stdin","data":"x"}"#), TerminalAction::Input(b"x".to_vec()));
        let binary = |bytes: &'static [u8]| SocketMessage::Binary(Bytes::from_static(bytes));
        check_decoded(binary(b"\0ab"), TerminalAction::Input(b"ab".to_vec()));
        for invalid in [
            text(r#"{"type":"reboot"}"#),
            text(r#"{"type":"signal","signal":"SIGSTOP"}"#),
            text("x"),
            binary(b"\x01ab"),
            binary(b""),
        ] {
            assert!(decode_message(&invalid).is_err(), "{invalid:?}");
        }
    }

    #[test]
    fn events_have_the_bytes_of_the_protocol() {
        let missed = MissedOutput { start: 258, bytes: b"old".to_vec() };
        for (event, expected) in [
            (TerminalEvent::Replay(&missed), &b"\x03\0\0\0\0\0\0\x01\x02old"[..]),
            (TerminalEvent::Output { stream: StreamKind::Terminal, bytes: b"o" }, b"\x01o"),
            (TerminalEvent::Output { stream: StreamKind::Stderr, bytes: b"e" }, b"\x02e"),
        ] {
            assert_eq!(encode_event(&event), SocketMessage::Binary(Bytes::from_static(expected)));
        }
        for (event, expected) in [
            (
                TerminalEvent::Connected { name: "t", mode: TerminalMode::Terminal },
                r#"{"type":"connected","session_id":"t","mode":"pty"}"#,
            ),
            (TerminalEvent::Exited(ExitReason::Code(3)), r#"{"type":"exit","exit_code":3}"#),
            (
                TerminalEvent::Fault { kind: TerminalFault::TakenOver, message: "m" },
                r#"{"type":"error","code":"TAKEN_OVER","error":"m"}"#,
            ),
            (TerminalEvent::Pong, r#"{"type":"pong"}"#),
        ] {
            assert_eq!(encode_event(&event), SocketMessage::Text(expected.to_owned()));
        }
    }
}

//! The frames of one command over the WebSocket `/pty/coracle.exec/ws`.
//!
//! ```text
//! to the server:    coracle.start  (0x00 bytes | coracle.stdin-end | signal | resize)…
//! from the server:  connected  (0x01|0x02 bytes | coracle.credit | coracle.gap)…  exit
//! ```

use std::time::Duration;

use bytes::{Buf, Bytes};
use serde_json::{Map, Value, json};

use crate::events::CommandEnding;

/// How many bytes of input may be sent before the server has confirmed delivery.
pub const INPUT_WINDOW: usize = 1 << 20;

const STDIN_FRAME: u8 = 0;
const STDOUT_FRAME: u8 = 1;
const STDERR_FRAME: u8 = 2;

/// A command to run, with the fields that `POST /command` and the WebSocket share.
#[derive(Clone, Debug, Default)]
pub struct ExecRequest {
    /// Shell text. If absent, `argv` is run without a shell.
    pub text: Option<String>,
    pub argv: Vec<String>,
    pub directory: Option<String>,
    pub env: Vec<(String, String)>,
    pub timeout: Option<Duration>,
    pub user: Option<(u32, u32)>,
    /// How many bytes of output to keep; the server decides if absent.
    pub output_kept: Option<u64>,
}

/// A frame sent by the server.
#[derive(Debug, PartialEq, Eq)]
pub enum ExecFrame {
    /// The command was started; its process has this id.
    Connected {
        process: String,
    },
    Stdout(Bytes),
    Stderr(Bytes),
    /// This many bytes of input were delivered.
    Credit(usize),
    /// The command no longer reads its input.
    StdinClosed,
    /// Output from `from` up to, not including, `to` is missing.
    Gap {
        from: u64,
        to: u64,
    },
    Exited {
        code: i32,
        ending: Option<CommandEnding>,
    },
    Failed {
        code: String,
        message: String,
        ending: Option<CommandEnding>,
    },
}

impl ExecRequest {
    /// Whether the request names no command.
    pub fn is_blank(&self) -> bool {
        match &self.text {
            Some(text) => text.trim().is_empty(),
            None => self.argv.first().is_none_or(|program| program.trim().is_empty()),
        }
    }

    /// Returns the request body as JSON.
    pub fn body(&self) -> Value {
        let mut body = match &self.text {
            Some(text) => json!({ "command": text }),
            None => json!({ "argv": self.argv }),
        };
        if let Some(directory) = &self.directory {
            body["cwd"] = json!(directory);
        }
        if let Some(timeout) = self.timeout {
            body["timeout"] = json!(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1));
        }
        if let Some((uid, gid)) = self.user {
            body["uid"] = json!(uid);
            body["gid"] = json!(gid);
        }
        if !self.env.is_empty() {
            let envs: Map<_, _> = self.env.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
            body["envs"] = json!(envs);
        }
        if let Some(kept) = self.output_kept {
            body["coracle.output-kept"] = json!(kept);
        }
        body
    }

    /// Returns the first frame on the socket. With a size (columns, rows) the command gets a terminal.
    pub fn start_frame(&self, stdin: bool, size: Option<(u16, u16)>) -> String {
        let mut body = self.body();
        body["type"] = json!("coracle.start");
        body["stdin"] = json!(stdin);
        if let Some((columns, rows)) = size {
            body["cols"] = json!(columns);
            body["rows"] = json!(rows);
        }
        body.to_string()
    }
}

/// Builds a binary frame that carries input.
pub fn input_frame(bytes: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(bytes.len() + 1);
    frame.push(STDIN_FRAME);
    frame.extend_from_slice(bytes);
    frame
}

/// Builds the text frame that follows the last input.
pub fn input_end_frame() -> String {
    json!({ "type": "coracle.stdin-end" }).to_string()
}

/// Builds the text frame that sends a signal, such as `SIGINT`.
pub fn signal_frame(name: &str) -> String {
    json!({ "type": "signal", "signal": name }).to_string()
}

pub fn resize_frame(columns: u16, rows: u16) -> String {
    json!({ "type": "resize", "cols": columns, "rows": rows }).to_string()
}

impl ExecFrame {
    /// Parses a binary frame; `None` if it is of an unknown kind.
    pub fn from_binary(mut frame: Bytes) -> Option<Self> {
        let kind = *frame.first()?;
        frame.advance(1);
        match kind {
            STDOUT_FRAME => Some(Self::Stdout(frame)),
            STDERR_FRAME => Some(Self::Stderr(frame)),
            _ => None,
        }
    }

    /// Parses a text frame; `None` if it is malformed or of an unknown type.
    pub fn from_text(text: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(text).ok()?;
        let word = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        let ending = || serde_json::from_value(value["coracle"].clone()).ok();
        match value["type"].as_str()? {
            "connected" => Some(Self::Connected { process: word("session_id") }),
            "coracle.credit" => Some(Self::Credit(usize::try_from(value["bytes"].as_u64()?).ok()?)),
            "coracle.stdin-closed" => Some(Self::StdinClosed),
            "coracle.gap" => Some(Self::Gap { from: value["from"].as_u64()?, to: value["to"].as_u64()? }),
            "exit" => {
                let code = value["exit_code"].as_i64().and_then(|code| i32::try_from(code).ok());
                Some(Self::Exited { code: code.unwrap_or(-1), ending: ending() })
            }
            "error" => Some(Self::Failed { code: word("code"), message: word("error"), ending: ending() }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_with_arguments_needs_no_shell() {
        let request = ExecRequest { argv: vec!["ls".to_owned(), "a b".to_owned()], ..Default::default() };
        assert_eq!(request.body(), json!({"argv": ["ls", "a b"]}));
    }

    #[test]
    fn every_option_is_sent_in_api_units() {
        let request = ExecRequest {
            text: Some("exit 3".to_owned()),
            directory: Some("/tmp".to_owned()),
            env: vec![("A".to_owned(), "b".to_owned())],
            timeout: Some(Duration::from_secs(5)),
            user: Some((1, 2)),
            output_kept: Some(1024),
            ..Default::default()
        };
        assert_eq!(
            request.body(),
            json!({"command": "exit 3", "cwd": "/tmp", "timeout": 5000, "uid": 1, "gid": 2,
                   "envs": {"A": "b"}, "coracle.output-kept": 1024})
        );
        let start: Value = serde_json::from_str(&request.start_frame(true, Some((80, 24))))
            .expect("the start frame is JSON");
        assert_eq!(
            (&start["type"], &start["stdin"], &start["cols"]),
            (&json!("coracle.start"), &json!(true), &json!(80))
        );
    }

    #[test]
    fn blank_commands_are_recognised() {
        let text = |text: &str| ExecRequest { text: Some(text.to_owned()), ..Default::default() };
        let argv = |words: &[&str]| ExecRequest {
            argv: words.iter().map(|word| (*word).to_owned()).collect(),
            ..Default::default()
        };
        assert!(text(" \n").is_blank() && argv(&[]).is_blank() && argv(&["", "x"]).is_blank());
        assert!(!text("true").is_blank() && !argv(&["true"]).is_blank());
    }

    #[test]
    fn unknown_frames_are_skipped() {
        assert_eq!(ExecFrame::from_binary(Bytes::from_static(b"\x02e")), Some(ExecFrame::Stderr("e".into())));
        assert_eq!(ExecFrame::from_binary(Bytes::from_static(b"\x09e")), None);
        assert_eq!(ExecFrame::from_binary(Bytes::new()), None);
        for text in ["", "x", "{}", r#"{"type":"pong"}"#, r#"{"type":"coracle.gap","from":null}"#] {
            assert_eq!(ExecFrame::from_text(text), None, "{text}");
        }
        let exit = ExecFrame::from_text(r#"{"type":"exit","exit_code":-1,"coracle":{"ending":"oom"}}"#);
        assert_eq!(exit, Some(ExecFrame::Exited { code: -1, ending: Some(CommandEnding::Oom) }));
    }
}

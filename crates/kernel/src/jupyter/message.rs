//! Translates the messages of a Jupyter kernel into reports.
//!
//! Messages are parsed leniently: kernels differ in the fields they fill in, and a missing field
//! must not lose output.

use serde_json::Value;

use crate::line_protocol::{ExecutionError, KernelEvent, MimeBundle};

/// A message from a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct JupyterMessage {
    pub kind: String,
    /// The id of the request it is about.
    pub parent: String,
    pub content: Value,
}

/// The meaning of a message for a run.
#[derive(Debug)]
pub(super) enum MessageMeaning {
    Printed(StandardStream, String),
    Event(KernelEvent),
    /// The kernel has finished a request.
    Idle,
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StandardStream {
    Stdout,
    Stderr,
}

impl JupyterMessage {
    /// Parses header, parent header and content.
    pub(super) fn parse(header: &[u8], parent: &[u8], content: &[u8]) -> Option<Self> {
        let header: Value = serde_json::from_slice(header).ok()?;
        let parent: Value = serde_json::from_slice(parent).ok()?;
        Some(Self {
            kind: value_text(&header["msg_type"]),
            parent: value_text(&parent["msg_id"]),
            content: serde_json::from_slice(content).ok()?,
        })
    }

    pub(super) fn meaning(&self) -> MessageMeaning {
        let content = &self.content;
        match self.kind.as_str() {
            "stream" => {
                let stream =
                    if content["name"] == "stderr" { StandardStream::Stderr } else { StandardStream::Stdout };
                MessageMeaning::Printed(stream, value_text(&content["text"]))
            }
            "display_data" | "update_display_data" => {
                MessageMeaning::Event(KernelEvent::Display(parse_mime_bundle(&content["data"])))
            }
            "execute_result" => {
                MessageMeaning::Event(KernelEvent::Result(parse_mime_bundle(&content["data"])))
            }
            "execute_input" => match content["execution_count"].as_u64() {
                Some(count) => MessageMeaning::Event(KernelEvent::Count(count)),
                None => MessageMeaning::Nothing,
            },
            "error" => MessageMeaning::Event(KernelEvent::Error(parse_error(content))),
            "status" if content["execution_state"] == "idle" => MessageMeaning::Idle,
            _ => MessageMeaning::Nothing,
        }
    }

    /// The reports that only a reply contains: its error, if none was reported before, and the text
    /// that a pager would show.
    pub(super) fn reply_events(&self, failed: bool) -> Vec<KernelEvent> {
        let content = &self.content;
        let mut tells = Vec::new();
        for payload in content["payload"].as_array().into_iter().flatten() {
            if payload["source"] == "page" && payload["data"].is_object() {
                tells.push(KernelEvent::Display(parse_mime_bundle(&payload["data"])));
            }
        }
        match content["status"].as_str() {
            Some("error") if !failed => tells.push(KernelEvent::Error(parse_error(content))),
            Some("aborted" | "abort") if !failed => tells.push(KernelEvent::Error(ExecutionError {
                ename: "Aborted".to_owned(),
                evalue: "the kernel aborted the execution".to_owned(),
                traceback: Vec::new(),
            })),
            _ => {}
        }
        tells
    }
}

fn parse_error(content: &Value) -> ExecutionError {
    ExecutionError {
        ename: value_text(&content["ename"]),
        evalue: value_text(&content["evalue"]),
        traceback: content["traceback"].as_array().into_iter().flatten().map(value_text).collect(),
    }
}

fn parse_mime_bundle(data: &Value) -> MimeBundle {
    let entries = data.as_object().into_iter().flatten();
    entries.map(|(mime, value)| (mime.clone(), value_text(value))).collect()
}

/// A string as it is, a list of strings joined, anything else as JSON.
fn value_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(lines) if lines.iter().all(Value::is_string) => lines.iter().map(value_text).collect(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn meaning(kind: &str, content: Value) -> String {
        let message = JupyterMessage { kind: kind.to_owned(), parent: String::new(), content };
        match message.meaning() {
            MessageMeaning::Printed(stream, text) => format!("{stream:?} {text}"),
            MessageMeaning::Event(tell) => serde_json::to_string(&tell).expect("it is JSON"),
            MessageMeaning::Idle => "idle".to_owned(),
            MessageMeaning::Nothing => "nothing".to_owned(),
        }
    }

    #[test]
    fn messages_mean_the_same_as_in_the_protocol() {
        for (kind, content, expected) in [
            ("stream", json!({"name": "stdout", "text": "a\n"}), "Stdout a\n"),
            ("stream", json!({"name": "stderr", "text": ["b", "c"]}), "Stderr bc"),
            ("stream", json!({}), "Stdout "),
            ("execute_result", json!({"data": {"text/plain": "4"}}), r#"{"result":{"text/plain":"4"}}"#),
            (
                "display_data",
                json!({"data": {"application/json": {"a": [1]}, "text/html": ["<b>", "</b>"]}}),
                r#"{"display":{"application/json":"{\"a\":[1]}","text/html":"<b></b>"}}"#,
            ),
            ("update_display_data", json!({"data": {"x/y": 1}}), r#"{"display":{"x/y":"1"}}"#),
            ("execute_input", json!({"execution_count": 7, "code": "x"}), r#"{"count":7}"#),
            ("execute_input", json!({"execution_count": "x"}), "nothing"),
            ("status", json!({"execution_state": "idle"}), "idle"),
            ("status", json!({"execution_state": "busy"}), "nothing"),
            (
                "error",
                json!({"ename": "E", "evalue": "v", "traceback": ["t"]}),
                r#"{"error":{"ename":"E","evalue":"v","traceback":["t"]}}"#,
            ),
            ("error", json!([]), r#"{"error":{"ename":"","evalue":"","traceback":[]}}"#),
            ("comm_open", json!({}), "nothing"),
        ] {
            assert_eq!(meaning(kind, content.clone()), expected, "{kind} {content}");
        }
    }

    #[test]
    fn error_only_in_the_reply_is_reported_once() {
        let reply =
            |content| JupyterMessage { kind: "execute_reply".to_owned(), parent: String::new(), content };
        let failed = reply(json!({"status": "error", "ename": "E", "evalue": "v", "traceback": []}));
        assert_eq!(failed.reply_events(false).len(), 1);
        assert_eq!(failed.reply_events(true).len(), 0);
        assert_eq!(reply(json!({"status": "aborted"})).reply_events(false).len(), 1);
        assert_eq!(reply(json!({"status": "ok"})).reply_events(false).len(), 0);
        let paged = json!({"status": "ok", "payload": [{"source": "page", "data": {"text/plain": "help"}}]});
        assert_eq!(reply(paged).reply_events(false).len(), 1);
    }
}

//! Translates the messages of a Jupyter kernel into reports.
//!
//! Messages are parsed leniently: kernels differ in the fields they fill in, and a missing field
//! must not lose output.

use serde_json::Value;

use crate::report::{Bundle, Failure, Tell};

/// A message from a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Message {
    pub kind: String,
    /// The id of the request it is about.
    pub parent: String,
    pub content: Value,
}

/// The meaning of a message for a run.
#[derive(Debug)]
pub(super) enum Meaning {
    Printed(Stream, String),
    Told(Tell),
    /// The kernel has finished a request.
    Idle,
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl Message {
    /// Parses header, parent header and content.
    pub(super) fn read(header: &[u8], parent: &[u8], content: &[u8]) -> Option<Self> {
        let header: Value = serde_json::from_slice(header).ok()?;
        let parent: Value = serde_json::from_slice(parent).ok()?;
        Some(Self {
            kind: text(&header["msg_type"]),
            parent: text(&parent["msg_id"]),
            content: serde_json::from_slice(content).ok()?,
        })
    }

    pub(super) fn meaning(&self) -> Meaning {
        let content = &self.content;
        match self.kind.as_str() {
            "stream" => {
                let stream = if content["name"] == "stderr" { Stream::Stderr } else { Stream::Stdout };
                Meaning::Printed(stream, text(&content["text"]))
            }
            "display_data" | "update_display_data" => Meaning::Told(Tell::Display(bundle(&content["data"]))),
            "execute_result" => Meaning::Told(Tell::Result(bundle(&content["data"]))),
            "execute_input" => match content["execution_count"].as_u64() {
                Some(count) => Meaning::Told(Tell::Count(count)),
                None => Meaning::Nothing,
            },
            "error" => Meaning::Told(Tell::Error(failure(content))),
            "status" if content["execution_state"] == "idle" => Meaning::Idle,
            _ => Meaning::Nothing,
        }
    }

    /// The reports that only a reply contains: its error, if none was reported before, and the text
    /// that a pager would show.
    pub(super) fn verdict(&self, failed: bool) -> Vec<Tell> {
        let content = &self.content;
        let mut tells = Vec::new();
        for payload in content["payload"].as_array().into_iter().flatten() {
            if payload["source"] == "page" && payload["data"].is_object() {
                tells.push(Tell::Display(bundle(&payload["data"])));
            }
        }
        match content["status"].as_str() {
            Some("error") if !failed => tells.push(Tell::Error(failure(content))),
            Some("aborted" | "abort") if !failed => tells.push(Tell::Error(Failure {
                ename: "Aborted".to_owned(),
                evalue: "the kernel aborted the execution".to_owned(),
                traceback: Vec::new(),
            })),
            _ => {}
        }
        tells
    }
}

fn failure(content: &Value) -> Failure {
    Failure {
        ename: text(&content["ename"]),
        evalue: text(&content["evalue"]),
        traceback: content["traceback"].as_array().into_iter().flatten().map(text).collect(),
    }
}

fn bundle(data: &Value) -> Bundle {
    let entries = data.as_object().into_iter().flatten();
    entries.map(|(mime, value)| (mime.clone(), text(value))).collect()
}

/// A string as it is, a list of strings joined, anything else as JSON.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(lines) if lines.iter().all(Value::is_string) => lines.iter().map(text).collect(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn meaning(kind: &str, content: Value) -> String {
        let message = Message { kind: kind.to_owned(), parent: String::new(), content };
        match message.meaning() {
            Meaning::Printed(stream, text) => format!("{stream:?} {text}"),
            Meaning::Told(tell) => serde_json::to_string(&tell).expect("it is JSON"),
            Meaning::Idle => "idle".to_owned(),
            Meaning::Nothing => "nothing".to_owned(),
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
        let reply = |content| Message { kind: "execute_reply".to_owned(), parent: String::new(), content };
        let failed = reply(json!({"status": "error", "ename": "E", "evalue": "v", "traceback": []}));
        assert_eq!(failed.verdict(false).len(), 1);
        assert_eq!(failed.verdict(true).len(), 0);
        assert_eq!(reply(json!({"status": "aborted"})).verdict(false).len(), 1);
        assert_eq!(reply(json!({"status": "ok"})).verdict(false).len(), 0);
        let paged = json!({"status": "ok", "payload": [{"source": "page", "data": {"text/plain": "help"}}]});
        assert_eq!(reply(paged).verdict(false).len(), 1);
    }
}

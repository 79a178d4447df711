//! A sandbox of the AIO API, and what its client knows about its sessions and files.

use e2e::aio::AioSandbox;
use e2e::http::HttpClient;
use serde_json::{Value, json};

use super::operations::content;

/// A session with a name, a directory and a variable.
pub(super) const SESSION: &str = "work on it";
/// A session in which a command keeps running.
const COUNTER_SESSION: &str = "counter";
const COUNTER: &str = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.02; done";
/// Lines are appended to it.
pub(super) const LINES_FILE: &str = "/home/gem/lines";
/// It is uploaded over and over. Nothing else is in its directory.
pub(super) const UPLOADED_FILE: &str = "/home/gem/uploads/file";

/// A sandbox with sessions, a running command and files.
pub(super) struct AioMember {
    pub(super) sandbox: AioSandbox,
    counter: String,
    /// The next byte of the counter's output, the next number, and the line that has not ended.
    offset: u64,
    number: u64,
    line: String,
    /// The lines that were acknowledged.
    lines: String,
    uploaded: Vec<u8>,
}

impl AioMember {
    pub(super) fn begin(mut sandbox: AioSandbox) -> Self {
        sandbox.post("/v1/shell/sessions/create", &json!({"id": SESSION, "exec_dir": "/home/gem"}));
        sandbox.run_in(SESSION, "mkdir -p deep/er uploads && cd deep/er && export WORK=kept");
        let counter = json!({"session_id": COUNTER_SESSION, "command": COUNTER, "async_mode": true});
        let counter =
            sandbox.post("/v1/bash/exec", &counter)["command_id"].as_str().expect("an id").to_owned();
        sandbox.post("/v1/file/write", &json!({"file": LINES_FILE, "content": ""}));
        let uploaded = content(0);
        let answer = sandbox.try_upload(UPLOADED_FILE, &uploaded).expect("the server answers");
        assert_eq!(answer.status, 200, "{}", answer.text());
        let (line, lines) = (String::new(), String::new());
        Self { sandbox, counter, offset: 0, number: 0, line, lines, uploaded }
    }

    pub(super) fn with_client(&self, client: HttpClient) -> AioSandbox {
        self.sandbox.with_client(client)
    }

    /// The session is where it was, and the running command goes on from the offset that its client knows.
    pub(super) fn check_works(&mut self) {
        let found = self.sandbox.run_in(SESSION, "pwd; echo $WORK");
        assert_eq!(found, "/home/gem/deep/er\nkept", "the session is another one");
        let sessions = self.sandbox.get("/v1/shell/sessions");
        assert_eq!(sessions["sessions"][SESSION]["working_dir"], "/home/gem/deep/er", "{sessions}");
        self.check_counter();
        self.check_lines("", false);
        let uploaded = self.uploaded.clone();
        self.check_upload(&uploaded, true);
        e2e::eventually("drafts of interrupted uploads are gone", || {
            self.sandbox.run("ls -A /home/gem/uploads") == "file"
        });
    }

    fn check_counter(&mut self) {
        let request = json!({
            "session_id": COUNTER_SESSION, "command_id": self.counter, "offset": self.offset,
            "wait": true, "wait_timeout": 20,
        });
        let read = self.sandbox.post("/v1/bash/output", &request);
        assert_eq!(read["command"]["status"], "running", "{read}");
        let text = read["stdout"].as_str().unwrap_or_default();
        assert!(!text.is_empty(), "the counter stands still at {}", self.number);
        let end = self.offset + text.len() as u64;
        assert_eq!(read["offset"], end, "the offset is not the number of bytes");
        self.offset = end;
        self.line.push_str(text);
        let whole = std::mem::take(&mut self.line);
        let (ended, rest) = whole.rsplit_once('\n').unwrap_or(("", whole.as_str()));
        for line in ended.lines() {
            assert_eq!(line, self.number.to_string(), "a line of the counter was lost or doubled");
            self.number += 1;
        }
        self.line = rest.to_owned();
    }

    /// The file has every line that was acknowledged, once, and perhaps the last one that was not.
    pub(super) fn check_lines(&mut self, last: &str, done: bool) {
        let found = String::from_utf8(self.sandbox.download(LINES_FILE)).expect("lines are text");
        let more = format!("{}{last}", self.lines);
        assert!(found == more || (!done && found == self.lines), "`{found}` is not `{more}`");
        self.lines = found;
    }

    /// The file has the old or the new content, and the new one if the upload was acknowledged.
    pub(super) fn check_upload(&mut self, new: &[u8], done: bool) {
        let found = self.sandbox.download(UPLOADED_FILE);
        let is_new = found == new;
        assert!(is_new || found == self.uploaded, "the file is neither old nor new");
        assert!(is_new || !done, "an upload was acknowledged and is lost");
        self.uploaded = found;
    }

    /// A command that was started has run to its end, whether or not its client received the output.
    pub(super) fn check_command(&mut self, command: &str, output: &str, received: Option<&str>) {
        let waited = self.sandbox.post("/v1/shell/wait", &json!({"id": SESSION, "seconds": 20}));
        assert_eq!(waited["status"], "completed", "{waited}");
        let view = self.sandbox.post("/v1/shell/view", &json!({"id": SESSION}));
        let records = view["console"].as_array().expect("a view has records");
        let outputs: Vec<&Value> = records.iter().filter(|record| record["command"] == command).collect();
        match received {
            Some(received) => assert_eq!(received, output),
            None if outputs.is_empty() => return,
            None => {}
        }
        assert_eq!(outputs.len(), 1, "a command ran twice or left no record: {view}");
        assert_eq!(outputs[0]["output"].as_str().unwrap_or_default().trim_end(), output);
    }
}

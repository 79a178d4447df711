//! The sandboxes that clients know, and what must be true of each.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};

use e2e::http::HttpClient;
use e2e::sandbox::RemoteSandbox;
use serde_json::{Value, json};

use super::operations::{DIRECTORY, FILE, LINES, OperationResult, content};

/// Prints consecutive numbers without end.
const COUNTER: &str = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.02; done";

/// A sandbox in which a command keeps running.
pub(super) struct FleetMember {
    pub(super) sandbox: RemoteSandbox,
    counter: String,
    /// How many numbers were seen so far.
    counted: usize,
    /// The expected content of the file.
    content: Vec<u8>,
}

/// All sandboxes that clients know.
pub(super) struct SandboxFleet {
    address: String,
    /// Headers that the server requires.
    headers: Vec<(String, String)>,
    pub(super) members: Vec<FleetMember>,
}

impl SandboxFleet {
    pub(super) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), headers: Vec::new(), members: Vec::new() }
    }

    /// As [`SandboxFleet::new`], for a server that requires a key.
    pub(super) fn with_headers(address: &str, headers: &[(String, String)]) -> Self {
        Self { headers: headers.to_vec(), ..Self::new(address) }
    }

    pub(super) fn client(&self) -> HttpClient {
        let mut client = HttpClient::new(&self.address);
        client.set_headers(&self.headers);
        client
    }

    /// Adds sandboxes until there are `count`.
    pub(super) fn fill(&mut self, count: usize) {
        while self.members.len() < count {
            let sandbox = RemoteSandbox::create(self.client(), &json!({"resourceLimits": {}}));
            self.members.push(FleetMember::begin(sandbox));
        }
    }

    /// Every id that the server lists.
    pub(super) fn listed(&self) -> BTreeSet<String> {
        let page = self.client().get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
        let items = page["items"].as_array().expect("a page has items").iter();
        items.map(|item| item["id"].as_str().expect("an id is a text").to_owned()).collect()
    }

    /// Ids that the server lists and no client received.
    pub(super) fn unknown_sandboxes(&self) -> BTreeSet<String> {
        let known = |id: &String| self.members.iter().any(|member| member.sandbox.id == *id);
        self.listed().into_iter().filter(|id| !known(id)).collect()
    }

    pub(super) fn delete(&self, id: &str) {
        let path = format!("/v1/sandboxes/{id}");
        let answer = self.client().delete(&path).expect("the server answers");
        assert_eq!(answer.status, 204, "{id} could not be deleted: {}", answer.text());
        let answer = self.client().get(&path).expect("the server answers");
        assert_eq!(answer.status, 404, "{id} was deleted and still exists: {}", answer.text());
    }

    /// A sandbox whose first process was killed reports it; then it is removed.
    pub(super) fn delete_dead_sandbox(&self, id: &str) {
        let mut state = String::new();
        e2e::eventually("the dead sandbox is reported dead", || {
            state = state_of(&mut self.client(), id).expect("it is still listed");
            !matches!(state.as_str(), "Running" | "Pausing" | "Paused" | "Resuming")
        });
        assert!(matches!(state.as_str(), "Failed" | "Terminated"), "a dead sandbox is {state}");
        self.delete(id);
    }

    /// Waits until a sandbox is either gone or in a stable state.
    pub(super) fn wait_until_stable(&self, id: &str) -> Option<String> {
        let mut state = None;
        e2e::eventually("the sandbox is at rest", || {
            state = state_of(&mut self.client(), id);
            !matches!(state.as_deref(), Some("Pending" | "Pausing" | "Resuming" | "Stopping"))
        });
        state
    }
}

impl FleetMember {
    pub(super) fn begin(mut sandbox: RemoteSandbox) -> Self {
        let content = content(0);
        sandbox.upload(FILE, &content);
        let counter = sandbox.start_background(COUNTER);
        Self { sandbox, counter, counted: 0, content }
    }

    /// Checks the sandbox against the response to an operation, which may have been cut off.
    pub(super) fn check_result(&mut self, reported: &OperationResult) {
        match reported {
            OperationResult::Ran(ran) if !ran.id.is_empty() => self.check_command(&ran.id),
            OperationResult::Wrote { content, done } => self.check_file(content, *done),
            OperationResult::Ran(_)
            | OperationResult::Created(_)
            | OperationResult::Paused { .. }
            | OperationResult::Deleted { .. } => {}
        }
    }

    /// A command that was started has run to its end, whether or not its client received the output.
    fn check_command(&mut self, id: &str) {
        e2e::eventually("the command has ended", || self.sandbox.status(id)["running"] == false);
        let whole: String = (0..LINES).map(|number| format!("{number}\n")).collect();
        assert_eq!(self.sandbox.logs(id), whole, "lines of a command were lost or doubled");
    }

    /// It runs, and its file is as it was.
    pub(super) fn check_files(&mut self) {
        assert_eq!(self.sandbox.state().as_deref(), Some("Running"), "{}", self.sandbox.id);
        let content = self.content.clone();
        self.check_file(&content, true);
    }

    /// The file has the old or the new content, and the new one if the upload was acknowledged.
    fn check_file(&mut self, new: &[u8], done: bool) {
        let path = format!("files/download?path={FILE}");
        let found = self.sandbox.request_inside("GET", &path, &Value::Null);
        assert_eq!(found.status, 200, "the file is gone: {}", found.text());
        let is_new = found.body == new;
        assert!(is_new || found.body == self.content, "the file is neither old nor new");
        assert!(is_new || !done, "an upload was acknowledged and is lost");
        self.content = found.body;
    }

    /// The sandbox runs commands, keeps its files and its background command continues.
    pub(super) fn check_works(&mut self) {
        if self.sandbox.state().as_deref() == Some("Paused") {
            assert_eq!(self.sandbox.change_lifecycle("resume"), 202, "a paused sandbox does not resume");
        }
        assert_eq!(self.sandbox.state().as_deref(), Some("Running"), "{}", self.sandbox.id);
        e2e::eventually("drafts of interrupted uploads are gone", || {
            let ran = self.sandbox.run(&format!("ls -A {DIRECTORY}"));
            assert_eq!(ran.code, Some(0), "a command did not run: {ran:?}");
            ran.stdout.trim() == "file"
        });
        self.check_counter();
    }

    /// Follows the counter from its first line to one that was not there before.
    fn check_counter(&mut self) {
        let path = format!("command/{}/logs?cursor=0&follow=true", self.counter);
        let answer = self.sandbox.request_streaming("GET", &path, &Value::Null);
        assert_eq!(answer.status, 200, "the counter command is gone");
        for (expected, line) in BufReader::new(answer.body).lines().enumerate() {
            let line = line.expect("the counter continues");
            assert_eq!(line, expected.to_string(), "a line of the counter was lost or doubled");
            if expected > self.counted {
                self.counted = expected;
                return;
            }
        }
        panic!("the counter has ended after {} lines", self.counted);
    }
}

/// The state of a sandbox; `None` if the server does not know it.
pub(super) fn state_of(client: &mut HttpClient, id: &str) -> Option<String> {
    let answer = client.get(&format!("/v1/sandboxes/{id}")).expect("the server answers");
    match answer.status {
        200 => Some(answer.json()["status"]["state"].as_str().unwrap_or_default().to_owned()),
        404 => None,
        other => panic!("asking for a sandbox gave {other}: {}", answer.text()),
    }
}

//! The operations that clients perform while a process is killed, and the responses they received.

use std::io::{BufRead, BufReader};

use e2e::http::HttpClient;
use e2e::sandbox::{CommandRun, RemoteSandbox};
use serde_json::{Value, json};

/// The file that is written over and over. Nothing else is in its directory.
pub(super) const DIRECTORY: &str = "/srv";
pub(super) const FILE: &str = "/srv/file";

/// How many lines the command of [`CrashOperation::Exec`] prints.
pub(super) const LINES: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CrashOperation {
    Create,
    Exec,
    Write,
    Pause,
    Delete,
}

/// The state that the client knows when its operation is over, answered or not.
#[derive(Debug)]
pub(super) enum OperationResult {
    Created(Option<String>),
    Ran(CommandRun),
    Wrote {
        content: Vec<u8>,
        done: bool,
    },
    /// `restarted` if the sandbox had died before it was resumed.
    Paused {
        resumed: bool,
        restarted: bool,
    },
    Deleted {
        done: bool,
    },
}

impl CrashOperation {
    pub(super) const ALL: [Self; 5] = [Self::Create, Self::Exec, Self::Write, Self::Pause, Self::Delete];

    /// Performs the operation on its own connection: a kept one would hide that a request was lost. Only a
    /// create needs no sandbox.
    pub(super) fn perform(
        self,
        address: &str,
        sandbox: Option<RemoteSandbox>,
        round: usize,
    ) -> OperationResult {
        let existing = || sandbox.expect("this operation is about a sandbox");
        match self {
            Self::Create => OperationResult::Created(create(address)),
            Self::Exec => OperationResult::Ran(exec(existing())),
            Self::Write => write(existing(), round),
            Self::Pause => pause(&mut HttpClient::new(address), &existing().id),
            Self::Delete => {
                let path = format!("/v1/sandboxes/{}", existing().id);
                let answer = HttpClient::new(address).delete(&path);
                OperationResult::Deleted { done: answer.is_ok_and(|answer| answer.status == 204) }
            }
        }
    }
}

impl OperationResult {
    /// Whether the operation succeeded as if nothing had been killed.
    pub(super) fn succeeded(&self) -> bool {
        match self {
            Self::Created(id) => id.is_some(),
            Self::Ran(ran) => ran.code == Some(0),
            Self::Wrote { done, .. } | Self::Deleted { done } => *done,
            Self::Paused { resumed, restarted } => *resumed && !*restarted,
        }
    }
}

fn create(address: &str) -> Option<String> {
    let request = json!({
        "image": {"uri": "host"},
        "timeout": 3600,
        "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
    });
    let answer = HttpClient::new(address).post("/v1/sandboxes", &request).ok()?;
    (answer.status == 202).then(|| answer.json()["id"].as_str().expect("an id is a text").to_owned())
}

/// Runs a command and collects its events until they end.
fn exec(mut sandbox: RemoteSandbox) -> CommandRun {
    let text = format!("i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i+1)); done");
    let Ok(answer) = sandbox.try_request_streaming("POST", "command", &json!({"command": text})) else {
        return CommandRun::default();
    };
    if answer.status != 200 {
        return CommandRun::default();
    }
    let lines = BufReader::new(answer.body).lines().map_while(Result::ok);
    // A truncated line is not an event.
    let whole = lines.filter(|line| serde_json::from_str::<Value>(line.trim_start_matches("data: ")).is_ok());
    CommandRun::from_events(&whole.collect::<Vec<_>>().join("\n"))
}

fn write(mut sandbox: RemoteSandbox, round: usize) -> OperationResult {
    let content = content(round);
    let answer = sandbox.try_upload(FILE, &content);
    OperationResult::Wrote { content, done: answer.is_ok_and(|answer| answer.status == 200) }
}

/// A mebibyte that identifies the round that wrote it at every position.
pub(super) fn content(round: usize) -> Vec<u8> {
    format!("{round:15}\n").repeat(64 << 10).into_bytes()
}

fn pause(client: &mut HttpClient, id: &str) -> OperationResult {
    let mut ask = |action: &str| {
        let answer = client.request("POST", &format!("/v1/sandboxes/{id}/{action}"), "", &[]);
        answer.ok().filter(|answer| answer.status == 202)
    };
    let resumed = ask("pause").and_then(|_paused| ask("resume"));
    let restarted = resumed.as_ref().is_some_and(|answer| answer.header("coracle-restarted").is_some());
    OperationResult::Paused { resumed: resumed.is_some(), restarted }
}

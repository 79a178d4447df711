//! The operations that clients perform while a process is killed, and the responses they received.

use std::io::{BufRead, BufReader};

use e2e::http::Client;
use e2e::sandbox::{Ran, Sandbox};
use serde_json::{Value, json};

/// The file that is written over and over. Nothing else is in its directory.
pub(super) const DIRECTORY: &str = "/srv";
pub(super) const FILE: &str = "/srv/file";

/// How many lines the command of [`Operation::Exec`] prints.
pub(super) const LINES: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Create,
    Exec,
    Write,
    Pause,
    Delete,
}

/// The state that the client knows when its operation is over, answered or not.
#[derive(Debug)]
pub(super) enum Told {
    Created(Option<String>),
    Ran(Ran),
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

impl Operation {
    pub(super) const ALL: [Self; 5] = [Self::Create, Self::Exec, Self::Write, Self::Pause, Self::Delete];

    /// Performs the operation on its own connection: a kept one would hide that a request was lost. Only a
    /// create needs no sandbox.
    pub(super) fn perform(self, address: &str, sandbox: Option<Sandbox>, round: usize) -> Told {
        let existing = || sandbox.expect("this operation is about a sandbox");
        match self {
            Self::Create => Told::Created(create(address)),
            Self::Exec => Told::Ran(exec(existing())),
            Self::Write => write(existing(), round),
            Self::Pause => pause(&mut Client::new(address), &existing().id),
            Self::Delete => {
                let path = format!("/v1/sandboxes/{}", existing().id);
                let answer = Client::new(address).delete(&path);
                Told::Deleted { done: answer.is_ok_and(|answer| answer.status == 204) }
            }
        }
    }
}

impl Told {
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
    let answer = Client::new(address).post("/v1/sandboxes", &request).ok()?;
    (answer.status == 202).then(|| answer.json()["id"].as_str().expect("an id is a text").to_owned())
}

/// Runs a command and collects its events until they end.
fn exec(mut sandbox: Sandbox) -> Ran {
    let text = format!("i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i+1)); done");
    let Ok(answer) = sandbox.try_streaming("POST", "command", &json!({"command": text})) else {
        return Ran::default();
    };
    if answer.status != 200 {
        return Ran::default();
    }
    let lines = BufReader::new(answer.body).lines().map_while(Result::ok);
    // A truncated line is not an event.
    let whole = lines.filter(|line| serde_json::from_str::<Value>(line.trim_start_matches("data: ")).is_ok());
    Ran::of_events(&whole.collect::<Vec<_>>().join("\n"))
}

fn write(mut sandbox: Sandbox, round: usize) -> Told {
    let content = content(round);
    let answer = sandbox.try_upload(FILE, &content);
    Told::Wrote { content, done: answer.is_ok_and(|answer| answer.status == 200) }
}

/// A mebibyte that identifies the round that wrote it at every position.
pub(super) fn content(round: usize) -> Vec<u8> {
    format!("{round:15}\n").repeat(64 << 10).into_bytes()
}

fn pause(client: &mut Client, id: &str) -> Told {
    let mut ask = |action: &str| {
        let answer = client.request("POST", &format!("/v1/sandboxes/{id}/{action}"), "", &[]);
        answer.ok().filter(|answer| answer.status == 202)
    };
    let resumed = ask("pause").and_then(|_paused| ask("resume"));
    let restarted = resumed.as_ref().is_some_and(|answer| answer.header("coracle-restarted").is_some());
    Told::Paused { resumed: resumed.is_some(), restarted }
}

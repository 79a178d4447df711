//! Asks a sandbox what its image offers. The reply was made inside, so it is not trusted: it is only
//! shown as a list.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use wire::process::{Identity, Kernel, OpenKernel, OpenSession, Program, Retention, RunInSession};
use wire::{Frame, Reply, Request, StreamTag};

use super::link::Link;

const SESSION: &str = "offer";
/// The maximum length of the list; a longer one is not read to its end.
const LONGEST: usize = 4 << 20;
/// Long enough for reading the files of an image.
const PATIENCE_MS: u64 = 60_000;

pub(super) fn ask(socket: &Path) -> Result<Value> {
    let program = Program::Own([kernel::WORD, "list", "serve"].map(str::to_owned).into());
    let kernel = Kernel { language: "list".to_owned(), program };
    let open = OpenSession {
        session: SESSION.to_owned(),
        identity: Identity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        nest: None,
    };
    Link::ask(socket, Request::OpenKernel(OpenKernel { open, kernel }))?.reply()?;
    let run = RunInSession {
        session: SESSION.to_owned(),
        process: "0".repeat(32),
        text: String::new(),
        directory: None,
        deadline_ms: Some(PATIENCE_MS),
        retention: Retention { first: 0, last: LONGEST as u64, hold: true, stall_ms: None },
        follow: true,
        queue: false,
        env: BTreeMap::new(),
        beside: false,
    };
    let mut link = Link::ask(socket, Request::Run(run))?;
    link.reply()?;
    read(&told(&mut link)?).context("the image did not say what it offers")
}

/// Reads all output until the run ends.
fn told(link: &mut Link) -> Result<Vec<u8>> {
    let mut told = Vec::new();
    loop {
        match link.frame()? {
            Frame::Output { stream: StreamTag::Tell, bytes, .. } => told.extend_from_slice(&bytes),
            Frame::Output { .. } => {}
            frame => match frame.read()? {
                Reply::Ended(_) => return Ok(told),
                Reply::Fault(fault) => bail!("could not {} `{}`", fault.operation, fault.subject),
                _ => {}
            },
        }
        if told.len() > LONGEST {
            bail!("the image offers more than can be shown");
        }
    }
}

/// The only result among the output lines, each of which is one message.
fn read(told: &[u8]) -> Option<Value> {
    let lines = told.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let mut text =
        lines.filter_map(|line: Value| line["result"]["application/json"].as_str().map(str::to_owned));
    serde_json::from_str(&text.next_back()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_result_that_is_json_is_an_offer() {
        let line = json!({"result": {"application/json": "{\"languages\": []}"}}).to_string();
        assert_eq!(read(format!("{{\"count\": 1}}\n{line}\n").as_bytes()), Some(json!({"languages": []})));
        assert_eq!(read(b"nonsense\n{\"result\": {\"application/json\": \"{\"}}\n"), None);
        assert_eq!(read(b""), None);
    }
}

//! Asks a sandbox what its image offers. The reply was made inside, so it is not trusted: it is only
//! shown as a list.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use wire::process::{
    KernelProgram, KernelSpec, OpenKernel, OpenSession, OutputRetention, RunInSession, UserIdentity,
};
use wire::{AgentReply, AgentRequest, Frame, StreamTag};

use super::agent_connection::AgentConnection;

const SESSION_ID: &str = "offer";
/// The maximum length of the list; a longer one is not read to its end.
const MAX_OFFER_BYTES: usize = 4 << 20;
/// Long enough for reading the files of an image.
const OFFER_TIMEOUT_MS: u64 = 60_000;

pub(super) fn query_offer(socket: &Path) -> Result<Value> {
    let program = KernelProgram::Own([kernel::KERNEL_SUBCOMMAND, "list", "serve"].map(str::to_owned).into());
    let kernel = KernelSpec { language: "list".to_owned(), program };
    let open = OpenSession {
        session: SESSION_ID.to_owned(),
        identity: UserIdentity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        text_terminal: false,
        isolation: None,
        sharing: None,
    };
    AgentConnection::send_request(socket, AgentRequest::OpenKernel(OpenKernel { open, kernel }))?
        .read_reply()?;
    let run = RunInSession {
        session: SESSION_ID.to_owned(),
        process: "0".repeat(32),
        text: String::new(),
        directory: None,
        deadline_ms: Some(OFFER_TIMEOUT_MS),
        retention: OutputRetention { first: 0, last: MAX_OFFER_BYTES as u64, lossless: true, stall_ms: None },
        follow: true,
        queue: false,
        detached: false,
        env: BTreeMap::new(),
        beside: false,
    };
    let mut link = AgentConnection::send_request(socket, AgentRequest::Run(run))?;
    link.read_reply()?;
    parse_offer(&read_report_output(&mut link)?).context("the image did not say what it offers")
}

/// Reads all output until the run ends.
fn read_report_output(connection: &mut AgentConnection) -> Result<Vec<u8>> {
    let mut output = Vec::new();
    loop {
        match connection.next_frame()? {
            Frame::Output { stream: StreamTag::KernelEvent, bytes, .. } => output.extend_from_slice(&bytes),
            Frame::Output { .. } => {}
            frame => match frame.parse_message()? {
                AgentReply::Ended(_) => return Ok(output),
                AgentReply::Fault(fault) => bail!("could not {} `{}`", fault.operation, fault.subject),
                _ => {}
            },
        }
        if output.len() > MAX_OFFER_BYTES {
            bail!("the image offers more than can be shown");
        }
    }
}

/// The only result among the output lines, each of which is one message.
fn parse_offer(output: &[u8]) -> Option<Value> {
    let lines = output.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
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
        assert_eq!(
            parse_offer(format!("{{\"count\": 1}}\n{line}\n").as_bytes()),
            Some(json!({"languages": []}))
        );
        assert_eq!(parse_offer(b"nonsense\n{\"result\": {\"application/json\": \"{\"}}\n"), None);
        assert_eq!(parse_offer(b""), None);
    }
}

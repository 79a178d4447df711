//! One command over a WebSocket: `GET /pty/coracle.exec/ws?pty=0|1`.
//!
//! This file has the first frame of the client, `coracle.start`. A client without a terminal may send it as a header of
//! the upgrade instead, which saves a round trip: the server then starts the command while it accepts the upgrade, and
//! the response has the same header. Everything after it is in `kit/command_socket.rs`. Terminals of the reference
//! protocol are in `terminal_frames.rs`.

use domain::process::{ProcessIo, ProcessSpec, StdinMode, TerminalSize};
use http::HeaderValue;
use serde::Deserialize;
use service::{DEFAULT_TERMINAL_SIZE, OutputSettings, TERMINAL_TYPE, TerminalMode};
use tokio_util::task::AbortOnDropHandle;

use super::ExecTarget;
use super::command::{RunCommandBody, parse_foreground_command};
use super::problem::ExecdProblem;
use crate::kit::command_socket::{
    CommandClient, StartFrameReader, StartedCommand, serve_command, serve_started_command, start_command,
};
use crate::kit::socket::{MessageSink, MessageStream};

/// The name used in place of a terminal's name.
pub(super) const EXEC_TERMINAL_NAME: &str = "coracle.exec";

/// The header of the upgrade that may carry the first frame, and of the response that accepts it.
pub(in crate::opensandbox) const START_HEADER: &str = "coracle-exec-start";

/// The first frame of the client.
#[derive(Deserialize)]
struct StartFrame {
    #[serde(rename = "type")]
    kind: String,
    #[serde(flatten)]
    run: RunCommandBody,
    /// Whether input will be sent; otherwise the command reads from `/dev/null`.
    stdin: Option<bool>,
    /// The size of the terminal, with `pty=1`.
    cols: Option<u16>,
    rows: Option<u16>,
}

/// A command that is being started. The start is given up if the connection ends before the upgrade.
pub(super) type StartTask = AbortOnDropHandle<StartedCommand>;

/// Begins to start the command of a first frame that came as a header. The upgrade takes about as long, so neither waits
/// for the other.
pub(super) fn begin_start(target: &ExecTarget, mode: TerminalMode, start: &HeaderValue) -> StartTask {
    let (client, reader) = (command_client(target, mode), start_frame_reader(target, mode));
    let frame = start.as_bytes().to_vec();
    let starting = tokio::spawn(async move { start_command(&frame, &client, &reader).await });
    AbortOnDropHandle::new(starting)
}

/// Serves one client until it disconnects or its command ends. A command that is not being started yet comes as the
/// first frame.
pub(super) async fn serve_exec_socket(
    socket: (impl MessageSink, impl MessageStream),
    target: ExecTarget,
    mode: TerminalMode,
    starting: Option<StartTask>,
) {
    let client = command_client(&target, mode);
    match starting {
        Some(starting) => match starting.await {
            Ok(started) => serve_started_command(socket, client, started).await,
            Err(error) => {
                tracing::error!(%error, "the task that starts a command failed; its client is disconnected")
            }
        },
        None => serve_command(socket, client, start_frame_reader(&target, mode)).await,
    }
}

fn command_client(target: &ExecTarget, mode: TerminalMode) -> CommandClient {
    CommandClient { sandbox: target.sandbox.clone(), mode }
}

fn start_frame_reader(
    target: &ExecTarget,
    mode: TerminalMode,
) -> StartFrameReader<impl Fn(&[u8]) -> Result<ProcessSpec, String> + use<>> {
    let output = target.sandbox.processes().output_settings();
    StartFrameReader {
        parse: move |frame: &[u8]| parse_start_frame(frame, mode, output),
        describe_error: |error| ExecdProblem::from(error).0.message,
    }
}

fn parse_start_frame(text: &[u8], mode: TerminalMode, output: OutputSettings) -> Result<ProcessSpec, String> {
    let start: StartFrame = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if start.kind != "coracle.start" {
        return Err(format!("the first frame is `{}`, not `coracle.start`", start.kind));
    }
    let process = parse_foreground_command(start.run, output);
    let mut process = process.map_err(|fault| fault.0.message)?;
    process.stdin = if start.stdin == Some(true) { StdinMode::Piped } else { StdinMode::Empty };
    if mode == TerminalMode::Terminal {
        let given = |count: Option<u16>, default| count.filter(|count| *count > 0).unwrap_or(default);
        process.io = ProcessIo::Terminal(TerminalSize {
            columns: given(start.cols, DEFAULT_TERMINAL_SIZE.columns),
            rows: given(start.rows, DEFAULT_TERMINAL_SIZE.rows),
        });
        process.env.entry("TERM".to_owned()).or_insert_with(|| TERMINAL_TYPE.to_owned());
    }
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, mode: TerminalMode) -> Result<ProcessSpec, String> {
        parse_start_frame(text.as_bytes(), mode, OutputSettings::default())
    }

    #[test]
    fn first_frame_names_the_command_and_its_terminal() {
        let frame = r#"{"type":"coracle.start","argv":["top"],"stdin":true,"cols":100,"rows":0}"#;
        let process = parse(frame, TerminalMode::Terminal).unwrap();
        assert_eq!(process.io, ProcessIo::Terminal(TerminalSize { columns: 100, rows: 24 }));
        assert_eq!((process.stdin, process.env["TERM"].as_str()), (StdinMode::Piped, TERMINAL_TYPE));
        let process = parse(frame, TerminalMode::Pipes).unwrap();
        assert_eq!((process.io, process.env.len()), (ProcessIo::Pipes, 0));
    }

    #[test]
    fn other_first_frames_are_refused() {
        for frame in [r#"{"type":"ping"}"#, r#"{"type":"coracle.start"}"#, r#"{"argv":["a"]}"#, "x"] {
            assert!(parse(frame, TerminalMode::Pipes).is_err(), "{frame}");
        }
    }
}

//! `ps` and `kill`: the processes of a sandbox.

use std::process::ExitCode;

use anyhow::Result;
use jiff::Timestamp;
use serde_json::json;

use super::sandboxes::format_age;
use crate::args::{KillArgs, PsArgs};
use crate::client::{ProcessInfo, ServerClient};
use crate::output::{Printer, format_bytes};

/// How many characters of a command a line shows.
const MAX_COMMAND_CHARS: usize = 60;

pub(crate) async fn list_processes(
    server: &ServerClient,
    args: &PsArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox_in(&args.id, &args.owners.scope()).await?;
    let found = server.list_processes(&id, args.all).await?;
    let now = Timestamp::now();
    let rows = found.iter().map(|process| process_row(process, now)).collect();
    printer.print_json_or_table(
        &found,
        &["process", "kind", "state", "started", "cpu", "memory", "command"],
        rows,
    )?;
    Ok(ExitCode::SUCCESS)
}

fn process_row(process: &ProcessInfo, now: Timestamp) -> Vec<String> {
    let state = match process.exit_code {
        Some(code) if process.state == "ended" => format!("ended ({code})"),
        _ => process.state.clone(),
    };
    let ago = |at: &String| format!("{} ago", format_age(at, now));
    vec![
        process.id.clone(),
        process.kind.clone(),
        state,
        process.started_at.as_ref().map_or_else(|| "?".to_owned(), ago),
        process.cpu_millis.map_or_else(String::new, format_cpu_time),
        process.memory_bytes.map_or_else(String::new, format_bytes),
        one_line(&process.text),
    ]
}

/// Processor time for people.
fn format_cpu_time(millis: u64) -> String {
    format!("{}.{:02} s", millis / 1000, millis % 1000 / 10)
}

/// The first line of a text from inside a sandbox, without characters that could move the cursor.
fn one_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let mut shown: String =
        line.chars().filter(|letter| !letter.is_control()).take(MAX_COMMAND_CHARS).collect();
    if shown.len() < text.trim_end().len() {
        shown.push('…');
    }
    shown
}

pub(crate) async fn kill_processes(
    server: &ServerClient,
    args: &KillArgs,
    printer: &Printer,
) -> Result<ExitCode> {
    let id = server.resolve_sandbox(&args.id).await?;
    let processes = server.resolve_processes(&id, &args.processes).await?;
    for process in &processes {
        server.signal_process(&id, process, &args.signal).await?;
        if !printer.is_json() {
            printer.print_line(process)?;
        }
    }
    if printer.is_json() {
        let ids: Vec<&str> = processes.iter().map(|process| process.as_str()).collect();
        printer.print_json(&json!({ "sandbox": id.as_str(), "signalled": ids, "signal": args.signal }))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_shows_units_and_one_line_of_text() {
        let process: ProcessInfo = serde_json::from_value(json!({
            "id": "0123456789abcdef0123456789abcdef", "kind": "command", "state": "running",
            "text": "make all\nrm -rf x\u{1b}[2J", "startedAt": "2026-11-15T10:00:00Z",
            "cpuMillis": 1234, "memoryBytes": 5 << 20, "processes": 2,
        }))
        .expect("it reads");
        let now = "2026-11-15T10:02:00Z".parse().expect("a time");
        assert_eq!(
            process_row(&process, now)[1..],
            ["command", "running", "2m ago", "1.23 s", "5.0 MiB", "make all…"]
        );
        assert_eq!(one_line("a\u{1b}[2Jb"), "a[2Jb…");
        assert_eq!(one_line("plain"), "plain");
    }
}

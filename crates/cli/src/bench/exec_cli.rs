//! `coracle exec` as its users run it: as a process of its own, beside the HTTP call that it makes,
//! beside `coracle run`, and beside `coracle cp`.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::RoundCounts;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

/// Lines that a command prints.
const LINE_COUNT: &str = "3000000";
const FILE_PATH: &str = "/root/random";

/// This program with these arguments, as a client of the server.
fn coracle_command(server: &BenchServer, words: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--url").arg(format!("http://{}", server.address())).args(words).stdin(Stdio::null());
    Ok(command)
}

/// How long a process took, which must succeed.
fn time_command(command: &mut Command) -> Result<Duration> {
    let began = Instant::now();
    let status = command.status().context("could not start this program")?;
    let time = began.elapsed();
    if status.success() { Ok(time) } else { bail!("`{command:?}` ended with {status}") }
}

/// `coracle exec ID -- true` beside the HTTP calls of a new client: where the sandbox is, and the
/// command.
pub(crate) fn measure_exec_start(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut sandbox = server.client()?.create_sandbox(&json!({}))?;
    let id = sandbox.id.clone();
    let (mut called, mut ours) = (TimeSamples::default(), TimeSamples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.many {
        let began = Instant::now();
        let mut client = server.client()?;
        client.resolve_endpoint(&mut sandbox)?;
        client.run_true(&sandbox)?;
        let call = began.elapsed();
        let exec = time_command(&mut coracle_command(server, &["exec", &id, "--", "true"])?)?;
        if run > 0 {
            called.push(call);
            ours.push(exec);
        }
    }
    server.client()?.delete_sandbox(&sandbox)?;
    report.add_time("`true` over HTTP, new connection", called.summary());
    report.add_time("`coracle exec ID -- true`", ours.summary());
    let ratio = ours.summary().p50 / called.summary().p50;
    report.require_at_most("`coracle exec ID -- true`", ratio, 1.5, "times the HTTP call");
    Ok(())
}

/// Three million lines through `coracle exec` and through `coracle run`, complete.
pub(crate) fn measure_exec_lines(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let sandbox = server.client()?.create_sandbox(&json!({}))?;
    let state = server.directory().join("run");
    let (mut bare, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.long {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["run", "--state-dir"])
            .arg(&state)
            .args(["--", "seq", "1", LINE_COUNT])
            .stdin(Stdio::null());
        let (through_run, expected) = time_output(&mut command)?;
        let text = format!("seq 1 {LINE_COUNT}");
        let (through_exec, came) =
            time_output(&mut coracle_command(server, &["exec", &sandbox.id, "-c", &text])?)?;
        if came != expected {
            bail!("`coracle exec` gave {} bytes, `coracle run` {}", came.len(), expected.len());
        }
        if run > 0 {
            bare.push(through_run);
            ours.push(through_exec);
        }
    }
    server.client()?.delete_sandbox(&sandbox)?;
    report.add_time("3,000,000 lines through `coracle run`", bare.summary());
    report.add_time("3,000,000 lines through `coracle exec`", ours.summary());
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.require_at_most(
        "3,000,000 lines through `coracle exec`, complete",
        ratio,
        2.0,
        "times through `coracle run`",
    );
    Ok(())
}

/// The complete output of a process, and how long it took.
fn time_output(command: &mut Command) -> Result<(Duration, Vec<u8>)> {
    let mut bytes = Vec::with_capacity(32 << 20);
    let began = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn().context("could not start this program")?;
    child.stdout.take().context("it is a pipe")?.read_to_end(&mut bytes)?;
    let status = child.wait()?;
    let time = began.elapsed();
    if status.success() { Ok((time, bytes)) } else { bail!("`{command:?}` ended with {status}") }
}

/// A large file through `coracle exec ID -- cat` and through `coracle cp`, byte for byte.
pub(crate) fn measure_exec_bytes(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_with_memory("4Gi", &json!({"coracle.disk": "4Gi"}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let fill = format!("head -c {} /dev/urandom > {FILE_PATH}", rounds.file);
    client.run_command(&sandbox, &["sh", "-c", &fill])?;
    let (copied, printed) = (server.directory().join("copied"), server.directory().join("printed"));
    let source = format!("{}:{FILE_PATH}", sandbox.id);
    let (mut cp, mut cat) = (TimeSamples::default(), TimeSamples::default());
    for _ in 0..rounds.long {
        let target = copied.to_str().context("the directory's name is not UTF-8")?;
        cp.push(time_command(&mut coracle_command(server, &["cp", &source, target])?)?);
        let file = File::create(&printed)?;
        cat.push(time_command(
            coracle_command(server, &["exec", &sandbox.id, "--", "cat", FILE_PATH])?.stdout(file),
        )?);
        if !have_same_content(&copied, &printed)? {
            bail!("`coracle exec ID -- cat` gave other bytes than `coracle cp`");
        }
        fs::remove_file(&copied)?;
        fs::remove_file(&printed)?;
    }
    client.delete_sandbox(&sandbox)?;
    let mebibytes = rounds.file >> 20;
    report.add_time(format!("`coracle cp` of {mebibytes} MiB"), cp.summary());
    report.add_time(format!("`coracle exec ID -- cat` of {mebibytes} MiB"), cat.summary());
    let ratio = cp.summary().p50 / cat.summary().p50;
    report.require_at_least(
        "`coracle exec ID -- cat` of a large file, byte for byte",
        ratio,
        0.5,
        "of the rate of `coracle cp`",
    );
    Ok(())
}

fn have_same_content(one: &Path, other: &Path) -> Result<bool> {
    let hash = |path: &Path| -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        std::io::copy(&mut File::open(path)?, &mut hasher)?;
        Ok(hasher.finalize())
    };
    Ok(hash(one)? == hash(other)?)
}

//! `coracle exec` as its users run it: as a process of its own, beside the HTTP call that it makes,
//! beside `coracle run`, and beside `coracle cp`.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::Rounds;
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;

/// Lines that a command prints.
const LINES: &str = "3000000";
const FILE: &str = "/root/random";

/// This program with these arguments, as a client of the server.
fn coracle(server: &Server, words: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--url").arg(format!("http://{}", server.address())).args(words).stdin(Stdio::null());
    Ok(command)
}

/// How long a process took, which must succeed.
fn timed(command: &mut Command) -> Result<Duration> {
    let began = Instant::now();
    let status = command.status().context("could not start this program")?;
    let time = began.elapsed();
    if status.success() { Ok(time) } else { bail!("`{command:?}` ended with {status}") }
}

/// `coracle exec ID -- true` beside the HTTP calls of a new client: where the sandbox is, and the
/// command.
pub(crate) fn start(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut sandbox = server.client()?.create(&json!({}))?;
    let id = sandbox.id.clone();
    let (mut called, mut ours) = (Samples::default(), Samples::default());
    // The first of each fills caches and is not counted.
    for run in 0..=rounds.many {
        let began = Instant::now();
        let mut client = server.client()?;
        client.resolve(&mut sandbox)?;
        client.run_true(&sandbox)?;
        let call = began.elapsed();
        let exec = timed(&mut coracle(server, &["exec", &id, "--", "true"])?)?;
        if run > 0 {
            called.push(call);
            ours.push(exec);
        }
    }
    server.client()?.delete(&sandbox)?;
    report.time("`true` over HTTP, new connection", called.summary());
    report.time("`coracle exec ID -- true`", ours.summary());
    let ratio = ours.summary().p50 / called.summary().p50;
    report.at_most("`coracle exec ID -- true`", ratio, 1.5, "times the HTTP call");
    Ok(())
}

/// Three million lines through `coracle exec` and through `coracle run`, complete.
pub(crate) fn lines(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let sandbox = server.client()?.create(&json!({}))?;
    let state = server.directory().join("run");
    let (mut bare, mut ours) = (Samples::default(), Samples::default());
    for run in 0..=rounds.long {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["run", "--state-dir"]).arg(&state).args(["--", "seq", "1", LINES]).stdin(Stdio::null());
        let (through_run, expected) = output(&mut command)?;
        let text = format!("seq 1 {LINES}");
        let (through_exec, came) = output(&mut coracle(server, &["exec", &sandbox.id, "-c", &text])?)?;
        if came != expected {
            bail!("`coracle exec` gave {} bytes, `coracle run` {}", came.len(), expected.len());
        }
        if run > 0 {
            bare.push(through_run);
            ours.push(through_exec);
        }
    }
    server.client()?.delete(&sandbox)?;
    report.time("3,000,000 lines through `coracle run`", bare.summary());
    report.time("3,000,000 lines through `coracle exec`", ours.summary());
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.at_most(
        "3,000,000 lines through `coracle exec`, complete",
        ratio,
        2.0,
        "times through `coracle run`",
    );
    Ok(())
}

/// The complete output of a process, and how long it took.
fn output(command: &mut Command) -> Result<(Duration, Vec<u8>)> {
    let mut bytes = Vec::with_capacity(32 << 20);
    let began = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn().context("could not start this program")?;
    child.stdout.take().context("it is a pipe")?.read_to_end(&mut bytes)?;
    let status = child.wait()?;
    let time = began.elapsed();
    if status.success() { Ok((time, bytes)) } else { bail!("`{command:?}` ended with {status}") }
}

/// A large file through `coracle exec ID -- cat` and through `coracle cp`, byte for byte.
pub(crate) fn bytes(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_with("4Gi", &json!({"coracle.disk": "4Gi"}))?;
    client.resolve(&mut sandbox)?;
    let fill = format!("head -c {} /dev/urandom > {FILE}", rounds.file);
    client.run(&sandbox, &["sh", "-c", &fill])?;
    let (copied, printed) = (server.directory().join("copied"), server.directory().join("printed"));
    let source = format!("{}:{FILE}", sandbox.id);
    let (mut cp, mut cat) = (Samples::default(), Samples::default());
    for _ in 0..rounds.long {
        let target = copied.to_str().context("the directory's name is not UTF-8")?;
        cp.push(timed(&mut coracle(server, &["cp", &source, target])?)?);
        let file = File::create(&printed)?;
        cat.push(timed(coracle(server, &["exec", &sandbox.id, "--", "cat", FILE])?.stdout(file))?);
        if !same(&copied, &printed)? {
            bail!("`coracle exec ID -- cat` gave other bytes than `coracle cp`");
        }
        fs::remove_file(&copied)?;
        fs::remove_file(&printed)?;
    }
    client.delete(&sandbox)?;
    let mebibytes = rounds.file >> 20;
    report.time(format!("`coracle cp` of {mebibytes} MiB"), cp.summary());
    report.time(format!("`coracle exec ID -- cat` of {mebibytes} MiB"), cat.summary());
    let ratio = cp.summary().p50 / cat.summary().p50;
    report.at_least(
        "`coracle exec ID -- cat` of a large file, byte for byte",
        ratio,
        0.5,
        "of the rate of `coracle cp`",
    );
    Ok(())
}

fn same(one: &Path, other: &Path) -> Result<bool> {
    let hash = |path: &Path| -> Result<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        std::io::copy(&mut File::open(path)?, &mut hasher)?;
        Ok(hasher.finalize())
    };
    Ok(hash(one)? == hash(other)?)
}

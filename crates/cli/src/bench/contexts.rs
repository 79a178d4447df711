//! Code contexts: the first result of a fresh one beside the bare interpreter in the same sandbox,
//! and ten of them at once beside ten bare interpreters at once.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::RoundCounts;
use super::client::{BenchClient, BenchSandbox};
use super::report::BenchReport;
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

/// How many contexts run at once.
const CONTEXT_COUNT: u32 = 10;

/// Keeps one core busy for a few tenths of a second.
const WORK_CODE: &str = "total = 0\nfor number in range(4_000_000): total += number\ntotal";

/// The first result of a fresh context, and that of a fresh ipykernel where the image has one.
pub(crate) fn measure_first_result(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_with_size("8", "2Gi", &json!({}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let (mut bare, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=rounds.spaced {
        let began = Instant::now();
        client.run_command(&sandbox, &["python3", "-c", "1"])?;
        let interpreter = began.elapsed();
        let context = time_fresh_context(&mut client, &sandbox, "python")?
            .context("there is no python in this image")?;
        if run > 0 {
            bare.push(interpreter);
            ours.push(context);
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time("python3 -c 1 in a sandbox", bare.summary());
    report.add_time("first result of a fresh python context", ours.summary());
    measure_ipykernel(server, rounds, report)?;
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.require_at_most("first result of a fresh python context", ratio, 1.5, "times python3 -c 1");
    Ok(())
}

/// The same for an ipykernel, from a directory of the host or from the image.
fn measure_ipykernel(server: &BenchServer, rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    let mut client = server.client()?;
    let volumes: Vec<Value> = (server.packages.iter())
        .map(|path| json!({"name": "packages", "host": {"path": path}, "mountPath": "/opt/packages", "readOnly": true}))
        .collect();
    let env = json!({"PYTHONPATH": "/opt/packages", "JUPYTER_PATH": "/opt/packages/share/jupyter"});
    let limits = json!({"cpu": "8", "memory": "2Gi"});
    let mut sandbox =
        client.create_from_request(json!({"resourceLimits": limits, "volumes": volumes, "env": env}))?;
    client.resolve_endpoint(&mut sandbox)?;
    // ipykernel starts the interpreter under a name that not every system has.
    let named = r#"command -v python || ln -s "$(command -v python3)" /usr/local/bin/python"#;
    client.run_command(&sandbox, &["sh", "-c", named])?;
    wait_until_settled(server)?;
    let mut times = TimeSamples::default();
    for run in 0..=rounds.long {
        match time_fresh_context(&mut client, &sandbox, "jupyter:python3")? {
            Some(time) if run > 0 => times.push(time),
            Some(_) => {}
            None => {
                report.add_unmeasured("first result of a fresh ipykernel: there is none; see `bench --help`");
                return client.delete_sandbox(&sandbox);
            }
        }
    }
    report.add_time("first result of a fresh ipykernel", times.summary());
    client.delete_sandbox(&sandbox)
}

/// Ten contexts of one sandbox at once: this should take as long as the cores need for ten interpreters.
pub(crate) fn measure_parallel_contexts(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_with_size(&CONTEXT_COUNT.to_string(), "2Gi", &json!({}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let contexts: Vec<String> = (0..CONTEXT_COUNT)
        .map(|_| open_context(&mut client, &sandbox, "python")?.context("there is no python in this image"))
        .collect::<Result<_>>()?;
    wait_until_settled(server)?;
    let (mut bare, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for round in 0..=rounds.long {
        let interpreters = time_parallel_runs(server, &contexts, |client, _| {
            client.run_command(&sandbox, &["python3", "-c", WORK_CODE])
        })?;
        let together = time_parallel_runs(server, &contexts, |client, context| {
            run_code(client, &sandbox, context, WORK_CODE)
        })?;
        if round > 0 {
            bare.push(interpreters);
            ours.push(together);
        }
    }
    client.delete_sandbox(&sandbox)?;
    report.add_time(format!("work in {CONTEXT_COUNT} bare interpreters at once"), bare.summary());
    report.add_time(format!("the same in {CONTEXT_COUNT} contexts at once"), ours.summary());
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.require_at_most("ten contexts at once", ratio, 1.2, "times ten interpreters");
    Ok(())
}

/// The time until all runs that were started at once have finished.
fn time_parallel_runs(
    server: &BenchServer,
    contexts: &[String],
    act: impl Fn(&mut BenchClient, &str) -> Result<()> + Sync,
) -> Result<Duration> {
    let clients: Vec<BenchClient> = contexts.iter().map(|_| server.client()).collect::<Result<_>>()?;
    let act = &act;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let runs: Vec<_> = std::iter::zip(clients, contexts)
            .map(|(mut client, context)| scope.spawn(move || act(&mut client, context)))
            .collect();
        runs.into_iter().try_for_each(|run| run.join().expect("a run does not panic"))
    })?;
    Ok(began.elapsed())
}

/// The time from nothing to a first result; `None` if nothing here runs the language.
fn time_fresh_context(
    client: &mut BenchClient,
    sandbox: &BenchSandbox,
    language: &str,
) -> Result<Option<Duration>> {
    let began = Instant::now();
    let Some(context) = open_context(client, sandbox, language)? else { return Ok(None) };
    run_code(client, sandbox, &context, "1 + 1")?;
    let time = began.elapsed();
    client.send_inside(sandbox, "DELETE", &format!("code/contexts/{context}"), &Value::Null)?;
    Ok(Some(time))
}

pub(super) fn open_context(
    client: &mut BenchClient,
    sandbox: &BenchSandbox,
    language: &str,
) -> Result<Option<String>> {
    let (status, body) =
        client.send_inside(sandbox, "POST", "code/context", &json!({"language": language}))?;
    match status {
        200 => {
            let context: Value = serde_json::from_slice(body)?;
            Ok(Some(context["id"].as_str().context("the server names no id")?.to_owned()))
        }
        400 => Ok(None),
        _ => bail!("a context failed with status {status}: {}", String::from_utf8_lossy(body)),
    }
}

pub(super) fn run_code(
    client: &mut BenchClient,
    sandbox: &BenchSandbox,
    context: &str,
    code: &str,
) -> Result<()> {
    let request = json!({"code": code, "context": {"id": context}});
    let (status, body) = client.send_inside(sandbox, "POST", "code", &request)?;
    let text = String::from_utf8_lossy(body);
    if status != 200 || !text.contains(r#""type":"result""#) || !text.contains("execution_complete") {
        bail!("code failed with status {status}: {text}");
    }
    Ok(())
}

//! Code contexts: the first result of a fresh one beside the bare interpreter in the same sandbox,
//! and ten of them at once beside ten bare interpreters at once.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::Rounds;
use super::client::{Client, Sandbox};
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;

/// How many contexts run at once.
const CONTEXTS: u32 = 10;

/// Keeps one core busy for a few tenths of a second.
const WORK: &str = "total = 0\nfor number in range(4_000_000): total += number\ntotal";

/// The first result of a fresh context, and that of a fresh ipykernel where the image has one.
pub(crate) fn first_result(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_sized("8", "2Gi", &json!({}))?;
    client.resolve(&mut sandbox)?;
    let (mut bare, mut ours) = (Samples::default(), Samples::default());
    for run in 0..=rounds.spaced {
        let began = Instant::now();
        client.run(&sandbox, &["python3", "-c", "1"])?;
        let interpreter = began.elapsed();
        let context = fresh(&mut client, &sandbox, "python")?.context("there is no python in this image")?;
        if run > 0 {
            bare.push(interpreter);
            ours.push(context);
        }
    }
    client.delete(&sandbox)?;
    report.time("python3 -c 1 in a sandbox", bare.summary());
    report.time("first result of a fresh python context", ours.summary());
    ipykernel(server, rounds, report)?;
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.at_most("first result of a fresh python context", ratio, 3.0, "times python3 -c 1");
    Ok(())
}

/// The same for an ipykernel, from a directory of the host or from the image.
fn ipykernel(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let volumes: Vec<Value> = (server.packages.iter())
        .map(|path| json!({"name": "packages", "host": {"path": path}, "mountPath": "/opt/packages", "readOnly": true}))
        .collect();
    let env = json!({"PYTHONPATH": "/opt/packages", "JUPYTER_PATH": "/opt/packages/share/jupyter"});
    let limits = json!({"cpu": "8", "memory": "2Gi"});
    let mut sandbox =
        client.create_wish(json!({"resourceLimits": limits, "volumes": volumes, "env": env}))?;
    client.resolve(&mut sandbox)?;
    // ipykernel starts the interpreter under a name that not every system has.
    let named = r#"command -v python || ln -s "$(command -v python3)" /usr/local/bin/python"#;
    client.run(&sandbox, &["sh", "-c", named])?;
    let mut times = Samples::default();
    for run in 0..=rounds.long {
        match fresh(&mut client, &sandbox, "jupyter:python3")? {
            Some(time) if run > 0 => times.push(time),
            Some(_) => {}
            None => {
                report.absent("first result of a fresh ipykernel: there is none; see `bench --help`");
                return client.delete(&sandbox);
            }
        }
    }
    report.time("first result of a fresh ipykernel", times.summary());
    client.delete(&sandbox)
}

/// Ten contexts of one sandbox at once: this should take as long as the cores need for ten interpreters.
pub(crate) fn side_by_side(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let mut sandbox = client.create_sized(&CONTEXTS.to_string(), "2Gi", &json!({}))?;
    client.resolve(&mut sandbox)?;
    let contexts: Vec<String> = (0..CONTEXTS)
        .map(|_| open(&mut client, &sandbox, "python")?.context("there is no python in this image"))
        .collect::<Result<_>>()?;
    let (mut bare, mut ours) = (Samples::default(), Samples::default());
    for round in 0..=rounds.long {
        let interpreters =
            at_once(server, &contexts, |client, _| client.run(&sandbox, &["python3", "-c", WORK]))?;
        let together = at_once(server, &contexts, |client, context| run(client, &sandbox, context, WORK))?;
        if round > 0 {
            bare.push(interpreters);
            ours.push(together);
        }
    }
    client.delete(&sandbox)?;
    report.time(format!("work in {CONTEXTS} bare interpreters at once"), bare.summary());
    report.time(format!("the same in {CONTEXTS} contexts at once"), ours.summary());
    let ratio = ours.summary().p50 / bare.summary().p50;
    report.at_most("ten contexts at once", ratio, 1.2, "times ten interpreters");
    Ok(())
}

/// The time until all runs that were started at once have finished.
fn at_once(
    server: &Server,
    contexts: &[String],
    act: impl Fn(&mut Client, &str) -> Result<()> + Sync,
) -> Result<Duration> {
    let clients: Vec<Client> = contexts.iter().map(|_| server.client()).collect::<Result<_>>()?;
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
fn fresh(client: &mut Client, sandbox: &Sandbox, language: &str) -> Result<Option<Duration>> {
    let began = Instant::now();
    let Some(context) = open(client, sandbox, language)? else { return Ok(None) };
    run(client, sandbox, &context, "1 + 1")?;
    let time = began.elapsed();
    client.inside(sandbox, "DELETE", &format!("code/contexts/{context}"), &Value::Null)?;
    Ok(Some(time))
}

fn open(client: &mut Client, sandbox: &Sandbox, language: &str) -> Result<Option<String>> {
    let (status, body) = client.inside(sandbox, "POST", "code/context", &json!({"language": language}))?;
    match status {
        200 => {
            let context: Value = serde_json::from_slice(body)?;
            Ok(Some(context["id"].as_str().context("the server names no id")?.to_owned()))
        }
        400 => Ok(None),
        _ => bail!("a context failed with status {status}: {}", String::from_utf8_lossy(body)),
    }
}

fn run(client: &mut Client, sandbox: &Sandbox, context: &str, code: &str) -> Result<()> {
    let wish = json!({"code": code, "context": {"id": context}});
    let (status, body) = client.inside(sandbox, "POST", "code", &wish)?;
    let text = String::from_utf8_lossy(body);
    if status != 200 || !text.contains(r#""type":"result""#) || !text.contains("execution_complete") {
        bail!("code failed with status {status}: {text}");
    }
    Ok(())
}

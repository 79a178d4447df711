//! Where the time of a create goes, stage by stage, as the server logs it.
//!
//! The server and the launcher log the durations of their stages for each create, at level `trace`. The rest
//! of the time that the client sees is HTTP, admission and the way back.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::json;

use super::RoundCounts;
use super::report::{BenchReport, StageRow};
use super::server::BenchServer;
use super::settle::wait_until_settled;
use super::statistics::TimeSamples;

/// The server's stage that consists of the launcher's stages.
const LAUNCHER_STAGE: &str = "launcher";

/// A line of the log with stages, as `name=microseconds` with commas between.
#[derive(Debug, Deserialize)]
struct StageLine {
    target: String,
    part: String,
    sandbox: String,
    stages: String,
}

/// The samples of each stage, in the order in which the stages were first seen.
#[derive(Debug, Default)]
struct StageSamples {
    order: Vec<(String, String)>,
    samples: HashMap<(String, String), TimeSamples>,
}

impl StageSamples {
    fn push(&mut self, part: &str, stage: &str, time: Duration) {
        let key = (part.to_owned(), stage.to_owned());
        if !self.samples.contains_key(&key) {
            self.order.push(key.clone());
        }
        self.samples.entry(key).or_default().push(time);
    }

    /// Adds the stages of one create that took `total` for its client.
    fn push_create(&mut self, total: Duration, lines: &[&StageLine]) {
        let mut counted = Duration::ZERO;
        let stages_of = |part: &str| -> Vec<(&str, Duration)> {
            lines
                .iter()
                .filter(|line| line.part == part)
                .flat_map(|line| parse_stages(&line.stages))
                .collect()
        };
        let inside = stages_of("launcher");
        for (stage, time) in stages_of("server") {
            counted += time;
            if stage == LAUNCHER_STAGE && !inside.is_empty() {
                let known: Duration = inside.iter().map(|(_, time)| *time).sum();
                for (stage, time) in &inside {
                    self.push("launcher", stage, *time);
                }
                self.push("server", "request to the launcher", time.saturating_sub(known));
            } else {
                self.push("server", stage, time);
            }
        }
        self.push("client", "http, admission", total.saturating_sub(counted));
        self.push("client", "whole create", total);
    }
}

/// Creates sandboxes one after the other and reports the median of each stage.
pub(crate) fn measure_breakdown(rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    let server = BenchServer::start_logging_stages()?;
    wait_until_settled(&server)?;
    let mut client = server.client()?;
    let mut totals = Vec::new();
    for run in 0..=rounds.many {
        let began = Instant::now();
        let sandbox = client.create_sandbox(&json!({}))?;
        let total = began.elapsed();
        client.delete_sandbox(&sandbox)?;
        if run > 0 {
            totals.push((sandbox.id, total));
        }
    }
    let lines = parse_log(&server.read_log()?);
    let mut samples = StageSamples::default();
    for (id, total) in &totals {
        let lines: Vec<&StageLine> = lines.iter().filter(|line| line.sandbox == *id).collect();
        samples.push_create(*total, &lines);
    }
    server.stop()?;
    let whole: TimeSamples = totals.iter().map(|(_, total)| *total).collect();
    report.add_time("create", whole.summary());
    let whole = whole.summary().p50;
    for key in &samples.order {
        let p50 = samples.samples.get(key).context("each stage has samples")?.summary().p50;
        let (part, stage) = key.clone();
        report.add_stage(StageRow { part, stage, p50, share: p50 / whole });
    }
    report.add_note("stages follow each other; medians do not add up exactly to the whole".to_owned());
    Ok(())
}

fn parse_log(log: &str) -> Vec<StageLine> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<StageLine>(line).ok());
    lines.filter(|line| line.target == backend::STAGE_LOG_TARGET).collect()
}

fn parse_stages(text: &str) -> impl Iterator<Item = (&str, Duration)> {
    text.split(',').filter_map(|pair| {
        let (stage, micros) = pair.split_once('=')?;
        Some((stage, Duration::from_micros(micros.parse().ok()?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_of_the_launcher_replace_the_wait_for_it() {
        let log = concat!(
            r#"{"target":"create_stages","part":"launcher","sandbox":"a","stages":"clone=100,agent=300"}"#,
            "\n{\"target\":\"service\",\"message\":\"another line\"}\nnot JSON\n",
            r#"{"target":"create_stages","part":"server","sandbox":"a","stages":"store=50,launcher=450,ping=20"}"#,
        );
        let lines = parse_log(log);
        assert_eq!(lines.len(), 2);
        let mut samples = StageSamples::default();
        samples.push_create(Duration::from_micros(600), &lines.iter().collect::<Vec<_>>());
        let micros = |part: &str, stage: &str| {
            let key = (part.to_owned(), stage.to_owned());
            samples.samples[&key].summary().p50 * 1000.0
        };
        for (part, stage, expected) in [
            ("server", "store", 50.0),
            ("launcher", "clone", 100.0),
            ("launcher", "agent", 300.0),
            ("server", "request to the launcher", 50.0),
            ("server", "ping", 20.0),
            ("client", "http, admission", 80.0),
            ("client", "whole create", 600.0),
        ] {
            assert!((micros(part, stage) - expected).abs() < 0.001, "{part} {stage}");
        }
        assert_eq!(samples.order.len(), 7, "{:?}", samples.order);
    }
}

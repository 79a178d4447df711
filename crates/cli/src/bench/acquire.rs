//! Measures asking for a sandbox by the name that it already has, beside making one.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;

use super::Rounds;
use super::client::Client;
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;

pub(crate) fn acquire(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let named = json!({"coracle.key": "bench"});
    let sandbox = client.create(&named)?;
    let (mut cold, mut again) = (Samples::default(), Samples::default());
    for run in 0..=rounds.many {
        let made = create_and_remove(&mut client)?;
        let began = Instant::now();
        client.create(&named)?;
        let found = began.elapsed();
        if run > 0 {
            cold.push(made);
            again.push(found);
        }
    }
    client.delete(&sandbox)?;
    report.time("create", cold.summary());
    report.time("acquire a living sandbox by its key", again.summary());
    let ratio = again.summary().p50 / cold.summary().p50;
    report.at_most("acquire a living sandbox by its key", ratio, 0.2, "times a create");
    Ok(())
}

/// The time of a create; the removal is not counted.
pub(super) fn create_and_remove(client: &mut Client) -> Result<Duration> {
    let began = Instant::now();
    let sandbox = client.create(&json!({}))?;
    let time = began.elapsed();
    client.delete(&sandbox)?;
    Ok(time)
}

//! Many idle sandboxes: the cost of each, and whether the list stays quick.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::Rounds;
use super::client::{Client, Sandbox};
use super::report::Report;
use super::server::{Server, kibibytes};
use super::statistics::Samples;

const MEBIBYTE: f64 = 1024.0 * 1024.0;

/// The number of pages in which the whole list is requested.
const PAGES: usize = 5;

/// Connections that create sandboxes in parallel.
const MAKERS: usize = 8;

/// The decrease of the host's available memory per idle sandbox, and the share of the agent.
pub(crate) fn memory(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let count = rounds.idle.min(200);
    // The first few sandboxes pay for everything that is shared.
    let first = make(server, 4)?;
    let before = available()?;
    let made = make(server, count)?;
    let after = available()?;
    let each = precise(before.saturating_sub(after)) / count_of(&made) / MEBIBYTE;
    report.at_most("memory of an idle sandbox", each, 2.0, "MiB");
    match agent_share(&made) {
        Some(share) => report.at_most("of which its agent (PSS)", share / MEBIBYTE, 2.0, "MiB"),
        None => report.absent("the share of an agent, which root alone may read"),
    }
    remove(server, &made)?;
    remove(server, &first)
}

/// The time for one page of the list, with ten sandboxes and with very many.
pub(crate) fn list(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let few = make(server, 10)?;
    let with_few = pages(server, rounds.many)?;
    let many = make(server, rounds.idle - few.len())?;
    let with_many = pages(server, rounds.many)?;
    report.time("a page of the list, 10 alive", with_few.summary());
    report.time(format!("a page of the list, {} alive", rounds.idle), with_many.summary());
    let ratio = with_many.summary().p50 / with_few.summary().p50;
    report.at_most("a page of the list, all alive", ratio, 2.0, "times with ten");
    whole_list(server, rounds, &with_many, report)?;
    remove(server, &many)?;
    remove(server, &few)
}

/// The time per sandbox of the whole list in five pages, beside that of one page of ten.
fn whole_list(server: &Server, rounds: Rounds, page_of_ten: &Samples, report: &mut Report) -> Result<()> {
    let mut client = server.client()?;
    let size = rounds.idle / PAGES;
    let mut whole = Samples::default();
    for _ in 0..rounds.spaced {
        let began = Instant::now();
        let mut found = 0;
        for page in 1..=PAGES {
            found += client.list_page(page, size)?.len();
        }
        whole.push(began.elapsed());
        ensure!(found == rounds.idle, "the pages hold {found} sandboxes instead of {}", rounds.idle);
    }
    report.time(format!("{PAGES} pages of {size}"), whole.summary());
    let each = whole.summary().p50 / precise(rounds.idle as u64);
    let ratio = each / (page_of_ten.summary().p50 / 10.0);
    report.at_most("the whole list in five pages, per sandbox", ratio, 2.0, "times in a page of ten");
    Ok(())
}

fn pages(server: &Server, runs: usize) -> Result<Samples> {
    let mut client = server.client()?;
    client.list()?;
    (0..runs)
        .map(|_| {
            let began = Instant::now();
            client.list()?;
            Ok(began.elapsed())
        })
        .collect()
}

/// Makes `count` sandboxes, several at a time.
fn make(server: &Server, count: usize) -> Result<Vec<Sandbox>> {
    side_by_side(server, count, |client, _| client.create(&json!({})))
}

fn remove(server: &Server, sandboxes: &[Sandbox]) -> Result<()> {
    side_by_side(server, sandboxes.len(), |client, index| client.delete(&sandboxes[index])).map(drop)
}

/// Does `work` for each index below `count`, on a few connections.
fn side_by_side<T: Send>(
    server: &Server,
    count: usize,
    work: impl Fn(&mut Client, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..MAKERS)
            .map(|maker| {
                scope.spawn(move || {
                    let mut client = server.client()?;
                    (maker..count)
                        .step_by(MAKERS)
                        .map(|index| work(&mut client, index))
                        .collect::<Result<Vec<T>>>()
                })
            })
            .collect();
        let mut all = Vec::with_capacity(count);
        for thread in threads {
            all.extend(thread.join().expect("a client does not panic")?);
        }
        Ok(all)
    })
}

fn available() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    kibibytes(&text, "MemAvailable:").context("the kernel does not say how much memory is available")
}

/// The mean of the agents' proportional shares, in bytes.
fn agent_share(sandboxes: &[Sandbox]) -> Option<f64> {
    let mut total = 0;
    let mut found = 0_u32;
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Ok(groups) = fs::read_to_string(process.path().join("cgroup")) else { continue };
        if sandboxes.iter().any(|sandbox| groups.contains(&sandbox.id)) {
            let share = fs::read_to_string(process.path().join("smaps_rollup")).ok()?;
            total += kibibytes(&share, "Pss:")?;
            found += 1;
        }
    }
    (found > 0).then(|| precise(total) / f64::from(found))
}

#[expect(clippy::cast_precision_loss, reason = "an amount of memory is far below 2^52")]
fn precise(bytes: u64) -> f64 {
    bytes as f64
}

fn count_of(sandboxes: &[Sandbox]) -> f64 {
    precise(sandboxes.len() as u64)
}

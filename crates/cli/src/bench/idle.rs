//! Many idle sandboxes: whether the list stays quick. Also makes and removes many for other measurements.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;

use super::RoundCounts;
use super::client::{BenchClient, BenchSandbox};
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

/// The number of pages in which the whole list is requested.
const PAGE_COUNT: usize = 5;

/// Connections that create sandboxes in parallel.
const PARALLEL_CLIENTS: usize = 8;

/// The time for one page of the list, with ten sandboxes and with very many.
pub(crate) fn measure_list(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let few = create_sandboxes(server, 10)?;
    let with_few = time_pages(server, rounds.many)?;
    let many = create_sandboxes(server, rounds.idle - few.len())?;
    let with_many = time_pages(server, rounds.many)?;
    report.add_time("a page of the list, 10 alive", with_few.summary());
    report.add_time(format!("a page of the list, {} alive", rounds.idle), with_many.summary());
    let ratio = with_many.summary().p50 / with_few.summary().p50;
    report.require_at_most("a page of the list, all alive", ratio, 2.0, "times with ten");
    measure_whole_list(server, rounds, &with_many, report)?;
    remove_sandboxes(server, &many)?;
    remove_sandboxes(server, &few)
}

/// The time per sandbox of the whole list in five pages, beside that of one page of ten.
fn measure_whole_list(
    server: &BenchServer,
    rounds: RoundCounts,
    page_of_ten: &TimeSamples,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let size = rounds.idle / PAGE_COUNT;
    let mut whole = TimeSamples::default();
    for _ in 0..rounds.spaced {
        let began = Instant::now();
        let mut found = 0;
        for page in 1..=PAGE_COUNT {
            found += client.list_page(page, size)?.len();
        }
        whole.push(began.elapsed());
        ensure!(found == rounds.idle, "the pages hold {found} sandboxes instead of {}", rounds.idle);
    }
    report.add_time(format!("{PAGE_COUNT} pages of {size}"), whole.summary());
    let each = whole.summary().p50 / to_f64(rounds.idle as u64);
    let ratio = each / (page_of_ten.summary().p50 / 10.0);
    report.require_at_most("the whole list in five pages, per sandbox", ratio, 2.0, "times in a page of ten");
    Ok(())
}

fn time_pages(server: &BenchServer, runs: usize) -> Result<TimeSamples> {
    let mut client = server.client()?;
    client.list_first_page()?;
    (0..runs)
        .map(|_| {
            let began = Instant::now();
            client.list_first_page()?;
            Ok(began.elapsed())
        })
        .collect()
}

/// Makes `count` sandboxes, several at a time.
pub(super) fn create_sandboxes(server: &BenchServer, count: usize) -> Result<Vec<BenchSandbox>> {
    run_in_parallel(server, count, |client, _| client.create_sandbox(&json!({})))
}

pub(super) fn remove_sandboxes(server: &BenchServer, sandboxes: &[BenchSandbox]) -> Result<()> {
    run_in_parallel(server, sandboxes.len(), |client, index| client.delete_sandbox(&sandboxes[index]))
        .map(drop)
}

/// Does `work` for each index below `count`, on a few connections.
fn run_in_parallel<T: Send>(
    server: &BenchServer,
    count: usize,
    work: impl Fn(&mut BenchClient, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..PARALLEL_CLIENTS)
            .map(|maker| {
                scope.spawn(move || {
                    let mut client = server.client()?;
                    (maker..count)
                        .step_by(PARALLEL_CLIENTS)
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

#[expect(clippy::cast_precision_loss, reason = "an amount of memory is far below 2^52")]
pub(super) fn to_f64(bytes: u64) -> f64 {
    bytes as f64
}

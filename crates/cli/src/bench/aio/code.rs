//! Code in a kernel that runs already, beside `/code` of the OpenSandbox API.

use anyhow::{Result, ensure};
use serde_json::json;

use super::client::provision;
use super::create_peer;
use crate::bench::RoundCounts;
use crate::bench::contexts::{open_context, run_code};
use crate::bench::report::BenchReport;
use crate::bench::server::BenchServer;
use crate::bench::statistics::TimeSamples;
use crate::bench::transfer::time_work;

pub(super) fn measure_code(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let mut client = server.client()?;
    let peer = create_peer(&mut client)?;
    let Some(context) = open_context(&mut client, &peer, "python")? else {
        report.add_unmeasured("AIO: code in a warm kernel: there is no python in this image");
        return client.delete_sandbox(&peer);
    };
    let sandbox = provision(&mut client, "code")?;
    let request = json!({"language": "python", "code": "1 + 1", "session_id": "bench"});
    let (mut ours, mut theirs) = (TimeSamples::default(), TimeSamples::default());
    // The first of each starts its kernel.
    for run in 0..=rounds.many {
        let reference = time_work(|| run_code(&mut client, &peer, &context, "1 + 1"))?;
        let time = time_work(|| {
            let data = sandbox.call(&mut client, "code/execute", &request)?;
            ensure!(data["status"] == "ok", "code failed: {data}");
            Ok(())
        })?;
        if run > 0 {
            theirs.push(reference);
            ours.push(time);
        }
    }
    sandbox.remove(&mut client)?;
    client.delete_sandbox(&peer)?;
    let (ours, theirs) = (ours.summary(), theirs.summary());
    report.add_time("AIO: code/execute in a warm session", ours);
    report.add_time("/code in a warm context, OpenSandbox", theirs);
    report.require_at_most("AIO: code/execute", ours.p50 / theirs.p50, 1.2, "times /code of OpenSandbox");
    Ok(())
}

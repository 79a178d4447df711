//! Another OpenSandbox server, measured with the same calls as our own.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::client::BenchClient;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;
use super::{RoundCounts, sleep_for};

/// The variable with the key of the other server.
const PEER_KEY_VARIABLE: &str = "CORACLE_BENCH_PEER_KEY";
/// The pause between two questions whether a sandbox runs.
const STATE_INTERVAL: Duration = Duration::from_millis(2);
/// How long a sandbox of the other server may take to start; it may have to fetch its image.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// The output of one command, and the line of which it consists.
const OUTPUT_BYTES: usize = 8_000_000;
const LINE: &str = "a-line-of-ordinary-length-as-a-build-or-a-test-prints-many-of-them";

/// A server and how to use it.
struct MeasuredServer {
    name: &'static str,
    address: SocketAddr,
    /// Header lines that every request needs.
    headers: String,
    image: String,
}

/// The times of one server.
#[derive(Default)]
struct PeerTimes {
    first_result: TimeSamples,
    command: TimeSamples,
    output: TimeSamples,
    delete: TimeSamples,
}

pub(crate) fn measure_peer(
    server: &BenchServer,
    url: &str,
    image: &str,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let key = std::env::var(PEER_KEY_VARIABLE).ok();
    let headers = key.map(|key| format!("OPEN-SANDBOX-API-KEY: {key}\r\n")).unwrap_or_default();
    let ours = MeasuredServer {
        name: "coracle",
        address: server.address(),
        headers: String::new(),
        image: "host".to_owned(),
    };
    let peer = MeasuredServer { name: "peer", address: parse_url(url)?, headers, image: image.to_owned() };
    for measured in [&ours, &peer] {
        let times = time_server(measured, rounds.long)
            .with_context(|| format!("could not measure `{}` at {}", measured.name, measured.address))?;
        let name = measured.name;
        report.add_time(format!("{name}: create and first result"), times.first_result.summary());
        report.add_time(format!("{name}: `true` in a living sandbox"), times.command.summary());
        report.add_time(format!("{name}: {} MB of output", OUTPUT_BYTES / 1_000_000), times.output.summary());
        report.add_time(format!("{name}: delete"), times.delete.summary());
    }
    Ok(())
}

fn time_server(server: &MeasuredServer, runs: usize) -> Result<PeerTimes> {
    let mut times = PeerTimes::default();
    let mut client = BenchClient::connect(server.address)?.with_headers(server.headers.clone());
    // The first run may have to fetch the image and is not counted.
    for run in 0..=runs {
        let began = Instant::now();
        let request = json!({"resourceLimits": {"cpu": "1", "memory": "512Mi"}});
        let mut sandbox = client.create_from_image(&server.image, request)?;
        while client.sandbox_state(&sandbox)? != "Running" {
            if began.elapsed() > START_TIMEOUT {
                bail!("the sandbox `{}` did not start", sandbox.id);
            }
            sleep_for(STATE_INTERVAL);
        }
        let (address, path) = client.resolve_direct_endpoint(&mut sandbox)?;
        let mut inside =
            BenchClient::connect(resolve_address(&address)?)?.with_headers(server.headers.clone());
        inside.run_line_at(&sandbox, &path, "true")?;
        let first = began.elapsed();
        let began = Instant::now();
        inside.run_line_at(&sandbox, &path, "true")?;
        let command = began.elapsed();
        let began = Instant::now();
        let received =
            inside.run_line_at(&sandbox, &path, &format!("yes {LINE} | head -c {OUTPUT_BYTES}"))?;
        let output = began.elapsed();
        ensure!(received >= OUTPUT_BYTES, "only {received} bytes of {OUTPUT_BYTES} arrived");
        let began = Instant::now();
        client.delete_sandbox(&sandbox)?;
        if run > 0 {
            times.first_result.push(first);
            times.command.push(command);
            times.output.push(output);
            times.delete.push(began.elapsed());
        }
    }
    Ok(times)
}

/// Takes the address from a URL such as `http://127.0.0.1:8080`.
fn parse_url(url: &str) -> Result<SocketAddr> {
    let rest = url.strip_prefix("http://").with_context(|| format!("`{url}` does not begin with http://"))?;
    resolve_address(rest.trim_end_matches('/'))
}

fn resolve_address(address: &str) -> Result<SocketAddr> {
    let with_port = if address.contains(':') { address.to_owned() } else { format!("{address}:80") };
    let mut found = with_port.to_socket_addrs().with_context(|| format!("could not resolve `{address}`"))?;
    found.next().with_context(|| format!("`{address}` has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_peer_is_an_http_address() {
        assert_eq!(parse_url("http://127.0.0.1:8080/").expect("an address").port(), 8080);
        assert_eq!(parse_url("http://127.0.0.1").expect("an address").port(), 80);
        assert!(parse_url("https://127.0.0.1").is_err());
    }
}

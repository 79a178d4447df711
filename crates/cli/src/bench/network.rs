//! The network of a sandbox: what it adds to a create, and what passes through it beside a plain
//! link with a plain packet filter.
//!
//! ```text
//!  world ── link ── host of the benchmark's own ──┬── sandboxes of a second server
//!                                                 └── plain: one link, masqueraded
//! ```
//!
//! All of it lies in net namespaces of its own; the machine's links and filters stay untouched.

use std::fs;
use std::io::Write;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use linux::namespaces::{self, NamespaceSet};
use linux::netlink::nftables::{ChainHook, FilterRule, FilterTable};
use linux::netlink::route::{RoutingSocket, VethEnd};
use serde_json::json;

use super::client::{BenchClient, BenchSandbox};
use super::floor::{FloorProcess, FloorTask};
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;
use super::{RoundCounts, sleep_for};

const WORLD_ADDRESS: [u8; 4] = [203, 0, 113, 1];
const HOST_ADDRESS: [u8; 4] = [203, 0, 113, 2];
const GATEWAY_ADDRESS: [u8; 4] = [203, 0, 113, 65];
const PLAIN_ADDRESS: [u8; 4] = [203, 0, 113, 66];
const WORLD_PORT: u16 = 5000;
/// How often each download is repeated.
const DOWNLOAD_COUNT: usize = 7;
/// The stock of network namespaces is refilled while the server is idle, so creates come a little apart,
/// as real ones do.
const CREATE_INTERVAL: Duration = Duration::from_millis(20);

/// Measures in a thread of its own, the only one that is in the network of the benchmark.
pub(crate) fn measure_network(_: &BenchServer, rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    if !linux::privileges::is_host_root() {
        report.add_unmeasured("network `on`: only root makes links");
        return Ok(());
    }
    std::thread::scope(|scope| scope.spawn(|| measure_in_namespace(rounds, report)).join())
        .expect("the measurement does not panic")
}

fn measure_in_namespace(rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    unshare_net_namespace()?;
    let world = spawn_in_new_namespace(serve_bytes(rounds.file))?;
    link_namespaces("up0", world.as_fd(), HOST_ADDRESS, WORLD_ADDRESS)?;
    RoutingSocket::open()?.add_default_route(link_index("up0")?, IpAddr::from(WORLD_ADDRESS))?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("could not let the namespace forward")?;
    let server = BenchServer::start_as("network", "on")?;
    measure_creates(&server, rounds, report)?;
    measure_throughput(&server, rounds, report)?;
    server.stop()
}

/// Creates with and without a network in turn, and the floor between them.
fn measure_creates(server: &BenchServer, rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    let mut floor = FloorProcess::start(server.directory())?;
    let mut client = server.client()?;
    let [mut bare, mut off, mut on] =
        [TimeSamples::default(), TimeSamples::default(), TimeSamples::default()];
    for run in 0..=rounds.many / 2 {
        let times = [
            floor.run(FloorTask::Sandbox)?,
            time_create(&mut client, "off")?,
            time_create(&mut client, "on")?,
        ];
        if run > 0 {
            let samples = [&mut bare, &mut off, &mut on];
            samples.into_iter().zip(times).for_each(|(samples, time)| samples.push(time));
        }
    }
    report.add_time("create with network off", off.summary());
    report.add_time("create with network on", on.summary());
    let added = on.summary().p50 - off.summary().p50;
    report.require_at_most(
        "network `on` adds to a create",
        added / bare.summary().p50,
        0.5,
        "times the floor",
    );
    Ok(())
}

fn time_create(client: &mut BenchClient, network: &str) -> Result<Duration> {
    sleep_for(CREATE_INTERVAL);
    let began = Instant::now();
    let mut sandbox = client.create_sandbox(&json!({"coracle.network": network}))?;
    client.resolve_endpoint(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete_sandbox(&sandbox)?;
    Ok(time)
}

/// The same download by the same programs, from a sandbox and from behind a plain link.
fn measure_throughput(server: &BenchServer, rounds: RoundCounts, report: &mut BenchReport) -> Result<()> {
    let plain = spawn_in_new_namespace(|| Ok(()))?;
    link_namespaces("plain0", plain.as_fd(), GATEWAY_ADDRESS, PLAIN_ADDRESS)?;
    run_in_namespace(&plain, || {
        RoutingSocket::open()?
            .add_default_route(link_index("eth0")?, IpAddr::from(GATEWAY_ADDRESS))
            .map_err(Into::into)
    })?;
    let mut table = FilterTable::new("plain");
    table.add_base_chain("source", ChainHook::ChangeSource);
    table.add_rule("source", &FilterRule::new().from_link("plain0").masquerade());
    table.install().context("could not set a plain filter")?;

    let mut client = server.client()?;
    let mut sandbox = client.create_sandbox(&json!({"coracle.network": "on"}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let (mut beside, mut ours) = (TimeSamples::default(), TimeSamples::default());
    for run in 0..=DOWNLOAD_COUNT {
        let times = [
            run_in_namespace(&plain, || time_plain_download(rounds.file))?,
            time_sandbox_download(&mut client, &sandbox, rounds.file)?,
        ];
        if run > 0 {
            beside.push(times[0]);
            ours.push(times[1]);
        }
    }
    client.delete_sandbox(&sandbox)?;
    let size = rounds.file >> 20;
    report.add_time(format!("{size} MiB over a plain link"), beside.summary());
    report.add_time(format!("{size} MiB into a sandbox"), ours.summary());
    let ratio = beside.summary().p50 / ours.summary().p50;
    report.require_at_least("throughput of network `on`", ratio, 0.9, "of a plain veth and nft");
    Ok(())
}

fn download_command(size: u64) -> [String; 3] {
    let [a, b, c, d] = WORLD_ADDRESS;
    let text = format!(
        "exec 3<>/dev/tcp/{a}.{b}.{c}.{d}/{WORLD_PORT} && head -c {size} <&3 > /dev/null \\
         && read -r word <&3 && test $word = end"
    );
    ["bash".to_owned(), "-c".to_owned(), text]
}

fn time_plain_download(size: u64) -> Result<Duration> {
    let [program, arguments @ ..] = download_command(size);
    let began = Instant::now();
    let status = Command::new(program).args(arguments).stdin(Stdio::null()).status()?;
    if status.success() { Ok(began.elapsed()) } else { bail!("the plain link does not work") }
}

fn time_sandbox_download(client: &mut BenchClient, sandbox: &BenchSandbox, size: u64) -> Result<Duration> {
    let began = Instant::now();
    client.run_command(sandbox, &download_command(size))?;
    Ok(began.elapsed())
}

/// Takes this thread into a net namespace of its own.
fn unshare_net_namespace() -> Result<OwnedFd> {
    namespaces::unshare_namespaces(NamespaceSet::NET).context("could not make a net namespace")?;
    namespaces::set_loopback_up()?;
    current_net_namespace()
}

/// The net namespace of this thread, not of the process.
fn current_net_namespace() -> Result<OwnedFd> {
    Ok(fs::File::open("/proc/thread-self/ns/net")?.into())
}

/// Makes a namespace and runs `work` there, which may continue in the background.
fn spawn_in_new_namespace(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<OwnedFd> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(unshare_net_namespace().and_then(|made| work().map(|()| made))));
    receiver.recv().context("a thread of the benchmark died")?
}

fn run_in_namespace<T>(place: &OwnedFd, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let home = current_net_namespace()?;
    namespaces::enter_namespace(place.as_fd(), NamespaceSet::NET)?;
    let done = work();
    namespaces::enter_namespace(home.as_fd(), NamespaceSet::NET)?;
    done
}

/// Sends zeros to every client that connects, then a marker that shows that all of them arrived.
fn serve_bytes(size: u64) -> impl FnOnce() -> Result<()> {
    move || {
        let listener = TcpListener::bind(("0.0.0.0", WORLD_PORT)).context("could not listen")?;
        std::thread::spawn(move || {
            let block = vec![0; 1 << 20];
            while let Ok((mut stream, _)) = listener.accept() {
                let mut left = size;
                while left > 0 {
                    let now = left.min(block.len() as u64);
                    let piece = usize::try_from(now).expect("it is at most a block");
                    if stream.write_all(&block[..piece]).is_err() {
                        break;
                    }
                    left -= now;
                }
                stream.write_all(b"end\n").ok();
            }
        });
        Ok(())
    }
}

/// Connects this namespace with another, whose end of the link is `eth0`.
fn link_namespaces(
    name: &str,
    place: std::os::fd::BorrowedFd<'_>,
    own: [u8; 4],
    other: [u8; 4],
) -> Result<()> {
    let mut routing = RoutingSocket::open()?;
    let ends = (VethEnd { name, mac: [2, 0, 0, 0, 1, 1] }, VethEnd { name: "eth0", mac: [2, 0, 0, 0, 1, 2] });
    routing.create_veth_pair(ends.0, ends.1, place).context("could not make a link")?;
    set_end_up(name, own, other)?;
    run_in_namespace(&place.try_clone_to_owned()?, || set_end_up("eth0", other, own))
}

fn set_end_up(name: &str, own: [u8; 4], other: [u8; 4]) -> Result<()> {
    let (index, mut routing) = (link_index(name)?, RoutingSocket::open()?);
    routing.set_link_up(index)?;
    routing.add_address(index, own.into())?;
    routing.add_route(index, other.into())?;
    Ok(())
}

fn link_index(name: &str) -> Result<u32> {
    Ok(RoutingSocket::open()?.find_link(name)?.context("the link is not there")?.index)
}

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
use linux::namespaces::{self, Namespaces};
use linux::netlink::filter::{Hook, Rule, Table};
use linux::netlink::route::{End, Routing};
use serde_json::json;

use super::client::{Client, Sandbox};
use super::floor::{Floor, Task};
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;
use super::{Rounds, pause};

const WORLD: [u8; 4] = [203, 0, 113, 1];
const HOST: [u8; 4] = [203, 0, 113, 2];
const GATEWAY: [u8; 4] = [203, 0, 113, 65];
const PLAIN: [u8; 4] = [203, 0, 113, 66];
const PORT: u16 = 5000;
/// How often each download is repeated.
const DOWNLOADS: usize = 7;
/// The stock of network namespaces is refilled while the server is idle, so creates come a little apart,
/// as real ones do.
const APART: Duration = Duration::from_millis(20);

/// Measures in a thread of its own, the only one that is in the network of the benchmark.
pub(crate) fn network(_: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        report.absent("network `on`: only root makes links");
        return Ok(());
    }
    std::thread::scope(|scope| scope.spawn(|| measure(rounds, report)).join())
        .expect("the measurement does not panic")
}

fn measure(rounds: Rounds, report: &mut Report) -> Result<()> {
    own_namespace()?;
    let world = elsewhere(serve_bytes(rounds.file))?;
    link("up0", world.as_fd(), HOST, WORLD)?;
    Routing::open()?.add_default_route(index("up0")?, IpAddr::from(WORLD))?;
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("could not let the namespace forward")?;
    let server = Server::start_as("network", "on")?;
    creates(&server, rounds, report)?;
    throughput(&server, rounds, report)?;
    server.stop()
}

/// Creates with and without a network in turn, and the floor between them.
fn creates(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let mut floor = Floor::start(server.directory())?;
    let mut client = server.client()?;
    let [mut bare, mut off, mut on] = [Samples::default(), Samples::default(), Samples::default()];
    for run in 0..=rounds.many / 2 {
        let times = [floor.run(Task::Sandbox)?, create(&mut client, "off")?, create(&mut client, "on")?];
        if run > 0 {
            let samples = [&mut bare, &mut off, &mut on];
            samples.into_iter().zip(times).for_each(|(samples, time)| samples.push(time));
        }
    }
    report.time("create with network off", off.summary());
    report.time("create with network on", on.summary());
    let added = on.summary().p50 - off.summary().p50;
    report.at_most("network `on` adds to a create", added / bare.summary().p50, 0.5, "times the floor");
    Ok(())
}

fn create(client: &mut Client, network: &str) -> Result<Duration> {
    pause(APART);
    let began = Instant::now();
    let mut sandbox = client.create(&json!({"coracle.network": network}))?;
    client.resolve(&mut sandbox)?;
    client.run_true(&sandbox)?;
    let time = began.elapsed();
    client.delete(&sandbox)?;
    Ok(time)
}

/// The same download by the same programs, from a sandbox and from behind a plain link.
fn throughput(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let plain = elsewhere(|| Ok(()))?;
    link("plain0", plain.as_fd(), GATEWAY, PLAIN)?;
    within(&plain, || {
        Routing::open()?.add_default_route(index("eth0")?, IpAddr::from(GATEWAY)).map_err(Into::into)
    })?;
    let mut table = Table::new("plain");
    table.base_chain("source", Hook::ChangeSource);
    table.rule("source", &Rule::new().from_link("plain0").masquerade());
    table.install().context("could not set a plain filter")?;

    let mut client = server.client()?;
    let mut sandbox = client.create(&json!({"coracle.network": "on"}))?;
    client.resolve(&mut sandbox)?;
    let (mut beside, mut ours) = (Samples::default(), Samples::default());
    for run in 0..=DOWNLOADS {
        let times = [within(&plain, || download(rounds.file))?, inside(&mut client, &sandbox, rounds.file)?];
        if run > 0 {
            beside.push(times[0]);
            ours.push(times[1]);
        }
    }
    client.delete(&sandbox)?;
    let size = rounds.file >> 20;
    report.time(format!("{size} MiB over a plain link"), beside.summary());
    report.time(format!("{size} MiB into a sandbox"), ours.summary());
    let ratio = beside.summary().p50 / ours.summary().p50;
    report.at_least("throughput of network `on`", ratio, 0.9, "of a plain veth and nft");
    Ok(())
}

fn words(size: u64) -> [String; 3] {
    let [a, b, c, d] = WORLD;
    let text = format!(
        "exec 3<>/dev/tcp/{a}.{b}.{c}.{d}/{PORT} && head -c {size} <&3 > /dev/null \\
         && read -r word <&3 && test $word = end"
    );
    ["bash".to_owned(), "-c".to_owned(), text]
}

fn download(size: u64) -> Result<Duration> {
    let [program, arguments @ ..] = words(size);
    let began = Instant::now();
    let status = Command::new(program).args(arguments).stdin(Stdio::null()).status()?;
    if status.success() { Ok(began.elapsed()) } else { bail!("the plain link does not work") }
}

fn inside(client: &mut Client, sandbox: &Sandbox, size: u64) -> Result<Duration> {
    let began = Instant::now();
    client.run(sandbox, &words(size))?;
    Ok(began.elapsed())
}

/// Takes this thread into a net namespace of its own.
fn own_namespace() -> Result<OwnedFd> {
    namespaces::unshare(Namespaces::NET).context("could not make a net namespace")?;
    namespaces::raise_loopback()?;
    here()
}

/// The net namespace of this thread, not of the process.
fn here() -> Result<OwnedFd> {
    Ok(fs::File::open("/proc/thread-self/ns/net")?.into())
}

/// Makes a namespace and runs `work` there, which may continue in the background.
fn elsewhere(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<OwnedFd> {
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(own_namespace().and_then(|made| work().map(|()| made))));
    told.recv().context("a thread of the benchmark died")?
}

fn within<T>(place: &OwnedFd, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let home = here()?;
    namespaces::enter(place.as_fd(), Namespaces::NET)?;
    let done = work();
    namespaces::enter(home.as_fd(), Namespaces::NET)?;
    done
}

/// Sends zeros to every client that connects, then a marker that shows that all of them arrived.
fn serve_bytes(size: u64) -> impl FnOnce() -> Result<()> {
    move || {
        let listener = TcpListener::bind(("0.0.0.0", PORT)).context("could not listen")?;
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
fn link(name: &str, place: std::os::fd::BorrowedFd<'_>, own: [u8; 4], other: [u8; 4]) -> Result<()> {
    let mut routing = Routing::open()?;
    let ends = (End { name, mac: [2, 0, 0, 0, 1, 1] }, End { name: "eth0", mac: [2, 0, 0, 0, 1, 2] });
    routing.make_pair(ends.0, ends.1, place).context("could not make a link")?;
    set_end_up(name, own, other)?;
    within(&place.try_clone_to_owned()?, || set_end_up("eth0", other, own))
}

fn set_end_up(name: &str, own: [u8; 4], other: [u8; 4]) -> Result<()> {
    let (index, mut routing) = (index(name)?, Routing::open()?);
    routing.set_up(index)?;
    routing.add_address(index, own.into())?;
    routing.add_route(index, other.into())?;
    Ok(())
}

fn index(name: &str) -> Result<u32> {
    Ok(Routing::open()?.find(name)?.context("the link is not there")?.index)
}

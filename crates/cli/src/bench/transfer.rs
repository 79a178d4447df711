//! A large file in and out, beside what nginx serves over the same loopback.

use std::fs::{self, File};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::client::Client;
use super::peers::find;
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;
use super::{Rounds, pause};

/// The growth of the server's memory that a transfer may cause, in MiB: buffers, not the file.
const FLAT: f64 = 32.0;

const FILE: &str = "/root/large";

pub(crate) fn transfer(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    const REPEATS: usize = 3;
    let mut client = server.client()?;
    let mut sandbox = client.create(&json!({"coracle.disk": "4Gi"}))?;
    client.resolve(&mut sandbox)?;
    let nginx = Nginx::start(server.directory(), rounds.file)?;
    let (mut up, mut down, mut served) = (Samples::default(), Samples::default(), Samples::default());
    let growth = growth_during(server, || {
        for _ in 0..REPEATS {
            up.push(timed(|| client.upload(&sandbox, FILE, rounds.file))?);
            down.push(timed(|| whole(client.download(&sandbox, FILE)?, rounds.file))?);
            if let Some(nginx) = &nginx {
                served.push(timed(|| whole(nginx.fetch()?, rounds.file))?);
            }
        }
        Ok(())
    })?;
    client.delete(&sandbox)?;
    report.time(format!("upload of {} MiB", rounds.file >> 20), up.summary());
    report.time(format!("download of {} MiB", rounds.file >> 20), down.summary());
    report.at_most("growth of the server while it transfers", growth, FLAT, "MiB");
    if nginx.is_none() {
        report.absent("transfers beside nginx, which is not installed");
        return Ok(());
    }
    let served = served.summary();
    report.time(format!("nginx serves {} MiB", rounds.file >> 20), served);
    report.at_least("upload", served.p50 / up.summary().p50, 0.5, "of nginx's rate");
    report.at_least("download", served.p50 / down.summary().p50, 0.5, "of nginx's rate");
    Ok(())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed())
}

fn whole(size: u64, expected: u64) -> Result<()> {
    if size == expected { Ok(()) } else { bail!("{size} bytes came instead of {expected}") }
}

/// How much the server's memory rose at most while `work` was done, in MiB.
fn growth_during(server: &Server, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    const STEP: Duration = Duration::from_millis(20);
    let before = server.resident();
    let ended = AtomicBool::new(false);
    let highest = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut highest = before;
            while !ended.load(Ordering::Relaxed) {
                highest = highest.max(server.resident());
                pause(STEP);
            }
            highest
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        let highest = watcher.join().expect("reading of /proc does not panic");
        done.map(|()| highest)
    })?;
    let mebibytes = u32::try_from((highest - before) >> 20)?;
    Ok(f64::from(mebibytes))
}

/// nginx with one file to serve.
struct Nginx {
    process: Child,
    address: SocketAddr,
}

impl Nginx {
    /// `None` where it is not installed.
    fn start(directory: &Path, size: u64) -> Result<Option<Self>> {
        let Some(program) = find("nginx") else { return Ok(None) };
        let root = directory.join("nginx");
        fs::create_dir(&root)?;
        fill(&root.join("large"), size)?;
        // The port is free now; nginx cannot choose one itself.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new(program)
            .arg("-p")
            .arg(&root)
            .arg("-e")
            .arg(root.join("error.log"))
            .arg("-c")
            .arg(configuration(&root, address)?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("could not start nginx")?;
        let nginx = Self { process, address };
        nginx.wait()?;
        Ok(Some(nginx))
    }

    fn wait(&self) -> Result<()> {
        const STEP: Duration = Duration::from_millis(20);
        for _ in 0..250 {
            if TcpStream::connect(self.address).is_ok() {
                return Ok(());
            }
            pause(STEP);
        }
        bail!("nginx does not answer")
    }

    fn fetch(&self) -> Result<u64> {
        Client::connect(self.address)?.fetch("/large", "")
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::QUIT).ok();
        self.process.wait().ok();
    }
}

fn configuration(root: &Path, address: SocketAddr) -> Result<PathBuf> {
    let path = root.join("nginx.conf");
    let place = root.display();
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let text = format!(
        "daemon off; {user} worker_processes 1; pid {place}/pid;\nevents {{}}\n\
         http {{ access_log off; sendfile on; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;\n\
         fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;\n\
         server {{ listen {address}; root {place}; }} }}\n"
    );
    fs::write(&path, text)?;
    Ok(path)
}

fn fill(path: &Path, size: u64) -> Result<()> {
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = File::create(path)?;
    for _ in 0..size >> 20 {
        file.write_all(&block)?;
    }
    Ok(())
}

//! A large file in and out, compared with nginx over the same loopback.
//!
//! The same client talks to both sides, with blocks of the same size: a download is compared with a file
//! that nginx serves, an upload with one that nginx takes by PUT and that is on disk afterwards. A file
//! is removed after its round, before the kernel writes it out, and the sandbox has memory for all of
//! it, as nginx has: this measures the path of the bytes, not the disk.

use std::fs::{self, File};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::client::BenchClient;
use super::other_runtimes::find_program;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;
use super::{RoundCounts, sleep_for};

/// The growth of the server's memory that a transfer may cause, in MiB: buffers, not the file.
const MAX_GROWTH_MIB: f64 = 32.0;

const FILE_PATH: &str = "/root/large";

/// The times of the rounds.
#[derive(Default)]
struct TransferTimes {
    up: TimeSamples,
    down: TimeSamples,
    taken: TimeSamples,
    served: TimeSamples,
}

pub(crate) fn measure_transfer(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    const REPEATS: usize = 5;
    let mut client = server.client()?;
    let mut sandbox = client.create_with_memory("4Gi", &json!({"coracle.disk": "4Gi"}))?;
    client.resolve_endpoint(&mut sandbox)?;
    let nginx = Nginx::start(server.directory(), rounds.file)?;
    let mut times = TransferTimes::default();
    let growth = growth_during(server, || {
        for _ in 0..REPEATS {
            times.up.push(time_work(|| client.upload(&sandbox, FILE_PATH, rounds.file))?);
            times.down.push(time_work(|| check_size(client.download(&sandbox, FILE_PATH)?, rounds.file))?);
            client.remove_file(&sandbox, FILE_PATH)?;
            if let Some(nginx) = &nginx {
                times.taken.push(time_work(|| nginx.put(rounds.file))?);
                nginx.remove()?;
                times.served.push(time_work(|| check_size(nginx.fetch()?, rounds.file))?);
            }
        }
        Ok(())
    })?;
    client.delete_sandbox(&sandbox)?;
    report.require_at_most("growth of the server while it transfers", growth, MAX_GROWTH_MIB, "MiB");
    report_times(&times, rounds.file >> 20, nginx.is_some(), report);
    Ok(())
}

fn report_times(times: &TransferTimes, mebibytes: u64, beside_nginx: bool, report: &mut BenchReport) {
    let (up, down) = (times.up.summary(), times.down.summary());
    report.add_time(format!("upload of {mebibytes} MiB"), up);
    report.add_time(format!("download of {mebibytes} MiB"), down);
    if !beside_nginx {
        report.add_unmeasured("transfers beside nginx, which is not installed");
        return;
    }
    let (taken, served) = (times.taken.summary(), times.served.summary());
    report.add_time(format!("nginx takes {mebibytes} MiB"), taken);
    report.add_time(format!("nginx serves {mebibytes} MiB"), served);
    report.require_at_least("upload", taken.p50 / up.p50, 0.5, "of the rate nginx takes a file");
    report.require_at_least("download", served.p50 / down.p50, 0.5, "of the rate nginx serves one");
    report.add_note(format!(
        "nginx takes uploads by PUT into a file beside the state directory; against the rate at which it \
         serves, the upload is {:.2}",
        served.p50 / up.p50
    ));
}

pub(super) fn time_work(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed())
}

fn check_size(size: u64, expected: u64) -> Result<()> {
    if size == expected { Ok(()) } else { bail!("{size} bytes came instead of {expected}") }
}

/// The largest growth of the server's memory while `work` was done, in MiB.
pub(super) fn growth_during(server: &BenchServer, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
    let before = server.resident_bytes();
    let ended = AtomicBool::new(false);
    let highest = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut highest = before;
            while !ended.load(Ordering::Relaxed) {
                highest = highest.max(server.resident_bytes());
                sleep_for(SAMPLE_INTERVAL);
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
    /// Returns `None` if nginx is not installed.
    fn start(directory: &Path, size: u64) -> Result<Option<Self>> {
        let Some(program) = find_program("nginx") else { return Ok(None) };
        let root = directory.join("nginx");
        fs::create_dir(&root)?;
        write_large_file(&root.join("large"), size)?;
        // The port is free now; nginx cannot choose one by itself.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new(program)
            .arg("-p")
            .arg(&root)
            .arg("-e")
            .arg(root.join("error.log"))
            .arg("-c")
            .arg(write_configuration(&root, address)?)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("could not start nginx")?;
        let nginx = Self { process, address };
        nginx.wait_until_listening()?;
        Ok(Some(nginx))
    }

    fn wait_until_listening(&self) -> Result<()> {
        const POLL_INTERVAL: Duration = Duration::from_millis(20);
        for _ in 0..250 {
            if TcpStream::connect(self.address).is_ok() {
                return Ok(());
            }
            sleep_for(POLL_INTERVAL);
        }
        bail!("nginx does not answer")
    }

    fn fetch(&self) -> Result<u64> {
        BenchClient::connect(self.address)?.fetch_and_discard("/large", "")
    }

    fn put(&self, size: u64) -> Result<()> {
        BenchClient::connect(self.address)?.put("/taken", size)
    }

    fn remove(&self) -> Result<()> {
        BenchClient::connect(self.address)?.delete_path("/taken", "")
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::QUIT).ok();
        self.process.wait().ok();
    }
}

fn write_configuration(root: &Path, address: SocketAddr) -> Result<PathBuf> {
    let path = root.join("nginx.conf");
    let place = root.display();
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let text = format!(
        "daemon off; {user} worker_processes 1; pid {place}/pid;\nevents {{}}\n\
         http {{ access_log off; sendfile on; client_max_body_size 0; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;\n\
         fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;\n\
         server {{ listen {address}; root {place}; dav_methods PUT DELETE; }} }}\n"
    );
    fs::write(&path, text)?;
    Ok(path)
}

fn write_large_file(path: &Path, size: u64) -> Result<()> {
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = File::create(path)?;
    for _ in 0..size >> 20 {
        file.write_all(&block)?;
    }
    Ok(())
}

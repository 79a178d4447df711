//! Other runtimes, where the host has them: each runs `true` in a fresh sandbox of its kind, on the
//! host's own `/usr`, so that no image has to be fetched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::RoundCounts;
use super::report::BenchReport;
use super::server::BenchServer;
use super::statistics::TimeSamples;

/// Directories at `/` that are links into `/usr` on today's hosts.
const USR_LINKS: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// One way to run `true`, prepared so that it can be repeated.
pub(crate) struct PeerRuntime {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    directory: PathBuf,
}

pub(crate) fn measure_runtimes(
    server: &BenchServer,
    rounds: RoundCounts,
    report: &mut BenchReport,
) -> Result<()> {
    let place = server.directory().join("peers");
    fs::create_dir(&place)?;
    for (name, prepare) in [
        ("bubblewrap", prepare_bubblewrap as PrepareRuntime),
        ("runc", prepare_runc),
        ("docker", prepare_docker),
    ] {
        match prepare(&place).and_then(|peer| measure_runtime(&peer, rounds.many / 4)) {
            Ok(times) => report.add_time(format!("{name}: `true` in a new sandbox"), times.summary()),
            Err(error) => report.add_unmeasured(format!("{name}: {error:#}")),
        }
    }
    Ok(())
}

type PrepareRuntime = fn(&Path) -> Result<PeerRuntime>;

fn measure_runtime(peer: &PeerRuntime, runs: usize) -> Result<TimeSamples> {
    peer.time_once()?;
    (0..runs).map(|_| peer.time_once()).collect()
}

impl PeerRuntime {
    /// Runs `true` and returns how long it took.
    pub(crate) fn time_once(&self) -> Result<Duration> {
        let began = Instant::now();
        let output = Command::new(&self.program)
            .args(&self.arguments)
            .current_dir(&self.directory)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("could not run {}", self.name))?;
        if !output.status.success() {
            bail!("it failed here: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(began.elapsed())
    }
}

/// Bubblewrap with all namespaces that a sandbox of ours has.
pub(crate) fn prepare_bubblewrap(place: &Path) -> Result<PeerRuntime> {
    let program = find_program("bwrap").context("it is not installed")?;
    let mut arguments: Vec<String> =
        ["--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
            .map(str::to_owned)
            .into();
    for link in USR_LINKS {
        arguments.extend(["--symlink".to_owned(), format!("usr/{link}"), format!("/{link}")]);
    }
    arguments.push("true".to_owned());
    Ok(PeerRuntime { name: "bubblewrap", program, arguments, directory: place.to_owned() })
}

fn prepare_runc(place: &Path) -> Result<PeerRuntime> {
    let program = find_program("runc").context("it is not installed")?;
    let bundle = place.join("runc");
    link_tree(&bundle.join("rootfs"))?;
    let made =
        Command::new(&program).arg("spec").current_dir(&bundle).output().context("could not run runc")?;
    if !made.status.success() {
        bail!("`runc spec` failed: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    let path = bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    spec["process"]["args"] = json!(["true"]);
    spec["process"]["terminal"] = json!(false);
    let usr = json!({"destination": "/usr", "source": "/usr", "type": "bind", "options": ["bind", "ro"]});
    spec["mounts"].as_array_mut().context("the spec has no mounts")?.push(usr);
    fs::write(&path, spec.to_string())?;
    let name = format!("coracle-bench-{}", std::process::id());
    Ok(PeerRuntime { name: "runc", program, arguments: vec!["run".to_owned(), name], directory: bundle })
}

fn prepare_docker(place: &Path) -> Result<PeerRuntime> {
    const IMAGE: &str = "coracle-bench";
    let program = find_program("docker").context("it is not installed")?;
    let tree = place.join("docker");
    link_tree(&tree)?;
    let archive = place.join("docker.tar");
    run_checked(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&tree).arg("."))?;
    run_checked(Command::new(&program).args(["import"]).arg(&archive).arg(IMAGE))?;
    let arguments = ["run", "--rm", "--network", "none", "--volume", "/usr:/usr:ro", IMAGE, "true"];
    Ok(PeerRuntime {
        name: "docker",
        program,
        arguments: arguments.map(str::to_owned).into(),
        directory: place.to_owned(),
    })
}

fn run_checked(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    bail!("{}", String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("it failed").trim())
}

/// Makes a root with the links into `/usr` and with mount points.
fn link_tree(root: &Path) -> Result<()> {
    for name in ["usr", "proc", "dev", "sys", "etc", "tmp"] {
        fs::create_dir_all(root.join(name))?;
    }
    for link in USR_LINKS {
        std::os::unix::fs::symlink(format!("usr/{link}"), root.join(link))?;
    }
    Ok(())
}

/// Finds a program in the usual directories.
pub(crate) fn find_program(program: &str) -> Option<PathBuf> {
    ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin"]
        .into_iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.exists())
}

//! Other runtimes, where the host has them: each runs `true` in a fresh sandbox of its kind, on the
//! host's own `/usr`, so that no image has to be fetched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::Rounds;
use super::report::Report;
use super::server::Server;
use super::statistics::Samples;

/// Directories at `/` that are links into `/usr` on today's hosts.
const LINKS: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// One way to run `true`, prepared so that it can be repeated.
struct Peer {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    directory: PathBuf,
}

pub(crate) fn compare(server: &Server, rounds: Rounds, report: &mut Report) -> Result<()> {
    let place = server.directory().join("peers");
    fs::create_dir(&place)?;
    for (name, prepare) in [("bubblewrap", bubblewrap as Prepare), ("runc", runc), ("docker", docker)] {
        match prepare(&place).and_then(|peer| measure(&peer, rounds.many / 4)) {
            Ok(times) => report.time(format!("{name}: `true` in a new sandbox"), times.summary()),
            Err(error) => report.absent(format!("{name}: {error:#}")),
        }
    }
    Ok(())
}

type Prepare = fn(&Path) -> Result<Peer>;

fn measure(peer: &Peer, runs: usize) -> Result<Samples> {
    let once = || -> Result<_> {
        let began = Instant::now();
        let output = Command::new(&peer.program)
            .args(&peer.arguments)
            .current_dir(&peer.directory)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("could not run {}", peer.name))?;
        if !output.status.success() {
            bail!("it failed here: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(began.elapsed())
    };
    once()?;
    (0..runs).map(|_| once()).collect()
}

fn bubblewrap(place: &Path) -> Result<Peer> {
    let program = find("bwrap").context("it is not installed")?;
    let mut arguments: Vec<String> =
        ["--unshare-all", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
            .map(str::to_owned)
            .into();
    for link in LINKS {
        arguments.extend(["--symlink".to_owned(), format!("usr/{link}"), format!("/{link}")]);
    }
    arguments.push("true".to_owned());
    Ok(Peer { name: "bubblewrap", program, arguments, directory: place.to_owned() })
}

fn runc(place: &Path) -> Result<Peer> {
    let program = find("runc").context("it is not installed")?;
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
    Ok(Peer { name: "runc", program, arguments: vec!["run".to_owned(), name], directory: bundle })
}

fn docker(place: &Path) -> Result<Peer> {
    const IMAGE: &str = "coracle-bench";
    let program = find("docker").context("it is not installed")?;
    let tree = place.join("docker");
    link_tree(&tree)?;
    let archive = place.join("docker.tar");
    run(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&tree).arg("."))?;
    run(Command::new(&program).args(["import"]).arg(&archive).arg(IMAGE))?;
    let arguments = ["run", "--rm", "--network", "none", "--volume", "/usr:/usr:ro", IMAGE, "true"];
    Ok(Peer {
        name: "docker",
        program,
        arguments: arguments.map(str::to_owned).into(),
        directory: place.to_owned(),
    })
}

fn run(command: &mut Command) -> Result<()> {
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
    for link in LINKS {
        std::os::unix::fs::symlink(format!("usr/{link}"), root.join(link))?;
    }
    Ok(())
}

/// Finds a program in the usual directories.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin"]
        .into_iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.exists())
}

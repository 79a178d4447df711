//! `cargo xtask kernels`: real Jupyter kernels in one directory, for tests that need them.
//!
//! ```text
//! DIR/kernels/python3/    kernel.json, site/    ipykernel, for the host's /usr/bin/python3
//!             java/       kernel.json, *.jar    JJava; needs a JDK where it runs
//!             gonb/       kernel.json, gonb …   GoNB; needs the Go toolchain where it runs
//! ```
//! The directory can be anywhere in an image: `JUPYTER_PATH` names it. Existing kernels are kept as long as
//! their pins are the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::packages::has_python;
use crate::report::{Report, say};
use crate::tools::{output, run, workspace};
use crate::vm::find;

const PINS: &str = "tests/kernels";
/// The Python of sandboxes that show the host's files; the one in `PATH` may be another.
const PYTHON: &str = "/usr/bin/python3";

/// Where tests look for kernels.
pub(crate) fn usual_place() -> PathBuf {
    workspace().join("target/kernels")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Python,
    Java,
    Go,
}

/// The chore: makes the given kernels, or all.
pub(crate) fn chore(args: &[String]) -> Result<bool> {
    let (place, names) = match args.split_first() {
        Some((place, names)) => (PathBuf::from(place), names),
        None => (usual_place(), args),
    };
    let kernels: Vec<Kernel> = match names {
        [] => vec![Kernel::Python, Kernel::Java, Kernel::Go],
        names => names.iter().map(|name| parse(name)).collect::<Result<_>>()?,
    };
    for kernel in kernels {
        assemble(kernel, &place)?;
    }
    say(format_args!("JUPYTER_PATH={}", place.display()));
    Ok(true)
}

/// A step of the tests: makes the kernels that are quick to make.
pub(crate) fn prepare(report: &mut Report) -> Result<()> {
    for (kernel, program) in [(Kernel::Python, PYTHON), (Kernel::Java, "java")] {
        if !has_python() || (find(program).is_none() && !Path::new(program).exists()) {
            report.skip("a Jupyter kernel", format_args!("there is no {program} on this host"));
            continue;
        }
        assemble(kernel, &usual_place())?;
    }
    Ok(())
}

fn parse(name: &str) -> Result<Kernel> {
    match name {
        "python" => Ok(Kernel::Python),
        "java" => Ok(Kernel::Java),
        "go" => Ok(Kernel::Go),
        other => bail!("there is no kernel for `{other}` here; there are python, java and go"),
    }
}

/// Makes a kernel in a temporary directory and moves it into place when it is complete.
fn assemble(kernel: Kernel, place: &Path) -> Result<()> {
    let (name, pins) = match kernel {
        Kernel::Python => ("python3", "python.txt"),
        Kernel::Java => ("java", "java.txt"),
        Kernel::Go => ("gonb", "go/go.sum"),
    };
    let kernels = place.join("kernels");
    let (finished, mark) = (kernels.join(name), kernels.join(name).join("pins"));
    let pins = workspace().join(PINS).join(pins);
    let wanted = fs::read_to_string(&pins).with_context(|| format!("could not read {}", pins.display()))?;
    if fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    fs::create_dir_all(&kernels).context("could not make the directory of kernels")?;
    let work = tempfile::Builder::new().prefix(".new-").tempdir_in(&kernels)?;
    let made = work.path().join("kernel");
    fs::create_dir(&made)?;
    match kernel {
        Kernel::Python => python(&made, &pins)?,
        Kernel::Java => java(&made, &pins, work.path())?,
        Kernel::Go => go(&made)?,
    }
    fs::write(made.join("pins"), wanted)?;
    if finished.exists() {
        fs::remove_dir_all(&finished)?;
    }
    fs::rename(&made, &finished).context("could not move the kernel into place")
}

fn python(made: &Path, pins: &Path) -> Result<()> {
    let version = "import sys; print('%d.%d' % sys.version_info[:2])";
    let version = output(Command::new(PYTHON).args(["-c", version]))?;
    run(pip(&made.join("site"), pins)?.args(["--python-version", version.trim(), "--only-binary=:all:"]))?;
    let words =
        ["/usr/bin/env", "PYTHONPATH={resource_dir}/site", "python3", "-m", "ipykernel_launcher", "-f"];
    describe(made, "python", "Python 3 (ipykernel)", &words)
}

/// The kernel comes as a Python package, with its own description.
fn java(made: &Path, pins: &Path, work: &Path) -> Result<()> {
    let package = work.join("package");
    run(&mut pip(&package, pins)?)?;
    for entry in fs::read_dir(package.join("share/jupyter/kernels/java"))? {
        let entry = entry?;
        fs::copy(entry.path(), made.join(entry.file_name()))?;
    }
    Ok(())
}

fn go(made: &Path) -> Result<()> {
    for (program, package) in
        [("gonb", "github.com/janpfeifer/gonb"), ("goimports", "golang.org/x/tools/cmd/goimports")]
    {
        run(Command::new("go")
            .args(["build", "-trimpath", "-mod=readonly", "-buildvcs=false", "-o"])
            .arg(made.join(program))
            .arg(package)
            .current_dir(workspace().join(PINS).join("go")))?;
    }
    // The kernel calls the toolchain, which is often outside of PATH.
    let script = "PATH=\"$0:$PATH:/usr/local/go/bin\" exec \"$0/gonb\" --kernel \"$1\"";
    describe(made, "go", "Go (GoNB)", &["/bin/sh", "-c", script, "{resource_dir}"])
}

/// Uses our own pip: the Python of a host may not have one.
fn pip(target: &Path, pins: &Path) -> Result<Command> {
    let home = workspace().join("target/pip");
    if !home.join("bin/pip").exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    }
    let mut command = crate::python::install(&home.join("bin/python"));
    command
        .args(["--no-deps", "--root-user-action=ignore", "--target"])
        .arg(target)
        .arg("--requirement")
        .arg(pins);
    Ok(command)
}

/// Writes how the kernel is started: with these arguments and its connection file.
fn describe(made: &Path, language: &str, title: &str, words: &[&str]) -> Result<()> {
    let argv: Vec<&str> = words.iter().copied().chain(["{connection_file}"]).collect();
    let text = json!({"argv": argv, "display_name": title, "language": language});
    fs::write(made.join("kernel.json"), format!("{text:#}\n")).context("could not describe the kernel")
}

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
use crate::report::{TestReport, say};
use crate::tools::{command_output, run_command, workspace_root};
use crate::vm::find_program;

const PINS_DIRECTORY: &str = "tests/kernels";
/// The Python of sandboxes that show the host's files; the one in `PATH` may be another.
const SANDBOX_PYTHON: &str = "/usr/bin/python3";

/// Where tests look for kernels.
pub(crate) fn default_directory() -> PathBuf {
    workspace_root().join("target/kernels")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JupyterKernel {
    Python,
    Java,
    Go,
}

/// The chore: makes the given kernels, or all.
pub(crate) fn run_kernels(args: &[String]) -> Result<bool> {
    let (place, names) = match args.split_first() {
        Some((place, names)) => (PathBuf::from(place), names),
        None => (default_directory(), args),
    };
    let kernels: Vec<JupyterKernel> = match names {
        [] => vec![JupyterKernel::Python, JupyterKernel::Java, JupyterKernel::Go],
        names => names.iter().map(|name| parse_kernel(name)).collect::<Result<_>>()?,
    };
    for kernel in kernels {
        assemble_kernel(kernel, &place)?;
    }
    say(format_args!("JUPYTER_PATH={}", place.display()));
    Ok(true)
}

/// A step of the tests: makes the kernels whose language is installed. The tests of a kernel that
/// could not be made are skipped.
pub(crate) fn prepare_kernels(report: &mut TestReport) {
    let kernels =
        [(JupyterKernel::Python, SANDBOX_PYTHON), (JupyterKernel::Java, "java"), (JupyterKernel::Go, "go")];
    for (kernel, program) in kernels {
        let installed = match kernel {
            // Often installed outside of the system's directories.
            JupyterKernel::Go => Command::new(program).arg("version").output().is_ok(),
            JupyterKernel::Python | JupyterKernel::Java => {
                find_program(program).is_some() || Path::new(program).exists()
            }
        };
        if !installed || (kernel != JupyterKernel::Go && !has_python()) {
            report.record_skip("a Jupyter kernel", format_args!("there is no {program} on this host"));
        } else if let Err(error) = assemble_kernel(kernel, &default_directory()) {
            report.record_skip("a Jupyter kernel", format_args!("{kernel:?} could not be made: {error:#}"));
        }
    }
}

fn parse_kernel(name: &str) -> Result<JupyterKernel> {
    match name {
        "python" => Ok(JupyterKernel::Python),
        "java" => Ok(JupyterKernel::Java),
        "go" => Ok(JupyterKernel::Go),
        other => bail!("there is no kernel for `{other}` here; there are python, java and go"),
    }
}

/// Makes a kernel in a temporary directory and moves it into place when it is complete.
fn assemble_kernel(kernel: JupyterKernel, place: &Path) -> Result<()> {
    let (name, pins) = match kernel {
        JupyterKernel::Python => ("python3", "python.txt"),
        JupyterKernel::Java => ("java", "java.txt"),
        JupyterKernel::Go => ("gonb", "go/go.sum"),
    };
    let kernels = place.join("kernels");
    let (finished, mark) = (kernels.join(name), kernels.join(name).join("pins"));
    let pins = workspace_root().join(PINS_DIRECTORY).join(pins);
    let wanted = fs::read_to_string(&pins).with_context(|| format!("could not read {}", pins.display()))?;
    if fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    fs::create_dir_all(&kernels).context("could not make the directory of kernels")?;
    let work = tempfile::Builder::new().prefix(".new-").tempdir_in(&kernels)?;
    let made = work.path().join("kernel");
    fs::create_dir(&made)?;
    match kernel {
        JupyterKernel::Python => assemble_python(&made, &pins)?,
        JupyterKernel::Java => assemble_java(&made, &pins, work.path())?,
        JupyterKernel::Go => assemble_go(&made)?,
    }
    fs::write(made.join("pins"), wanted)?;
    if finished.exists() {
        fs::remove_dir_all(&finished)?;
    }
    fs::rename(&made, &finished).context("could not move the kernel into place")
}

fn assemble_python(made: &Path, pins: &Path) -> Result<()> {
    let version = "import sys; print('%d.%d' % sys.version_info[:2])";
    let version = command_output(Command::new(SANDBOX_PYTHON).args(["-c", version]))?;
    run_command(pip_install_to(&made.join("site"), pins)?.args([
        "--python-version",
        version.trim(),
        "--only-binary=:all:",
    ]))?;
    let words =
        ["/usr/bin/env", "PYTHONPATH={resource_dir}/site", "python3", "-m", "ipykernel_launcher", "-f"];
    write_kernelspec(made, "python", "Python 3 (ipykernel)", &words)
}

/// The kernel comes as a Python package, with its own description.
fn assemble_java(made: &Path, pins: &Path, work: &Path) -> Result<()> {
    let package = work.join("package");
    run_command(&mut pip_install_to(&package, pins)?)?;
    for entry in fs::read_dir(package.join("share/jupyter/kernels/java"))? {
        let entry = entry?;
        fs::copy(entry.path(), made.join(entry.file_name()))?;
    }
    Ok(())
}

fn assemble_go(made: &Path) -> Result<()> {
    for (program, package) in
        [("gonb", "github.com/janpfeifer/gonb"), ("goimports", "golang.org/x/tools/cmd/goimports")]
    {
        run_command(
            Command::new("go")
                .args(["build", "-trimpath", "-mod=readonly", "-buildvcs=false", "-o"])
                .arg(made.join(program))
                .arg(package)
                .current_dir(workspace_root().join(PINS_DIRECTORY).join("go")),
        )?;
    }
    // The kernel calls the toolchain, which is often outside of PATH.
    let script = "PATH=\"$0:$PATH:/usr/local/go/bin\" exec \"$0/gonb\" --kernel \"$1\"";
    write_kernelspec(made, "go", "Go (GoNB)", &["/bin/sh", "-c", script, "{resource_dir}"])
}

/// Uses our own pip: the Python of a host may not have one.
fn pip_install_to(target: &Path, pins: &Path) -> Result<Command> {
    let home = workspace_root().join("target/pip");
    if !home.join("bin/pip").exists() {
        run_command(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    }
    let mut command = crate::python::pip_install_command(&home.join("bin/python"));
    command
        .args(["--no-deps", "--root-user-action=ignore", "--target"])
        .arg(target)
        .arg("--requirement")
        .arg(pins);
    Ok(command)
}

/// Writes how the kernel is started: with these arguments and its connection file.
fn write_kernelspec(made: &Path, language: &str, title: &str, words: &[&str]) -> Result<()> {
    let argv: Vec<&str> = words.iter().copied().chain(["{connection_file}"]).collect();
    let text = json!({"argv": argv, "display_name": title, "language": language});
    fs::write(made.join("kernel.json"), format!("{text:#}\n")).context("could not describe the kernel")
}

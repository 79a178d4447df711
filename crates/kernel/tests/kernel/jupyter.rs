//! Jupyter kernels that are missing, broken, or real.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::harness::KernelProcess;

/// A Jupyter data directory with one kernelspec.
fn kernelspec_directory(name: &str, spec: &str) -> TempDir {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("kernels").join(name);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("kernel.json"), spec).unwrap();
    place
}

fn start_jupyter(name: &str, place: &Path) -> KernelProcess {
    KernelProcess::start(&["jupyter", name], &[("JUPYTER_PATH", place.to_str().unwrap())])
}

#[test]
fn missing_kernel_is_reported_with_the_available_ones() {
    let place = kernelspec_directory("present", r#"{"argv": ["true"], "language": "something"}"#);
    let mut kernel = start_jupyter("absent", place.path());
    assert_eq!(kernel.wait_for_exit().code(), Some(127));
    kernel.wait_for("there is no `Jupyter kernel for absent` in this image; available kernels:");
    kernel.wait_for("present");
}

#[test]
fn last_output_of_a_kernel_that_cannot_start_is_reported() {
    let place = kernelspec_directory(
        "broken",
        r#"{"argv": ["sh", "-c", "echo no such module >&2; exit 3"], "language": "b"}"#,
    );
    let mut kernel = start_jupyter("broken", place.path());
    assert_eq!(kernel.wait_for_exit().code(), Some(3));
    kernel.wait_for("no such module");
    let place = self::kernelspec_directory("nowhere", r#"{"argv": ["/no/such/program"], "language": "b"}"#);
    let mut kernel = start_jupyter("nowhere", place.path());
    assert!(!kernel.wait_for_exit().success());
    kernel.wait_for("could not start `/no/such/program`");
}

/// The directory in which `cargo xtask kernels` installs it.
fn ipykernel() -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let place = workspace.join("target/kernels");
    let found = place.join("kernels/python3/kernel.json").exists();
    if !found {
        testkit::skip_test("ipykernel is not in target/kernels; `cargo xtask kernels` installs it");
    }
    found.then_some(place)
}

#[test]
fn real_kernel_runs_code_and_ends_with_its_orders() {
    let Some(place) = ipykernel() else { return };
    // The Python it was installed for must come first.
    let path = format!("/usr/bin:{}", std::env::var("PATH").unwrap());
    let environment = [("JUPYTER_PATH", place.to_str().unwrap()), ("PATH", &path)];
    let mut kernel = KernelProcess::start_ready(&["jupyter", "python"], &environment);
    let received = kernel.run("print('printed')\ndisplay(1)\n6 * 7");
    assert_eq!((received.text(), received.count, received.displays.len()), ("42", Some(1), 1));
    kernel.wait_for("printed\n");
    assert_eq!(kernel.run("input()").error().0, "StdinNotImplementedError");
    let key = kernel.begin_run("print('spinning', flush=True)\nwhile True: pass");
    kernel.wait_for("spinning");
    kernel.interrupt();
    assert_eq!(kernel.finish_run(&key).error().0, "KeyboardInterrupt");
    let file = kernel.run("import ipykernel.connect as c; c.get_connection_file()").text().replace('\'', "");
    assert!(Path::new(&file).exists());
    kernel.close_orders();
    assert!(kernel.wait_for_exit().success());
    assert!(!Path::new(&file).exists());
}

//! Chores of the project, started as `cargo xtask CHORE`.

mod aio_js;
mod bench;
mod build_paths;
mod check;
mod deerflow;
mod dist;
mod docs;
mod kernels;
mod npm;
mod packages;
mod python;
mod report;
mod sdk;
mod server;
mod side_stage;
mod test;
mod test_internet;
mod tools;
mod upstream;
mod vm;

use std::process::ExitCode;

use anyhow::Result;

use report::say;

const USAGE: &str = "\
usage: cargo xtask CHORE

  test    install the prerequisites and run all tests
  check   check the invariants of ARCHITECTURE.md
  lints   run clippy over all crates; a warning is an error
  sdk     run only the tests with the official clients; `--binary PATH` names the program
  docs    run the commands and snippets of the pages; `--binary PATH` names the program, PAGE... the pages
  upstream CHECKOUT
          run the reference's own suites from a checkout of its repository
  deerflow CHECKOUT
          run DeerFlow's provider from a checkout of its repository; `--python PROGRAM` names a Python 3.12 or later
  aio-js CHECKOUT
          run the JavaScript SDK of AIO Sandbox from a checkout of its repository
  dist    build the release archive in target/dist and verify it; `--binary PATH` packs that one
  kernels assemble Jupyter kernels in target/kernels; `DIR [python] [java] [go]` selects others
  vm      run tests on kernels with cgroup v2 only and with restricted user namespaces, under emulation";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let passed = match args.split_first() {
        Some((chore, [])) if chore == "test" => test::run_tests(),
        Some((chore, [])) if chore == "check" => check::check_invariants().map(|()| true),
        Some((chore, rest)) if chore == "sdk" => test::run_sdk_tests(rest),
        Some((chore, rest)) if chore == "docs" => docs::run_docs(rest),
        Some((chore, rest)) if chore == "upstream" => upstream::run_upstream(rest),
        Some((chore, rest)) if chore == "deerflow" => deerflow::run_deerflow(rest),
        Some((chore, rest)) if chore == "aio-js" => aio_js::run_aio_js(rest),
        Some((chore, rest)) if chore == "dist" => dist::run_dist(rest),
        Some((chore, rest)) if chore == "kernels" => kernels::run_kernels(rest),
        Some((chore, rest)) if chore == "vm" => run_vm(rest),
        Some((chore, [])) if chore == "lints" => test::run_lints(),
        // Parts of `test`, each in a process of its own.
        Some((chore, [])) if chore == "downloads" => test::run_downloads(),
        Some((chore, [])) if chore == "build-tests" => test::build_tests(),
        _ => {
            say(format_args!("{USAGE}"));
            return ExitCode::from(2);
        }
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs the machine and prints its result in one line, and what was skipped as tests do. A skip is not a
/// failure.
fn run_vm(args: &[String]) -> Result<bool> {
    let outcome = vm::run_vm_tests(args)?;
    say(format_args!("{}", outcome.summary_line()));
    match &outcome {
        vm::VmOutcome::Skipped(why) => say(format_args!("SKIPPED virtual machine: {why}")),
        vm::VmOutcome::Passed { skipped, .. } => {
            skipped.iter().for_each(|test| say(format_args!("SKIPPED in a virtual machine: {test}")));
        }
        vm::VmOutcome::Failed { .. } => {}
    }
    Ok(!matches!(outcome, vm::VmOutcome::Failed { .. }))
}

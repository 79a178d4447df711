//! Chores of the project: `cargo xtask test` and `cargo xtask vm`.

mod vm;

use std::io::Write;
use std::process::{Command, ExitCode};

fn main() -> anyhow::Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let passed = match args.split_first() {
        Some((chore, rest)) if chore == "vm" => run_vm(rest)?,
        _ => test()?,
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn test() -> anyhow::Result<bool> {
    let status = Command::new(env!("CARGO")).args(["test", "--workspace", "--locked"]).status()?;
    Ok(status.success())
}

/// Runs the machine and says in one line how it ended. A skip is no failure.
fn run_vm(args: &[String]) -> anyhow::Result<bool> {
    let outcome = vm::vm(args)?;
    writeln!(std::io::stderr(), "{}", outcome.line())?;
    Ok(!matches!(outcome, vm::VmOutcome::Failed { .. }))
}

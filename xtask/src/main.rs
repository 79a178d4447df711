//! Chores of the project: `cargo xtask test`.

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let passed = Command::new(env!("CARGO"))
        .args(["test", "--workspace", "--locked"])
        .status()
        .is_ok_and(|status| status.success());
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! A kernel without an agent, for the tests of this crate.
#![expect(clippy::print_stderr, reason = "a program reports its failure there")]

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    kernel::run_subcommand(&arguments).unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}

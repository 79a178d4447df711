//! `coracle __kernel`: runs code in languages whose interpreter alone cannot keep state between
//! runs.
//!
//! It is a process inside the sandbox with the same rights as the code it runs, and nothing trusts
//! it. The agent starts it, sends orders on descriptor 3 and receives reports on 4; output of the
//! code goes to 1 and 2 directly. Its subcommands:
//!
//! ```text
//! javascript, typescript    cells are prepared here and run by the image's node
//! jupyter NAME              a Jupyter kernel of the image, driven by the Jupyter protocol
//! list                      prints the languages, kernels and tools of this image, as JSON
//! list serve                the same, as the result of any run
//! ```

mod group;
mod incoming;
mod jupyter;
mod list;
mod report;
mod script;
mod search;
mod transform;

use std::process::ExitCode;

use anyhow::{Result, bail};

use report::{Orders, Reports};
use transform::Language;

/// The first word of the command line that runs a kernel.
pub const WORD: &str = "__kernel";
/// The exit code of shells for a missing program.
const NOT_FOUND: u8 = 127;

/// Runs until there are no more orders.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["javascript"] => serve(|orders, reports| script::serve(Language::JavaScript, orders, reports)),
        ["typescript"] => serve(|orders, reports| script::serve(Language::TypeScript, orders, reports)),
        ["jupyter", name] => serve(|orders, reports| jupyter::serve(name, orders, reports)),
        ["list"] => list::print(),
        ["list", "serve"] => serve(list::serve),
        _ => bail!("`{WORD}` is only for the agent inside a sandbox"),
    }
}

fn serve(work: impl FnOnce(Orders, &mut Reports) -> Result<ExitCode>) -> Result<ExitCode> {
    let (orders, mut reports) = report::take()?;
    let code = work(orders, &mut reports);
    // The reports must stay open until this process exits, because the agent kills a kernel that
    // closes them.
    std::mem::forget(reports);
    code
}

/// Prints in one line what is missing in the image.
#[expect(clippy::print_stderr, reason = "the agent reads the reason from there")]
fn missing(what: &str, hint: &str) -> ExitCode {
    eprintln!("there is no `{what}` in this image; {hint}");
    ExitCode::from(NOT_FOUND)
}

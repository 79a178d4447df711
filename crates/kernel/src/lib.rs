//! `coracle __kernel`: what runs code of a language that its interpreter alone cannot keep alive.
//!
//! It is a process inside the sandbox, with no more rights than the code it runs, and trusted by
//! nobody. The agent starts it, gives it orders on descriptor 3 and hears of them on 4; what the
//! code prints goes to 1 and 2 directly. Its words:
//!
//! ```text
//! javascript, typescript    cells are prepared here and run by the image's node
//! jupyter NAME              a Jupyter kernel of the image, spoken to in its own protocol
//! list                      prints what this image offers, as JSON
//! list serve                the same, as the result of whatever is run
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

/// The first word of the command line that leads here.
pub const WORD: &str = "__kernel";
/// As a shell says that there is no such program.
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
        _ => bail!("`{WORD}` is for the agent inside a sandbox"),
    }
}

fn serve(work: impl FnOnce(Orders, &mut Reports) -> Result<ExitCode>) -> Result<ExitCode> {
    let (orders, mut reports) = report::take()?;
    let code = work(orders, &mut reports);
    // To hang up is the last thing a process does: who hears it kills what is left.
    std::mem::forget(reports);
    code
}

/// Says in one line what the image lacks.
#[expect(clippy::print_stderr, reason = "whoever started this reads the reason there")]
fn missing(what: &str, hint: &str) -> ExitCode {
    eprintln!("there is no `{what}` in this image; {hint}");
    ExitCode::from(NOT_FOUND)
}

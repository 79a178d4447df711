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

mod jupyter;
mod line_protocol;
mod list;
mod order_queue;
mod process_group;
mod program_search;
mod script;
mod transform;

use std::process::ExitCode;

use anyhow::{Result, bail};

use line_protocol::{OrderReader, ReportWriter};
use transform::ScriptLanguage;

/// The first word of the command line that runs a kernel.
pub const KERNEL_SUBCOMMAND: &str = "__kernel";
/// The exit code of shells for a missing program.
const EXIT_NOT_FOUND: u8 = 127;

/// Runs until there are no more orders.
pub fn run_subcommand(arguments: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["javascript"] => serve_orders(|orders, reports| {
            script::serve_node_kernel(ScriptLanguage::JavaScript, orders, reports)
        }),
        ["typescript"] => serve_orders(|orders, reports| {
            script::serve_node_kernel(ScriptLanguage::TypeScript, orders, reports)
        }),
        ["jupyter", name] => {
            serve_orders(|orders, reports| jupyter::serve_jupyter_kernel(name, orders, reports))
        }
        ["list"] => list::print_inventory(),
        ["list", "serve"] => serve_orders(list::serve_inventory),
        _ => bail!("`{KERNEL_SUBCOMMAND}` is only for the agent inside a sandbox"),
    }
}

fn serve_orders(work: impl FnOnce(OrderReader, &mut ReportWriter) -> Result<ExitCode>) -> Result<ExitCode> {
    let (orders, mut reports) = line_protocol::take_descriptors()?;
    let code = work(orders, &mut reports);
    // The reports must stay open until this process exits, because the agent kills a kernel that
    // closes them.
    std::mem::forget(reports);
    code
}

/// Prints in one line what is missing in the image.
#[expect(clippy::print_stderr, reason = "the agent reads the reason from there")]
fn report_missing(what: &str, hint: &str) -> ExitCode {
    eprintln!("there is no `{what}` in this image; {hint}");
    ExitCode::from(EXIT_NOT_FOUND)
}

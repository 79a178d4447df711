//! The agent as a program of its own. `coracle` contains it and starts it in every sandbox. A small program has few
//! relocations, so it starts faster and dirties less memory than the whole of `coracle` would.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Its standard error leads nowhere; the launcher reads the reason from the agent's pipe.
    match agent::run() {
        Ok(never) => match never {},
        Err(_) => ExitCode::FAILURE,
    }
}

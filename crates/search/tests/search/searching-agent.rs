//! The agent without a jail, for tests, whose program also searches for text.

use std::error::Error;

use wire::search::SEARCH_SUBCOMMAND;

#[path = "../../../agent/tests/agent/bare-agent.rs"]
mod bare_agent;

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().nth(1).as_deref() == Some(SEARCH_SUBCOMMAND) {
        return Ok(search::run_subcommand().map(drop)?);
    }
    bare_agent::main()
}

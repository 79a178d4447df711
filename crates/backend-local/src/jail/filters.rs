//! The system call filters, as data in `profiles/`, compiled once.

use linux::seccomp::Program;
use linux::seccomp::policy::{Policy, PolicyError};

/// The filters, ready to be loaded.
#[derive(Clone, Debug)]
pub struct Filters {
    pub usual: Pair,
    /// For sandboxes that write where users of the host could run what they wrote.
    pub without_set_id: Pair,
}

/// A filter for the agent and one that each command adds to it.
#[derive(Clone, Debug)]
pub struct Pair {
    pub agent: Program,
    pub command: Program,
}

impl Filters {
    pub fn compile() -> Result<Self, PolicyError> {
        let agent = Policy::parse("agent.json", include_str!("../../profiles/agent.json"))?;
        let command = Policy::parse("command.json", include_str!("../../profiles/command.json"))?;
        let usual = Pair { agent: agent.compile()?, command: command.compile()? };
        let agent = agent.without_set_id().compile()?;
        let command = command.without_set_id().compile()?;
        Ok(Self { usual, without_set_id: Pair { agent, command } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_filters_compile_and_stay_small() {
        let filters = Filters::compile().expect("our own policies are well formed");
        for pair in [filters.usual, filters.without_set_id] {
            assert!(pair.agent.len() < 450 && pair.command.len() < 450);
        }
    }
}

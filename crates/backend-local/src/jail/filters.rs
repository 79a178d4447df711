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

/// A filter for the agent, one that each command adds to it, and one for who makes nests.
#[derive(Clone, Debug)]
pub struct Pair {
    pub agent: Program,
    pub command: Program,
    pub nester: Program,
}

impl Filters {
    pub fn compile() -> Result<Self, PolicyError> {
        let agent = Policy::parse("agent.json", include_str!("../../profiles/agent.json"))?;
        let command = Policy::parse("command.json", include_str!("../../profiles/command.json"))?;
        let nester = Policy::parse("nester.json", include_str!("../../profiles/nester.json"))?;
        let nester = nester.beside(&agent);
        let compile = |policies: [&Policy; 3]| -> Result<Pair, PolicyError> {
            let [agent, command, nester] = policies;
            Ok(Pair { agent: agent.compile()?, command: command.compile()?, nester: nester.compile()? })
        };
        let without = [&agent, &command, &nester].map(|policy| policy.clone().without_set_id());
        Ok(Self {
            usual: compile([&agent, &command, &nester])?,
            without_set_id: compile(without.each_ref())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_filters_compile_and_stay_small() {
        let filters = Filters::compile().expect("our own policies are well formed");
        for pair in [filters.usual, filters.without_set_id] {
            assert!([pair.agent, pair.command, pair.nester].iter().all(|filter| filter.len() < 450));
        }
    }
}

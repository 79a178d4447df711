//! The system call filters, as data in `profiles/`, compiled once.

use linux::seccomp::Program;
use linux::seccomp::policy::{Policy, PolicyError};

/// Both filters, ready to be loaded.
#[derive(Clone, Debug)]
pub struct Filters {
    pub agent: Program,
    pub command: Program,
}

impl Filters {
    pub fn compile() -> Result<Self, PolicyError> {
        Ok(Self {
            agent: Policy::parse("agent.json", include_str!("../../profiles/agent.json"))?.compile()?,
            command: Policy::parse("command.json", include_str!("../../profiles/command.json"))?.compile()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_filters_compile_and_stay_small() {
        let filters = Filters::compile().expect("our own policies are well formed");
        assert!(filters.agent.len() < 400 && filters.command.len() < 400);
    }
}

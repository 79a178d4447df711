//! Agents that are started before they have an owner.

use std::collections::BTreeMap;

use wire::{AgentReply, AgentRequest, FaultKind};

use crate::client::shell;
use crate::harness::with_both_tree_modes;

fn adopt(value: &str) -> AgentRequest {
    AgentRequest::Adopt { env: BTreeMap::from([("OWN".to_owned(), value.to_owned())]), env_file: None }
}

#[test]
fn variables_of_an_owner_are_in_every_process_from_then_on() {
    with_both_tree_modes(|agent| {
        assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
        assert_eq!(agent.reply(AgentRequest::Processes), AgentReply::Statuses(Vec::new()));
        assert_eq!(agent.reply(adopt("yes")), AgentReply::Ok);
        assert_eq!(agent.run(shell("first", "echo $OWN")).stdout(), "yes\n");
    });
}

#[test]
fn used_or_adopted_agent_refuses_another_owner() {
    with_both_tree_modes(|agent| {
        agent.run(shell("first", "true"));
        assert_eq!(agent.fault(adopt("late")).kind, FaultKind::Busy);
        assert_eq!(agent.run(shell("second", "echo $OWN")).stdout(), "\n");
    });
    with_both_tree_modes(|agent| {
        assert_eq!(agent.reply(adopt("one")), AgentReply::Ok);
        assert_eq!(agent.fault(adopt("two")).kind, FaultKind::Busy);
        assert_eq!(agent.run(shell("first", "echo $OWN")).stdout(), "one\n");
    });
}

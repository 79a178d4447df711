//! Agents that are started before they have an owner.

use std::collections::BTreeMap;

use wire::{FaultKind, Reply, Request};

use crate::client::shell;
use crate::harness::both_ways;

fn adopt(value: &str) -> Request {
    Request::Adopt { env: BTreeMap::from([("OWN".to_owned(), value.to_owned())]), env_file: None }
}

#[test]
fn variables_of_an_owner_are_in_every_process_from_then_on() {
    both_ways(|agent| {
        assert_eq!(agent.reply(Request::Ping), Reply::Ok);
        assert_eq!(agent.reply(Request::Processes), Reply::Statuses(Vec::new()));
        assert_eq!(agent.reply(adopt("yes")), Reply::Ok);
        assert_eq!(agent.run(shell("first", "echo $OWN")).stdout(), "yes\n");
    });
}

#[test]
fn used_or_adopted_agent_refuses_another_owner() {
    both_ways(|agent| {
        agent.run(shell("first", "true"));
        assert_eq!(agent.fault(adopt("late")).kind, FaultKind::Busy);
        assert_eq!(agent.run(shell("second", "echo $OWN")).stdout(), "\n");
    });
    both_ways(|agent| {
        assert_eq!(agent.reply(adopt("one")), Reply::Ok);
        assert_eq!(agent.fault(adopt("two")).kind, FaultKind::Busy);
        assert_eq!(agent.run(shell("first", "echo $OWN")).stdout(), "one\n");
    });
}

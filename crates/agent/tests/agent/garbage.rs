//! Malformed input.

use std::io::{Read, Write};

use wire::{AgentReply, AgentRequest, FaultKind, Frame, FrameDecoder};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode};

/// Sends bytes and returns the kind of the fault in the reply.
fn answer_to(agent: &TestAgent, bytes: &[u8]) -> FaultKind {
    let mut stream = agent.connect();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let mut decoder = FrameDecoder::new();
    decoder.feed(&answer);
    decoder.next_frame().unwrap().expect("a greeting");
    match decoder.next_frame().unwrap().expect("an answer").parse_message().unwrap() {
        AgentReply::Fault(fault) => fault.kind,
        other => panic!("expected a fault, got {other:?}"),
    }
}

fn frame(json: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::Control(json.as_bytes().to_vec().into()).encode(&mut bytes);
    bytes
}

#[test]
fn malformed_input_gets_a_fault_and_the_agent_keeps_working() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    for (bytes, expected) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), FaultKind::Invalid),
        (vec![0xff; 64], FaultKind::Invalid),
        (vec![0, 0, 0, 0, 9], FaultKind::Invalid),
        (vec![0, 0, 0, 0, 2], FaultKind::Invalid),
        (frame(""), FaultKind::Invalid),
        (frame("{}"), FaultKind::Invalid),
        (frame("[[[["), FaultKind::Invalid),
        (frame(&"[".repeat(100_000)), FaultKind::Invalid),
        (frame(r#"{"version":1,"request":{"start":{}}}"#), FaultKind::Invalid),
        (frame(r#"{"version":1,"request":{"teleport":{}}}"#), FaultKind::Unsupported),
        (frame(r#"{"version":2,"request":"levitate"}"#), FaultKind::Unsupported),
    ] {
        assert_eq!(
            answer_to(&agent, &bytes),
            expected,
            "{:?}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
        );
    }
    assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
}

#[test]
fn unknown_fields_of_a_newer_server_are_ignored() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let mut stream = agent.connect();
    stream.write_all(&frame(r#"{"version":7,"request":"ping","trace":"abc"}"#)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains(r#"{"version":1}"#) && text.contains(r#""ok""#), "{text}");
}

#[test]
fn silent_and_incomplete_connections_do_no_harm() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let silent: Vec<_> = (0..100).map(|_| agent.connect()).collect();
    let mut halves = Vec::new();
    for length in 1..20 {
        let mut stream = agent.connect();
        stream.write_all(&frame(r#"{"version":1,"request":"ping"}"#)[..length]).unwrap();
        halves.push(stream);
    }
    drop(halves);
    assert_eq!(agent.run(shell("well", "echo well")).stdout(), "well\n");
    drop(silent);
    assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
}

#[test]
fn too_many_connections_get_a_fault() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let crowd: Vec<_> = (0..512).map(|_| agent.connect()).collect();
    let fault = agent.fault(AgentRequest::Ping);
    assert_eq!(fault.kind, FaultKind::Busy);
    drop(crowd);
    // Connections are accepted again as soon as the agent has noticed the closed ones.
    while agent.reply(AgentRequest::Ping) != AgentReply::Ok {}
}

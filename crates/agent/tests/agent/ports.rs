//! Tunnels to ports, and reserved ports.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use wire::{AgentReply, AgentRequest, FaultKind};

use crate::harness::{TestAgent, TreeMode};

#[test]
fn port_can_be_reserved_unless_it_is_in_use() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    assert_eq!(agent.reply(AgentRequest::Occupy { port }), AgentReply::Ok);
    drop(taken);
    assert_eq!(agent.reply(AgentRequest::Occupy { port }), AgentReply::Ok);
    for _ in 0..100 {
        let mut caller = TcpStream::connect(("127.0.0.1", port)).unwrap();
        assert_eq!(caller.read(&mut [0]).unwrap(), 0, "the connection is closed without data");
    }
    assert_eq!(agent.reply(AgentRequest::Occupy { port }), AgentReply::Ok);
    for _ in 0..8 {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        agent.reply(AgentRequest::Occupy { port: free });
    }
    assert_eq!(agent.fault(AgentRequest::Occupy { port: 1 }).kind, FaultKind::Busy);
}

fn check_half_close(address: &str) {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let listener = TcpListener::bind(address).unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent: Vec<u8> = (0..=255).cycle().take(3_000_000).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The service answers only after the end of the input, so the tunnel has to pass the
            // end on.
            let (mut stream, _) = listener.accept().unwrap();
            let mut heard = Vec::new();
            stream.read_to_end(&mut heard).unwrap();
            heard.reverse();
            stream.write_all(&heard).unwrap();
        });
        let mut talk = agent.send_request(AgentRequest::Tunnel { port });
        assert_eq!(talk.reply(), AgentReply::Ok);
        let stream = talk.stream();
        stream.write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer.reverse();
        assert!(answer == sent, "{} bytes came back", answer.len());
    });
}

#[test]
fn each_direction_of_a_tunnel_ends_on_its_own() {
    check_half_close("127.0.0.1:0");
}

#[test]
fn port_on_the_ipv6_loopback_is_found() {
    check_half_close("[::1]:0");
}

#[test]
fn bytes_after_the_request_are_part_of_the_tunnel() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let call = wire::VersionedRequest { version: wire::VERSION, request: AgentRequest::Tunnel { port } };
    let mut bytes = Vec::new();
    wire::Frame::from_message(&call).encode(&mut bytes);
    bytes.extend_from_slice(b"early");
    let mut near = agent.connect();
    near.write_all(&bytes).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let mut heard = [0; 5];
    far.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"early");
}

#[test]
fn answer_arrives_although_the_service_stopped_reading() {
    const SENT: usize = 8 << 20;
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The service closes with most of the input unread, so its kernel resets the
            // connection.
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 1000]).unwrap();
            stream.write_all(b"refused").unwrap();
        });
        let mut talk = agent.send_request(AgentRequest::Tunnel { port });
        assert_eq!(talk.reply(), AgentReply::Ok);
        let stream = talk.stream();
        // None of this fails: input that the service does not read is dropped.
        stream.write_all(&vec![b'x'; SENT]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, b"refused");
    });
}

#[test]
fn port_without_a_listener_is_refused() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let fault = agent.fault(AgentRequest::Tunnel { port });
    assert_eq!((fault.kind, fault.subject), (FaultKind::Refused, port.to_string()));
    assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
}

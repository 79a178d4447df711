//! The protocol, spoken to the whole process.

use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use egress_protocol::{
    ActionMessage, EgressReply, EgressReplyBody, EgressRequest, EgressRequestBody, EgressSettings,
    PolicyMessage, RuleMessage, ServeMode, ServedSandbox,
};
use linux::packet::{receive_with_descriptors, send_with_descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};
use serde::Serialize;

use crate::{EgressOptions, run};

const SANDBOX: &str = "one";

/// One end of a control connection.
struct TestPeer(OwnedFd);

impl TestPeer {
    fn pair() -> (Self, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("a pair");
        (Self(ours), theirs)
    }

    fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) {
        send_with_descriptors(self.0.as_fd(), message, descriptors).expect("sent");
    }

    fn receive(&self) -> Option<EgressReply> {
        let timeout = Timespec { tv_sec: 30, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout)).expect("polled");
        assert_eq!(ready, 1, "no reply");
        receive_with_descriptors(self.0.as_fd()).expect("received").map(|(reply, _)| reply)
    }

    fn ask(&self, body: EgressRequestBody) -> EgressReplyBody {
        self.ask_with(body, &[])
    }

    fn ask_with(&self, body: EgressRequestBody, descriptors: &[BorrowedFd<'_>]) -> EgressReplyBody {
        self.send(&EgressRequest { number: 5, body }, descriptors);
        let reply = self.receive().expect("the connection is open");
        assert_eq!(reply.number, 5);
        reply.body
    }
}

/// A running process, as far as its peers can tell.
struct TestEgress {
    keeper: TestPeer,
    thread: JoinHandle<std::io::Result<()>>,
}

impl TestEgress {
    fn start(server_listener: Option<OwnedFd>) -> Self {
        let (keeper, theirs) = TestPeer::pair();
        let thread = std::thread::spawn(move || {
            run(EgressOptions {
                keeper: theirs,
                server_listener,
                sealing_key: None,
                roots: crate::vault::TrustedRoots::default(),
            })
        });
        Self { keeper, thread }
    }

    fn configure(&self) {
        let done = self.keeper.ask(EgressRequestBody::Configure(EgressSettings::default()));
        assert_eq!(done, EgressReplyBody::Done);
    }

    /// Serves a sandbox with sockets on loopback, and returns the listener.
    fn serve(&self, id: &str) -> TcpListener {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let queries =
            UdpSocket::bind(("::1", 0)).or_else(|_| UdpSocket::bind(("127.0.0.1", 0))).expect("a free port");
        let served = ServedSandbox { sandbox: id.into(), mode: ServeMode::Filtered, own: Vec::new() };
        let body = EgressRequestBody::Serve(served);
        let done = self.keeper.ask_with(body, &[listener.as_fd(), queries.as_fd()]);
        assert_eq!(done, EgressReplyBody::Done);
        listener
    }

    fn stop(self) {
        drop(self.keeper);
        self.thread.join().expect("it does not panic").expect("it ends without an error");
    }
}

fn is_refused(body: &EgressReplyBody) -> bool {
    matches!(body, EgressReplyBody::Refused { .. })
}

fn policy(target: &str) -> PolicyMessage {
    let rule = RuleMessage { action: ActionMessage::Allow, target: target.into() };
    PolicyMessage { rules: vec![rule], default: ActionMessage::Deny }
}

fn set_policy(target: &str) -> EgressRequestBody {
    EgressRequestBody::SetPolicy { sandbox: SANDBOX.into(), policy: policy(target) }
}

fn read_log(wait: bool) -> EgressRequestBody {
    EgressRequestBody::ReadLog { sandbox: SANDBOX.into(), after: 0, limit: 10, wait }
}

/// Connects and expects a reset, now or as soon as something is read.
fn expect_reset(listener: &TcpListener) {
    let address = listener.local_addr().expect("it is bound");
    if let Ok(mut stream) = TcpStream::connect(address) {
        stream.read(&mut [0; 1]).expect_err("a reset");
    }
}

#[test]
fn keeper_serves_sandboxes_until_it_closes() {
    let egress = TestEgress::start(None);
    egress.configure();
    let _listener = egress.serve(SANDBOX);
    let other = egress.serve("two");
    let served = || egress.keeper.ask(EgressRequestBody::ListServed);
    assert_eq!(served(), EgressReplyBody::Served { sandboxes: vec![SANDBOX.into(), "two".into()] });
    assert_eq!(egress.keeper.ask(EgressRequestBody::Forget { sandbox: "two".into() }), EgressReplyBody::Done);
    assert_eq!(served(), EgressReplyBody::Served { sandboxes: vec![SANDBOX.into()] });
    // The keeper still holds the listener, so a connection waits for the next process.
    TcpStream::connect(other.local_addr().expect("it is bound")).expect("somebody listens");
    assert!(is_refused(&egress.keeper.ask(EgressRequestBody::Serve(ServedSandbox {
        sandbox: "three".into(),
        mode: ServeMode::Open,
        own: Vec::new()
    }))));
    egress.stop();
}

#[test]
fn nothing_passes_before_the_settings_arrive() {
    let egress = TestEgress::start(None);
    let listener = egress.serve(SANDBOX);
    expect_reset(&listener);
    let EgressReplyBody::Log(page) = egress.keeper.ask(read_log(true)) else { panic!("no log") };
    assert_eq!(page.records[0].reason, "no settings");
    egress.stop();
}

#[test]
fn log_is_awaited_and_counters_are_read() {
    let egress = TestEgress::start(None);
    egress.configure();
    let listener = egress.serve(SANDBOX);
    assert_eq!(egress.keeper.ask(set_policy("a.org")), EgressReplyBody::Done);
    assert_eq!(egress.keeper.ask(read_log(false)), EgressReplyBody::Log(Default::default()));
    egress.keeper.send(&EgressRequest { number: 1, body: read_log(true) }, &[]);
    assert!(matches!(egress.keeper.ask(EgressRequestBody::ListServed), EgressReplyBody::Served { .. }));
    expect_reset(&listener);
    let reply = egress.keeper.receive().expect("the connection is open");
    let EgressReplyBody::Log(page) = reply.body else { panic!("no log") };
    assert_eq!((reply.number, page.records.len(), page.dropped), (1, 1, 0));
    assert_eq!(page.records[0].reason, "own address");
    // A time in microseconds: no number of an earlier process is used again.
    assert!(page.records[0].number > 1_000_000_000_000_000);
    let EgressReplyBody::Counters(counters) = egress.keeper.ask(EgressRequestBody::ReadCounters) else {
        panic!("no counters")
    };
    assert_eq!(counters.sandboxes[0].denied_connections, 1);
    egress.stop();
}

#[test]
fn server_may_only_set_policies_and_ask() {
    let path = std::env::temp_dir().join(format!("egress-test-{}", std::process::id()));
    let address = rustix::net::SocketAddrUnix::new(&path).expect("a short path");
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&listener, &address).expect("the path is free");
    rustix::net::listen(&listener, 8).expect("it is bound");
    let connect = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::connect(&socket, &address).expect("it listens");
        TestPeer(socket)
    };
    let egress = TestEgress::start(Some(listener));
    let server = connect();
    std::fs::remove_file(&path).expect("the path exists");
    assert!(is_refused(&server.ask(EgressRequestBody::Configure(EgressSettings::default()))));
    assert!(is_refused(&server.ask(EgressRequestBody::Forget { sandbox: SANDBOX.into() })));
    assert!(is_refused(&server.ask(read_log(false))), "it is not known yet");
    assert_eq!(server.ask(set_policy("a.org")), EgressReplyBody::Done);
    assert!(is_refused(&server.ask(set_policy("not a name"))));
    assert!(matches!(server.ask(read_log(false)), EgressReplyBody::Log(_)));
    assert_eq!(server.ask(EgressRequestBody::KeepPolicies { sandboxes: Vec::new() }), EgressReplyBody::Done);
    assert!(is_refused(&server.ask(read_log(false))), "it was not kept");
    server.send(&serde_json::json!({"number": 5, "body": {"explode": {}}}), &[]);
    assert!(is_refused(&server.receive().expect("the connection is open").body));
    let many = PolicyMessage { rules: vec![policy("a.org").rules[0].clone(); 5000], ..policy("a.org") };
    assert!(is_refused(&server.ask(EgressRequestBody::SetPolicy { sandbox: SANDBOX.into(), policy: many })));
    // What is no message at all ends this connection alone.
    rustix::net::send(&server.0, b"\xff not a message", SendFlags::empty()).expect("sent");
    assert_eq!(server.receive(), None);
    assert!(matches!(egress.keeper.ask(EgressRequestBody::ListServed), EgressReplyBody::Served { .. }));
    egress.stop();
}

use std::path::Path;

use domain::{PolicyAction, PolicyRule};
use egress_protocol::{ActionMessage, LogPage};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;

use super::*;

/// The listening socket of an egress process, which the supervisor keeps.
struct FakeSupervisor {
    listener: AsyncFd<OwnedFd>,
    _directory: TempDir,
}

/// The server's connection, as the egress process sees it.
struct FakeEgress(AsyncFd<OwnedFd>);

fn open_client(directory: &Path) -> EgressClient {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    EgressClient::new(rustix::fs::open(directory, flags, Mode::empty()).expect("the directory exists"))
}

fn start_supervisor() -> (FakeSupervisor, Arc<EgressClient>) {
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let client = Arc::new(open_client(directory.path()));
    (FakeSupervisor { listener: listen(directory.path()), _directory: directory }, client)
}

fn listen(directory: &Path) -> AsyncFd<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("the kernel has such sockets");
    let address = SocketAddrUnix::new(directory.join(EGRESS_SOCKET)).expect("the path is short");
    rustix::net::bind(&listener, &address).expect("the name is free");
    rustix::net::listen(&listener, 8).expect("it is bound");
    register_descriptor(listener, Interest::READABLE).expect("it can be watched")
}

impl FakeSupervisor {
    /// Starts an egress process, which accepts the connection that waits.
    async fn start_egress(&self) -> FakeEgress {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            let mut guard = self.listener.readable().await.expect("the listener is registered");
            let accepted = guard.try_io(|listener| Ok(rustix::net::accept_with(listener.get_ref(), flags)?));
            if let Ok(accepted) = accepted {
                let interest = Interest::READABLE | Interest::WRITABLE;
                let accepted = register_descriptor(accepted.expect("it is accepted"), interest);
                return FakeEgress(accepted.expect("the socket can be watched"));
            }
        }
    }
}

impl FakeEgress {
    async fn receive(&self) -> EgressRequest {
        loop {
            let mut guard = self.0.readable().await.expect("the socket is registered");
            if let Ok(received) = guard.try_io(|socket| packet::receive_message(socket.as_fd())) {
                return received.expect("a request").expect("the client is connected").0;
            }
        }
    }

    fn reply(&self, number: u64, body: EgressReplyBody) {
        packet::send_message(self.0.as_fd(), &EgressReply { number, body }, None).expect("there is room");
    }

    /// Receives the policies that a new connection begins with, sorted.
    async fn receive_policies(&self) -> Vec<(String, usize)> {
        let mut policies = Vec::new();
        loop {
            match self.receive().await.body {
                EgressRequestBody::SetPolicy { sandbox, policy } => {
                    policies.push((sandbox, policy.rules.len()));
                }
                EgressRequestBody::KeepPolicies { mut sandboxes } => {
                    policies.sort();
                    sandboxes.sort();
                    let set: Vec<_> = policies.iter().map(|(sandbox, _)| sandbox.clone()).collect();
                    assert_eq!(sandboxes, set, "the kept policies are those that were set");
                    return policies;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    async fn expect_policy(&self, id: &SandboxId, rules: usize) -> u64 {
        let request = self.receive().await;
        match request.body {
            EgressRequestBody::SetPolicy { sandbox, policy } => {
                assert_eq!((sandbox.as_str(), policy.rules.len()), (id.as_str(), rules));
                assert_eq!(policy.default, ActionMessage::Deny);
            }
            other => panic!("{other:?}"),
        }
        request.number
    }
}

fn id(number: u8) -> SandboxId {
    SandboxId::from_entropy([number; 20])
}

/// A policy that allows some names.
fn policy(rules: usize) -> Arc<NetworkPolicy> {
    let rule = |number| PolicyRule {
        action: PolicyAction::Allow,
        target: format!("n{number}.example.org").parse().expect("a target"),
    };
    let rules = (0..rules).map(rule).collect();
    Arc::new(NetworkPolicy::new(rules, PolicyAction::Deny).expect("few rules"))
}

fn spawn_set(
    client: &Arc<EgressClient>,
    id: &SandboxId,
    policy: Arc<NetworkPolicy>,
) -> JoinHandle<Result<(), BackendError>> {
    let (client, id) = (Arc::clone(client), id.clone());
    tokio::spawn(async move { client.set_policy(&id, &policy).await })
}

#[tokio::test]
async fn policy_is_set_when_egress_has_acknowledged_it() {
    let (supervisor, client) = start_supervisor();
    let set = spawn_set(&client, &id(1), policy(2));
    let egress = supervisor.start_egress().await;
    assert_eq!(egress.receive_policies().await, [(id(1).to_string(), 2)]);
    let number = egress.expect_policy(&id(1), 2).await;
    assert!(!set.is_finished());
    egress.reply(number, EgressReplyBody::Done);
    set.await.expect("it does not panic").expect("egress has set it");
}

#[tokio::test]
async fn new_egress_gets_the_policies_of_living_sandboxes_before_anything_else() {
    let (supervisor, client) = start_supervisor();
    let first = [spawn_set(&client, &id(1), policy(1)), spawn_set(&client, &id(2), policy(2))];
    let egress = supervisor.start_egress().await;
    egress.receive_policies().await;
    for _ in 0..2 {
        let number = egress.receive().await.number;
        egress.reply(number, EgressReplyBody::Done);
    }
    for set in first {
        set.await.expect("it does not panic").expect("egress has set it");
    }
    client.forget_policy(&id(1));
    // The third is asked for when egress dies, and so is repeated.
    let third = spawn_set(&client, &id(3), policy(3));
    egress.expect_policy(&id(3), 3).await;
    drop(egress);
    let egress = supervisor.start_egress().await;
    assert_eq!(egress.receive_policies().await, [(id(2).to_string(), 2), (id(3).to_string(), 3)]);
    let number = egress.expect_policy(&id(3), 3).await;
    egress.reply(number, EgressReplyBody::Done);
    third.await.expect("it does not panic").expect("egress has set it");
}

#[tokio::test]
async fn newest_policy_is_sent_last_however_slow_the_first_change_was() {
    let (supervisor, client) = start_supervisor();
    let changes = [spawn_set(&client, &id(1), policy(1)), spawn_set(&client, &id(1), policy(2))];
    while client.link.lock().policies.get(&id(1)).is_none_or(|policy| policy.rules().len() < 2) {
        tokio::task::yield_now().await;
    }
    let egress = supervisor.start_egress().await;
    assert_eq!(egress.receive_policies().await, [(id(1).to_string(), 2)]);
    for _ in changes {
        let number = egress.expect_policy(&id(1), 2).await;
        egress.reply(number, EgressReplyBody::Done);
    }
}

#[tokio::test]
async fn withdrawn_policy_is_not_kept_by_egress() {
    let (supervisor, client) = start_supervisor();
    let set = spawn_set(&client, &id(1), policy(1));
    let egress = supervisor.start_egress().await;
    egress.receive_policies().await;
    let number = egress.receive().await.number;
    egress.reply(number, EgressReplyBody::Refused { message: "too long".to_owned() });
    let refused = set.await.expect("it does not panic").expect_err("egress has refused it");
    assert_eq!(refused.to_string(), "step `egress` failed: too long");
    client.withdraw_policy(&id(1));
    assert_eq!(egress.receive_policies().await, []);
}

#[tokio::test(start_paused = true)]
async fn egress_that_does_not_answer_is_an_error() {
    let (_supervisor, client) = start_supervisor();
    let error = client.set_policy(&id(1), &policy(1)).await.expect_err("nobody answers");
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert_eq!(
        (error.to_string().as_str(), source.as_deref()),
        ("could not ask the egress process", Some("it does not answer"))
    );
    // It stays in the list, so that egress gets it when it is back.
    let state = client.link.lock();
    assert_eq!((state.policies.len(), state.waiting.len()), (1, 0));
}

#[tokio::test]
async fn client_connects_when_the_socket_appears() {
    let directory = tempfile::tempdir().expect("there is room for a directory");
    let client = Arc::new(open_client(directory.path()));
    let asked = {
        let client = Arc::clone(&client);
        tokio::spawn(async move { client.request(REQUEST_TIMEOUT, EgressRequestBody::ReadCounters).await })
    };
    tokio::task::yield_now().await;
    let supervisor = FakeSupervisor { listener: listen(directory.path()), _directory: directory };
    let egress = supervisor.start_egress().await;
    assert_eq!(egress.receive_policies().await, []);
    let request = egress.receive().await;
    assert_eq!(request.body, EgressRequestBody::ReadCounters);
    egress.reply(request.number, EgressReplyBody::Log(LogPage::default()));
    assert!(matches!(asked.await, Ok(Ok(EgressReplyBody::Log(_)))));
}

//! Filtered networks while their processes are killed: never a connection that the policy in force denies.
//!
//! ```text
//!  sandbox: a program that connects to every host, all the time       world: counts what arrives at each
//!  test:    one operation, and one process killed during it           then: denied hosts have counted nothing
//! ```
//!
//! The policy allows one of two hosts in turn; a third host is never allowed. While a change of the policy is not
//! acknowledged both hosts of the turn may be reached.

use std::fs;
use std::time::Duration;

use e2e::http::HttpClient;
use e2e::probe::{host_reached, http_at, probe, tls, tls_at, with};
use e2e::run::{ORDINARY_USER, TestUser};
use e2e::sandbox::RemoteSandbox;
use e2e::test_network::hosts::{OTHER, PACKAGES, WEB, WorldHost};
use e2e::test_network::{self, TestNetwork};
use serde_json::{Value, json};

use super::fleet::SandboxFleet;
use super::leftovers::HostLeftovers;
use super::parts::{self, KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_use, check_nothing_is_left, environment_number, print_progress, seed};
use crate::filtered::{policy, read_policy, with_policy};

/// How often each process is killed during each operation by default.
const ROUNDS: usize = 20;
const ORDINARY_ROUNDS: usize = 10;

const VICTIMS: [KilledProcess; 4] =
    [KilledProcess::Egress, KilledProcess::Server, KilledProcess::Launcher, KilledProcess::Supervisor];

/// The kill comes this long after the operation began, at the latest.
const MAX_KILL_DELAY_MICROS: [u64; 3] = [2_000, 10_000, 40_000];
const MAX_SECOND_KILL_DELAY_MICROS: u64 = 60_000;

/// What happens while a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilteredOperation {
    /// A long download, which may be cut off and never changed.
    Transfer,
    ChangePolicy,
    Create,
    Delete,
}

impl FilteredOperation {
    const ALL: [Self; 4] = [Self::Transfer, Self::ChangePolicy, Self::Create, Self::Delete];
}

#[derive(Debug)]
struct FilteredRound {
    victim: KilledProcess,
    operation: FilteredOperation,
    moment: Duration,
    /// When the successor of the victim is killed too.
    cut: Option<Duration>,
}

/// Connects to three hosts by name without asking for their names, and asks for the name that is never allowed.
const HAMMER: &str = "
import socket, time
hosts = [('web.example', '93.184.216.34'), ('other.example', '93.184.216.77'), ('packages.example', '93.184.217.10')]
while True:
    for name, address in hosts:
        for port in (80, 22):
            try:
                stream = socket.create_connection((address, port), 1)
                stream.settimeout(1)
                stream.sendall(f'GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n'.encode())
                stream.recv(4096)
                stream.close()
            except OSError:
                pass
    try:
        socket.getaddrinfo('packages.example', 80)
    except OSError:
        pass
    time.sleep(0.01)
";

#[test]
fn killing_any_process_lets_no_denied_connection_through() {
    if !testkit::needs_root() {
        return;
    }
    play_filtered_rounds(TestUser::Same, "crash-filtered", ROUNDS);
}

#[test]
fn killing_any_process_of_an_ordinary_user_lets_no_denied_connection_through() {
    if !testkit::needs_root() {
        return;
    }
    play_filtered_rounds(ORDINARY_USER, "crash-filtered-ordinary", ORDINARY_ROUNDS);
}

fn play_filtered_rounds(user: TestUser, name: &str, usual: usize) {
    let world = TestNetwork::create();
    test_network::use_world_resolver();
    let seed = seed();
    let count = environment_number("CORACLE_CRASH_ROUNDS")
        .map_or(usual, |count| usize::try_from(count).expect("few"));
    print_progress(&format!("{name}: {count} rounds, CORACLE_CRASH_SEED={seed}"));
    let instance = format!("{name}-{}", std::process::id());
    let mut parts = ServerParts::start(user, "off", &instance);
    let before = after_use(&mut parts, &instance, |server| {
        server.create_sandbox_with(&with_policy(&policy("deny", &["allow web.example"]))).delete();
    });
    let mut test = FilteredCrashTest::start(&parts, &world);
    let descriptors = count_descriptors(parts.server.pid());
    let mut random = RandomChoices::new(seed);
    let mut plan = Vec::new();
    for number in 1..=count {
        let round = plan_round(&mut plan, &mut random);
        print_on_failure(number, &round, || test.play(&round, &mut parts));
    }
    test.finish(parts, &instance, &before, descriptors);
}

fn plan_round(
    plan: &mut Vec<(KilledProcess, FilteredOperation)>,
    random: &mut RandomChoices,
) -> FilteredRound {
    if plan.is_empty() {
        let pairs = |victim| FilteredOperation::ALL.into_iter().map(move |operation| (victim, operation));
        *plan = VICTIMS.into_iter().flat_map(pairs).collect();
        random.shuffle(plan);
    }
    let (victim, operation) = plan.pop().expect("it was filled");
    let latest = random.pick(&MAX_KILL_DELAY_MICROS);
    let moment = Duration::from_micros(random.below(latest));
    let cut =
        (random.below(4) == 0).then(|| Duration::from_micros(random.below(MAX_SECOND_KILL_DELAY_MICROS)));
    FilteredRound { victim, operation, moment, cut }
}

fn print_on_failure(number: usize, round: &FilteredRound, play: impl FnOnce()) {
    struct PrintOnPanic<'a>(usize, &'a FilteredRound);
    impl Drop for PrintOnPanic<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                print_progress(&format!("round {} failed: {:?}", self.0, self.1));
            }
        }
    }
    let _failing = PrintOnPanic(number, round);
    play();
}

fn count_descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// A sandbox under attack, and what its policy allows.
struct FilteredCrashTest<'a> {
    world: &'a TestNetwork,
    address: String,
    id: String,
    /// The host that the acknowledged policy allows, and the one that it denies.
    allowed: &'static WorldHost,
    denied: &'static WorldHost,
    /// A sandbox that the next round may delete.
    spare: Option<String>,
}

/// How an operation ended that may have been cut off.
#[derive(Debug)]
enum FilteredResult {
    Transferred,
    Changed(bool),
    Created(Option<String>),
    Deleted,
}

impl<'a> FilteredCrashTest<'a> {
    fn start(parts: &ServerParts, world: &'a TestNetwork) -> Self {
        let mut sandbox =
            parts.server.create_sandbox_with(&with_policy(&policy("deny", &["allow web.example"])));
        sandbox.upload("/tmp/hammer.py", HAMMER.as_bytes());
        sandbox.start_background("exec /usr/bin/python3 /tmp/hammer.py");
        e2e::eventually("the program connects", || world.count_contacts(WEB.v4) > 0);
        let (address, id) = (parts.server.address().to_owned(), sandbox.id.clone());
        Self { world, address, id, allowed: &WEB, denied: &OTHER, spare: None }
    }

    fn sandbox(&self) -> RemoteSandbox {
        RemoteSandbox::existing(HttpClient::new(&self.address), &self.id)
    }

    fn play(&mut self, round: &FilteredRound, parts: &mut ServerParts) {
        if round.operation == FilteredOperation::Delete && self.spare.is_none() {
            let spare = parts.server.create_sandbox_with(&with_policy(&policy("deny", &["allow 0.0.0.0/0"])));
            self.spare = Some(spare.id);
        }
        let denied_before = self.world.count_contacts(self.denied.v4);
        let result = self.kill_during(round, parts);
        parts.wait_until_healthy();
        let changing = matches!(result, FilteredResult::Changed(_));
        if !changing {
            let after = self.world.count_contacts(self.denied.v4);
            assert_eq!(after, denied_before, "{} was reached although it is denied", self.denied.name());
        }
        self.settle(result, parts);
        self.check_policy_holds(parts);
    }

    /// Begins the operation, kills the victim, and waits for the end of one and the successor of the other.
    fn kill_during(&mut self, round: &FilteredRound, parts: &mut ServerParts) -> FilteredResult {
        let (address, id, spare) = (self.address.clone(), self.id.clone(), self.spare.take());
        let (allowed, next) = (self.allowed, self.denied);
        let operation = round.operation;
        let working =
            std::thread::spawn(move || operation.perform(&address, &id, spare.as_deref(), allowed, next));
        std::thread::park_timeout(round.moment);
        match round.victim {
            KilledProcess::Supervisor => {
                parts.kill_supervisor();
                parts.start_again(round.cut);
            }
            part => {
                let former = parts.kill_part(part);
                parts.wait_for_successor(part, former, round.cut);
            }
        }
        working.join().expect("an operation does not panic")
    }

    /// Brings the state that the client knows in line with the result of an operation.
    fn settle(&mut self, result: FilteredResult, parts: &ServerParts) {
        match result {
            FilteredResult::Transferred | FilteredResult::Deleted | FilteredResult::Created(None) => {}
            FilteredResult::Created(Some(id)) => {
                let mut sandbox = RemoteSandbox::existing(HttpClient::new(&self.address), &id);
                e2e::eventually("a new sandbox is filtered", || {
                    let found = probe(&mut sandbox, &[tls("web.example"), tls_at(OTHER.v4, "other.example")]);
                    assert_ne!(host_reached(&found[1]), Some("other.example"), "{found:?}");
                    host_reached(&found[0]) == Some("web.example")
                });
                self.spare = Some(id);
            }
            FilteredResult::Changed(acknowledged) => {
                let shown = read_policy(&parts.server, &self.id)["policy"].clone();
                let [old, new] = [self.allowed, self.denied].map(allow_only);
                assert!(shown == new || (!acknowledged && shown == old), "{acknowledged}: {shown}");
                if shown != new {
                    let (status, text) = crate::filtered::send_policy(&parts.server, &self.id, "PUT", &new);
                    assert_eq!(status, 200, "{text}");
                }
                std::mem::swap(&mut self.allowed, &mut self.denied);
            }
        }
    }

    /// The policy in force is that which was acknowledged, for new connections at once.
    fn check_policy_holds(&self, parts: &ServerParts) {
        assert_eq!(read_policy(&parts.server, &self.id)["policy"], allow_only(self.allowed));
        let mut sandbox = self.sandbox();
        // A connection that was dialled before the answer may be counted a moment after it.
        std::thread::park_timeout(Duration::from_millis(50));
        let before = self.world.count_contacts(self.denied.v4);
        let steps = [
            http_at(self.allowed.v4, self.allowed.name()),
            with(tls_at(self.denied.v4, self.denied.name()), json!({"verify": false})),
        ];
        e2e::eventually("the allowed host is reached", || {
            let found = probe(&mut sandbox, &steps);
            assert_ne!(host_reached(&found[1]), Some(self.denied.name()), "{found:?}");
            host_reached(&found[0]) == Some(self.allowed.name())
        });
        assert_eq!(self.world.count_contacts(self.denied.v4), before, "a denied host was reached");
        assert_eq!(self.world.count_contacts(PACKAGES.v4), 0, "a host that was never allowed was reached");
        assert!(!self.world.was_asked_for("packages.example"), "a denied name was asked for");
    }

    fn finish(self, mut parts: ServerParts, instance: &str, before: &HostLeftovers, descriptors: usize) {
        let fleet = SandboxFleet::new(&self.address);
        fleet.listed().iter().for_each(|id| fleet.delete(id));
        parts.record_processes();
        let supervisor = parts.server.pid();
        e2e::eventually("the keeper has closed the sockets of all sandboxes", || {
            count_descriptors(supervisor) <= descriptors
        });
        check_nothing_is_left(parts, &fleet, instance, before);
    }
}

fn allow_only(host: &'static WorldHost) -> Value {
    policy("deny", &[&format!("allow {}", host.name())])
}

impl FilteredOperation {
    fn perform(
        self,
        address: &str,
        id: &str,
        spare: Option<&str>,
        allowed: &'static WorldHost,
        next: &'static WorldHost,
    ) -> FilteredResult {
        let mut client = HttpClient::new(address);
        match self {
            Self::Transfer => {
                transfer(address, id, allowed);
                FilteredResult::Transferred
            }
            Self::ChangePolicy => {
                let path = format!("/v1/sandboxes/{id}/proxy/18080/policy");
                let body = allow_only(next).to_string();
                let answer = client.request("PUT", &path, "application/json", body.as_bytes());
                FilteredResult::Changed(answer.is_ok_and(|answer| answer.status == 200))
            }
            Self::Create => {
                let mut request = with_policy(&policy("deny", &["allow web.example"]));
                request["image"] = json!({"uri": "host"});
                request["entrypoint"] = json!(["tail", "-f", "/dev/null"]);
                request["timeout"] = json!(3600);
                let made = client.post("/v1/sandboxes", &request).ok().filter(|answer| answer.status == 202);
                FilteredResult::Created(
                    made.and_then(|answer| Some(answer.json()["id"].as_str()?.to_owned())),
                )
            }
            Self::Delete => {
                if let Some(id) = spare {
                    client.delete(&format!("/v1/sandboxes/{id}")).ok();
                }
                FilteredResult::Deleted
            }
        }
    }
}

/// Downloads inside; what arrives is either whole or reported as cut off.
fn transfer(address: &str, id: &str, from: &WorldHost) {
    const SIZE: usize = 8_000_000;
    let step = with(http_at(from.v4, from.name()), json!({"path": format!("/bytes/{SIZE}")}));
    let argv = e2e::probe::probe_argv(&[step]);
    let mut client = HttpClient::new(address);
    // The server may be dead already, or die meanwhile.
    let path = format!("/v1/sandboxes/{id}/proxy/44772/command");
    let Ok(answer) = client.post(&path, &json!({"argv": argv})) else { return };
    if answer.status != 200 {
        return;
    }
    let ran = e2e::sandbox::CommandRun::from_events(&answer.text());
    if let Some(result) = ran.stdout.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()) {
        assert!(result["status"] != 200 || result["length"].as_u64() <= Some(SIZE as u64), "{result}");
    }
}

/// Kills egress as often as it appears, and checks that what waits for it is served by its successor.
#[test]
fn new_connections_wait_for_the_successor_of_egress() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = crate::filtered::start_server(TestUser::Same);
    let mut sandbox = crate::filtered::create_filtered(&server, &["web.example"]);
    let step = with(http_at(WEB.v4, "web.example"), json!({}));
    assert_eq!(host_reached(&probe(&mut sandbox, std::slice::from_ref(&step))[0]), Some("web.example"));
    let mut results = Vec::new();
    for _ in 0..5 {
        let former = server.part_pid("__egress");
        parts::kill(former);
        results.extend(probe(&mut sandbox, std::slice::from_ref(&step)));
        assert_ne!(server.part_pid("__egress"), former);
    }
    let reached = results.iter().filter(|result| host_reached(result) == Some("web.example")).count();
    assert_eq!(reached, results.len(), "{results:?}");
    assert_eq!(world.count_contacts(OTHER.v4), 0);
    sandbox.delete();
}

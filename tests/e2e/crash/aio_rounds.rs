//! Rounds of kills in the middle of requests of the AIO API and its provisioner.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use e2e::aio::{self, AioSandbox};
use e2e::http::{HttpClient, HttpResponse};
use e2e::run::TestUser;
use serde_json::{Value, json};

use super::aio_member::{AioMember, LINES_FILE, SESSION, UPLOADED_FILE};
use super::fleet::SandboxFleet;
use super::operations::content;
use super::parts::{self, KilledProcess, ServerParts};
use super::random::RandomChoices;
use super::rounds::{after_use, check_nothing_is_left, environment_number, print_progress, seed};

/// Every process meets every operation twice.
const ROUNDS: u64 = 38;
/// The number of sandboxes at the beginning of a round: one for the operation and one that stays untouched.
const FLEET_SIZE: usize = 2;
const MAX_KILL_DELAY_MICROS: [u64; 3] = [2_000, 8_000, 30_000];
/// A request to a sandbox whose agent was killed must be answered within this time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const ENVIRONMENT: &[(&str, &str)] = &[("CORACLE_API_KEY", aio::KEY)];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum AioOperation {
    Create,
    Exec,
    Append,
    Upload,
    Delete,
}

/// The state that the client knows when its operation is over.
#[derive(Debug)]
enum AioResult {
    Created(Option<Value>),
    Ran { command: String, output: Option<String> },
    Appended { line: String, done: bool },
    Uploaded { content: Vec<u8>, done: bool },
    Deleted { done: bool },
}

impl AioOperation {
    const ALL: [Self; 5] = [Self::Create, Self::Exec, Self::Append, Self::Upload, Self::Delete];

    fn perform(self, address: &str, sandbox: Option<AioSandbox>, round: u64) -> AioResult {
        let existing = || sandbox.expect("this operation is about a sandbox");
        match self {
            Self::Create => {
                let answer = aio::try_provision(address, &new_id(round), &json!({})).ok();
                AioResult::Created(answer.filter(is_success).map(|answer| answer.json()))
            }
            Self::Exec => {
                let command = format!("echo begin {round}; sleep 0.01; echo end {round}");
                let request = json!({"id": SESSION, "command": command});
                let answer = existing().try_post("/v1/shell/exec", &request).ok().filter(is_success);
                // A response that was cut off is none.
                let body = answer.and_then(|answer| serde_json::from_slice::<Value>(&answer.body).ok());
                let output = body.filter(|body| body["data"]["status"] == "completed");
                let output = output.and_then(|body| body["data"]["output"].as_str().map(str::to_owned));
                AioResult::Ran { command, output }
            }
            Self::Append => {
                let line = format!("line {round}\n");
                let request = json!({"file": LINES_FILE, "content": line, "append": true});
                let answer = existing().try_post("/v1/file/write", &request);
                AioResult::Appended { line, done: answer.is_ok_and(|answer| is_success(&answer)) }
            }
            Self::Upload => {
                let content = content(usize::try_from(round).expect("few"));
                let answer = existing().try_upload(UPLOADED_FILE, &content);
                AioResult::Uploaded { content, done: answer.is_ok_and(|answer| is_success(&answer)) }
            }
            Self::Delete => {
                let path = format!("/api/sandboxes/{}", existing().id);
                let answer = aio::keyed_client(address).delete(&path);
                AioResult::Deleted { done: answer.is_ok_and(|answer| answer.status == 200) }
            }
        }
    }
}

impl AioResult {
    fn succeeded(&self) -> bool {
        match self {
            Self::Created(created) => created.is_some(),
            Self::Ran { output, .. } => output.is_some(),
            Self::Appended { done, .. } | Self::Uploaded { done, .. } | Self::Deleted { done } => *done,
        }
    }
}

/// An error is always said in the envelope.
fn is_success(answer: &HttpResponse) -> bool {
    let text = answer.text();
    assert!(!text.contains("ErrorObservation"), "{text}");
    assert!(answer.status == 200 || answer.json().is_object(), "{} {text}", answer.status);
    answer.status == 200
}

fn new_id(round: u64) -> String {
    format!("made-{round}")
}

#[test]
fn killing_any_process_loses_no_session_directory_command_or_offset() {
    if !testkit::needs_root() {
        return;
    }
    let (seed, count) = (seed(), environment_number("CORACLE_CRASH_ROUNDS").unwrap_or(ROUNDS));
    print_progress(&format!("crash-aio: {count} rounds, CORACLE_CRASH_SEED={seed}"));
    let mut random = RandomChoices::new(seed);
    let instance = format!("crash-aio-{}", std::process::id());
    let mut parts = ServerParts::start_with(TestUser::Same, "off", &instance, ENVIRONMENT);
    let before = after_use(&mut parts, &instance, |server| {
        AioSandbox::create(server, "first").run("true");
        delete(server.address(), "first");
    });
    let fleet = SandboxFleet::with_headers(parts.server.address(), &aio::keys());
    let (mut members, mut plan, mut cut_off) =
        (Vec::new(), Vec::new(), BTreeMap::<AioOperation, usize>::new());
    for number in 1..=count {
        while members.len() < FLEET_SIZE {
            let id = format!("member-{number}-{}", members.len());
            members.push(AioMember::begin(AioSandbox::create(&parts.server, &id)));
        }
        if plan.is_empty() {
            let pairs = |victim| AioOperation::ALL.into_iter().map(move |operation| (victim, operation));
            plan = KilledProcess::ALL.into_iter().flat_map(pairs).collect();
            // Which agent is to be killed is unknown before there is one.
            plan.retain(|pair| *pair != (KilledProcess::Agent, AioOperation::Create));
            random.shuffle(&mut plan);
        }
        let (victim, operation) = plan.pop().expect("it was filled");
        let latest = random.pick(&MAX_KILL_DELAY_MICROS);
        let moment = Duration::from_micros(random.below(latest));
        let round = AioRound { number, victim, operation, moment };
        let succeeded = round.name_on_failure(|| {
            let succeeded = round.play(&mut parts, &mut members);
            members.iter_mut().for_each(AioMember::check_works);
            succeeded
        });
        *cut_off.entry(operation).or_default() += usize::from(!succeeded);
    }
    print_progress(&format!("crash-aio: operations that were cut off: {cut_off:?}"));
    assert!(cut_off.values().any(|count| *count > 0), "every operation was over before anything was killed");
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

#[derive(Debug)]
struct AioRound {
    number: u64,
    victim: KilledProcess,
    operation: AioOperation,
    moment: Duration,
}

impl AioRound {
    /// Names the round if it fails.
    fn name_on_failure<T>(&self, play: impl FnOnce() -> T) -> T {
        struct NameOnPanic<'a>(&'a AioRound);
        impl Drop for NameOnPanic<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    print_progress(&format!("the failing round: {:?}", self.0));
                }
            }
        }
        let _failing = NameOnPanic(self);
        play()
    }

    /// Plays the round; returns whether the operation succeeded.
    fn play(&self, parts: &mut ServerParts, members: &mut Vec<AioMember>) -> bool {
        let address = parts.server.address().to_owned();
        let target = (self.operation != AioOperation::Create).then(|| members.remove(0));
        let agent = target.as_ref().map(|target| parts.agent(&target.sandbox.container).expect("it runs"));
        let (result, took) = std::thread::scope(|scope| {
            let sandbox = target.as_ref().map(|target| target.with_client(HttpClient::new(&address)));
            let operation = scope.spawn(|| self.operation.perform(&address, sandbox, self.number));
            std::thread::park_timeout(self.moment);
            let killed = Instant::now();
            match (self.victim, agent) {
                (KilledProcess::Supervisor, _) => {
                    parts.kill_supervisor();
                    parts.start_again(None);
                }
                (part @ (KilledProcess::Server | KilledProcess::Launcher | KilledProcess::Egress), _) => {
                    let former = parts.kill_part(part);
                    parts.wait_for_successor(part, former, None);
                }
                (KilledProcess::Agent, Some(pid)) => parts::kill(pid),
                (KilledProcess::Agent, None) => unreachable!("no such pair is planned"),
            }
            (operation.join().expect("an operation does not panic"), killed.elapsed())
        });
        parts.wait_until_healthy();
        let succeeded = result.succeeded();
        if self.victim == KilledProcess::Agent {
            assert!(took < ANSWER_TIMEOUT * e2e::slowness_factor(), "{result:?} took {took:?}");
            members.extend(check_crashed(&address, &target.expect("it has a target"), &result));
            return succeeded;
        }
        // The launcher only makes and removes sandboxes; the agents answer without it.
        let needs_victim = self.victim != KilledProcess::Launcher
            || matches!(self.operation, AioOperation::Create | AioOperation::Delete);
        assert!(needs_victim || succeeded, "an operation that the kill did not affect failed: {result:?}");
        members.extend(check_result(&address, result, target, self.number));
        succeeded
    }
}

/// Checks the sandbox after an operation that may have been cut off, and returns it if it still exists.
fn check_result(
    address: &str,
    result: AioResult,
    target: Option<AioMember>,
    round: u64,
) -> Option<AioMember> {
    match (result, target) {
        (AioResult::Created(created), _) => {
            let again = AioSandbox::provision(address, &new_id(round), &json!({}));
            if let Some(created) = created {
                assert_eq!(created["container_id"], again.container, "a create was acknowledged and is lost");
            }
            assert_eq!(listed(address).iter().filter(|id| **id == again.id).count(), 1);
            Some(AioMember::begin(again))
        }
        (AioResult::Ran { command, output }, Some(mut target)) => {
            target.check_command(&command, &format!("begin {round}\nend {round}"), output.as_deref());
            Some(target)
        }
        (AioResult::Appended { line, done }, Some(mut target)) => {
            target.check_lines(&line, done);
            Some(target)
        }
        (AioResult::Uploaded { content, done }, Some(mut target)) => {
            target.check_upload(&content, done);
            Some(target)
        }
        (AioResult::Deleted { done }, Some(mut target)) => {
            let id = &target.sandbox.id;
            let status =
                aio::keyed_client(address).get(&format!("/api/sandboxes/{id}")).expect("it answers").status;
            assert!(!done || status == 404, "a delete was acknowledged, and the sandbox still lives");
            if status == 404 {
                let opened = target.sandbox.try_get("/v1/sandbox").expect("the server answers");
                assert_eq!(
                    opened.status,
                    404,
                    "the address of a deleted sandbox opens it: {}",
                    opened.text()
                );
            }
            delete(address, &target.sandbox.id);
            assert!(!listed(address).contains(&target.sandbox.id));
            None
        }
        (result, None) => panic!("{result:?} without a sandbox"),
    }
}

/// A sandbox whose agent was killed is absent, and the next create makes a successor with the same address.
fn check_crashed(address: &str, target: &AioMember, result: &AioResult) -> Option<AioMember> {
    let AioSandbox { id, container, path, .. } = &target.sandbox;
    let mut client = aio::keyed_client(address);
    e2e::eventually("the crashed sandbox is absent", || {
        client.get(&format!("/api/sandboxes/{id}")).expect("the server answers").status == 404
    });
    e2e::eventually("the list omits it", || !listed(address).contains(id));
    let successor = AioSandbox::provision(address, id, &json!({}));
    assert_ne!(successor.container, *container, "a dead sandbox was returned");
    let deleted = matches!(result, AioResult::Deleted { done: true });
    assert!(deleted || successor.path == *path, "a crash changed the address");
    Some(AioMember::begin(successor))
}

fn listed(address: &str) -> Vec<String> {
    let list = aio::keyed_client(address).get("/api/sandboxes").expect("the server answers").json();
    let sandboxes = list["sandboxes"].as_array().expect("it is a list").iter();
    sandboxes.map(|one| one["sandbox_id"].as_str().expect("an id is a text").to_owned()).collect()
}

/// Deletes twice, which is the same as once.
fn delete(address: &str, id: &str) {
    for _ in 0..2 {
        let answer = aio::keyed_client(address).delete(&format!("/api/sandboxes/{id}")).expect("it answers");
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

//! Rounds of kills: every process in the middle of every operation.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Barrier;
use std::time::Duration;

use e2e::run::{ORDINARY_USER, TestUser};
use e2e::server::TestServer;
use e2e::test_network::TestNetwork;
use serde_json::json;

use super::fleet::{FleetMember, SandboxFleet};
use super::leftovers::{self, HostLeftovers};
use super::operations::{CrashOperation, OperationResult};
use super::parts::{self, KilledProcess, ServerParts};
use super::random::RandomChoices;

const ROUNDS: usize = 200;

/// The seed is fixed, so that two runs differ only by the change under test.
const SEED: u64 = 20_261_116;

/// The number of sandboxes at the beginning of a round: one for each operation and one that stays untouched.
const FLEET_SIZE: usize = 3;

/// The kill comes this long after the operations began, at the latest. Some operations are over
/// in two milliseconds, so the early moments are chosen more often.
const MAX_KILL_DELAY_MICROS: [u64; 3] = [2_000, 5_000, 15_000];
/// A second kill comes this long after a successor was started, at the latest.
const MAX_SECOND_KILL_DELAY_MICROS: u64 = 60_000;

/// One round, chosen before it begins.
#[derive(Debug)]
struct Round {
    number: usize,
    victim: KilledProcess,
    operation: CrashOperation,
    beside: CrashOperation,
    moment: Duration,
    /// When the successor of the victim is killed too.
    cut: Option<Duration>,
}

#[test]
fn killing_any_process_at_any_instant_loses_nothing() {
    if !testkit::needs_root() {
        return;
    }
    play_rounds(TestUser::Same, "off", "crash", &CrashOperation::ALL, ROUNDS);
}

#[test]
fn killing_any_process_loses_no_links_or_filters() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let operations = [CrashOperation::Create, CrashOperation::Exec, CrashOperation::Delete];
    play_rounds(TestUser::Same, "on", "crash-linked", &operations, ROUNDS / 5);
}

#[test]
fn killing_any_process_of_an_ordinary_user_loses_nothing() {
    // Without groups nothing can be paused.
    let operations =
        [CrashOperation::Create, CrashOperation::Exec, CrashOperation::Write, CrashOperation::Delete];
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    play_rounds(user, "off", "crash-ordinary", &operations, ROUNDS / 5);
}

fn play_rounds(
    user: TestUser,
    network: &'static str,
    name: &str,
    operations: &[CrashOperation],
    usual: usize,
) {
    let seed = seed();
    let count = environment_number("CORACLE_CRASH_ROUNDS")
        .map_or(usual, |count| usize::try_from(count).expect("few"));
    print_progress(&format!("{name}: {count} rounds, CORACLE_CRASH_SEED={seed}"));
    let instance = format!("{name}-{}", std::process::id());
    let mut parts = ServerParts::start(user, network, &instance);
    let before = after_normal_use(&mut parts, &instance);
    let mut fleet = SandboxFleet::new(parts.server.address());
    let mut random = RandomChoices::new(seed);
    let mut plan = Vec::new();
    let mut cut_off = BTreeMap::<CrashOperation, usize>::new();
    for number in 1..=count {
        fleet.fill(FLEET_SIZE);
        let round = plan_rounds(number, operations, &mut plan, &mut random);
        let unfinished = name_round_on_failure(&round, || play_round(&round, &mut parts, &mut fleet));
        for operation in unfinished {
            *cut_off.entry(operation).or_default() += 1;
        }
    }
    print_progress(&format!("{name}: operations that were cut off: {cut_off:?}"));
    assert!(!cut_off.is_empty(), "every operation was over before anything was killed");
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

/// Returns the seed that determines every moment and every choice.
pub(super) fn seed() -> u64 {
    environment_number("CORACLE_CRASH_SEED").unwrap_or(SEED)
}

/// A number from the environment.
pub(super) fn environment_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name} is `{text}`: {error}")))
}

/// Writes straight to standard error, which is shown for passing tests too.
pub(super) fn print_progress(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}

/// Names the round if it fails.
fn name_round_on_failure<T>(round: &Round, play: impl FnOnce() -> T) -> T {
    struct NameRoundOnPanic<'a>(&'a Round);
    impl Drop for NameRoundOnPanic<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                print_progress(&format!("the failing round: {:?}", self.0));
            }
        }
    }
    let _failing = NameRoundOnPanic(round);
    play()
}

/// Returns what remains of a server that was started, used and ended normally; then starts it again.
pub(super) fn after_normal_use(parts: &mut ServerParts, instance: &str) -> HostLeftovers {
    after_use(parts, instance, |server| server.create_sandbox_with(&json!({"resourceLimits": {}})).delete())
}

/// As [`after_normal_use`], with a use of the caller.
pub(super) fn after_use(
    parts: &mut ServerParts,
    instance: &str,
    use_server: impl FnOnce(&TestServer),
) -> HostLeftovers {
    use_server(&parts.server);
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    let before = HostLeftovers::at_rest(&parts.server.state_directory(), instance);
    parts.start_again(None);
    before
}

/// Every victim meets every operation equally often, in a new order each time.
fn plan_rounds(
    number: usize,
    operations: &[CrashOperation],
    plan: &mut Vec<(KilledProcess, CrashOperation)>,
    random: &mut RandomChoices,
) -> Round {
    if plan.is_empty() {
        let pairs = |victim| operations.iter().map(move |operation| (victim, *operation));
        *plan = KilledProcess::ALL.into_iter().flat_map(pairs).collect();
        random.shuffle(plan);
    }
    let (victim, operation) = plan.pop().expect("it was filled");
    let mut beside = random.pick(operations);
    if victim == KilledProcess::Agent
        && operation == CrashOperation::Create
        && beside == CrashOperation::Create
    {
        // With two new sandboxes it is unknown which one is the victim.
        beside = CrashOperation::Exec;
    }
    let latest = random.pick(&MAX_KILL_DELAY_MICROS);
    let moment = Duration::from_micros(random.below(latest));
    let cut =
        (random.below(4) == 0).then(|| Duration::from_micros(random.below(MAX_SECOND_KILL_DELAY_MICROS)));
    Round { number, victim, operation, beside, moment, cut }
}

/// Plays one round and returns the operations that did not succeed.
fn play_round(round: &Round, parts: &mut ServerParts, fleet: &mut SandboxFleet) -> Vec<CrashOperation> {
    let target = (round.operation != CrashOperation::Create).then(|| fleet.members.remove(0));
    let other = (round.beside != CrashOperation::Create).then(|| fleet.members.remove(0));
    let [reported, reported_beside] = kill_during_operations(round, parts, target.as_ref(), other.as_ref());
    parts.wait_until_healthy();
    let harm = match round.victim {
        KilledProcess::Supervisor | KilledProcess::Server => [true, true],
        KilledProcess::Launcher => [round.operation, round.beside].map(|one| one == CrashOperation::Create),
        KilledProcess::Egress => [false, false],
        KilledProcess::Agent => [true, false],
    };
    let operations = [(round.operation, &reported), (round.beside, &reported_beside)];
    let unfinished = operations.into_iter().filter(|(_, reported)| !reported.succeeded());
    let unfinished = unfinished.map(|(operation, _)| operation).collect();
    let dead = round.victim == KilledProcess::Agent;
    let mut unanswered = 0;
    for (reported, member, harm, dead) in
        [(reported, target, harm[0], dead), (reported_beside, other, harm[1], false)]
    {
        assert!(
            harm || reported.succeeded(),
            "an operation that the kill did not affect failed: {reported:?}"
        );
        match (reported, member) {
            (OperationResult::Created(Some(id)), _) if dead => fleet.delete_dead_sandbox(&id),
            (OperationResult::Created(Some(id)), _) => {
                let sandbox = e2e::sandbox::RemoteSandbox::existing(fleet.client(), &id);
                fleet.members.push(FleetMember::begin(sandbox));
            }
            (OperationResult::Created(None), _) => unanswered += 1,
            (reported, Some(member)) => check_after_operation(fleet, &reported, member, dead),
            (reported, None) => panic!("{reported:?} without a sandbox"),
        }
    }
    check_unknown_sandboxes(round, fleet, unanswered);
    fleet.members.iter_mut().for_each(FleetMember::check_works);
    unfinished
}

/// Begins both operations, kills the victim, and waits for their ends and for the victim's successor.
fn kill_during_operations(
    round: &Round,
    parts: &mut ServerParts,
    target: Option<&FleetMember>,
    other: Option<&FleetMember>,
) -> [OperationResult; 2] {
    let address = parts.server.address().to_owned();
    let begin = Barrier::new(3);
    let known = target.map(|member| parts.agent(&member.sandbox.id).expect("its process runs"));
    let born = parts.sandbox_pids();
    std::thread::scope(|scope| {
        let operate = |operation: CrashOperation, member: Option<&FleetMember>| {
            let sandbox =
                member.map(|member| member.sandbox.with_client(e2e::http::HttpClient::new(&address)));
            let (address, begin) = (&address, &begin);
            scope.spawn(move || {
                begin.wait();
                operation.perform(address, sandbox, round.number)
            })
        };
        let (first, second) = (operate(round.operation, target), operate(round.beside, other));
        begin.wait();
        std::thread::park_timeout(round.moment);
        match round.victim {
            KilledProcess::Supervisor => {
                parts.kill_supervisor();
                parts.start_again(round.cut);
            }
            part @ (KilledProcess::Server | KilledProcess::Launcher | KilledProcess::Egress) => {
                let former = parts.kill_part(part);
                parts.wait_for_successor(part, former, round.cut);
            }
            KilledProcess::Agent => kill_agent(parts, known, &born, &first),
        }
        [first.join(), second.join()].map(|reported| reported.expect("an operation does not panic"))
    })
}

/// Kills the agent of an existing sandbox, or of the next one that is created.
fn kill_agent<T>(
    parts: &ServerParts,
    known: Option<u32>,
    born: &std::collections::BTreeSet<u32>,
    operation: &std::thread::ScopedJoinHandle<'_, T>,
) {
    if let Some(pid) = known {
        return parts::kill(pid);
    }
    const STEP: Duration = Duration::from_micros(200);
    loop {
        let answered = operation.is_finished();
        if let Some(newborn) = parts.sandbox_pids().difference(born).next() {
            return parts::kill(*newborn);
        }
        assert!(!answered, "a create was answered and no sandbox was created");
        std::thread::park_timeout(STEP);
    }
}

/// Checks a sandbox after an operation on it.
fn check_after_operation(
    fleet: &mut SandboxFleet,
    reported: &OperationResult,
    mut member: FleetMember,
    dead: bool,
) {
    let id = member.sandbox.id.clone();
    let state = fleet.wait_until_stable(&id);
    match (reported, state) {
        (OperationResult::Deleted { .. }, None) => {}
        (OperationResult::Deleted { done: true }, Some(state)) => panic!("{id} was deleted and is {state}"),
        (reported, None) => panic!("{id} was lost after {reported:?}"),
        // Resuming a sandbox that had already died starts it again.
        (OperationResult::Paused { restarted: true, .. }, Some(_)) if dead => {
            member.check_files();
            fleet.delete(&id);
        }
        (_, Some(_)) if dead => fleet.delete_dead_sandbox(&id),
        (reported, Some(_)) => {
            member.check_works();
            member.check_result(reported);
            fleet.members.push(member);
        }
    }
}

/// A create that was not answered may have completed if the process that asked for it died; in all other
/// cases it is undone.
fn check_unknown_sandboxes(round: &Round, fleet: &SandboxFleet, unanswered: usize) {
    if matches!(round.victim, KilledProcess::Supervisor | KilledProcess::Server) {
        let strangers = fleet.unknown_sandboxes();
        assert!(strangers.len() <= unanswered, "no client requested {strangers:?}");
        strangers.iter().for_each(|id| fleet.delete(id));
    }
    e2e::eventually("creates that failed are undone", || fleet.unknown_sandboxes().is_empty());
}

pub(super) fn check_nothing_is_left(
    mut parts: ServerParts,
    fleet: &SandboxFleet,
    instance: &str,
    before: &HostLeftovers,
) {
    let state = parts.server.state_directory();
    fleet.listed().iter().for_each(|id| fleet.delete(id));
    assert!(fleet.listed().is_empty());
    leftovers::wait_for_no_volumes(parts.pid(KilledProcess::Launcher), &state);
    e2e::eventually("no sandbox is left as a process", || parts.sandbox_pids().is_empty());
    // Sandboxes whose launcher died were reparented to the supervisor.
    e2e::eventually("the supervisor has only its three parts", || {
        parts::children(parts.server.pid()).len() == 3
    });
    parts.record_processes();
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    assert_eq!(parts.survivors(), Vec::<String>::new());
    assert_eq!(leftovers::count_rows(&state), 0);
    before.wait_for(&state, instance);
}

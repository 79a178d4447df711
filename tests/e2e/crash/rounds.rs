//! Rounds of kills: every process in the middle of every operation.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Barrier;
use std::time::Duration;

use e2e::run::{ORDINARY, User};
use e2e::world::World;
use serde_json::json;

use super::fleet::{Fleet, Member};
use super::operations::{Operation, Told};
use super::parts::{self, Parts, Victim};
use super::random::Random;
use super::remains::{self, Remains};

const ROUNDS: usize = 200;

/// The seed is fixed, so that two runs differ only by the change under test.
const SEED: u64 = 20_261_116;

/// The number of sandboxes at the beginning of a round: one for each operation and one that stays untouched.
const FLEET: usize = 3;

/// The kill comes this long after the operations began, at the latest. Some operations are over
/// in two milliseconds, so the early moments are chosen more often.
const LATEST_MICROS: [u64; 3] = [2_000, 5_000, 15_000];
/// A second kill comes this long after a successor was started, at the latest.
const LATEST_CUT_MICROS: u64 = 60_000;

/// One round, chosen before it begins.
#[derive(Debug)]
struct Round {
    number: usize,
    victim: Victim,
    operation: Operation,
    beside: Operation,
    moment: Duration,
    /// When the successor of the victim is killed too.
    cut: Option<Duration>,
}

#[test]
fn killing_any_process_at_any_instant_loses_nothing() {
    if !testkit::needs_root() {
        return;
    }
    play_all(User::Same, "off", "crash", &Operation::ALL, ROUNDS);
}

#[test]
fn killing_any_process_loses_no_links_or_filters() {
    if !testkit::needs_root() {
        return;
    }
    let _world = World::make();
    let operations = [Operation::Create, Operation::Exec, Operation::Delete];
    play_all(User::Same, "on", "crash-linked", &operations, ROUNDS / 5);
}

#[test]
fn killing_any_process_of_an_ordinary_user_loses_nothing() {
    // Without groups nothing can be paused.
    let operations = [Operation::Create, Operation::Exec, Operation::Write, Operation::Delete];
    let user = if testkit::is_root() { ORDINARY } else { User::Same };
    play_all(user, "off", "crash-ordinary", &operations, ROUNDS / 5);
}

fn play_all(user: User, network: &'static str, name: &str, operations: &[Operation], usual: usize) {
    let seed = seed();
    let count = setting("CORACLE_CRASH_ROUNDS").map_or(usual, |count| usize::try_from(count).expect("few"));
    say(&format!("{name}: {count} rounds, CORACLE_CRASH_SEED={seed}"));
    let instance = format!("{name}-{}", std::process::id());
    let mut parts = Parts::start(user, network, &instance);
    let before = after_peace(&mut parts, &instance);
    let mut fleet = Fleet::new(parts.server.address());
    let mut random = Random::new(seed);
    let mut plan = Vec::new();
    let mut cut_off = BTreeMap::<Operation, usize>::new();
    for number in 1..=count {
        fleet.fill(FLEET);
        let round = decide(number, operations, &mut plan, &mut random);
        let unfinished = say_while(&round, || play(&round, &mut parts, &mut fleet));
        for operation in unfinished {
            *cut_off.entry(operation).or_default() += 1;
        }
    }
    say(&format!("{name}: operations that were cut off: {cut_off:?}"));
    assert!(!cut_off.is_empty(), "every operation was over before anything was killed");
    check_nothing_is_left(parts, &fleet, &instance, &before);
}

/// Returns the seed that determines every moment and every choice.
pub(super) fn seed() -> u64 {
    setting("CORACLE_CRASH_SEED").unwrap_or(SEED)
}

/// A number from the environment.
pub(super) fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name} is `{text}`: {error}")))
}

/// Writes straight to standard error, which is shown for passing tests too.
pub(super) fn say(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}

/// Names the round if it fails.
fn say_while<T>(round: &Round, play: impl FnOnce() -> T) -> T {
    struct Failing<'a>(&'a Round);
    impl Drop for Failing<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                say(&format!("the failing round: {:?}", self.0));
            }
        }
    }
    let _failing = Failing(round);
    play()
}

/// Returns what remains of a server that was started, used and ended normally; then starts it again.
pub(super) fn after_peace(parts: &mut Parts, instance: &str) -> Remains {
    parts.server.create_with(&json!({"resourceLimits": {}})).delete();
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    let before = Remains::at_rest(&parts.server.state_directory(), instance);
    parts.start_again(None);
    before
}

/// Every victim meets every operation equally often, in a new order each time.
fn decide(
    number: usize,
    operations: &[Operation],
    plan: &mut Vec<(Victim, Operation)>,
    random: &mut Random,
) -> Round {
    if plan.is_empty() {
        let pairs = |victim| operations.iter().map(move |operation| (victim, *operation));
        *plan = Victim::ALL.into_iter().flat_map(pairs).collect();
        random.shuffle(plan);
    }
    let (victim, operation) = plan.pop().expect("it was filled");
    let mut beside = random.pick(operations);
    if victim == Victim::Agent && operation == Operation::Create && beside == Operation::Create {
        // With two new sandboxes it is unknown which one is the victim.
        beside = Operation::Exec;
    }
    let latest = random.pick(&LATEST_MICROS);
    let moment = Duration::from_micros(random.below(latest));
    let cut = (random.below(4) == 0).then(|| Duration::from_micros(random.below(LATEST_CUT_MICROS)));
    Round { number, victim, operation, beside, moment, cut }
}

/// Plays one round and returns the operations that did not succeed.
fn play(round: &Round, parts: &mut Parts, fleet: &mut Fleet) -> Vec<Operation> {
    let target = (round.operation != Operation::Create).then(|| fleet.members.remove(0));
    let other = (round.beside != Operation::Create).then(|| fleet.members.remove(0));
    let [reported, reported_beside] = strike(round, parts, target.as_ref(), other.as_ref());
    parts.wait_until_healthy();
    let harm = match round.victim {
        Victim::Supervisor | Victim::Server => [true, true],
        Victim::Launcher => [round.operation, round.beside].map(|one| one == Operation::Create),
        Victim::Agent => [true, false],
    };
    let operations = [(round.operation, &reported), (round.beside, &reported_beside)];
    let unfinished = operations.into_iter().filter(|(_, reported)| !reported.succeeded());
    let unfinished = unfinished.map(|(operation, _)| operation).collect();
    let dead = round.victim == Victim::Agent;
    let mut unanswered = 0;
    for (reported, member, harm, dead) in
        [(reported, target, harm[0], dead), (reported_beside, other, harm[1], false)]
    {
        assert!(
            harm || reported.succeeded(),
            "an operation that the kill did not affect failed: {reported:?}"
        );
        match (reported, member) {
            (Told::Created(Some(id)), _) if dead => fleet.bury(&id),
            (Told::Created(Some(id)), _) => {
                let sandbox = e2e::sandbox::Sandbox::known(fleet.client(), &id);
                fleet.members.push(Member::begin(sandbox));
            }
            (Told::Created(None), _) => unanswered += 1,
            (reported, Some(member)) => follow_up(fleet, &reported, member, dead),
            (reported, None) => panic!("{reported:?} without a sandbox"),
        }
    }
    check_strangers(round, fleet, unanswered);
    fleet.members.iter_mut().for_each(Member::check_works);
    unfinished
}

/// Begins both operations, kills the victim, and waits for their ends and for the victim's successor.
fn strike(round: &Round, parts: &mut Parts, target: Option<&Member>, other: Option<&Member>) -> [Told; 2] {
    let address = parts.server.address().to_owned();
    let begin = Barrier::new(3);
    let known = target.map(|member| parts.agent(&member.sandbox.id).expect("its process runs"));
    let born = parts.born();
    std::thread::scope(|scope| {
        let operate = |operation: Operation, member: Option<&Member>| {
            let sandbox = member.map(|member| member.sandbox.another(e2e::http::Client::new(&address)));
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
            Victim::Supervisor => {
                parts.kill_supervisor();
                parts.start_again(round.cut);
            }
            part @ (Victim::Server | Victim::Launcher) => {
                let former = parts.kill_part(part);
                parts.wait_for_successor(part, former, round.cut);
            }
            Victim::Agent => kill_agent(parts, known, &born, &first),
        }
        [first.join(), second.join()].map(|reported| reported.expect("an operation does not panic"))
    })
}

/// Kills the agent of an existing sandbox, or of the next one that is created.
fn kill_agent<T>(
    parts: &Parts,
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
        if let Some(newborn) = parts.born().difference(born).next() {
            return parts::kill(*newborn);
        }
        assert!(!answered, "a create was answered and no sandbox was created");
        std::thread::park_timeout(STEP);
    }
}

/// Checks a sandbox after an operation on it.
fn follow_up(fleet: &mut Fleet, reported: &Told, mut member: Member, dead: bool) {
    let id = member.sandbox.id.clone();
    let state = fleet.settled(&id);
    match (reported, state) {
        (Told::Deleted { .. }, None) => {}
        (Told::Deleted { done: true }, Some(state)) => panic!("{id} was deleted and is {state}"),
        (reported, None) => panic!("{id} was lost after {reported:?}"),
        // Resuming a sandbox that had already died starts it again.
        (Told::Paused { restarted: true, .. }, Some(_)) if dead => {
            member.check_files();
            fleet.delete(&id);
        }
        (_, Some(_)) if dead => fleet.bury(&id),
        (reported, Some(_)) => {
            member.check_works();
            member.hold_to(reported);
            fleet.members.push(member);
        }
    }
}

/// A create that was not answered may have completed if the process that asked for it died; in all other
/// cases it is undone.
fn check_strangers(round: &Round, fleet: &Fleet, unanswered: usize) {
    if matches!(round.victim, Victim::Supervisor | Victim::Server) {
        let strangers = fleet.strangers();
        assert!(strangers.len() <= unanswered, "no client requested {strangers:?}");
        strangers.iter().for_each(|id| fleet.delete(id));
    }
    e2e::eventually("creates that failed are undone", || fleet.strangers().is_empty());
}

pub(super) fn check_nothing_is_left(mut parts: Parts, fleet: &Fleet, instance: &str, before: &Remains) {
    let state = parts.server.state_directory();
    fleet.listed().iter().for_each(|id| fleet.delete(id));
    assert!(fleet.listed().is_empty());
    remains::wait_for_no_volumes(parts.pid(Victim::Launcher), &state);
    e2e::eventually("no sandbox is left as a process", || parts.born().is_empty());
    // Sandboxes whose launcher died were reparented to the supervisor.
    e2e::eventually("the supervisor has only its two parts", || {
        parts::children(parts.server.pid()).len() == 2
    });
    parts.remember();
    assert!(parts.server.terminate().success(), "the server did not end cleanly");
    assert_eq!(parts.survivors(), Vec::<String>::new());
    assert_eq!(remains::rows(&state), 0);
    before.wait_for(&state, instance);
}

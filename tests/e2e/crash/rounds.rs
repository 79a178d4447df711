//! Round after round of killing, every process in the middle of every operation.

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

/// Always the same, so that a change is judged by what it changes.
const SEED: u64 = 20_261_116;

/// So many sandboxes there are at the beginning of a round: one for each operation and one that
/// nobody touches.
const FLEET: usize = 3;

/// The kill comes this long after the operations began, at the latest. Some operations are over
/// in two milliseconds, so the early moments are chosen more often.
const LATEST_MICROS: [u64; 3] = [2_000, 5_000, 15_000];
/// A second kill comes this long after a successor was started, at the latest.
const LATEST_CUT_MICROS: u64 = 60_000;

/// One round, decided before it begins.
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
fn links_and_filters_are_not_lost_either() {
    if !testkit::needs_root() {
        return;
    }
    let _world = World::make();
    let operations = [Operation::Create, Operation::Exec, Operation::Delete];
    play_all(User::Same, "on", "crash-linked", &operations, ROUNDS / 5);
}

#[test]
fn an_ordinary_users_processes_can_be_killed_as_well() {
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

/// What decides about every moment and every choice.
pub(super) fn seed() -> u64 {
    setting("CORACLE_CRASH_SEED").unwrap_or(SEED)
}

/// A number from the environment.
pub(super) fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name} is `{text}`: {error}")))
}

/// Straight to standard error, which tests that succeed show too.
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

/// What a server leaves that was started, used and ended in peace; then it is started again.
pub(super) fn after_peace(parts: &mut Parts, instance: &str) -> Remains {
    parts.server.create_with(&json!({"resourceLimits": {}})).delete();
    assert!(parts.server.terminate().success(), "the server did not end in peace");
    let before = Remains::at_rest(&parts.server.state_directory(), instance);
    parts.start_again(None);
    before
}

/// Every victim meets every operation equally often, in an order of its own each time.
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
        // Of two newborn sandboxes nobody knows which one is the victim.
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
    let [told, told_beside] = strike(round, parts, target.as_ref(), other.as_ref());
    parts.wait_until_healthy();
    let harm = match round.victim {
        Victim::Supervisor | Victim::Server => [true, true],
        Victim::Launcher => [round.operation, round.beside].map(|one| one == Operation::Create),
        Victim::Agent => [true, false],
    };
    let operations = [(round.operation, &told), (round.beside, &told_beside)];
    let unfinished = operations.into_iter().filter(|(_, told)| !told.succeeded());
    let unfinished = unfinished.map(|(operation, _)| operation).collect();
    let dead = round.victim == Victim::Agent;
    let mut unanswered = 0;
    for (told, member, harm, dead) in [(told, target, harm[0], dead), (told_beside, other, harm[1], false)] {
        assert!(harm || told.succeeded(), "something unconcerned failed: {told:?}");
        match (told, member) {
            (Told::Created(Some(id)), _) if dead => fleet.bury(&id),
            (Told::Created(Some(id)), _) => {
                let sandbox = e2e::sandbox::Sandbox::known(fleet.client(), &id);
                fleet.members.push(Member::begin(sandbox));
            }
            (Told::Created(None), _) => unanswered += 1,
            (told, Some(member)) => follow_up(fleet, &told, member, dead),
            (told, None) => panic!("{told:?} about nothing"),
        }
    }
    check_strangers(round, fleet, unanswered);
    fleet.members.iter_mut().for_each(Member::check_works);
    unfinished
}

/// Begins both operations, kills the victim, waits for their ends and for its successor.
fn strike(round: &Round, parts: &mut Parts, target: Option<&Member>, other: Option<&Member>) -> [Told; 2] {
    let address = parts.server.address().to_owned();
    let begin = Barrier::new(3);
    let known = target.map(|member| parts.agent(&member.sandbox.id).expect("it lives"));
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
        [first.join(), second.join()].map(|told| told.expect("an operation does not panic"))
    })
}

/// Kills the agent of a sandbox that exists, or the next one that is born.
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
        assert!(!answered, "a create was answered and no sandbox was born");
        std::thread::park_timeout(STEP);
    }
}

/// What must hold for a sandbox after an operation on it.
fn follow_up(fleet: &mut Fleet, told: &Told, mut member: Member, dead: bool) {
    let id = member.sandbox.id.clone();
    let state = fleet.settled(&id);
    match (told, state) {
        (Told::Deleted { .. }, None) => {}
        (Told::Deleted { done: true }, Some(state)) => panic!("{id} was deleted and is {state}"),
        (told, None) => panic!("{id} is forgotten after {told:?}"),
        // A resume of one that had died already starts it again.
        (Told::Paused { restarted: true, .. }, Some(_)) if dead => {
            member.check_files();
            fleet.delete(&id);
        }
        (_, Some(_)) if dead => fleet.bury(&id),
        (told, Some(_)) => {
            member.check_works();
            member.hold_to(told);
            fleet.members.push(member);
        }
    }
}

/// A create that was not answered may have come to its end nevertheless if the one who asked
/// for it died; in all other cases it is undone.
fn check_strangers(round: &Round, fleet: &Fleet, unanswered: usize) {
    if matches!(round.victim, Victim::Supervisor | Victim::Server) {
        let strangers = fleet.strangers();
        assert!(strangers.len() <= unanswered, "nobody asked for {strangers:?}");
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
    // Those whose launcher died became the supervisor's.
    e2e::eventually("the supervisor has its two parts alone", || {
        parts::children(parts.server.pid()).len() == 2
    });
    parts.remember();
    assert!(parts.server.terminate().success(), "the server did not end in peace");
    assert_eq!(parts.survivors(), Vec::<String>::new());
    assert_eq!(remains::rows(&state), 0);
    before.wait_for(&state, instance);
}

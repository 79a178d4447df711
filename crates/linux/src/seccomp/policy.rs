//! Compiles a policy, written as data, into a filter program.
//!
//! A policy is a list of groups of system calls, each with the reason why it is allowed. The
//! compiler sorts all numbers into ranges with one verdict each and arranges them as a balanced
//! tree of comparisons, so that loading and running stay cheap however long the list is: the kernel
//! copies, checks and translates the program at every load, and each exec loads one.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::SeccompProgram;

/// A filter as data.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeccompPolicy {
    /// The purpose of the filter.
    pub about: String,
    /// The errno of calls that are not listed. Numbers beyond all known ones get ENOSYS, so that
    /// newer libraries fall back.
    pub otherwise: i32,
    pub groups: Vec<CallGroup>,
    #[serde(default)]
    pub conditions: Vec<CallCondition>,
    /// Calls that fail with a specific errno.
    #[serde(default)]
    pub refused: Vec<RefusedCalls>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallGroup {
    pub name: String,
    pub why: String,
    pub calls: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefusedCalls {
    pub calls: Vec<String>,
    pub why: String,
    pub errno: i32,
    /// Whether libraries make these calls in ordinary use and fall back, so that a log of refused calls
    /// should not have them.
    #[serde(default)]
    pub expected: bool,
}

/// A call that is allowed only if an argument matches one of the rules.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallCondition {
    pub call: String,
    pub why: String,
    /// The index of the argument, from 0; its low 32 bits are examined.
    pub argument: u8,
    /// The bits to examine; all by default.
    #[serde(default = "all_bits")]
    pub mask: u32,
    #[serde(flatten)]
    pub rule: ArgumentRule,
    /// Apply the rule only if another argument has one of these values.
    #[serde(default)]
    pub only_when: Option<OnlyWhen>,
    /// The errno if the rule does not match.
    pub errno: i32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnlyWhen {
    pub argument: u8,
    pub one_of: Vec<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentRule {
    /// The masked argument equals one of these.
    OneOf(Vec<u32>),
    /// It equals none of these.
    NoneOf(Vec<u32>),
}

/// The reason why a policy cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("`{0}` is not a valid policy")]
    Malformed(&'static str, #[source] serde_json::Error),
    #[error("call `{0}` is listed twice")]
    Twice(String),
    #[error("the filter has {0} instructions, more than the kernel accepts")]
    TooLong(usize),
}

fn all_bits() -> u32 {
    u32::MAX
}

const BPF_LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const BPF_AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const BPF_JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const BPF_JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const BPF_JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const BPF_RETURN: u16 = 0x06; // BPF_RET | BPF_K

const NUMBER_OFFSET: u32 = 0;
const ARCHITECTURE_OFFSET: u32 = 4;
const ARGUMENTS_OFFSET: u32 = 16;

#[cfg(target_arch = "x86_64")]
const NATIVE_ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
#[cfg(target_arch = "aarch64")]
const NATIVE_ARCHITECTURE: u32 = 0xc000_00b7; // AUDIT_ARCH_AARCH64

/// The verdict for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CallVerdict {
    Allow,
    Errno(u32),
    /// Index into the conditions of this call.
    Check(Vec<usize>),
}

impl SeccompPolicy {
    /// This policy on top of `other`: what it says about a call replaces what `other` says about it.
    #[must_use]
    pub fn merged_with(mut self, other: &Self) -> Self {
        let own: BTreeSet<String> = self.named_calls().map(str::to_owned).collect();
        let new = |calls: &[String]| calls.iter().filter(|call| !own.contains(*call)).cloned().collect();
        let groups = other.groups.iter().map(|group| CallGroup { calls: new(&group.calls), ..group.clone() });
        self.groups.extend(groups);
        let conditions = other.conditions.iter().filter(|condition| !own.contains(&condition.call));
        self.conditions.extend(conditions.cloned());
        let refused = other.refused.iter();
        self.refused
            .extend(refused.map(|refused| RefusedCalls { calls: new(&refused.calls), ..refused.clone() }));
        self
    }

    /// The calls that this policy says anything about.
    fn named_calls(&self) -> impl Iterator<Item = &str> {
        let allowed = self.groups.iter().flat_map(|group| &group.calls);
        let refused = self.refused.iter().flat_map(|refused| &refused.calls);
        let checked = self.conditions.iter().map(|condition| &condition.call);
        allowed.chain(refused).chain(checked).map(String::as_str)
    }

    /// The calls that it allows, always or under a condition.
    pub fn allowed_calls(&self) -> impl Iterator<Item = &str> {
        let allowed = self.groups.iter().flat_map(|group| &group.calls);
        allowed.chain(self.conditions.iter().map(|condition| &condition.call)).map(String::as_str)
    }

    /// The same policy, but no file can be created with set-id bits. For sandboxes that write to
    /// places where host users could execute the file.
    #[must_use]
    pub fn without_set_id(mut self) -> Self {
        const WHY: &str = "modes without set-id bits: the file lies where users of the host could run it";
        const SET_ID: u32 = 0o6000;
        let modes = [
            ("chmod", 1),
            ("fchmod", 1),
            ("fchmodat", 2),
            ("fchmodat2", 2),
            ("open", 2),
            ("openat", 3),
            ("creat", 1),
            ("mknod", 1),
            ("mknodat", 2),
        ];
        let hidden = "openat2".to_owned();
        for group in &mut self.groups {
            group.calls.retain(|call| *call != hidden && modes.iter().all(|(name, _)| call != name));
        }
        self.conditions.extend(modes.map(|(call, argument)| CallCondition {
            call: call.to_owned(),
            why: WHY.to_owned(),
            argument,
            mask: SET_ID,
            rule: ArgumentRule::OneOf(vec![0]),
            only_when: None,
            errno: libc::EPERM,
        }));
        // Its mode is passed in memory, where a filter cannot inspect it; libraries fall back to
        // openat.
        self.refused.push(RefusedCalls {
            calls: vec![hidden],
            why: WHY.to_owned(),
            errno: libc::ENOSYS,
            expected: true,
        });
        self
    }

    pub fn parse(name: &'static str, json: &str) -> Result<Self, PolicyError> {
        serde_json::from_str(json).map_err(|error| PolicyError::Malformed(name, error))
    }

    /// Takes out the expected refusals: the rest allows these calls. Where both are loaded, each as a
    /// filter of its own, the refusals of the rest can be logged without the expected ones.
    #[must_use]
    pub fn without_expected(mut self) -> (Vec<RefusedCalls>, Self) {
        let (expected, refused) = self.refused.into_iter().partition(|refused| refused.expected);
        self.refused = refused;
        let calls = expected.iter().flat_map(|refused: &RefusedCalls| refused.calls.clone()).collect();
        let why = "another filter refuses them".to_owned();
        self.groups.push(CallGroup { name: "refused elsewhere".to_owned(), why, calls });
        (expected, self)
    }

    /// Call names that this architecture does not have are ignored: a policy lists the calls of all
    /// architectures.
    pub fn compile(&self) -> Result<SeccompProgram, PolicyError> {
        let answers = self.call_verdicts()?;
        let otherwise = CallVerdict::Errno(self.otherwise.unsigned_abs());
        let unknown = CallVerdict::Errno(libc::ENOSYS.unsigned_abs());
        let highest = call_number(syscalls::Sysno::last());
        let mut ranges: Vec<(u32, CallVerdict)> = Vec::new();
        // Numbers that no call has, between known calls and behind them, may get one in a later kernel. Libraries
        // fall back only from ENOSYS.
        for number in 0..=highest + 1 {
            let is_known = syscalls::Sysno::new(number as usize).is_some();
            let default = if is_known { &otherwise } else { &unknown };
            push_range(&mut ranges, number, answers.get(&number).unwrap_or(default).clone());
        }

        let mut tree = TreeCode::default();
        let first = self.emit_tree(&ranges, &mut tree);
        let mut code = program_start();
        code.append(&mut tree.into_code(first));
        if code.len() > 4096 { Err(PolicyError::TooLong(code.len())) } else { Ok(SeccompProgram::new(code)) }
    }

    /// Compiles a filter that refuses these calls and allows everything else.
    pub fn compile_refusals(refused: &[RefusedCalls]) -> SeccompProgram {
        let mut code = program_start();
        for refused in refused {
            for call in refused.calls.iter().filter_map(|name| name.parse().ok()) {
                code.push(bpf_jump(BPF_JUMP_EQUAL, call_number(call), 0, 1));
                code.push(return_errno(refused.errno.unsigned_abs()));
            }
        }
        code.push(bpf_statement(BPF_RETURN, libc::SECCOMP_RET_ALLOW));
        SeccompProgram::new(code)
    }

    fn call_verdicts(&self) -> Result<BTreeMap<u32, CallVerdict>, PolicyError> {
        let mut answers = BTreeMap::new();
        let mut add = |name: &str, answer: CallVerdict| match name.parse::<syscalls::Sysno>() {
            Ok(call) if answers.insert(call_number(call), answer).is_some() => {
                Err(PolicyError::Twice(name.to_owned()))
            }
            Ok(_) | Err(_) => Ok(()),
        };
        for name in self.groups.iter().flat_map(|group| &group.calls) {
            add(name, CallVerdict::Allow)?;
        }
        for refused in &self.refused {
            for name in &refused.calls {
                add(name, CallVerdict::Errno(refused.errno.unsigned_abs()))?;
            }
        }
        let mut asked: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, condition) in self.conditions.iter().enumerate() {
            asked.entry(&condition.call).or_default().push(index);
        }
        for (name, indices) in asked {
            add(name, CallVerdict::Check(indices))?;
        }
        Ok(answers)
    }

    /// Emits the comparisons that lead from a number to its verdict, and returns where they begin.
    fn emit_tree(&self, ranges: &[(u32, CallVerdict)], code: &mut TreeCode) -> JumpTarget {
        if let [(_, verdict)] = ranges {
            return match verdict {
                CallVerdict::Allow => JumpTarget::Return(libc::SECCOMP_RET_ALLOW),
                CallVerdict::Errno(errno) => JumpTarget::Return(libc::SECCOMP_RET_ERRNO | *errno),
                CallVerdict::Check(indices) => code.prepend_block(self.condition_block(indices)),
            };
        }
        let (low, high) = ranges.split_at(ranges.len() / 2);
        let above = self.emit_tree(high, code);
        let below = self.emit_tree(low, code);
        code.prepend_comparison(high[0].0, above, below)
    }

    fn condition_block(&self, indices: &[usize]) -> Vec<libc::sock_filter> {
        let mut block = Vec::new();
        for index in indices {
            emit_condition(&self.conditions[*index], &mut block);
        }
        block.push(bpf_statement(BPF_RETURN, libc::SECCOMP_RET_ALLOW));
        block
    }
}

/// The farthest that a comparison jumps, in instructions.
const MAX_COMPARISON_JUMP: usize = u8::MAX as usize;

/// Where a comparison continues.
#[derive(Clone, Copy, Debug)]
enum JumpTarget {
    /// At an instruction that was emitted, counted from the end of the program.
    Instruction(usize),
    /// At any instruction that returns this value.
    Return(u32),
}

/// A tree of comparisons that is emitted from its end to its beginning: jumps lead only forward, so whatever one may
/// lead to exists by then, and all comparisons nearby share one return of each value.
#[derive(Debug, Default)]
struct TreeCode {
    /// The last instruction first.
    reversed: Vec<libc::sock_filter>,
    /// The latest return of each value.
    returns: BTreeMap<u32, usize>,
}

impl TreeCode {
    fn prepend(&mut self, instruction: libc::sock_filter) -> usize {
        self.reversed.push(instruction);
        self.reversed.len() - 1
    }

    /// How many instructions would be skipped by a jump from the one that is emitted `later` instructions from now.
    fn distance(&self, target: usize, later: usize) -> usize {
        self.reversed.len() + later - target - 1
    }

    fn prepend_block(&mut self, block: Vec<libc::sock_filter>) -> JumpTarget {
        self.reversed.extend(block.into_iter().rev());
        JumpTarget::Instruction(self.reversed.len() - 1)
    }

    fn prepend_comparison(&mut self, number: u32, above: JumpTarget, below: JumpTarget) -> JumpTarget {
        // What brings the second target within reach may move the comparison by one instruction.
        let above = self.bring_within_reach(above, 1);
        let below = self.bring_within_reach(below, 0);
        let distance =
            |target| u8::try_from(self.distance(target, 0)).expect("both targets are within reach");
        let comparison = bpf_jump(BPF_JUMP_AT_LEAST, number, distance(above), distance(below));
        JumpTarget::Instruction(self.prepend(comparison))
    }

    /// Returns an instruction that the comparison emitted at most `later` instructions from now can jump to.
    fn bring_within_reach(&mut self, target: JumpTarget, later: usize) -> usize {
        let is_near = |place: &usize| self.distance(*place, later) <= MAX_COMPARISON_JUMP;
        match target {
            JumpTarget::Instruction(place) if is_near(&place) => place,
            JumpTarget::Instruction(place) => {
                // A plain jump reaches any distance.
                let distance = u32::try_from(self.distance(place, 0)).unwrap_or(u32::MAX);
                self.prepend(bpf_statement(BPF_JUMP, distance))
            }
            JumpTarget::Return(value) => match self.returns.get(&value).copied().filter(is_near) {
                Some(place) => place,
                None => {
                    let place = self.prepend(bpf_statement(BPF_RETURN, value));
                    self.returns.insert(value, place);
                    place
                }
            },
        }
    }

    /// Returns the instructions, the first one first.
    fn into_code(mut self, first: JumpTarget) -> Vec<libc::sock_filter> {
        // A tree without comparisons is one return.
        if let JumpTarget::Return(value) = first {
            self.prepend(bpf_statement(BPF_RETURN, value));
        }
        self.reversed.reverse();
        self.reversed
    }
}

impl SeccompProgram {
    /// Returns what the kernel would do with a call of this architecture, given the low 32 bits of its
    /// arguments: a `SECCOMP_RET_*` value. It interprets the instructions that the compiler emits, so
    /// that filters can be compared without loading them.
    pub fn evaluate(&self, number: u32, arguments: [u32; 6]) -> u32 {
        let mut accumulator = 0;
        let mut at = 0;
        loop {
            let instruction = self.0[at];
            let (k, jt, jf) = (instruction.k, usize::from(instruction.jt), usize::from(instruction.jf));
            at += 1;
            match instruction.code {
                BPF_LOAD => {
                    accumulator = match k {
                        NUMBER_OFFSET => number,
                        ARCHITECTURE_OFFSET => NATIVE_ARCHITECTURE,
                        offset => arguments[((offset - ARGUMENTS_OFFSET) / 8) as usize],
                    }
                }
                BPF_AND => accumulator &= k,
                BPF_JUMP => at += k as usize,
                BPF_JUMP_EQUAL => at += if accumulator == k { jt } else { jf },
                BPF_JUMP_AT_LEAST => at += if accumulator >= k { jt } else { jf },
                BPF_RETURN => return k,
                other => unreachable!("the compiler does not emit {other:#x}"),
            }
        }
    }
}

/// Falls through if the rule matches or does not apply, otherwise returns the condition's errno.
fn emit_condition(condition: &CallCondition, code: &mut Vec<libc::sock_filter>) {
    let mut check = Vec::new();
    emit_argument_check(condition, &mut check);
    if let Some(when) = &condition.only_when {
        let count = u8::try_from(when.one_of.len()).expect("a rule lists fewer than 200 values");
        code.push(bpf_statement(BPF_LOAD, ARGUMENTS_OFFSET + 8 * u32::from(when.argument)));
        for (place, value) in (0u8..).zip(&when.one_of) {
            // A match jumps over the remaining comparisons and the jump behind them.
            code.push(bpf_jump(BPF_JUMP_EQUAL, *value, count - place, 0));
        }
        code.push(bpf_statement(BPF_JUMP, u32::try_from(check.len()).unwrap_or(u32::MAX)));
    }
    code.append(&mut check);
}

fn emit_argument_check(condition: &CallCondition, code: &mut Vec<libc::sock_filter>) {
    let errno = condition.errno.unsigned_abs();
    code.push(bpf_statement(BPF_LOAD, ARGUMENTS_OFFSET + 8 * u32::from(condition.argument)));
    code.push(bpf_statement(BPF_AND, condition.mask));
    let (values, holds_on_match) = match &condition.rule {
        ArgumentRule::OneOf(values) => (values, true),
        ArgumentRule::NoneOf(values) => (values, false),
    };
    let count = u8::try_from(values.len()).expect("a rule lists fewer than 200 values");
    for (place, value) in (0u8..).zip(values) {
        // Each comparison jumps over the remaining ones, to the refusal or past it.
        let left = count - place - 1;
        code.push(bpf_jump(BPF_JUMP_EQUAL, *value, left + 1, 0));
    }
    if holds_on_match {
        code.push(return_errno(errno));
    } else {
        code.push(bpf_statement(BPF_JUMP, 1));
        code.push(return_errno(errno));
    }
}

/// Kills a process that uses the call table of another architecture, and loads the number of the call.
fn program_start() -> Vec<libc::sock_filter> {
    vec![
        bpf_statement(BPF_LOAD, ARCHITECTURE_OFFSET),
        bpf_jump(BPF_JUMP_EQUAL, NATIVE_ARCHITECTURE, 1, 0),
        bpf_statement(BPF_RETURN, libc::SECCOMP_RET_KILL_PROCESS),
        bpf_statement(BPF_LOAD, NUMBER_OFFSET),
    ]
}

fn push_range(ranges: &mut Vec<(u32, CallVerdict)>, from: u32, answer: CallVerdict) {
    match ranges.last_mut() {
        Some(last) if last.0 == from => last.1 = answer,
        Some(last) if last.1 == answer => {}
        _ => ranges.push((from, answer)),
    }
    // A range that became equal to the one before it is merged into it.
    if let [.., (_, before), (_, last)] = ranges.as_slice()
        && before == last
    {
        ranges.pop();
    }
}

fn call_number(call: syscalls::Sysno) -> u32 {
    u32::try_from(call.id()).unwrap_or(u32::MAX)
}

fn return_errno(errno: u32) -> libc::sock_filter {
    bpf_statement(BPF_RETURN, libc::SECCOMP_RET_ERRNO | errno)
}

fn bpf_statement(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

fn bpf_jump(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(program: &SeccompProgram, number: u32, arguments: [u32; 6]) -> u32 {
        program.evaluate(number, arguments)
    }

    fn policy() -> SeccompPolicy {
        SeccompPolicy::parse(
            "test",
            r#"{ "about": "a test", "otherwise": 1,
                 "groups": [{ "name": "basics", "why": "to run", "calls": ["read", "write", "exit", "no_such_call"] }],
                 "refused": [{ "calls": ["clone3"], "why": "flags in memory", "errno": 38 }],
                 "conditions": [
                   { "call": "socket", "why": "families", "argument": 0, "one_of": [1, 2, 10], "errno": 97 },
                   { "call": "socket", "why": "types", "argument": 1, "mask": 15, "one_of": [1, 2],
                     "only_when": { "argument": 0, "one_of": [2, 10] }, "errno": 1 },
                   { "call": "ioctl", "why": "no injection", "argument": 1, "none_of": [21522, 21532], "errno": 1 },
                   { "call": "clone", "why": "no namespaces", "argument": 0, "mask": 268435456, "one_of": [0], "errno": 1 }] }"#,
        )
        .expect("the policy is valid")
    }

    #[test]
    fn every_number_gets_its_verdict() {
        let program = policy().compile().expect("the policy compiles");
        let errno = |number: i32| libc::SECCOMP_RET_ERRNO | number.unsigned_abs();
        for number in 0..600 {
            let name = syscalls::Sysno::new(number).map(|call| call.name());
            let expected = match name {
                Some("read" | "write" | "exit" | "ioctl" | "clone") => libc::SECCOMP_RET_ALLOW,
                Some("clone3") => errno(libc::ENOSYS),
                Some("socket") => errno(97),
                Some(_) => errno(1),
                None => continue,
            };
            assert_eq!(
                run(&program, u32::try_from(number).expect("small"), [0; 6]),
                expected,
                "{number} {name:?}"
            );
        }
        assert_eq!(run(&program, 0x4000_0001, [0; 6]), errno(libc::ENOSYS), "the x32 table is not ours");
    }

    /// Every second call is checked, so that the tree is longer than a comparison can jump.
    #[test]
    fn long_program_gives_every_number_its_verdict() {
        let mut policy = policy();
        policy.groups.clear();
        policy.refused.clear();
        let value_of = |call: syscalls::Sysno| call_number(call) % 7;
        let call_of = |number: usize| syscalls::Sysno::new(number).filter(|_| number.is_multiple_of(2));
        policy.conditions = (0..600)
            .filter_map(call_of)
            .map(|call| CallCondition {
                call: call.name().to_owned(),
                why: "a test".to_owned(),
                argument: 0,
                mask: u32::MAX,
                rule: ArgumentRule::OneOf(vec![value_of(call)]),
                only_when: None,
                errno: 90 + i32::try_from(call_number(call) % 5).expect("small"),
            })
            .collect();
        let program = policy.compile().expect("the policy compiles");
        assert!(program.len() > 4 * MAX_COMPARISON_JUMP, "{}", program.len());
        let errno = |number: u32| libc::SECCOMP_RET_ERRNO | number;
        for number in 0..600u32 {
            let other = match call_of(number as usize) {
                Some(call) => {
                    let value = value_of(call);
                    assert_eq!(run(&program, number, [value; 6]), libc::SECCOMP_RET_ALLOW, "{call}");
                    errno(90 + number % 5)
                }
                None if syscalls::Sysno::new(number as usize).is_some() => errno(1),
                None => errno(libc::ENOSYS.unsigned_abs()),
            };
            assert_eq!(run(&program, number, [7; 6]), other, "{number}");
        }
    }

    #[test]
    fn policy_without_calls_is_one_verdict_for_known_numbers() {
        let mut policy = policy();
        policy.groups.clear();
        policy.refused.clear();
        policy.conditions.clear();
        let program = policy.compile().expect("the policy compiles");
        assert_eq!(run(&program, 0, [0; 6]), libc::SECCOMP_RET_ERRNO | 1);
        let unknown = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
        assert_eq!(run(&program, 100_000, [0; 6]), unknown);
        policy.otherwise = libc::ENOSYS;
        let program = policy.compile().expect("the policy compiles");
        assert_eq!(program.len(), program_start().len() + 1, "it needs no comparison");
        assert_eq!([0, 100_000].map(|number| run(&program, number, [0; 6])), [unknown; 2]);
    }

    #[test]
    fn conditions_check_their_argument() {
        let program = policy().compile().expect("the policy compiles");
        let number = |name: &str| call_number(name.parse().expect("a call"));
        let allowed =
            |name: &str, arguments| run(&program, number(name), arguments) == libc::SECCOMP_RET_ALLOW;
        for family in 0..50 {
            assert_eq!(allowed("socket", [family, 1, 0, 0, 0, 0]), [1, 2, 10].contains(&family), "{family}");
            assert_eq!(allowed("socket", [family, 3, 0, 0, 0, 0]), family == 1, "a raw socket of {family}");
        }
        assert!(allowed("ioctl", [0, 21505, 0, 0, 0, 0]));
        assert!(!allowed("ioctl", [0, 21522, 0, 0, 0, 0]));
        assert!(!allowed("ioctl", [0, 21532, 0, 0, 0, 0]));
        assert!(allowed("clone", [17, 0, 0, 0, 0, 0]));
        assert!(!allowed("clone", [0x1000_0011, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn set_id_bits_can_be_forbidden() {
        let policy = SeccompPolicy::parse(
            "test",
            r#"{ "about": "a test", "otherwise": 1,
                 "groups": [{ "name": "files", "why": "to run", "calls": ["fchmod", "openat", "openat2"] }] }"#,
        );
        let program =
            policy.expect("the policy is valid").without_set_id().compile().expect("the policy compiles");
        let number = |name: &str| call_number(name.parse().expect("a call"));
        let answer = |name: &str, mode| run(&program, number(name), [0, mode, mode, mode, 0, 0]);
        for mode in [0, 0o644, 0o755, 0o1777] {
            assert_eq!(answer("fchmod", mode), libc::SECCOMP_RET_ALLOW, "{mode:o}");
            assert_eq!(answer("openat", mode), libc::SECCOMP_RET_ALLOW, "{mode:o}");
        }
        for mode in [0o4755, 0o2755, 0o6000] {
            assert_ne!(answer("fchmod", mode), libc::SECCOMP_RET_ALLOW, "{mode:o}");
            assert_ne!(answer("openat", mode), libc::SECCOMP_RET_ALLOW, "{mode:o}");
        }
        assert_eq!(answer("openat2", 0), libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs());
    }

    #[test]
    fn program_survives_conversion_to_words() {
        let program = policy().compile().expect("the policy compiles");
        assert_eq!(SeccompProgram::from_words(&program.to_words()).to_words(), program.to_words());
    }
}

//! Commands that a sandbox runs by itself: one before its main process, others on a schedule.

use std::time::{Duration, SystemTime};

use cronexpr::jiff::Timestamp;
use cronexpr::{Crontab, FallbackTimezoneOption, MakeTimestamp, ParseOptions};

/// The maximum number of periodic hooks of one sandbox.
pub const MAX_PERIODIC_HOOKS: usize = 32;

const MAX_HOOK_NAME_BYTES: usize = 128;
const MAX_SCHEDULE_BYTES: usize = 256;
const MAX_COMMAND_BYTES: usize = 64 << 10;

/// All hooks of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxHooks {
    /// Must succeed before the entrypoint starts; otherwise creating the sandbox fails.
    pub before: Option<HookCommand>,
    pub periodic: Vec<PeriodicHook>,
}

/// A command and its time limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookCommand {
    pub command: Vec<String>,
    pub timeout: Duration,
}

/// A named hook that runs on a schedule, never twice at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeriodicHook {
    pub name: String,
    pub schedule: HookSchedule,
    pub hook: HookCommand,
}

/// When something is due: `*/5 * * * *` in UTC, `@hourly` and the like, or `@every 30s`.
#[derive(Clone, Debug)]
pub struct HookSchedule {
    text: String,
    times: ScheduleRule,
}

#[derive(Clone, Debug)]
enum ScheduleRule {
    Every(Duration),
    At(Box<Crontab>),
}

/// The reason why hooks are rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookError {
    #[error("a hook command must have a first word, no NUL byte and at most {MAX_COMMAND_BYTES} bytes")]
    Command,
    #[error("a hook name must have 1 to {MAX_HOOK_NAME_BYTES} bytes and no control characters")]
    Name,
    #[error("hook name `{0}` is used twice")]
    NameTwice(String),
    #[error("`{0}` is not a valid schedule")]
    Schedule(String),
    #[error("a sandbox may have at most {MAX_PERIODIC_HOOKS} periodic hooks")]
    TooMany,
}

impl HookCommand {
    /// Checks a command. How long a hook may take is the choice of the API that it comes from.
    pub fn new(command: Vec<String>, timeout: Duration) -> Result<Self, HookError> {
        let size: usize = command.iter().map(|word| word.len() + 1).sum();
        let named = command.first().is_some_and(|word| !word.trim().is_empty());
        if !named || size > MAX_COMMAND_BYTES || command.iter().any(|word| word.contains('\0')) {
            return Err(HookError::Command);
        }
        Ok(Self { command, timeout })
    }
}

impl PeriodicHook {
    pub fn new(name: &str, schedule: &str, hook: HookCommand) -> Result<Self, HookError> {
        let name = name.trim();
        if !(1..=MAX_HOOK_NAME_BYTES).contains(&name.len()) || name.contains(char::is_control) {
            return Err(HookError::Name);
        }
        Ok(Self { name: name.to_owned(), schedule: HookSchedule::parse(schedule)?, hook })
    }
}

impl SandboxHooks {
    /// Checks the rules that concern several hooks together.
    pub fn check(&self) -> Result<(), HookError> {
        if self.periodic.len() > MAX_PERIODIC_HOOKS {
            return Err(HookError::TooMany);
        }
        for (index, hook) in self.periodic.iter().enumerate() {
            if self.periodic[..index].iter().any(|other| other.name == hook.name) {
                return Err(HookError::NameTwice(hook.name.clone()));
            }
        }
        Ok(())
    }
}

impl HookSchedule {
    pub fn parse(text: &str) -> Result<Self, HookError> {
        let wrong = || HookError::Schedule(text.chars().take(MAX_SCHEDULE_BYTES).collect());
        let text = text.trim();
        if text.len() > MAX_SCHEDULE_BYTES {
            return Err(wrong());
        }
        let times = match text.strip_prefix("@every ") {
            Some(span) => ScheduleRule::Every(parse_interval(span.trim()).ok_or_else(wrong)?),
            None => ScheduleRule::At(Box::new(parse_crontab(text).ok_or_else(wrong)?)),
        };
        Ok(Self { text: text.to_owned(), times })
    }

    /// The schedule as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the first moment after `moment` at which it is due, if there is one.
    pub fn next_after(&self, moment: SystemTime) -> Option<SystemTime> {
        match &self.times {
            ScheduleRule::Every(span) => moment.checked_add(*span),
            ScheduleRule::At(crontab) => {
                let moment = Timestamp::try_from(moment).ok()?;
                crontab.find_next(MakeTimestamp(moment)).ok().map(|next| next.timestamp().into())
            }
        }
    }
}

impl PartialEq for HookSchedule {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for HookSchedule {}

/// Parses five fields, or one of the words that stand for them. The only time zone is UTC: a sixth
/// word would name a zone that the host may not know.
fn parse_crontab(text: &str) -> Option<Crontab> {
    let fields = match text {
        "@yearly" | "@annually" => "0 0 1 1 *",
        "@monthly" => "0 0 1 * *",
        "@weekly" => "0 0 * * 0",
        "@daily" | "@midnight" => "0 0 * * *",
        "@hourly" => "0 * * * *",
        fields => fields,
    };
    if fields.split_whitespace().count() != 5 {
        return None;
    }
    let mut options = ParseOptions::default();
    options.fallback_timezone_option = FallbackTimezoneOption::UTC;
    cronexpr::parse_crontab_with(fields, options).ok()
}

/// Parses whole seconds, at least one: `30s`, `5m`, `1h30m`.
fn parse_interval(text: &str) -> Option<Duration> {
    let mut seconds: u64 = 0;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
        let count: u64 = rest[..end].parse().ok()?;
        let unit = rest[end..].chars().next()?;
        let factor = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            _ => return None,
        };
        seconds = seconds.checked_add(count.checked_mul(factor)?)?;
        rest = &rest[end + unit.len_utf8()..];
    }
    (seconds > 0).then(|| Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    /// Checks the seconds from `now` until the schedule is next due.
    fn check(schedule: &str, now: u64, expected: Option<u64>) {
        let next = HookSchedule::parse(schedule).ok().and_then(|schedule| {
            let next = schedule.next_after(UNIX_EPOCH + Duration::from_secs(now))?;
            next.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs() - now)
        });
        assert_eq!(next, expected, "{schedule}");
    }

    #[test]
    fn schedules_compute_the_next_due_time() {
        check("* * * * *", 90, Some(30));
        check("*/5 * * * *", 1, Some(299));
        check("0 12 * * *", 0, Some(43_200));
        check("30 4 * * mon", 0, Some(4 * 86_400 + 4 * 3600 + 1800));
        check("@hourly", 10, Some(3590));
        check("@every 30s", 7, Some(30));
        check("@every 1h30m", 7, Some(5400));
        for wrong in ["", "* * * *", "* * * * * *", "60 * * * *", "@often", "@every", "@every 0s"] {
            check(wrong, 0, None);
        }
        for wrong in ["@every 1.5s", "@every 10", "@every s", "@every 99999999999999999h", "* * * * UTC"] {
            check(wrong, 0, None);
        }
    }

    #[test]
    fn hooks_are_limited_and_have_distinct_names() {
        let words = |word: &str| vec![word.to_owned()];
        let timeout = Duration::from_secs(60);
        let hook = HookCommand::new(words("true"), timeout).expect("a valid hook");
        for wrong in [Vec::new(), words(""), words(" "), words("a\0"), words(&"x".repeat(1 << 20))] {
            assert_eq!(HookCommand::new(wrong, timeout), Err(HookError::Command));
        }
        let periodic = |name: &str| PeriodicHook::new(name, "@hourly", hook.clone());
        assert_eq!(periodic(" a "), periodic("a"));
        assert_eq!(periodic("  "), Err(HookError::Name));
        let twice = vec![periodic("a").expect("a hook"), periodic("a").expect("a hook")];
        let hooks = SandboxHooks { before: None, periodic: twice };
        assert_eq!(hooks.check(), Err(HookError::NameTwice("a".to_owned())));
    }
}

//! Commands that a sandbox runs by itself: one before its main process, others on a schedule or before it is removed.

use std::time::{Duration, SystemTime};

use cronexpr::jiff::Timestamp;
use cronexpr::{Crontab, FallbackTimezoneOption, MakeTimestamp, ParseOptions};

/// The maximum number of periodic hooks of one sandbox.
pub const MAX_PERIODIC_HOOKS: usize = 32;

/// The maximum number of shutdown hooks of one sandbox.
pub const MAX_SHUTDOWN_HOOKS: usize = 32;

/// How long all shutdown hooks of a sandbox may take together. A client that removes a sandbox waits for them.
pub const SHUTDOWN_HOOKS_TIMEOUT: Duration = Duration::from_secs(10);

const MAX_HOOK_NAME_BYTES: usize = 128;
const MAX_SCHEDULE_BYTES: usize = 256;
const MAX_COMMAND_BYTES: usize = 64 << 10;

/// All hooks of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxHooks {
    /// Must succeed before the entrypoint starts; otherwise creating the sandbox fails.
    pub before: Option<HookCommand>,
    pub periodic: Vec<PeriodicHook>,
    /// Run once when the sandbox is removed, before its processes end.
    pub shutdown: Vec<ShutdownHook>,
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

/// A named hook that runs when the sandbox is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownHook {
    pub name: String,
    /// Hooks with a lower number run first, and those with the same number at the same time.
    pub priority: i64,
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
    #[error("a sandbox may have at most {MAX_SHUTDOWN_HOOKS} shutdown hooks")]
    TooManyAtShutdown,
    #[error("a shutdown hook may take at most {} seconds", SHUTDOWN_HOOKS_TIMEOUT.as_secs())]
    ShutdownTimeout,
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
        Ok(Self { name: check_name(name)?, schedule: HookSchedule::parse(schedule)?, hook })
    }
}

impl ShutdownHook {
    pub fn new(name: &str, priority: i64, hook: HookCommand) -> Result<Self, HookError> {
        if hook.timeout.is_zero() || hook.timeout > SHUTDOWN_HOOKS_TIMEOUT {
            return Err(HookError::ShutdownTimeout);
        }
        Ok(Self { name: check_name(name)?, priority, hook })
    }
}

fn check_name(name: &str) -> Result<String, HookError> {
    let name = name.trim();
    if !(1..=MAX_HOOK_NAME_BYTES).contains(&name.len()) || name.contains(char::is_control) {
        return Err(HookError::Name);
    }
    Ok(name.to_owned())
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

    /// Adds a shutdown hook, or replaces the one with the same name.
    pub fn put_shutdown_hook(&mut self, hook: ShutdownHook) -> Result<(), HookError> {
        match self.shutdown.iter().position(|other| other.name == hook.name) {
            Some(index) => self.shutdown[index] = hook,
            None if self.shutdown.len() >= MAX_SHUTDOWN_HOOKS => return Err(HookError::TooManyAtShutdown),
            None => self.shutdown.push(hook),
        }
        Ok(())
    }

    /// Removes the shutdown hook with this name; false if there is none.
    pub fn remove_shutdown_hook(&mut self, name: &str) -> bool {
        let count = self.shutdown.len();
        self.shutdown.retain(|hook| hook.name != name);
        self.shutdown.len() < count
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
        let hooks = SandboxHooks { periodic: twice, ..SandboxHooks::default() };
        assert_eq!(hooks.check(), Err(HookError::NameTwice("a".to_owned())));
    }

    #[test]
    fn shutdown_hooks_replace_each_other_by_name_and_are_limited() {
        let hook =
            |seconds| HookCommand { command: vec!["x".to_owned()], timeout: Duration::from_secs(seconds) };
        assert_eq!(ShutdownHook::new("a", 1, hook(11)), Err(HookError::ShutdownTimeout));
        assert_eq!(ShutdownHook::new("a", 1, hook(0)), Err(HookError::ShutdownTimeout));
        let mut hooks = SandboxHooks::default();
        for number in 0..MAX_SHUTDOWN_HOOKS {
            let added = ShutdownHook::new(&number.to_string(), 1, hook(10)).expect("a hook");
            hooks.put_shutdown_hook(added).expect("room");
        }
        let more = ShutdownHook::new("more", 1, hook(1)).expect("a hook");
        assert_eq!(hooks.put_shutdown_hook(more), Err(HookError::TooManyAtShutdown));
        let changed = ShutdownHook::new("3", 7, hook(1)).expect("a hook");
        hooks.put_shutdown_hook(changed.clone()).expect("a hook with this name exists");
        assert_eq!((hooks.shutdown.len(), &hooks.shutdown[3]), (MAX_SHUTDOWN_HOOKS, &changed));
        assert!(hooks.remove_shutdown_hook("3") && !hooks.remove_shutdown_hook("3"));
    }
}

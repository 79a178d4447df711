//! The processes of one server: finding them, killing them, waiting until they are replaced.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use e2e::run::TestUser;
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KilledProcess {
    Supervisor,
    Server,
    Launcher,
    /// The process that carries the traffic of filtered networks. Only the rounds for those kill it.
    Egress,
    /// The first process of the sandbox that the first operation is about.
    Agent,
}

impl KilledProcess {
    pub(super) const ALL: [Self; 4] = [Self::Supervisor, Self::Server, Self::Launcher, Self::Agent];

    fn role(self) -> &'static str {
        match self {
            Self::Server => "__server",
            Self::Launcher => "__launcher",
            Self::Egress => "__egress",
            Self::Supervisor | Self::Agent => unreachable!("these are found differently"),
        }
    }
}

/// A server whose parts can be killed one by one.
pub(super) struct ServerParts {
    pub(super) server: TestServer,
    user: TestUser,
    network: &'static str,
    instance: String,
    environment: &'static [(&'static str, &'static str)],
    /// All parts and first processes of sandboxes that ever existed. Pids are reused soon, so each is
    /// stored with its start time.
    seen: BTreeSet<(u32, u64)>,
}

impl ServerParts {
    pub(super) fn start(user: TestUser, network: &'static str, instance: &str) -> Self {
        Self::start_with(user, network, instance, &[])
    }

    /// As [`ServerParts::start`], with variables of the environment.
    pub(super) fn start_with(
        user: TestUser,
        network: &'static str,
        instance: &str,
        environment: &'static [(&'static str, &'static str)],
    ) -> Self {
        let server = server_builder(user, network, instance, environment).start();
        let (instance, seen) = (instance.to_owned(), BTreeSet::new());
        let mut parts = Self { server, user, network, instance, environment, seen };
        parts.record_processes();
        parts
    }

    pub(super) fn record_processes(&mut self) {
        self.record_tree(self.server.pid());
    }

    fn record_tree(&mut self, supervisor: u32) {
        let all = children(supervisor).into_iter().chain([supervisor]);
        self.seen.extend(all.filter_map(|pid| Some((pid, start_time_of(pid)?))));
        let records = fs::read_dir(self.server.state_directory().join("boxes")).into_iter().flatten();
        self.seen.extend(records.flatten().filter_map(|record| first_process(&record.path())));
    }

    /// The pid of a part, once it has one. The part is a child of the supervisor, which the kernel shows.
    pub(super) fn pid(&self, part: KilledProcess) -> u32 {
        let mut found = None;
        e2e::eventually("the part runs", || {
            found = children(self.server.pid()).into_iter().find(|pid| arguments(*pid).contains(part.role()));
            found.is_some()
        });
        found.expect("it was waited for")
    }

    pub(super) fn kill_supervisor(&mut self) {
        self.record_processes();
        self.server.kill();
    }

    /// Kills the server or the launcher, and returns which process that was.
    pub(super) fn kill_part(&mut self, part: KilledProcess) -> u32 {
        let pid = self.pid(part);
        self.record_processes();
        kill(pid);
        pid
    }

    /// Starts the supervisor at its former address; with `cut`, the first attempt is killed that soon.
    pub(super) fn start_again(&mut self, cut: Option<Duration>) {
        let start = server_builder(self.user, self.network, &self.instance, self.environment);
        let start = start.listen(self.server.address());
        if let Some(moment) = cut {
            let mut attempt = start.spawn(self.server.directory());
            std::thread::park_timeout(moment);
            self.record_tree(attempt.id());
            attempt.kill().expect("it is our child");
            attempt.wait().expect("it is our child");
        }
        self.server.restart(&start);
        self.record_processes();
    }

    /// Waits until the supervisor has replaced a part; with `cut`, the first successor is killed that soon.
    pub(super) fn wait_for_successor(&mut self, part: KilledProcess, of: u32, cut: Option<Duration>) {
        let mut former = of;
        if let Some(moment) = cut {
            self.wait_for_other(part, former);
            std::thread::park_timeout(moment);
            former = self.kill_part(part);
        }
        self.wait_for_other(part, former);
        self.record_processes();
    }

    fn wait_for_other(&self, part: KilledProcess, than: u32) {
        e2e::eventually("the part is started again", || self.pid(part) != than);
    }

    /// Waits until the server answers.
    pub(super) fn wait_until_healthy(&self) {
        e2e::eventually("the server is healthy", || {
            self.server.client().get("/health").is_ok_and(|answer| answer.status == 200)
        });
    }

    /// The first process of a sandbox, according to the launcher's record.
    pub(super) fn agent(&self, id: &str) -> Option<u32> {
        first_process(&self.server.state_directory().join("boxes").join(id)).map(|(pid, _)| pid)
    }

    /// Sandboxes of this launcher, living or dead.
    pub(super) fn sandbox_pids(&self) -> BTreeSet<u32> {
        children(self.pid(KilledProcess::Launcher))
    }

    /// Parts and sandboxes that still exist although their server has ended.
    pub(super) fn survivors(&self) -> Vec<String> {
        let alive = self.seen.iter().filter(|(pid, born)| start_time_of(*pid) == Some(*born));
        alive.map(|(pid, _)| format!("{pid} {}", arguments(*pid))).collect()
    }
}

/// An ordinary user's server must be allowed to run without limits.
fn server_builder(
    user: TestUser,
    network: &str,
    instance: &str,
    environment: &[(&str, &str)],
) -> ServerBuilder {
    let start = environment.iter().fold(ServerBuilder::new(), |start, (name, value)| start.env(name, value));
    let start = start.as_user(user).env("CORACLE_INSTANCE", instance).env("CORACLE_NETWORK_DEFAULT", network);
    if user == TestUser::Same { start } else { start.env("CORACLE_REQUIRE_LIMITS", "false") }
}

/// Kills a process that is not our child. A process that has already ended is not an error.
pub(super) fn kill(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid is not zero");
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) {
        pidfd_send_signal(&process, Signal::KILL).ok();
    }
}

/// Pid and start time of a sandbox's first process, from its record.
fn first_process(record: &Path) -> Option<(u32, u64)> {
    let record: serde_json::Value = serde_json::from_slice(&fs::read(record).ok()?).ok()?;
    let process = &record["process"];
    Some((u32::try_from(process["pid"].as_u64()?).ok()?, process["started"].as_u64()?))
}

/// The launcher below a supervisor.
pub(crate) fn launcher_of(supervisor: u32) -> Option<u32> {
    children(supervisor).into_iter().find(|pid| arguments(*pid).contains(KilledProcess::Launcher.role()))
}

pub(super) fn children(pid: u32) -> BTreeSet<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// The start time of a living process, in ticks since boot. A process that has ended and that the host's
/// init has not reaped yet does not count as living.
fn start_time_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; the start time is the 20th word after it.
    let mut words = stat.rsplit_once(')')?.1.split_whitespace();
    if words.next()? == "Z" {
        return None;
    }
    words.nth(18)?.parse().ok()
}

fn arguments(pid: u32) -> String {
    let line = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cmdline"));
    line.unwrap_or_default().replace('\0', " ")
}

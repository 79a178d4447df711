//! Limits that a group enforces, and full disks.

use std::path::{Path, PathBuf};

use wire::process::{ExitReason, UserIdentity};
use wire::{AgentReply, AgentRequest};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode, remove_group};

/// A v1 group of one controller with a limit, removed at the end.
struct LimitedGroup(PathBuf);

impl LimitedGroup {
    fn new(controller: &str, file: &str, limit: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup").join(controller);
        if !rustix::process::geteuid().is_root() || !root.join("tasks").exists() {
            testkit::skip_test(&format!("the v1 controller `{controller}` is not available"));
            return None;
        }
        let name = tempfile::Builder::new().prefix("coracle-test-").tempdir_in("/tmp").unwrap();
        let group = root.join(name.path().file_name().unwrap());
        std::fs::create_dir(&group).unwrap();
        std::fs::write(group.join(file), limit).unwrap();
        Some(Self(group))
    }

    fn file(&self, word: &str, name: &str) -> String {
        format!("{word}={}", self.0.join(name).display())
    }
}

impl Drop for LimitedGroup {
    fn drop(&mut self) {
        remove_group(&self.0);
    }
}

#[test]
fn lack_of_memory_is_reported_and_ends_only_its_process() {
    let Some(memory) = LimitedGroup::new("memory", "memory.limit_in_bytes", "33554432") else { return };
    let limits = [memory.file("tasks", "tasks"), memory.file("oom", "memory.oom_control")];
    let agent = TestAgent::with_limits(TreeMode::Runners, &limits, |_| {});
    let hungry = agent.run(shell("eater", "x=y; while :; do x=$x$x; done"));
    assert_eq!(hungry.exit(), ExitReason::Oom);
    let through_a_shell = agent.run(shell("shell", "bash -c 'x=y; while :; do x=$x$x; done'; exit $?"));
    assert_eq!(through_a_shell.exit(), ExitReason::Oom);
    assert_eq!(agent.run(shell("killed", "kill -9 $$")).exit(), ExitReason::Signal(9));
    assert_eq!(agent.run(shell("after", "echo well")).stdout(), "well\n");
}

#[test]
fn commands_and_files_work_while_the_number_of_processes_is_exhausted() {
    let Some(pids) = LimitedGroup::new("pids", "pids.max", "20") else { return };
    let agent = TestAgent::with_limits(TreeMode::Groups, &[pids.file("tasks", "tasks")], |_| {});
    // The shell itself is the twentieth process.
    let mut bomb = agent.start(shell("bomb", "for i in {1..19}; do sleep 1000 & done; echo full; wait"));
    bomb.read_text(5);
    assert_eq!(std::fs::read_to_string(pids.0.join("pids.current")).unwrap(), "20\n");
    let output = agent.run(shell("more", "echo more"));
    assert_eq!((output.stdout().as_str(), output.exit()), ("more\n", ExitReason::Code(0)));
    let operation = wire::files::FileOperation::Stat { paths: vec!["/".to_owned()] };
    let file =
        wire::files::FileRequest { identity: UserIdentity::Default, isolated_session: None, operation };
    assert!(matches!(agent.reply(AgentRequest::File(file)), AgentReply::Info(_)));
    agent.signal("bomb", 9, wire::process::SignalTarget::Tree);
    assert_eq!(bomb.output().exit(), ExitReason::Signal(9));
}

#[test]
fn full_disk_loses_only_output() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_small_journals(TreeMode::Runners, "size=256k");
    let output = agent.run(shell("flood", "seq 1 200000; exit 6"));
    assert_eq!(output.exit(), ExitReason::Code(6));
    let expected: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(output.ended.written, expected.len() as u64);
    let again = agent.follow("flood", 0).output();
    again.bytes_from(0);
    assert!(!again.gaps.is_empty(), "not everything can have been kept");
    for (_, offset, bytes) in &again.pieces {
        let start = usize::try_from(*offset).unwrap();
        assert_eq!(&expected.as_bytes()[start..start + bytes.len()], bytes);
    }
    assert_eq!(agent.run(shell("after", "exit 3")).exit(), ExitReason::Code(3));
}

//! Signals, deadlines, and how processes end because of them.

use std::path::Path;
use std::time::{Duration, Instant};

use wire::process::{ExitReason, SignalTarget};
use wire::{AgentReply, FaultKind};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

/// Starts a child that has left its process group, its session and its parent, prints its pid, and
/// ignores every signal that can be ignored.
const DAEMON: &str =
    "(setsid sh -c 'trap \"\" TERM INT HUP; (echo $$; exec sleep 1000) &') & wait; exec sleep 1000";

/// Waits for the end of a process that is not our child.
pub(crate) fn wait_until_gone(pid: i32) {
    let begun = Instant::now();
    let stat = format!("/proc/{pid}/stat");
    while Path::new(&stat).exists() {
        assert!(begun.elapsed() < Duration::from_secs(10), "process {pid} still runs");
        std::thread::yield_now();
    }
}

/// Waits until the process has a child that runs this program.
fn wait_for_child(pid: i32, program: &str) {
    let begun = Instant::now();
    let runs_it = |child: &str| {
        std::fs::read_to_string(format!("/proc/{child}/comm")).is_ok_and(|name| name.trim_end() == program)
    };
    loop {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        if children.split_whitespace().any(runs_it) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "process {pid} never ran {program}");
        std::thread::yield_now();
    }
}

fn daemon_pid(output: &str) -> i32 {
    output.trim().parse().expect("the daemon prints its pid")
}

#[test]
fn code_signal_and_deadline_are_distinguished() {
    with_both_tree_modes(|agent| {
        assert_eq!(agent.run(shell("code", "exit 143")).exit(), ExitReason::Code(143));
        assert_eq!(agent.run(shell("signal", "kill -TERM $$")).exit(), ExitReason::Signal(15));
        let mut start = shell("deadline", "echo before; exec sleep 1000");
        start.deadline_ms = Some(1000);
        let output = agent.run(start);
        assert_eq!((output.exit(), output.stdout().as_str()), (ExitReason::Deadline, "before\n"));
        assert!((1000..20_000).contains(&output.ended.duration_ms), "{:?}", output.ended);
        let mut start = shell("early", "exit 0");
        start.deadline_ms = Some(60_000);
        assert_eq!(agent.run(start).exit(), ExitReason::Code(0));
    });
}

#[test]
fn deadline_kills_a_child_that_left_its_group_and_session() {
    with_both_tree_modes(|agent| {
        let mut start = shell("daemon", DAEMON);
        start.deadline_ms = Some(1000);
        let output = agent.run(start);
        assert_eq!(output.exit(), ExitReason::Deadline);
        wait_until_gone(daemon_pid(&output.stdout()));
    });
}

#[test]
fn processes_left_by_a_finished_command_can_be_killed() {
    with_both_tree_modes(|agent| {
        let output = agent.run(shell("left", "setsid sleep 1000 & echo $!"));
        let pid = daemon_pid(&output.stdout());
        assert!(Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(agent.signal("left", 9, SignalTarget::Tree), AgentReply::Ok);
        wait_until_gone(pid);
    });
}

#[test]
fn processes_left_running_are_reported() {
    with_both_tree_modes(|agent| {
        let left = |name: &str| match agent.reply(wire::AgentRequest::Status { process: name.to_owned() }) {
            AgentReply::Status(status) => status.left,
            other => panic!("{other:?}"),
        };
        let output = agent.run(shell("left", "setsid sleep 1000 & echo $!"));
        assert!(left("left"));
        assert_eq!(agent.signal("left", 9, SignalTarget::Tree), AgentReply::Ok);
        wait_until_gone(daemon_pid(&output.stdout()));
        let begun = Instant::now();
        while left("left") {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "the status still reports a process that has ended"
            );
        }
    });
}

#[test]
fn signal_to_the_group_spares_processes_that_left_it() {
    with_both_tree_modes(|agent| {
        let script = "trap 'echo caught; exit 9' INT; setsid sh -c 'echo $$; exec sleep 1000' & while :; do sleep 0.01; done";
        let mut talk = agent.start(shell("group", script));
        let pid: i32 = talk.read_text(2).trim().parse().unwrap();
        assert_eq!(agent.signal("group", 2, SignalTarget::Group), AgentReply::Ok);
        let output = talk.output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("caught\n", ExitReason::Code(9)));
        assert!(Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(agent.signal("group", 15, SignalTarget::Tree), AgentReply::Ok);
        wait_until_gone(pid);
    });
}

#[test]
fn cleanup_program_is_not_interrupted() {
    with_both_tree_modes(|agent| {
        // The handler takes a moment, so that the agent has recorded the members long before.
        let moment = "n=0; while [ $n -lt 500000 ]; do n=$((n+1)); done";
        let script = format!(
            "trap '{moment}; sleep 0.7 && echo clean; exit 9' INT; echo $$; while :; do sleep 1000; done"
        );
        let mut talk = agent.start(shell("cleaning", &script));
        let pid: i32 = talk.read_text(2).trim().parse().unwrap();
        // A shell that is interrupted just before it forks runs its handler after the child's end.
        wait_for_child(pid, "sleep");
        assert_eq!(agent.signal("cleaning", 2, SignalTarget::Group), AgentReply::Ok);
        let output = talk.output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("clean\n", ExitReason::Code(9)));
    });
}

/// Many interpreters do this at their end.
#[test]
fn process_that_handled_an_interrupt_gets_no_second_one() {
    with_both_tree_modes(|agent| {
        let script = "import signal, time\n\
            try:\n    print('on', flush=True)\n    time.sleep(1000)\n\
            except KeyboardInterrupt:\n    pass\n\
            signal.signal(signal.SIGINT, signal.SIG_DFL)\n\
            time.sleep(1.5)\n\
            print('clean')\n";
        let mut talk = agent.start(crate::client::argv("polite", &["/usr/bin/python3", "-c", script]));
        assert_eq!(talk.read_text(3), "on\n");
        assert_eq!(agent.signal("polite", 2, SignalTarget::Group), AgentReply::Ok);
        let output = talk.output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("clean\n", ExitReason::Code(0)));
    });
}

#[test]
fn signal_to_a_missing_process_is_not_found() {
    with_both_tree_modes(|agent| {
        agent.run(shell("gone", "true"));
        // The group or the runner ends a moment after the end was reported.
        let begun = Instant::now();
        loop {
            match agent.signal("gone", 15, SignalTarget::Tree) {
                AgentReply::Fault(fault) if fault.kind == FaultKind::NotFound => break,
                other => assert!(begun.elapsed() < Duration::from_secs(10), "{other:?}"),
            }
        }
        let AgentReply::Fault(fault) = agent.signal("unknown", 9, SignalTarget::Tree) else {
            panic!("a fault")
        };
        assert_eq!(fault.kind, FaultKind::NotFound);
        let AgentReply::Fault(fault) = agent.signal("gone", 12_345, SignalTarget::Tree) else {
            panic!("a fault")
        };
        assert_eq!(fault.kind, FaultKind::Invalid);
    });
}

#[test]
fn groups_of_finished_commands_are_removed() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Groups);
    assert!(agent.command_groups().is_empty(), "an unused agent has no spare group");
    for number in 0..20 {
        agent.run(shell(&format!("n{number}"), "true"));
    }
    let left = agent.run(shell("left", "sleep 1000 & echo $!"));
    let begun = Instant::now();
    // One more group is made ahead for the next command.
    while agent.command_groups().len() > 2 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.command_groups());
    }
    agent.signal("left", 9, SignalTarget::Tree);
    wait_until_gone(daemon_pid(&left.stdout()));
    while agent.command_groups().len() > 1 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.command_groups());
    }
}

#[test]
fn lost_spare_group_is_replaced() {
    if !testkit::needs_root() {
        return;
    }
    let agent = TestAgent::with_trees(TreeMode::Groups);
    for number in 0..3 {
        let run = agent.run(shell(&format!("n{number}"), "echo ran"));
        assert_eq!(run.stdout(), "ran\n");
        let begun = Instant::now();
        // The group of the command is removed, and then a spare one is made.
        let spare = loop {
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", agent.command_groups());
            match agent.command_groups().as_slice() {
                [only] if std::fs::remove_dir(only).is_ok() => break only.clone(),
                _ => {}
            }
        };
        assert!(!spare.exists());
    }
}

#[test]
fn signals_from_inside_do_not_reach_the_agent() {
    with_both_tree_modes(|agent| {
        let pid = agent.pid();
        for signal in ["TERM", "INT", "HUP", "USR1", "PIPE", "CHLD", "ALRM"] {
            agent.run(shell(signal, &format!("kill -{signal} {pid}")));
        }
        assert_eq!(agent.reply(wire::AgentRequest::Ping), AgentReply::Ok);
    });
}

#[test]
fn orphans_are_reaped() {
    with_both_tree_modes(|agent| {
        let output = agent.run(shell("orphan", "(setsid sh -c 'echo $$; exec true' &)"));
        // It has become a child of the agent or of the runner, and has ended.
        if let Ok(pid) = output.stdout().trim().parse() {
            wait_until_gone(pid);
        }
        assert_eq!(output.exit(), ExitReason::Code(0));
    });
}

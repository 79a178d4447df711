//! Journals and their followers.

use std::io::Read;

use wire::process::{ExitReason, OutputRetention};
use wire::{AgentReply, AgentRequest, FaultKind, Frame};

use crate::client::shell;
use crate::harness::{TestAgent, TreeMode, with_both_tree_modes};

#[test]
fn process_can_be_followed_repeatedly_from_any_offset_after_its_end() {
    with_both_tree_modes(|agent| {
        let whole = agent.run(shell("seq", "seq 1 50000")).bytes_from(0);
        for from in [0, 1, 7, 65_535, 65_536, 200_001, whole.len() as u64 - 1] {
            let again = agent.follow("seq", from).output();
            let start = usize::try_from(from).unwrap();
            assert_eq!(again.bytes_from(from), whole[start..], "from {from}");
        }
        let behind = agent.follow("seq", whole.len() as u64 + 5).output();
        assert!(behind.pieces.is_empty() && behind.gaps.is_empty());
    });
}

#[test]
fn followers_that_join_while_it_runs_see_every_byte() {
    with_both_tree_modes(|agent| {
        let mut start = shell("slow", "echo one; read x; echo two");
        start.stdin = true;
        let mut first = agent.start(start);
        assert_eq!(first.read_text(4), "one\n");
        let second = agent.follow("slow", 0);
        let third = agent.follow("slow", 2);
        let mut input = agent.send_request(AgentRequest::Input { process: "slow".to_owned() });
        input.send(&Frame::Data(b"\n"[..].into()));
        assert_eq!(first.output().stdout(), "two\n");
        assert_eq!(second.output().stdout(), "one\ntwo\n");
        assert_eq!(third.output().stdout(), "e\ntwo\n");
    });
}

#[test]
fn output_beyond_retention_is_an_exact_gap() {
    with_both_tree_modes(|agent| {
        let mut start = shell("much", "seq 1 1500000");
        start.retention = OutputRetention { first: 1000, last: 100_000, lossless: false, stall_ms: None };
        let live = agent.run(start);
        let written = live.ended.written;
        live.bytes_from(0);
        let expected: String = (1..=1_500_000).map(|number| format!("{number}\n")).collect();
        assert_eq!(written, expected.len() as u64);
        let late = agent.follow("much", 0).output();
        late.bytes_from(0);
        let [(from, to)] = late.gaps[..] else { panic!("one gap, not {:?}", late.gaps) };
        assert_eq!(from, 1000);
        assert!(to <= written - 100_000, "the last bytes are kept: {to}");
        assert!(to > written - 400_000, "the middle is not kept: {to}");
        for (_, offset, bytes) in &late.pieces {
            let start = usize::try_from(*offset).unwrap();
            assert_eq!(&expected.as_bytes()[start..start + bytes.len()], bytes);
        }
        let inside = agent.follow("much", from + 5).output();
        assert_eq!(inside.gaps, [(from + 5, to)]);
        let metadata = std::fs::metadata(agent.journal("much")).unwrap();
        assert!(metadata.len() < written / 2, "the file is bounded: {} of {written}", metadata.len());
    });
}

#[test]
fn follower_that_does_not_read_delays_nothing_else() {
    with_both_tree_modes(|agent| {
        let mut start = shell("flood", "head -c 52428800 /dev/zero; echo end");
        start.retention = OutputRetention { first: 1 << 20, last: 1 << 20, lossless: false, stall_ms: None };
        start.follow = false;
        agent.start(start);
        let mut sleeper = agent.follow("flood", 0);
        let quick = agent.follow("flood", 0).output();
        quick.bytes_from(0);
        assert_eq!(quick.ended.written, 52_428_804);
        // The sleeper got a bounded part; the rest follows when it reads again, or is reported as a
        // gap.
        let mut byte = [0];
        sleeper.stream().read_exact(&mut byte).unwrap();
        assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
    });
}

#[test]
fn command_with_backpressure_waits_for_its_reader_and_loses_nothing() {
    with_both_tree_modes(|agent| {
        // Far more than is kept, so all bytes can only arrive if the command waited.
        let mut start = shell("held", "head -c 20000000 /dev/zero; echo end");
        start.retention = OutputRetention { first: 0, last: 1 << 20, lossless: true, stall_ms: None };
        let talk = agent.start(start);
        // Each reply is a turn of the event loop in which the agent could have read a whole pipe:
        // in so many turns everything would have been read, and most of it dropped.
        for _ in 0..1000 {
            assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
        }
        let output = talk.output();
        assert_eq!(output.gaps, []);
        assert_eq!(output.ended.written, 20_000_004);
    });
}

#[test]
fn stalled_reader_sees_an_exact_gap_and_the_command_continues() {
    with_both_tree_modes(|agent| {
        let mut start = shell("stalled", "head -c 20000000 /dev/zero; echo end");
        start.retention = OutputRetention { first: 0, last: 1 << 20, lossless: true, stall_ms: Some(100) };
        let talk = agent.start(start);
        // This follower only waits for the end: the command ends although its reader took nothing.
        let end = agent.follow("stalled", u64::MAX).output();
        assert_eq!(end.ended.written, 20_000_004);
        let output = talk.output();
        assert_eq!(output.ended.written, 20_000_004);
        let [(from, to)] = output.gaps[..] else { panic!("one gap, not {:?}", output.gaps) };
        let received: u64 = output.pieces.iter().map(|(_, _, bytes)| bytes.len() as u64).sum();
        assert_eq!(received + (to - from), 20_000_004);
        assert!(20_000_004 - to >= 1 << 20, "the last bytes are kept");
    });
}

#[test]
fn only_the_reader_that_started_a_command_blocks_it() {
    with_both_tree_modes(|agent| {
        let mut start = shell("two", "head -c 20000000 /dev/zero; echo end");
        start.retention = OutputRetention { first: 0, last: 1 << 20, lossless: true, stall_ms: None };
        let talk = agent.start(start);
        let sleeper = agent.follow("two", 0);
        // The first reader reads everything, although the follower beside it reads nothing.
        let output = talk.output();
        assert_eq!((output.gaps.len(), output.ended.written), (0, 20_000_004));
        drop(sleeper);
    });
}

#[test]
fn reader_with_backpressure_loses_nothing_however_little_is_kept() {
    with_both_tree_modes(|agent| {
        let mut start = shell("little", "seq 1 300000; seq 1 300000 >&2");
        start.retention = OutputRetention { first: 0, last: 0, lossless: true, stall_ms: None };
        let output = agent.start(start).output();
        assert_eq!(output.gaps, []);
        let lines: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
        assert!(output.stdout() == lines, "stdout is complete");
    });
}

#[test]
fn caller_that_disconnects_kills_nothing() {
    with_both_tree_modes(|agent| {
        let mut start = shell("alone", "echo first; read x; echo last");
        start.stdin = true;
        let mut talk = agent.start(start);
        talk.read_text(6);
        drop(talk);
        let mut input = agent.send_request(AgentRequest::Input { process: "alone".to_owned() });
        input.send(&Frame::Data(b"\n"[..].into()));
        let output = agent.follow("alone", 0).output();
        assert_eq!((output.stdout().as_str(), output.exit()), ("first\nlast\n", ExitReason::Code(0)));
    });
}

#[test]
fn end_does_not_wait_for_children_that_hold_the_pipes() {
    with_both_tree_modes(|agent| {
        // The child would be killed by a closed pipe, or block on a full one.
        let script = "(read x < fifo; head -c 1000000 /dev/zero; echo survived > proof) & echo parent";
        let fifo = agent.home().join("fifo");
        std::fs::remove_file(agent.home().join("proof")).ok();
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        let output = agent.run(shell("parent", script));
        assert_eq!(output.stdout(), "parent\n");
        std::fs::write(&fifo, "\n").unwrap();
        let wait = agent.run(shell("wait", "until test -s proof; do sleep 0.01; done; cat proof"));
        assert_eq!(wait.stdout(), "survived\n");
        assert_eq!(agent.follow("parent", 0).output().stdout(), "parent\n");
    });
}

#[test]
fn finished_process_is_listed_until_it_is_forgotten() {
    with_both_tree_modes(|agent| {
        let mut start = shell("tagged", "echo hi");
        start.tag = Some("mine".to_owned());
        let output = agent.run(start);
        let AgentReply::Statuses(list) = agent.reply(AgentRequest::Processes) else { panic!("statuses") };
        let [status] = &list[..] else { panic!("one process, not {list:?}") };
        assert_eq!((status.tag.as_deref(), status.command.as_str()), (Some("mine"), "echo hi"));
        assert_eq!((status.written, status.ended.as_ref()), (3, Some(&output.ended)));
        assert!(agent.journal("tagged").exists());
        assert_eq!(agent.reply(AgentRequest::Forget { process: "tagged".to_owned() }), AgentReply::Ok);
        assert!(!agent.journal("tagged").exists());
        assert_eq!(
            agent.fault(AgentRequest::Status { process: "tagged".to_owned() }).kind,
            FaultKind::NotFound
        );
        assert_eq!(
            agent.fault(AgentRequest::Forget { process: "tagged".to_owned() }).kind,
            FaultKind::NotFound
        );
    });
}

#[test]
fn a_running_process_is_not_forgotten() {
    with_both_tree_modes(|agent| {
        let mut start = shell("busy", "read x");
        start.stdin = true;
        let talk = agent.start(start);
        assert_eq!(agent.fault(AgentRequest::Forget { process: "busy".to_owned() }).kind, FaultKind::Busy);
        agent.signal("busy", 9, wire::process::SignalTarget::Tree);
        talk.output();
    });
}

#[test]
fn truncated_list_still_contains_running_processes() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    let padding = "#".repeat(2000);
    let mut oldest = shell("oldest", &format!("read x {padding}"));
    oldest.stdin = true;
    let talk = agent.start(oldest);
    const ENDED: usize = 120;
    for number in 0..ENDED {
        agent.run(shell(&format!("p{number}"), &format!(": {padding}")));
    }
    let AgentReply::Statuses(list) = agent.reply(AgentRequest::Processes) else { panic!("statuses") };
    assert!(list.len() < ENDED, "the list was not truncated");
    assert_eq!(list[0].process, "oldest");
    assert_eq!(list[list.len() - 1].process, format!("p{}", ENDED - 1));
    agent.signal("oldest", 9, wire::process::SignalTarget::Tree);
    talk.output();
}

//! Kernels: programs that keep a language's state between runs, driven by lines.

use wire::process::{ExitReason, KernelProgram, KernelSpec, OpenKernel, RunInSession, SignalTarget};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, StreamTag};

use crate::client::ProcessOutput;
use crate::harness::{TestAgent, with_both_tree_modes};
use crate::sessions::{run, session};

/// A kernel written in shell, which evaluates `$code` with `$key` set. The code is a JSON string
/// without characters that would have to be escaped.
const KERNEL: &str = r#"
echo ready >&4
while read -r word key json <&3; do
    code=${json#\{\"code\":\"}
    code=${code%\"\}}
    interrupted=
    trap 'interrupted=1; echo "tell $key {\"error\":1}" >&4' INT
    eval "$code"
    echo "done $key" >&4
done
"#;

fn kernel(program: KernelProgram) -> AgentRequest {
    let kernel = KernelSpec { language: "test".to_owned(), program };
    AgentRequest::OpenKernel(OpenKernel { open: session(), kernel })
}

fn words(words: &[&str]) -> KernelProgram {
    KernelProgram::Argv(words.iter().map(|word| (*word).to_owned()).collect())
}

impl TestAgent {
    fn open_kernel(&self) {
        assert_eq!(self.reply(kernel(words(&["/bin/bash", "-c", KERNEL]))), AgentReply::Ok);
    }

    fn code(&self, process: &str, code: &str) -> ProcessOutput {
        self.run_in(run(process, code))
    }
}

fn kernel_events(output: &ProcessOutput) -> String {
    output.of(StreamTag::KernelEvent)
}

#[test]
fn kernel_keeps_its_state_and_reports_each_run_separately() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let first = agent.code("r1", "a=7; echo out; echo tell $key 1 >&4; echo tell other 2 >&4");
        assert_eq!((first.stdout().as_str(), kernel_events(&first).as_str()), ("out\n", "1\n"));
        assert_eq!(first.exit(), ExitReason::Code(0));
        let second = agent.code("r2", "echo $a; ls /proc/self/fd | tr '\\n' ' ' >&2");
        assert_eq!(second.stdout(), "7\n");
        assert_eq!(agent.follow("r1", 0).output().ended, first.ended);
        let status = &agent.sessions()[0];
        assert_eq!((status.kernel.as_deref(), status.busy), (Some("test"), false));
    });
}

#[test]
fn output_printed_before_a_report_precedes_it() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        for number in 0..20 {
            let output =
                agent.code(&format!("r{number}"), "echo a; echo b >&2; echo tell $key c >&4; echo d");
            let index_of = |tag, text: &str| {
                let found = output.pieces.iter().position(|(stream, _, bytes)| {
                    *stream == tag && String::from_utf8_lossy(bytes).contains(text)
                });
                found.unwrap_or_else(|| panic!("{text} is missing in {output:?}"))
            };
            let event = index_of(StreamTag::KernelEvent, "c");
            assert!(index_of(StreamTag::Stdout, "a") < event && index_of(StreamTag::Stderr, "b") < event);
            index_of(StreamTag::Stdout, "d");
        }
    });
}

#[test]
fn dead_kernel_ends_its_run_and_is_replaced_by_the_next() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        assert_eq!(agent.code("r1", "a=7; echo last; kill -9 $$").exit(), ExitReason::Signal(9));
        assert_eq!(agent.code("r2", "exit 3").exit(), ExitReason::Code(3));
        assert_eq!(agent.code("r3", "echo new$a").stdout(), "new\n");
    });
}

#[test]
fn kernel_that_closes_its_reports_does_not_block_its_run() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let output = agent.code("r1", "exec 4>&-; while :; do read -t 60 <>/dev/ptmx; done");
        assert_eq!(output.exit(), ExitReason::Signal(9));
        assert_eq!(agent.code("r2", "echo there").stdout(), "there\n");
    });
}

#[test]
fn interrupt_ends_the_run_but_keeps_the_state() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let mut talk = agent.begin(run("r1", "a=7; echo on; while [ -z $interrupted ]; do sleep 0.01; done"));
        assert_eq!(talk.read_text(3), "on\n");
        assert_eq!(agent.signal("r1", 2, SignalTarget::Group), AgentReply::Ok);
        let output = talk.output();
        assert_eq!(kernel_events(&output), "{\"error\":1}\n");
        assert_eq!(agent.code("r2", "echo $a").stdout(), "7\n");
    });
}

#[test]
fn deadline_interrupts_code_before_it_kills_the_kernel() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let late = |process: &str, code: &str| RunInSession { deadline_ms: Some(500), ..run(process, code) };
        // The code must have begun by then.
        let later =
            |process: &str, code: &str| RunInSession { deadline_ms: Some(2000), ..run(process, code) };
        let output = agent.run_in(later("r1", "a=7; while [ -z $interrupted ]; do sleep 0.01; done; b=8"));
        assert_eq!((output.exit(), output.ended.interrupted), (ExitReason::Deadline, true));
        assert_eq!(agent.code("r2", "echo $a $b").stdout(), "7 8\n");
        let output = agent.run_in(late("r3", "trap '' INT; while :; do sleep 0.01; done"));
        assert_eq!((output.exit(), output.ended.interrupted), (ExitReason::Deadline, false));
        assert_eq!(agent.code("r4", "echo new $a").stdout(), "new\n");
        let output = agent.run_in(late("r5", "trap 'exit 0' INT; while :; do sleep 0.01; done"));
        assert_eq!((output.exit(), output.ended.interrupted), (ExitReason::Deadline, false));
    });
}

#[test]
fn malformed_reports_are_skipped_and_an_endless_line_is_truncated() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let rubbish = "head -c 3000000 /dev/urandom >&4; echo >&4; echo tell $key 1 >&4";
        assert_eq!(kernel_events(&agent.code("r1", rubbish)), "1\n");
        let endless = "echo -n tell $key \"\" >&4; head -c 9000000 /dev/zero >&4; echo >&4; echo after";
        let output = agent.code("r2", endless);
        let reported: usize =
            output.pieces.iter().filter(|piece| piece.0 == StreamTag::KernelEvent).map(|p| p.2.len()).sum();
        let missing: u64 = output.gaps.iter().map(|(from, to)| to - from).sum();
        assert!(reported as u64 + missing <= 8 << 20, "{reported} and {missing}");
        assert_eq!(output.stdout(), "after\n");
        assert_eq!(agent.reply(AgentRequest::Ping), AgentReply::Ok);
    });
}

#[test]
fn kernel_that_cannot_start_returns_the_reason() {
    with_both_tree_modes(|agent| {
        let missing = agent.fault(kernel(words(&["no-such-interpreter"])));
        assert_eq!((missing.kind, missing.subject.as_str()), (FaultKind::NotFound, "no-such-interpreter"));
        let Fault { kind, operation, subject, .. } =
            agent.fault(kernel(words(&["/bin/sh", "-c", "echo too old >&2; exit 5"])));
        assert_eq!((kind, operation.as_str()), (FaultKind::Other, "start kernel"));
        assert_eq!(subject, "/bin/sh ended with exit code 5: too old");
        let lacking = agent.fault(kernel(words(&["/bin/sh", "-c", "echo there is no node >&2; exit 127"])));
        assert_eq!((lacking.kind, lacking.subject.as_str()), (FaultKind::NotFound, "there is no node"));
        assert_eq!(agent.sessions(), []);
        agent.open_kernel();
    });
}

#[test]
fn kernel_can_be_restarted() {
    with_both_tree_modes(|agent| {
        agent.open_kernel();
        let mut talk = agent.begin(run("r1", "a=7; echo on; sleep 600"));
        assert_eq!(talk.read_text(3), "on\n");
        let restart = || AgentRequest::RestartSession { session: "s".to_owned() };
        assert_eq!(agent.reply(restart()), AgentReply::Ok);
        assert_eq!(talk.output().exit(), ExitReason::Signal(9));
        assert_eq!(agent.reply(restart()), AgentReply::Ok, "restarting without a kernel succeeds");
        assert_eq!(agent.code("r2", "echo new$a").stdout(), "new\n");
        assert_eq!(agent.reply(restart()), AgentReply::Ok);
        assert_eq!(agent.code("r3", "echo newer").stdout(), "newer\n");
        let unknown = AgentRequest::RestartSession { session: "other".to_owned() };
        assert_eq!(agent.fault(unknown).kind, FaultKind::NotFound);
    });
}

#[test]
fn own_program_of_the_agent_can_be_a_kernel() {
    with_both_tree_modes(|agent| {
        assert_eq!(agent.reply(kernel(KernelProgram::Own(vec!["__echo".to_owned()]))), AgentReply::Ok);
        assert_eq!(kernel_events(&agent.code("r1", "say \"ü\"")), "{\"code\":\"say \\\"ü\\\"\"}\n");
    });
}

#[test]
fn shell_can_be_a_kernel_whose_runs_are_counted() {
    with_both_tree_modes(|agent| {
        assert_eq!(agent.reply(kernel(KernelProgram::Shell)), AgentReply::Ok);
        let first = agent.code("r1", "cd /usr; false");
        assert_eq!((kernel_events(&first).as_str(), first.exit()), ("{\"count\":1}\n", ExitReason::Code(1)));
        let second = agent.code("r2", "pwd");
        assert_eq!(
            (kernel_events(&second).as_str(), second.stdout().as_str()),
            ("{\"count\":2}\n", "/usr\n")
        );
        assert_eq!(agent.sessions()[0].kernel.as_deref(), Some("test"));
    });
}

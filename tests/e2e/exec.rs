//! `coracle exec` and `coracle logs`: every byte in and out, exit codes, signals, terminals, gaps.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::output_with_input;
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

/// `coracle` as a client of this server.
fn coracle(server: &TestServer, words: &[&str]) -> Command {
    let mut command = ProgramCopies::shared().command();
    command.arg("--url").arg(format!("http://{}", server.address())).args(words).stdin(Stdio::null());
    command
}

fn run(server: &TestServer, words: &[&str]) -> Output {
    coracle(server, words).output().expect("the binary can be run")
}

/// Runs the command with input, which is written while output is read.
fn run_with_input(server: &TestServer, words: &[&str], input: &[u8]) -> Output {
    let mut command = coracle(server, words);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary can be run");
    let mut stdin = child.stdin.take().expect("it is a pipe");
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(input).expect("the command reads its input"));
        child.wait_with_output().expect("it is our child")
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("a signal ended it: {output:?}"))
}

/// Pseudo-random bytes, the same in each run.
fn pseudo_random_bytes(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn signal(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).expect("it is our child");
}

#[test]
fn exec_passes_every_byte_in_both_directions() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let bytes = pseudo_random_bytes(5_000_000);
    let both = run_with_input(&server, &["exec", &sandbox.id, "--", "cat"], &bytes);
    assert!(both.stdout == bytes, "{} bytes came back, with different content", both.stdout.len());
    assert_eq!((code(&both), text(&both.stderr)), (0, String::new()));

    sandbox.upload("/root/noise", &bytes);
    let out = run(&server, &["exec", &sandbox.id, "--", "cat", "/root/noise"]);
    assert!(out.stdout == bytes, "{} bytes arrived, with different content", out.stdout.len());

    let lines = run_with_input(&server, &["exec", &sandbox.id, "--", "wc", "-l"], b"a\nb\n");
    assert_eq!(text(&lines.stdout).trim(), "2");
    let empty = run_with_input(&server, &["exec", &sandbox.id, "--", "wc", "-c"], b"");
    assert_eq!(text(&empty.stdout).trim(), "0");
    // A command that does not read its input ends nevertheless.
    let unread = run_with_input(&server, &["exec", &sandbox.id, "-c", "sleep 0.1; echo done"], b"x");
    assert_eq!((code(&unread), text(&unread.stdout)), (0, "done\n".to_owned()));

    let apart = run(&server, &["exec", &sandbox.id, "-c", "echo out; echo err >&2"]);
    assert_eq!((text(&apart.stdout), text(&apart.stderr)), ("out\n".to_owned(), "err\n".to_owned()));
}

#[test]
fn exec_output_is_complete_however_much_it_is() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let expected: String = (1..=3_000_000).map(|number| format!("{number}\n")).collect();
    let all = run(&server, &["exec", &sandbox.id, "-c", "seq 1 3000000"]);
    assert!(text(&all.stdout) == expected, "{} bytes of {}", all.stdout.len(), expected.len());
    assert_eq!((code(&all), text(&all.stderr)), (0, String::new()));

    // The event stream of the API also applies backpressure to the command: the output is far more than the
    // journal keeps.
    let ran = sandbox.run_with(&json!({"command": "seq 1 300000", "coracle.output-kept": 1 << 16}));
    let expected: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
    assert!(ran.stdout == expected, "{} bytes of {}: {}", ran.stdout.len(), expected.len(), ran.stderr);
}

#[test]
fn exec_exit_codes_are_those_of_run() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox_with(&json!({"resourceLimits": {"memory": "128Mi"}}));
    let exits = |words: &[&str]| {
        let words: Vec<&str> = ["exec", &sandbox.id].into_iter().chain(words.iter().copied()).collect();
        let output = run(&server, &words);
        (code(&output), text(&output.stderr))
    };
    assert_eq!(exits(&["-c", "exit 3"]).0, 3);
    assert_eq!(exits(&["-c", "kill -TERM $$"]).0, 143);
    assert_eq!(exits(&["--timeout", "200ms", "--", "sleep", "60"]).0, 124);
    assert_eq!(exits(&["--", "no-such-program"]).0, 127);
    assert_eq!(exits(&["--", "/etc/passwd"]).0, 126);
    assert_eq!(
        exits(&["-c", " \n"]),
        (125, "error: the command is blank\nhint: name a program, or shell text behind `-c`\n".to_owned())
    );
    let (oom, said) = exits(&["--", "python3", "-c", "x = bytearray(1 << 30); print(len(x))"]);
    assert!(oom == 137 && said.contains("memory limit"), "{oom}: {said}");
    let (missing, said) = exits(&["--", "echo a | wc"]);
    assert!(missing == 127 && said.contains("`-c`"), "{missing}: {said}");
    let env = run(
        &server,
        &["exec", &sandbox.id, "-e", "A=b c", "-w", "/tmp", "-u", "1:2", "-c", "echo $A; pwd; id -u; id -g"],
    );
    assert_eq!(text(&env.stdout), "b c\n/tmp\n1\n2\n");
}

#[test]
fn exec_opens_a_guarded_sandbox_and_sends_long_commands() {
    let server = TestServer::start();
    // Only its own token opens this sandbox, so the API key is refused first.
    let guarded = server.create_sandbox_with(&json!({"secureAccess": true}));
    let ran = run(&server, &["exec", &guarded.id, "--", "echo", "inside"]);
    assert_eq!((code(&ran), text(&ran.stdout)), (0, "inside\n".to_owned()), "{}", text(&ran.stderr));
    let sandbox = server.create_sandbox();
    // Around the size up to which a command travels in a header, and not only ASCII.
    for (letter, length) in [("x", 3_900), ("x", 4_000), ("x", 4_100), ("x", 100_000), ("ü", 1_000)] {
        let word = letter.repeat(length);
        let ran = run(&server, &["exec", &sandbox.id, "--", "echo", "-n", &word]);
        assert!(code(&ran) == 0 && text(&ran.stdout) == word, "{length}: {}", text(&ran.stderr));
    }
    let gone = run(&server, &["exec", "abcdefghijklmnopqrst", "--", "true"]);
    assert!(code(&gone) == 125 && text(&gone.stderr).contains("coracle ls"), "{}", text(&gone.stderr));
}

#[test]
fn exec_passes_signals_on() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    for (sent, name) in
        [(Signal::INT, "INT"), (Signal::TERM, "TERM"), (Signal::HUP, "HUP"), (Signal::QUIT, "QUIT")]
    {
        let script = format!("trap 'echo got; exit 7' {name}; echo ready; while :; do sleep 0.05; done");
        let mut command = coracle(&server, &["exec", &sandbox.id, "-c", &script]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the binary can be run");
        let mut lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
        assert_eq!(lines.next().expect("a line").expect("UTF-8"), "ready");
        signal(&child, sent);
        assert_eq!(lines.next().expect("a line").expect("UTF-8"), "got", "{name}");
        assert_eq!(child.wait().expect("it is our child").code(), Some(7), "{name}");
    }
    // Also while its output is not read.
    let mut command = coracle(&server, &["exec", &sandbox.id, "--", "yes"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("the binary can be run");
    let mut stdout = child.stdout.take().expect("it is a pipe");
    stdout.read_exact(&mut [0; 2]).expect("it prints");
    signal(&child, Signal::INT);
    stdout.read_to_end(&mut Vec::new()).expect("it ends");
    assert_eq!(child.wait().expect("it is our child").code(), Some(130));
}

#[test]
fn closed_output_ends_the_command() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let mut command =
        coracle(&server, &["exec", &sandbox.id, "-c", "trap 'echo gone > /tmp/gone' EXIT; yes"]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("the binary can be run");
    let mut stdout = child.stdout.take().expect("it is a pipe");
    stdout.read_exact(&mut [0; 2]).expect("it prints");
    drop(stdout);
    child.wait().expect("it is our child");
    let ran = sandbox.run("until test -s /tmp/gone; do sleep 0.05; done; pgrep -x yes | wc -l");
    assert_eq!(ran.stdout.trim(), "0");
}

#[test]
fn exec_gives_a_terminal_of_our_size() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let terminal = linux::pty::PtyPair::open(91, 33, rustix::process::getuid()).expect("a terminal");
    rustix::io::ioctl_fionbio(&terminal.master, false).expect("a descriptor can block");
    let end = || -> OwnedFd { terminal.slave.try_clone().expect("a descriptor can be copied") };
    let script = "test -t 0 && test -t 1 && stty size; trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut command = coracle(&server, &["exec", "-i", "-t", &sandbox.id, "-c", script]);
    command.stdin(end()).stdout(end()).stderr(end());
    let mut child = command.spawn().expect("the binary can be run");
    let mut lines =
        BufReader::new(std::fs::File::from(terminal.master.try_clone().expect("a descriptor"))).lines();
    let mut line = || lines.next().expect("a line").expect("UTF-8").trim().to_owned();
    assert_eq!((line().as_str(), line().as_str()), ("33 91", "ready"));
    let size = rustix::termios::Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&terminal.master, size).expect("a terminal has a size");
    // The terminal is not the test's own, so the kernel does not signal the client by itself.
    signal(&child, Signal::WINCH);
    assert_eq!(line(), "40 120");
    assert_eq!(child.wait().expect("it is our child").code(), Some(5));
    let plain = run(&server, &["exec", "-t", &sandbox.id, "--", "stty", "size"]);
    assert!(text(&plain.stdout).starts_with("24 80"), "{plain:?}");
}

#[test]
fn stalled_exec_reader_gets_the_exact_gap() {
    const TOTAL: u64 = 64_000_000;
    let server = ServerBuilder::new().env("CORACLE_OUTPUT_STALL_TIMEOUT", "1s").start();
    let mut sandbox = server.create_sandbox();
    let script = format!("head -c {TOTAL} /dev/zero; echo done > /tmp/done");
    let mut command = coracle(&server, &["exec", "--keep-output", "1m", &sandbox.id, "-c", &script]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary can be run");
    // The command ends although no byte was read.
    let ran = sandbox.run("until test -s /tmp/done; do sleep 0.05; done; echo over");
    assert_eq!(ran.stdout, "over\n");
    let output = child.wait_with_output().expect("it is our child");
    let said = text(&output.stderr);
    let missing: u64 =
        said.split_whitespace().find_map(|word| word.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    // The zeros before the gap are an unfinished line, which is ended.
    let zeros = output.stdout.iter().filter(|byte| **byte == 0).count();
    assert_eq!(zeros as u64 + missing, TOTAL, "{said}");
    assert_eq!(output.stdout.len(), zeros + 1, "one line is ended at the gap");
    assert_eq!(code(&output), 125);
}

#[test]
fn large_input_of_exec_arrives_however_fast_it_is_read() {
    const TOTAL: usize = 64 << 20;
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    for _ in 0..6 {
        let mut command = coracle(&server, &["exec", &sandbox.id, "--", "wc", "-c"]);
        let output = output_with_input(&mut command, TOTAL);
        assert_eq!(text(&output.stdout).trim(), TOTAL.to_string());
    }
}

#[test]
fn logs_report_missing_output() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let detached = run(&server, &["exec", "-d", "--keep-output", "128k", &sandbox.id, "-c", "seq 1 300000"]);
    let process = text(&detached.stdout).trim().to_owned();
    let logs = run(&server, &["logs", "-f", &sandbox.id, &process]);
    // A follower may have seen all of it; a later reader may not.
    assert!([0, 3].contains(&code(&logs)), "{logs:?}");

    let all: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
    let logs = run(&server, &["logs", &sandbox.id, &process]);
    assert_eq!(code(&logs), 3, "{}", text(&logs.stderr));
    let said = text(&logs.stderr);
    let missing: usize =
        said.split_whitespace().find_map(|word| word.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    let shown = text(&logs.stdout);
    let kept = all.len() - missing;
    assert!((kept..=kept + 1).contains(&shown.len()), "{missing} are missing, {} are shown", shown.len());
    let longest = shown.lines().map(str::len).max().unwrap_or(0);
    assert!(longest <= 6, "halves of two lines were joined");
    assert!(all.starts_with(&shown[..4096]) && all.ends_with(&shown[shown.len() - 4096..]));

    let records = run(&server, &["--json", "logs", &sandbox.id, &process]);
    assert_eq!(code(&records), 3);
    let (mut next, mut gaps, mut ends) = (0, 0, 0);
    for line in text(&records.stdout).lines() {
        let record: Value = serde_json::from_str(line).expect("a record is JSON");
        assert_eq!(record["offset"], next, "{line}");
        match record["type"].as_str() {
            Some("output") => {
                let place = usize::try_from(next).expect("it is small");
                let shown = record["text"].as_str().expect("digits are text");
                assert_eq!(&all[place..place + shown.len()], shown);
            }
            Some("gap") => gaps += 1,
            Some("end") => ends += 1,
            _ => panic!("{line}"),
        }
        next += record["length"].as_u64().unwrap_or(0);
    }
    assert_eq!((next, gaps, ends), (all.len() as u64, 1, 1));

    let whole = run(&server, &["exec", "-d", &sandbox.id, "-c", "seq 1 1000"]);
    let process = text(&whole.stdout).trim().to_owned();
    let logs = run(&server, &["logs", "-f", &sandbox.id, &process]);
    let expected: String = (1..=1000).map(|number| format!("{number}\n")).collect();
    assert_eq!((code(&logs), text(&logs.stdout)), (0, expected));
}

#[test]
fn logs_without_a_process_are_those_of_the_main_process_or_the_newest_command() {
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let nothing = run(&server, &["logs", &sandbox.id]);
    assert_eq!(code(&nothing), 1, "{nothing:?}");
    for word in ["first", "second"] {
        run(&server, &["exec", &sandbox.id, "--", "echo", word]);
    }
    let newest = run(&server, &["logs", &sandbox.id]);
    assert_eq!((code(&newest), text(&newest.stdout)), (0, "second\n".to_owned()));

    let main = server.create_sandbox_with(&json!({"entrypoint": ["sh", "-c", "echo main; exec sleep 1000"]}));
    run(&server, &["exec", &main.id, "--", "echo", "newer"]);
    let logs = run(&server, &["logs", &main.id]);
    assert_eq!((code(&logs), text(&logs.stdout)), (0, "main\n".to_owned()));
}

#[test]
fn follower_that_does_not_read_holds_nothing_back() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let script = "read x < /tmp/go; head -c 64000000 /dev/zero; echo done > /tmp/done";
    sandbox.run("mkfifo /tmp/go");
    let detached = run(&server, &["exec", "-d", &sandbox.id, "-c", script]);
    let process = text(&detached.stdout).trim().to_owned();
    let mut command = coracle(&server, &["logs", "-f", &sandbox.id, &process]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary can be run");
    let ran = sandbox.run("echo > /tmp/go; until test -s /tmp/done; do sleep 0.05; done; echo over");
    assert_eq!(ran.stdout, "over\n");
    let output = child.wait_with_output().expect("it is our child");
    assert_eq!(code(&output), 3, "{}", text(&output.stderr));
}

/// A server of another implementation: no socket for commands, and events with everything that the protocol
/// allows.
fn foreign_server(events: &'static str, unsent: usize) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it listens").to_string();
    let endpoint = json!({"endpoint": format!("{address}/inside"), "headers": {}}).to_string();
    let served = std::thread::spawn(move || {
        let mut heads = Vec::new();
        loop {
            let (stream, _) = listener.accept().expect("a client comes");
            let mut reader = BufReader::new(stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(reader.read_line(&mut head).expect("a request is text") > 0, "{head}");
            }
            let (status, body) = match head.split_whitespace().nth(1) {
                Some(path) if path.contains("/endpoints/") => ("200 OK", endpoint.as_str()),
                Some("/inside/command") => ("200 OK", events),
                _ => ("404 Not Found", "{\"message\": \"no such page\"}"),
            };
            let last = head.contains("/inside/command");
            let length = body.len() + if last { unsent } else { 0 };
            let head_of_answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
            let stream = reader.get_mut();
            stream
                .write_all(head_of_answer.as_bytes())
                .and_then(|()| stream.write_all(body.as_bytes()))
                .expect("it reads");
            heads.push(head);
            if last {
                // The rest is never sent; the client hangs up first.
                reader.read_to_end(&mut Vec::new()).ok();
                return heads;
            }
        }
    });
    (address, served)
}

#[test]
fn exec_reads_the_events_of_other_servers() {
    let events = concat!(
        ": hello\n\nevent: message\nid: 1\nretry: 3000\n<html>\n",
        "data: {\"type\":\"init\",\"text\":\"p1\"}\n\n",
        "{\"type\":\"news\"}\n\n{\"type\":\"stdout\",\"text\":\"out\\n\"}\n\n{\"type\":\"stderr\",\"text\":\"err\\n\"}\n\n",
        "{\"type\":\"error\",\"error\":{\"ename\":\"x\",\"evalue\":\"4\",\"traceback\":null}}\n\n",
    );
    let (address, served) = foreign_server(events, 0);
    let mut command = ProgramCopies::shared().command();
    command.arg("--url").arg(format!("http://{address}")).args(["exec", "abcdefghijklmnopqrst", "--", "x"]);
    let output = command.stdin(Stdio::null()).output().expect("the binary can be run");
    assert_eq!(
        (code(&output), text(&output.stdout), text(&output.stderr)),
        (4, "out\n".to_owned(), "err\n".to_owned())
    );
    let heads = served.join().expect("the server does not panic");
    let asked = heads.last().expect("it was asked").to_lowercase();
    assert!(asked.contains("accept: text/event-stream"), "{asked}");
}

#[test]
fn signals_end_an_exec_whose_server_does_not_answer() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &url, "exec", "abcdefghijklmnopqrst", "--", "true"]).stdin(Stdio::null());
    let mut child = command.spawn().expect("the binary can be run");
    let (mut client, _) = listener.accept().expect("it connects");
    client.read_exact(&mut [0; 16]).expect("it sends a request");
    // The first signal waits for a command that may run; the second ends the wait.
    signal(&child, Signal::TERM);
    signal(&child, Signal::INT);
    let status = child.wait().expect("it is our child");
    assert!(matches!(status.code(), Some(130 | 143)), "{status}");
}

#[test]
fn signals_end_an_exec_on_a_server_without_the_socket() {
    let events = "{\"type\":\"init\",\"text\":\"p1\"}\n\n{\"type\":\"stdout\",\"text\":\"out\\n\"}\n\n";
    let (address, served) = foreign_server(events, 100);
    let mut command = ProgramCopies::shared().command();
    command.arg("--url").arg(format!("http://{address}")).args(["exec", "abcdefghijklmnopqrst", "--", "x"]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("the binary can be run");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("it is a pipe")).read_line(&mut line).expect("it prints");
    assert_eq!(line, "out\n");
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().expect("it is our child").code(), Some(143));
    served.join().expect("the server does not panic");
}

//! One filtered sandbox that uses up what egress shares with the others: kernel memory, connections, questions.

use std::fs;
use std::time::{Duration, Instant};

use e2e::probe::{host_reached, http, probe, probe_argv, resolve, tls};
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{self, TestServer};
use e2e::test_network::TestNetwork;
use e2e::test_network::hosts::WEB;
use serde_json::{Value, json};

use crate::filtered::{create_filtered, create_open, start_server};

const PAGE: u64 = 4096;

/// The memory of all TCP sockets of this machine, in bytes; see proc(5), `/proc/net/sockstat`.
fn tcp_memory() -> u64 {
    let text = fs::read_to_string("/proc/net/sockstat").expect("a kernel file");
    let line = text.lines().find(|line| line.starts_with("TCP:")).expect("it has a line for TCP");
    let pages = line.split_whitespace().skip_while(|word| *word != "mem").nth(1).expect("it has a number");
    pages.parse::<u64>().expect("a number") * PAGE
}

/// Opens connections in the background that ask for everything and read nothing. Returns the command and how many there
/// are once all have been tried.
fn start_silent_readers(sandbox: &mut RemoteSandbox, count: u32, target: &str, port: u16) -> (String, u64) {
    let send = if port == 80 { "GET /endless HTTP/1.1\r\nHost: web.example\r\n\r\n" } else { "" };
    let step = json!({"do": "many", "to": target, "port": port, "count": count, "send": send, "hold": 600});
    sandbox.upload("/tmp/steps.json", Value::from(vec![step]).to_string().as_bytes());
    let argv = probe_argv(&[]);
    sandbox.upload("/tmp/probe.py", argv[2].as_bytes());
    let limits = "ulimit -n 20000 2>/dev/null || ulimit -n $(ulimit -Hn)";
    let text = format!("{limits}; exec /usr/bin/python3 /tmp/probe.py \"$(cat /tmp/steps.json)\" x");
    let command = sandbox.start_background(&text);
    let mut holding = None;
    e2e::happens_within(Duration::from_secs(60), || {
        let logs = sandbox.logs(&command);
        holding = logs.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()?["holding"].as_u64());
        holding.is_some()
    });
    let logs = sandbox.logs(&command);
    (command, holding.unwrap_or_else(|| panic!("the connections were not tried: {logs}")))
}

/// Waits until the memory of sockets no longer grows, and returns it.
fn settled_memory() -> u64 {
    let mut last = tcp_memory();
    let begun = Instant::now();
    loop {
        std::thread::park_timeout(Duration::from_millis(500));
        let now = tcp_memory();
        if now <= last + last / 50 || begun.elapsed() > Duration::from_secs(15) {
            return now;
        }
        last = now;
    }
}

fn egress_memory(server: &TestServer) -> u64 {
    server::resident_memory(server.part_pid("__egress"))
}

#[test]
fn connections_that_read_nothing_hold_little_memory_of_the_kernel() {
    if !testkit::needs_root() {
        return;
    }
    const CONNECTIONS: u32 = 1000;
    /// Both ends of the two connections are on this machine.
    const MAX_PER_CONNECTION: u64 = 3 << 20;
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut attacker = create_filtered(&server, &["web.example"]);
    let mut neighbour = create_filtered(&server, &["web.example"]);
    probe(&mut attacker, &[resolve("web.example")]);
    let before = tcp_memory();
    let resident = egress_memory(&server);
    let (_, opened) = start_silent_readers(&mut attacker, CONNECTIONS, WEB.v4, 19);
    assert!(opened > 500, "only {opened} connections were opened");
    let held = settled_memory().saturating_sub(before);
    assert!(
        held / opened < MAX_PER_CONNECTION,
        "{} kB for each of {opened} connections",
        held / opened / 1024
    );
    let grown = egress_memory(&server).saturating_sub(resident);
    assert!(grown / opened < 256 << 10, "egress grew by {} kB for each connection", grown / opened / 1024);
    let began = Instant::now();
    let found = probe(&mut neighbour, &[tls("web.example"), http("web.example")]);
    assert!(found.iter().all(|result| host_reached(result) == Some("web.example")), "{found:?}");
    assert!(began.elapsed() < Duration::from_secs(5) * e2e::slowness_factor(), "the neighbour waits");
    attacker.delete();
    e2e::eventually("the memory is given back", || {
        tcp_memory().saturating_sub(before) < held / 4 + (32 << 20)
    });
    neighbour.delete();
}

#[test]
fn a_slow_reader_of_a_page_holds_no_more_than_others() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    // The attack works where nothing bounds it: over a link a connection takes what the kernel gives.
    let mut open = create_open(&server);
    let before = tcp_memory();
    let (_, opened) = start_silent_readers(&mut open, 20, WEB.v4, 80);
    let by_link = settled_memory().saturating_sub(before) / opened.max(1);
    assert!(opened == 20 && by_link > 256 << 10, "{opened} connections hold {} kB each", by_link / 1024);
    open.delete();
    let mut filtered = create_filtered(&server, &["web.example"]);
    let resident = egress_memory(&server);
    let before = settled_memory();
    let (_, opened) = start_silent_readers(&mut filtered, 200, WEB.v4, 80);
    // The buffers of a sandbox's first connections may grow, which fast transfers need.
    let held = settled_memory().saturating_sub(before);
    let grown = egress_memory(&server).saturating_sub(resident) / opened.max(1);
    assert!(opened == 200 && held < 1 << 30, "{opened} connections hold {} MB", held >> 20);
    assert!(grown < 1 << 20, "egress buffers {} kB for each connection", grown / 1024);
    filtered.delete();
}

#[test]
fn a_flood_of_questions_disturbs_no_neighbour() {
    if !testkit::needs_root() {
        return;
    }
    const QUESTIONS: u64 = 30_000;
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut attacker = create_filtered(&server, &["*.example"]);
    let mut neighbour = create_filtered(&server, &["web.example"]);
    let resident = egress_memory(&server);
    let began = Instant::now();
    let flood = json!({"do": "flood", "name": "flood.example", "count": QUESTIONS});
    let argv = probe_argv(&[flood]);
    attacker.upload("/tmp/probe.py", argv[2].as_bytes());
    let command = attacker.start_background(&format!("exec /usr/bin/python3 /tmp/probe.py '{}' x", argv[3]));
    let mut slowest = 0.0_f64;
    e2e::eventually("the flood is over", || {
        let found = probe(&mut neighbour, &[resolve("web.example")]).remove(0);
        assert!(found["addresses"].is_array(), "a neighbour gets no answer: {found}");
        slowest = slowest.max(found["took"].as_f64().unwrap_or(f64::MAX));
        attacker.logs(&command).contains("sent")
    });
    assert!(slowest < 2.0 * f64::from(e2e::slowness_factor()), "a neighbour waits {slowest} s for a name");
    let asked = world.queries().iter().filter(|query| query.name.ends_with("flood.example")).count();
    // 200 questions a second, and a second's worth at once.
    let allowed = 200.0 * (began.elapsed().as_secs_f64() + 2.0);
    assert!((asked as f64) < allowed, "{asked} of {QUESTIONS} questions went out in {:?}", began.elapsed());
    assert!(egress_memory(&server) < resident + (64 << 20), "egress keeps what it was asked");
    assert!(
        probe(&mut attacker, &[resolve("web.example")])[0]["addresses"].is_array(),
        "the attacker is served again"
    );
    attacker.delete();
    neighbour.delete();
}

#[test]
fn one_sandbox_has_a_bounded_number_of_connections() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut attacker = create_filtered(&server, &["web.example"]);
    let mut neighbour = create_filtered(&server, &["web.example"]);
    probe(&mut attacker, &[resolve("web.example")]);
    let descriptors = || {
        let egress = server.part_pid("__egress");
        fs::read_dir(format!("/proc/{egress}/fd")).map_or(0, Iterator::count)
    };
    let before = descriptors();
    start_silent_readers(&mut attacker, 2500, WEB.v4, 7);
    let most = descriptors().saturating_sub(before);
    assert!(most <= 2 * 1024 + 100, "egress has {most} more descriptors");
    assert!(world.count_echo_connections() <= 1100, "{} connections", world.count_echo_connections());
    assert_eq!(host_reached(&probe(&mut neighbour, &[tls("web.example")])[0]), Some("web.example"));
    attacker.delete();
    e2e::eventually("its connections end with it", || descriptors() <= before + 4);
    neighbour.delete();
}

#[test]
fn ten_thousand_connections_leave_room_for_a_neighbour() {
    if !testkit::needs_root() {
        return;
    }
    if std::env::var_os("CORACLE_TEST_LONG").is_none() {
        return testkit::skip_test("ten thousand connections; CORACLE_TEST_LONG=1 opens them");
    }
    let world = TestNetwork::create();
    let server = start_server(TestUser::Same);
    let mut neighbour = create_filtered(&server, &["web.example"]);
    let mut attackers: Vec<RemoteSandbox> =
        (0..10).map(|_| create_filtered(&server, &["web.example"])).collect();
    let mut opened = 0;
    for attacker in &mut attackers {
        probe(attacker, &[resolve("web.example")]);
        opened += start_silent_readers(attacker, 1000, WEB.v4, 7).1;
    }
    assert!(opened >= 7000, "{opened} connections; the world saw {}", world.count_echo_connections());
    let found = probe(&mut neighbour, &[resolve("web.example")]);
    assert!(found[0]["addresses"].is_array(), "{found:?}");
    attackers.iter_mut().skip(5).for_each(RemoteSandbox::delete);
    e2e::eventually("there is room again", || {
        host_reached(&probe(&mut neighbour, &[tls("web.example")])[0]) == Some("web.example")
    });
    attackers.iter_mut().take(5).for_each(RemoteSandbox::delete);
    neighbour.delete();
}

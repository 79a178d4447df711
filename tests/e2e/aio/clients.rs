//! Clients that come and go leave nothing behind.

use std::fs;
use std::io::Write;
use std::net::{Shutdown, TcpStream};

use e2e::aio::{AioSandbox, keyed_client};
use e2e::host;
use e2e::http::HttpClient;
use e2e::server::TestServer;
use serde_json::json;

const CLIENTS: usize = 1000;
const KILLED_CLIENTS: usize = 100;
const THREADS: usize = 4;

/// What clients can make the server and an agent hold.
#[derive(Debug)]
struct HeldByClients {
    server_descriptors: usize,
    server_tasks: u64,
    agent_connections: usize,
    agent_descriptors: usize,
}

impl HeldByClients {
    fn capture(server: &TestServer, sandbox: &AioSandbox) -> Self {
        let agent = host::agent_pid(&sandbox.container).expect("its agent runs");
        let metrics = keyed_client(server.address()).get("/metrics").expect("the server answers").text();
        let tasks = metrics.lines().find_map(|line| line.strip_prefix("coracle_tasks ")?.parse().ok());
        Self {
            server_descriptors: descriptors(server.part_pid("__server")).len(),
            server_tasks: tasks.expect("the server counts its tasks"),
            agent_connections: descriptors(agent).iter().filter(|link| link.starts_with("socket:")).count(),
            agent_descriptors: descriptors(agent).len(),
        }
    }

    /// The least of several captures: a connection that was closed just now may still be counted in the first.
    fn capture_least(server: &TestServer, sandbox: &AioSandbox) -> Self {
        const CAPTURES: usize = 30;
        let captures = (0..CAPTURES).map(|_| Self::capture(server, sandbox));
        let least = captures.reduce(|one, other| Self {
            server_descriptors: one.server_descriptors.min(other.server_descriptors),
            server_tasks: one.server_tasks.min(other.server_tasks),
            agent_connections: one.agent_connections.min(other.agent_connections),
            agent_descriptors: one.agent_descriptors.min(other.agent_descriptors),
        });
        least.expect("there are several")
    }

    fn is_at_most(&self, before: &Self) -> bool {
        self.server_descriptors <= before.server_descriptors
            && self.server_tasks <= before.server_tasks
            && self.agent_connections <= before.agent_connections
            && self.agent_descriptors <= before.agent_descriptors
    }
}

fn descriptors(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// Begins to run a command, and disconnects as a killed process does.
fn disconnect_during_exec(address: &str, sandbox: &AioSandbox) {
    let body = json!({"command": "echo started; sleep 0.3"}).to_string();
    let mut stream = TcpStream::connect(address).expect("the server listens");
    let path = &sandbox.path;
    let head =
        format!("POST {path}/v1/shell/exec HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json");
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).expect("the server reads");
    stream.shutdown(Shutdown::Both).ok();
}

/// Opens and closes so many clients, some of which run a command and some of which are killed meanwhile.
fn visit(server: &TestServer, sandbox: &AioSandbox, clients: usize) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for number in 0..clients / THREADS {
                    let mut own = sandbox.with_client(HttpClient::new(server.address()));
                    match number % 10 {
                        0 => assert_eq!(
                            own.run(&format!("echo {thread} {number}")),
                            format!("{thread} {number}")
                        ),
                        _ => drop(own.get("/v1/shell/sessions/stats")),
                    }
                    if number % (CLIENTS / KILLED_CLIENTS) == 0 {
                        disconnect_during_exec(server.address(), sandbox);
                    }
                }
            });
        }
    });
}

#[test]
fn a_thousand_clients_and_a_hundred_killed_ones_leave_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "visited");
    // Some idle shells and connections are kept, as many as clients need at the same time; they belong to normal use.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let mut own = sandbox.with_client(server.client());
            scope.spawn(move || own.run("sleep 0.1"));
        }
    });
    visit(&server, &sandbox, CLIENTS / 10);
    wait_until_idle(&mut sandbox);
    let before = HeldByClients::capture_least(&server, &sandbox);
    visit(&server, &sandbox, CLIENTS);
    wait_until_idle(&mut sandbox);
    let mut after = HeldByClients::capture(&server, &sandbox);
    let settled = e2e::happens(|| {
        after = HeldByClients::capture(&server, &sandbox);
        after.is_at_most(&before)
    });
    assert!(settled, "before {before:?}, after {after:?}");
    assert_eq!(sandbox.run("echo still here"), "still here");
}

/// Waits until no command runs: those of killed clients go on.
fn wait_until_idle(sandbox: &mut AioSandbox) {
    e2e::eventually("the commands of killed clients have ended", || {
        sandbox.run("pgrep -x sleep; true").is_empty()
    });
}

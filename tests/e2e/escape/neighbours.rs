//! One sandbox against another on the same server.

use e2e::host;
use e2e::server::TestServer;

#[test]
fn files_of_another_sandbox_are_out_of_reach() {
    let server = TestServer::start();
    let (mut one, mut other) = (server.create_sandbox(), server.create_sandbox());
    other.upload_attacks();
    let token = format!("secret-{}", one.id);
    assert_eq!(one.run(&format!("echo {token} > /root/secret && chmod 644 /root/secret")).code, Some(0));
    // The attack works: the same search finds the file in its own sandbox.
    one.upload_attacks();
    assert_eq!(one.run_argv(&["/opt/attacks", "read-through-proc", "/root/secret", &token]).code, Some(0));
    for way in ["read", "read-through-proc", "read-through-descriptors", "read-through-dots"] {
        let ran = other.run_argv(&["/opt/attacks", way, "/root/secret", &token]);
        assert_eq!(ran.code, Some(1), "{way} was not stopped by a root of its own: {ran:?}");
    }
}

#[test]
fn processes_of_another_sandbox_are_out_of_reach() {
    let server = TestServer::start();
    let (mut one, mut other) = (server.create_sandbox(), server.create_sandbox());
    one.upload_attacks();
    other.upload_attacks();
    let mark = format!("/tmp/mark-{}", one.id);
    one.start_background(&format!("cp /bin/sleep {mark} && exec {mark} 600"));
    e2e::eventually("the marked process runs", || !host::pids_with_command_line(&mark).is_empty());
    assert_eq!(
        one.run_argv(&["/opt/attacks", "find-process", &mark]).code,
        Some(0),
        "the attack does not work"
    );
    let found = other.run_argv(&["/opt/attacks", "find-process", &mark]);
    assert_eq!(found.code, Some(1), "a neighbour's process was found: {found:?}");
    let pid = host::pids_with_command_line(&mark)[0].to_string();
    let killed = other.run_argv(&["/opt/attacks", "signal", &pid]);
    assert_eq!(killed.code, Some(1), "a number of the host meant something inside: {killed:?}");
}

#[test]
fn the_network_of_another_sandbox_is_out_of_reach() {
    let server = TestServer::start();
    let (mut one, mut other) = (server.create_sandbox(), server.create_sandbox());
    one.upload_attacks();
    other.upload_attacks();
    one.start_background("python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 8099)); s.listen(); input()' < /dev/zero");
    e2e::eventually("the service listens", || {
        one.run_argv(&["/opt/attacks", "connect-tcp", "8099"]).code == Some(0)
    });
    let ran = other.run_argv(&["/opt/attacks", "connect-tcp", "8099"]);
    assert!(ran.code == Some(1) && ran.stdout.contains("ECONNREFUSED"), "loopback is shared: {ran:?}");
}

#[test]
fn sandboxes_have_different_users_on_the_host() {
    let server = TestServer::start();
    let (one, other) = (server.create_sandbox(), server.create_sandbox());
    if !testkit::needs_root() {
        return;
    }
    let users = [&one, &other].map(|sandbox| {
        let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
        std::fs::read_to_string(format!("/proc/{agent}/uid_map")).expect("root can read it")
    });
    assert_ne!(users[0], users[1], "two sandboxes share a range of users");
}

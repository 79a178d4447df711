//! Other processes: the agent, and those of the host.

use std::process::{Child, Command};

use super::{Attack, Outside};
use e2e::binary::ProgramCopies;
use e2e::server::TestServer;

const UNTRACEABLE: &str =
    "an agent whose program cannot be read, which is not dumpable, and the filter for commands";
const OWN_PIDS: &str = "a pid namespace of its own, in which the host's processes have no number";

/// A host process that serves as the target of an attack.
struct VictimProcess(Child);

impl VictimProcess {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().expect("there is a `sleep`"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for VictimProcess {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// An attack on a victim outside, and on the agent inside.
fn check_on_agent(name: &str, refusals: &[&str]) {
    let victim = VictimProcess::start();
    let attack = Attack { words: &[name, "1"], refusals, stopped_by: UNTRACEABLE };
    Attack { words: &[name, &victim.pid()], ..attack }.check_outside(Outside::Bites);
    attack.check_inside();
}

#[test]
fn the_agent_cannot_be_traced() {
    check_on_agent("trace", &["EPERM"]);
}

#[test]
fn the_agents_memory_cannot_be_read() {
    check_on_agent("read-memory", &["EPERM", "EACCES"]);
}

#[test]
fn the_agents_descriptors_cannot_be_taken() {
    check_on_agent("steal-descriptor", &["EPERM", "EACCES"]);
}

#[test]
fn the_agents_program_cannot_be_overwritten() {
    check_on_agent("overwrite-binary", &["EACCES", "EPERM", "ENOENT", "EROFS"]);
}

#[test]
fn the_agent_survives_every_signal_from_inside() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let sent = sandbox
        .run("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; kill -9 -1 2>/dev/null; echo sent");
    assert!(sent.code != Some(0) || sent.stdout.contains("sent"), "{sent:?}");
    assert_eq!(sandbox.run("echo alive").stdout, "alive\n");
    assert_eq!(sandbox.state().as_deref(), Some("Running"));
}

#[test]
fn processes_of_the_host_cannot_be_signalled() {
    let victim = VictimProcess::start();
    let attack = Attack { words: &["signal", &victim.pid()], refusals: &["ESRCH"], stopped_by: OWN_PIDS };
    attack.check_inside();
    attack.check_outside(Outside::Bites);
}

#[test]
fn processes_of_the_host_cannot_be_seen() {
    let name = ProgramCopies::shared().attacks_directory().join("visible-only-outside");
    // The copy is made by another process: if this one had the file open for writing, a program that
    // another test starts might inherit it, and the copy could not be executed.
    let copied = Command::new("cp").arg("/bin/sleep").arg(&name).status();
    assert!(copied.expect("there is a `cp`").success());
    let mut victim = VictimProcess(Command::new(&name).arg("600").spawn().expect("a copy of `sleep` runs"));
    Attack { words: &["find-process", "visible-only-outside"], refusals: &["ESRCH"], stopped_by: OWN_PIDS }
        .check();
    victim.0.kill().expect("it is our child");
}

#[test]
fn priority_cannot_be_raised() {
    Attack { words: &["raise-priority"], refusals: &["EPERM", "EACCES"], stopped_by: "no CAP_SYS_NICE" }
        .check();
}

#[test]
fn limits_cannot_be_raised() {
    Attack { words: &["raise-limit"], refusals: &["EPERM"], stopped_by: "no CAP_SYS_RESOURCE" }.check();
}

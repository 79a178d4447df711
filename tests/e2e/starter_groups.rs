//! A sandbox is in none of the control groups that started the server, so that it is not ended with them.

use std::fs;
use std::path::{Path, PathBuf};

use e2e::host;
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, Signal};

/// A group in every hierarchy of this host, as a container engine or systemd makes one.
struct StarterGroups {
    name: String,
    hierarchies: Vec<PathBuf>,
}

/// Where the hierarchies of this host are mounted.
fn cgroup_hierarchies() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("Linux has it");
    let is_cgroup = |line: &&str| line.contains(" - cgroup ") || line.contains(" - cgroup2 ");
    let path = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
    table.lines().filter(is_cgroup).filter_map(path).collect()
}

impl StarterGroups {
    fn make() -> Self {
        let hierarchies = cgroup_hierarchies();
        let name = format!("starter-{}", std::process::id());
        for hierarchy in &hierarchies {
            let group = hierarchy.join(&name);
            fs::create_dir(&group).expect("tests with control groups run as root");
            // An empty group of the cpuset hierarchy accepts no process.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if let (Ok(value), true) =
                    (fs::read_to_string(hierarchy.join(file)), !hierarchy.ends_with("unified"))
                {
                    fs::write(group.join(file), value.trim()).expect("our own group");
                }
            }
        }
        Self { name, hierarchies }
    }

    /// Shell text that moves the shell into all of the groups.
    fn joining(&self) -> String {
        let join =
            |hierarchy: &PathBuf| format!("echo $$ > {}/{}/cgroup.procs", hierarchy.display(), self.name);
        self.hierarchies.iter().map(join).collect::<Vec<_>>().join("; ")
    }

    /// Kills all processes in the groups, as an engine does that ends a container.
    fn kill_all(&self) {
        for hierarchy in &self.hierarchies {
            let group = hierarchy.join(&self.name);
            e2e::eventually("the group is empty", || {
                for pid in pids_of(&group) {
                    // It may have ended by itself.
                    rustix::process::kill_process(pid, Signal::KILL).ok();
                }
                pids_of(&group).is_empty()
            });
        }
    }
}

fn pids_of(group: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(group.join("cgroup.procs")).expect("our own group");
    text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
}

impl Drop for StarterGroups {
    fn drop(&mut self) {
        for hierarchy in &self.hierarchies {
            let removed = e2e::happens(|| fs::remove_dir(hierarchy.join(&self.name)).is_ok());
            assert!(removed || std::thread::panicking(), "a group of the test stays");
        }
    }
}

#[test]
fn sandbox_survives_the_end_of_what_started_its_server() {
    if !testkit::needs_root() {
        return;
    }
    let groups = StarterGroups::make();
    let mut server: TestServer = ServerBuilder::new().with_shell_prefix(&groups.joining()).start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("echo kept > /root/file").code, Some(0));
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
    let own = fs::read_to_string(format!("/proc/{agent}/cgroup")).expect("its agent runs");
    assert!(!own.contains(&groups.name), "the sandbox is in a group of its server's starter:\n{own}");
    let supervisor = fs::read_to_string(format!("/proc/{}/cgroup", server.pid())).expect("it runs");
    assert_eq!(supervisor.matches(&groups.name).count(), groups.hierarchies.len(), "{supervisor}");
    groups.kill_all();
    server.kill();
    assert_eq!(host::agent_pid(&sandbox.id), Some(agent), "the sandbox was ended with its server's starter");
    let address = server.address().to_owned();
    server.restart(&ServerBuilder::new().listen(&address));
    assert_eq!(sandbox.run("cat /root/file").stdout, "kept\n");
}

/// The control groups of a server, in all hierarchies. Their names contain the identity of its state directory.
fn groups_of(server: &TestServer) -> Vec<PathBuf> {
    let identity = fs::read(server.state_directory().join("identity")).expect("it has an identity");
    let identity: serde_json::Value = serde_json::from_slice(&identity).expect("it is JSON");
    let instance = identity["instance"].as_str().expect("it has a name");
    let hierarchies =
        cgroup_hierarchies().into_iter().map(|hierarchy| hierarchy.join("coracle").join(instance));
    hierarchies.filter(|group| group.is_dir()).collect()
}

#[test]
fn stop_without_a_launcher_leaves_no_control_groups() {
    if !testkit::needs_root() {
        return;
    }
    let mut server = TestServer::start();
    assert!(!groups_of(&server).is_empty(), "the test looks for the wrong groups");
    let supervisor = Pid::from_raw(server.pid().cast_signed()).expect("a pid");
    let launcher = Pid::from_raw(server.part_pid("__launcher").cast_signed()).expect("a pid");
    // The supervisor is stopped meanwhile, so that it cannot start another launcher.
    rustix::process::kill_process(supervisor, Signal::STOP).expect("our own child");
    rustix::process::kill_process(launcher, Signal::KILL).expect("our own process");
    rustix::process::kill_process(supervisor, Signal::TERM).expect("our own child");
    rustix::process::kill_process(supervisor, Signal::CONT).expect("our own child");
    server.terminate();
    assert_eq!(groups_of(&server), Vec::<PathBuf>::new());
}

#[test]
fn next_server_removes_the_control_groups_of_a_killed_one() {
    if !testkit::needs_root() {
        return;
    }
    let mut server = TestServer::start();
    server.kill();
    assert!(!groups_of(&server).is_empty(), "a killed server removed its groups");
    server.restart(&ServerBuilder::new());
    server.terminate();
    assert_eq!(groups_of(&server), Vec::<PathBuf>::new());
}

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

impl StarterGroups {
    fn make() -> Self {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("Linux has it");
        let is_cgroup = |line: &&str| line.contains(" - cgroup ") || line.contains(" - cgroup2 ");
        let path = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
        let hierarchies: Vec<PathBuf> = table.lines().filter(is_cgroup).filter_map(path).collect();
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

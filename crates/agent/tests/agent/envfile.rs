//! The env file in which commands keep variables for later commands.

use std::collections::BTreeMap;
use std::path::PathBuf;

use wire::process::{
    ExitReason, MissingDirectory, OpenSession, RunInSession, StartProcess, WorkingDirectory,
};
use wire::{AgentReply, AgentRequest, FaultKind};

use crate::client::{argv, shell};
use crate::harness::{TestAgent, TreeMode};
use crate::sessions::{run, session};

/// An agent whose env file does not exist yet, and the path of that file.
fn with_file(trees: TreeMode) -> (TestAgent, PathBuf) {
    let mut path = PathBuf::new();
    let agent = TestAgent::with_config(trees, |config| {
        path = PathBuf::from(&config.default_directory).join("variables");
        config.env_file = Some(path.to_str().unwrap().to_owned());
        config.env.insert("BASE".to_owned(), "base".to_owned());
    });
    (agent, path)
}

#[test]
fn each_command_reads_the_file_anew_and_the_request_overrides_it() {
    let (agent, path) = with_file(TreeMode::Runners);
    assert_eq!(agent.run(shell("none", "echo [$V] [$BASE]")).stdout(), "[] [base]\n");
    std::fs::write(&path, "V='one two'\nBASE=$BASE/more\n").unwrap();
    assert_eq!(agent.run(shell("file", "echo [$V] [$BASE]")).stdout(), "[one two] [base/more]\n");
    let mut own = shell("own", "echo [$V] [$BASE]");
    own.env = BTreeMap::from([("V".to_owned(), "mine".to_owned())]);
    assert_eq!(agent.run(own).stdout(), "[mine] [base/more]\n");
    agent.run(shell("add", &format!("echo V=three >> {}", path.display())));
    assert_eq!(agent.run(shell("last", "echo $V")).stdout(), "three\n");
}

#[test]
fn path_variable_in_the_file_is_used_to_find_programs() {
    let (agent, path) = with_file(TreeMode::Runners);
    let tools = path.with_file_name("tools");
    agent.run(shell(
        "make",
        &format!(
            "mkdir {0}; printf '#!/bin/sh\\necho found' > {0}/tool; chmod 755 {0}/tool",
            tools.display()
        ),
    ));
    std::fs::write(&path, format!("PATH=$PATH:{}\n", tools.display())).unwrap();
    assert_eq!(agent.run(argv("tool", &["tool"])).stdout(), "found\n");
}

#[test]
fn new_shell_reads_the_file() {
    let (agent, path) = with_file(TreeMode::Runners);
    std::fs::write(&path, "V=kept\n").unwrap();
    assert_eq!(agent.reply(AgentRequest::OpenSession(session())), AgentReply::Ok);
    assert_eq!(agent.run_in(run("r", "echo $V")).stdout(), "kept\n");
}

fn directory(path: &str, missing: MissingDirectory) -> Option<WorkingDirectory> {
    Some(WorkingDirectory { path: path.to_owned(), missing, expand: true })
}

#[test]
fn directory_of_a_command_can_use_variables_of_the_file() {
    let (agent, path) = with_file(TreeMode::Runners);
    std::fs::write(&path, "D=/usr\nBASE=/etc\n").unwrap();
    let at = |name: &str, path: &str| StartProcess {
        directory: directory(path, MissingDirectory::Fail),
        ..shell(name, "pwd")
    };
    assert_eq!(agent.run(at("file", "$D/bin/../lib")).stdout(), "/usr/lib\n");
    assert_eq!(agent.run(at("before", "$BASE")).stdout(), "/etc\n");
    let env = BTreeMap::from([("D".to_owned(), "/dev".to_owned())]);
    assert_eq!(agent.run(StartProcess { env, ..at("own", "${D}") }).stdout(), "/dev\n");
    let fault = agent.fault(AgentRequest::Start(at("none", "$D/never/there")));
    assert_eq!((fault.kind, fault.subject.as_str()), (FaultKind::NotFound, "$D/never/there"));
    let ignored = StartProcess {
        directory: directory("$D/never", MissingDirectory::Ignore),
        ..shell("ignored", "pwd")
    };
    assert_eq!(agent.run(ignored).stdout().trim_end(), path.parent().unwrap().to_str().unwrap());
}

#[test]
fn directory_of_a_session_and_its_runs_can_use_them_too() {
    let (agent, path) = with_file(TreeMode::Runners);
    let home = path.parent().unwrap().to_str().unwrap();
    std::fs::write(&path, format!("D='{home}/a b'\n")).unwrap();
    let open = OpenSession { directory: directory("$D/new", MissingDirectory::Create), ..session() };
    assert_eq!(agent.reply(AgentRequest::OpenSession(open)), AgentReply::Ok);
    assert_eq!(agent.run_in(run("first", "pwd")).stdout(), format!("{home}/a b/new\n"));
    let at = |name: &str, path: &str| RunInSession {
        directory: directory(path, MissingDirectory::Fail),
        ..run(name, "pwd; export LATER=/usr")
    };
    assert_eq!(agent.run_in(at("second", "${D}")).stdout(), format!("{home}/a b\n"));
    assert_eq!(agent.run_in(at("third", "new")).stdout(), format!("{home}/a b/new\n"));
    assert_eq!(agent.run_in(at("later", "$LATER/bin")).stdout(), "/usr/bin\n");
    let missing = agent.run_in(at("missing", "$D/$(touch oops)"));
    assert_eq!((missing.stdout().as_str(), missing.exit()), ("", ExitReason::Code(1)));
    assert_eq!(agent.fault(AgentRequest::Run(at("plain", "/never/there"))).kind, FaultKind::NotFound);
    assert_eq!(agent.fault(AgentRequest::Run(at("zero", "$D\0"))).kind, FaultKind::Invalid);
    assert_eq!(agent.run_in(run("after", "pwd; ls oops")).stdout(), "/usr/bin\n");
}

#[test]
fn anything_instead_of_the_file_delays_no_command() {
    for trouble in ["mkfifo", "mkdir", "ln -s /dev/zero", "ln -s variables", "head -c 5000000 /dev/urandom >"]
    {
        let (agent, path) = with_file(TreeMode::Runners);
        agent.run(shell("trouble", &format!("{trouble} {}", path.display())));
        let output = agent.run(shell("next", "echo well"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("well\n", ExitReason::Code(0)), "{trouble}");
    }
}

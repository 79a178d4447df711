//! The file of variables that commands keep for those after them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use wire::process::{Exit, Identity, OpenSession, Retention, RunInSession};
use wire::{Reply, Request};

use crate::client::{argv, shell};
use crate::harness::{TestAgent, Trees};

/// An agent whose file is not there yet, and the file.
fn with_file(trees: Trees) -> (TestAgent, PathBuf) {
    let mut path = PathBuf::new();
    let agent = TestAgent::with_config(trees, |config| {
        path = PathBuf::from(&config.default_directory).join("variables");
        config.env_file = Some(path.to_str().unwrap().to_owned());
        config.env.insert("BASE".to_owned(), "base".to_owned());
    });
    (agent, path)
}

#[test]
fn each_command_reads_the_file_anew_and_the_requests_own_come_last() {
    let (agent, path) = with_file(Trees::Runners);
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
fn a_path_in_the_file_is_where_programs_are_looked_for() {
    let (agent, path) = with_file(Trees::Runners);
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
fn a_new_shell_reads_it_as_well() {
    let (agent, path) = with_file(Trees::Runners);
    std::fs::write(&path, "V=kept\n").unwrap();
    let open = OpenSession {
        session: "s".to_owned(),
        identity: Identity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        nest: None,
    };
    assert_eq!(agent.reply(Request::OpenSession(open)), Reply::Ok);
    let run = RunInSession {
        session: "s".to_owned(),
        process: "r".to_owned(),
        text: "echo $V".to_owned(),
        directory: None,
        deadline_ms: None,
        retention: Retention { first: 1 << 20, last: 1 << 20, hold: false },
        follow: true,
        queue: false,
        env: BTreeMap::new(),
        beside: false,
    };
    let mut talk = agent.ask(Request::Run(run));
    assert!(matches!(talk.reply(), Reply::Started { .. }));
    assert_eq!(talk.output().stdout(), "kept\n");
}

#[test]
fn whatever_stands_in_its_place_holds_up_nobody() {
    for trouble in ["mkfifo", "mkdir", "ln -s /dev/zero", "ln -s variables", "head -c 5000000 /dev/urandom >"]
    {
        let (agent, path) = with_file(Trees::Runners);
        agent.run(shell("trouble", &format!("{trouble} {}", path.display())));
        let output = agent.run(shell("next", "echo well"));
        assert_eq!((output.stdout().as_str(), output.exit()), ("well\n", Exit::Code(0)), "{trouble}");
    }
}

//! `coracle run`: a command in a sandbox that behaves like the bare command, and leaves nothing.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::host::{self, HostState};
use e2e::run::{RunCommand, TestUser, all_users};

#[test]
fn output_and_exit_code_are_those_of_the_command() {
    for user in all_users() {
        let ended = RunCommand::new(user).run_shell("echo out; echo err >&2; exit 7");
        assert_eq!(ended.code, Some(7), "{user:?}: {ended:?}");
        assert_eq!(ended.stdout, "out\n", "{user:?}");
        assert!(ended.stderr.contains("err\n"), "{user:?}: {ended:?}");
    }
}

#[test]
fn a_signal_becomes_the_exit_code_that_shells_use() {
    let ended = RunCommand::new(TestUser::Same).run_shell("kill -TERM $$");
    assert_eq!(ended.code, Some(128 + 15), "{ended:?}");
}

#[test]
fn input_reaches_the_command_and_its_end_too() {
    for user in all_users() {
        let run = RunCommand::new(user);
        let mut child = run
            .command(&["wc", "-c"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let input = vec![b'x'; 1_000_000];
        child.stdin.take().expect("it is a pipe").write_all(&input).expect("it is read");
        let output = child.wait_with_output().expect("it is our child");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "1000000", "{user:?}");
    }
}

#[test]
fn input_that_is_not_read_holds_nothing_up() {
    const TOTAL: usize = 3 << 20;
    let run = RunCommand::new(TestUser::Same);
    let ended = |argv: &[&str]| e2e::run::output_with_input(&mut run.command(argv), TOTAL);
    assert_eq!(ended(&["true"]).status.code(), Some(0));
    assert_eq!(ended(&["sh", "-c", "sleep 0.5; exit 3"]).status.code(), Some(3));
    let printing = ended(&["sh", "-c", "sleep 0.5; seq 1 300000; exec wc -c"]);
    let lines = String::from_utf8_lossy(&printing.stdout);
    assert_eq!(lines.lines().count(), 300_001);
    assert_eq!(lines.lines().next_back(), Some(TOTAL.to_string().as_str()));
    let late = RunCommand::new(TestUser::Same).flag("--timeout", "300ms");
    let late = e2e::run::output_with_input(&mut late.command(&["sleep", "60"]), TOTAL);
    assert_eq!(late.status.code(), Some(124));
}

#[test]
fn a_large_output_arrives_whole() {
    let ended = RunCommand::new(TestUser::Same).run_shell("head -c 20000000 /dev/zero | tr '\\0' x");
    assert_eq!((ended.code, ended.stdout.len()), (Some(0), 20_000_000));
}

#[test]
fn a_deadline_ends_with_124_and_a_missing_program_with_127() {
    let run = RunCommand::new(TestUser::Same).flag("--timeout", "300ms");
    assert_eq!(run.run_argv(&["sleep", "60"]).code, Some(124));
    assert_eq!(RunCommand::new(TestUser::Same).run_argv(&["/no/such/program"]).code, Some(127));
}

#[test]
fn a_sandbox_that_cannot_be_made_ends_with_125_and_says_why() {
    let ended = RunCommand::new(TestUser::Same).flag("--image", "no-such-image").run_argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("no-such-image") && ended.stderr.contains("hint:"), "{ended:?}");
    // A policy is for a filtered network alone.
    let contradiction = RunCommand::new(TestUser::Same).flag("--network", "off").flag("--allow", "a.example");
    let ended = contradiction.run_argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("filtered") && ended.stderr.contains("hint:"), "{ended:?}");
}

#[test]
fn an_imported_image_can_be_run() {
    for user in all_users() {
        let run = RunCommand::new(user).flag("--image", "mini");
        let tree = user.make_home();
        fs::create_dir_all(tree.path().join("image/bin")).expect("our own directory");
        // The one static program that exists on every test host.
        fs::copy(ProgramCopies::shared().coracle_path(), tree.path().join("image/bin/tool"))
            .expect("our own files");
        let mut import = ProgramCopies::shared().command();
        import.args(["image", "import", "mini"]).arg(tree.path().join("image"));
        import.arg("--state-dir").arg(run.state_directory());
        user.apply_to(&mut import);
        let imported = import.output().expect("the binary runs");
        assert!(imported.status.success(), "{user:?}: {imported:?}");
        let ended = run.run_argv(&["/bin/tool", "--version"]);
        assert_eq!(ended.code, Some(0), "{user:?}: {ended:?}");
        assert!(ended.stdout.starts_with("coracle "), "{user:?}: {ended:?}");
        assert_eq!(run.run_argv(&["/usr/bin/env"]).code, Some(127), "{user:?}: the image `host` was used");
    }
}

/// The descriptor numbers at which the agent expects what it inherits may be free or taken beforehand.
#[test]
fn run_works_whichever_descriptors_are_open() {
    const CLOSED: &str = "for n in {3..254}; do eval \"exec $n<&-\"; done; exec \"$@\"";
    const OPEN: &str = "for n in {3..254}; do eval \"exec $n</\"; done; exec \"$@\"";
    for (user, first) in all_users().into_iter().flat_map(|user| [(user, CLOSED), (user, OPEN)]) {
        let run = RunCommand::new(user);
        let plain = run.command(&["echo", "hello"]);
        let mut command = Command::new("bash");
        command.args(["-c", first, "bash"]).arg(plain.get_program()).args(plain.get_args());
        user.apply_to(&mut command);
        let output = command.env("HOME", run.home()).output().expect("there is a shell");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "hello\n", "{user:?}: {output:?}");
    }
}

#[test]
fn the_environment_is_set_and_not_inherited() {
    let run = RunCommand::new(TestUser::Same).flag("--env", "GIVEN=yes");
    let output = run.command(&["env"]).env("LEAKED", "secret").output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("GIVEN=yes") && !text.contains("LEAKED"), "{text}");
}

#[test]
fn the_whole_system_can_be_written_and_nothing_of_it_reaches_the_host() {
    let ended = RunCommand::new(TestUser::Same).run_shell(
        "touch /usr/local/bin/written /etc/written /root/written /written && rm /usr/bin/env && test ! -e /usr/bin/env",
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(Path::new("/usr/bin/env").exists() && !Path::new("/usr/local/bin/written").exists());
}

/// Lists the devices, sends something through the loopback and tries an address beyond it.
const SHOW_NETWORK: &str = "cat /proc/net/dev
python3 - <<'END'
import socket
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
client.sendall(b'through the loopback')
client.close()
print('heard:', listener.accept()[0].recv(100).decode())
END
exec 3<>/dev/tcp/192.0.2.1/80 || true";

#[test]
fn network_is_only_an_active_loopback() {
    for user in all_users() {
        let ended = RunCommand::new(user).run_argv(&["bash", "-c", SHOW_NETWORK]);
        assert_eq!(ended.code, Some(0), "{user:?}: {ended:?}");
        let lines: Vec<&str> = ended.stdout.lines().map(str::trim).collect();
        let devices: Vec<&str> = lines
            .iter()
            .take_while(|line| !line.starts_with("heard"))
            .filter_map(|line| line.split_once(':'))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(devices, ["lo"], "{user:?}: {ended:?}");
        assert!(lines.contains(&"heard: through the loopback"), "lo is not up for {user:?}: {ended:?}");
        // The connection is refused at once for lack of a route, without a timeout.
        assert!(ended.stderr.contains("Network is unreachable"), "{user:?}: {ended:?}");
    }
}

#[test]
fn run_leaves_nothing_on_the_host() {
    for user in all_users() {
        let run = RunCommand::new(user);
        let mark = format!("{}", 400_000 + std::process::id());
        // The first run makes the state that all runs share.
        assert_eq!(run.run_argv(&["true"]).code, Some(0));
        let named = run.run_shell(&format!("hostname; sleep {mark} & true"));
        assert_eq!(named.code, Some(0), "{named:?}");
        assert_eq!(host::pids_with_command_line(&format!("sleep {mark}")), Vec::<u32>::new(), "{user:?}");
        // The host name inside is the sandbox's id.
        let id = named.stdout.trim().to_owned();
        let left = HostState::capture(run.state_directory()).mentioning(&[id]);
        assert_eq!(left, HostState::default(), "{user:?} left something");
    }
}

#[test]
fn a_killed_run_takes_its_sandbox_along() {
    for user in all_users() {
        let run = RunCommand::new(user);
        let mark = format!("{}", 500_000 + std::process::id());
        let mut child = run.command(&["sleep", &mark]).spawn().expect("the binary runs");
        let inside = || {
            host::pids_with_command_line(&format!("sleep {mark}")).into_iter().any(|pid| pid != child.id())
        };
        e2e::eventually("the command runs", inside);
        child.kill().expect("it is our child");
        child.wait().expect("it is our child");
        e2e::eventually("the sandbox is gone", || {
            host::pids_with_command_line(&format!("sleep {mark}")).is_empty()
        });
        assert_eq!(run.run_argv(&["true"]).code, Some(0), "{user:?}: the next start fails over leftovers");
    }
}

/// Makes a wheel by hand, installs it and imports the module in it.
const INSTALL_WHEEL: &str = r#"
cd /tmp && python3 - <<'END'
import zipfile
with zipfile.ZipFile("greeting-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("greeting.py", "print('installed')")
    wheel.writestr("greeting-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    wheel.writestr("greeting-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("greeting-1.dist-info/RECORD", "")
END
python3 -m pip install --quiet --no-index ./greeting-1-py3-none-any.whl 2>&1 && cd / && python3 -c 'import greeting'
"#;

#[test]
fn pip_installs_in_image_host_without_flags() {
    if !host_has_pip() {
        testkit::skip_test("the host has no pip below /usr");
        return;
    }
    for user in all_users() {
        let ended = RunCommand::new(user).flag("--disk", "200m").run_shell(INSTALL_WHEEL);
        assert!(ended.code == Some(0) && ended.stdout.ends_with("installed\n"), "{user:?}: {ended:?}");
    }
    // A user without rights inside gets the packages in its home.
    let run = RunCommand::new(TestUser::Same).flag("--user", "1000:1000").flag("--env", "HOME=/tmp");
    let ended = run.run_shell(INSTALL_WHEEL);
    assert!(ended.code == Some(0) && ended.stdout.ends_with("installed\n"), "{ended:?}");
}

fn host_has_pip() -> bool {
    let found = Command::new("/usr/bin/python3").args(["-m", "pip", "--version"]).output();
    found.is_ok_and(|output| output.status.success())
}

#[test]
fn apt_in_image_host_explains_why_it_fails() {
    if !Path::new("/usr/bin/apt-get").exists() {
        testkit::skip_test("the host has no apt-get");
        return;
    }
    for arguments in [&["apt-get", "update"][..], &["apt-get", "install", "-y", "jq"]] {
        let ended = RunCommand::new(TestUser::Same).run_argv(arguments);
        assert_eq!(ended.code, Some(100), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
        for words in ["apt in image `host`", "has no package database", "use pip or npm", "is not supported"]
        {
            assert!(ended.stderr.contains(words), "{words}: {ended:?}");
        }
    }
}

//! `coracle run` and the attacker's program, as root and as an ordinary user.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::binary::ProgramCopies;

/// The user that starts a program of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestUser {
    /// The user who runs the tests: root in CI.
    Same,
    /// A uid without any privilege or account.
    Ordinary(u32),
}

/// A uid that no distribution assigns.
pub const ORDINARY_USER: TestUser = TestUser::Ordinary(61_234);

impl TestUser {
    /// Makes the command start as this user. Supplementary groups are dropped with the uid.
    pub fn apply_to(self, command: &mut Command) {
        if let Self::Ordinary(uid) = self {
            command.uid(uid).gid(uid);
        }
    }

    /// A temporary home that this user can write.
    pub fn make_home(self) -> TempDir {
        let home = tempfile::Builder::new()
            .prefix("coracle-home-")
            .permissions(Permissions::from_mode(0o755))
            .tempdir()
            .expect("the temporary directory can be written");
        if let Self::Ordinary(uid) = self {
            chown(home.path(), Some(uid), Some(uid)).expect("tests for ordinary users run as root");
        }
        home
    }
}

/// The users that create sandboxes: root and an ordinary user.
pub fn all_users() -> Vec<TestUser> {
    if testkit::is_root() {
        return vec![TestUser::Same, ORDINARY_USER];
    }
    testkit::skip_test("the part that needs root; only this ordinary user was tested");
    vec![TestUser::Same]
}

/// How a program ended, with its output as text.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for CommandOutput {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// A `coracle run` under construction.
pub struct RunCommand {
    user: TestUser,
    state: PathBuf,
    flags: Vec<String>,
    home: TempDir,
}

impl RunCommand {
    /// Root's runs share one state directory, as they would on a host; an ordinary user's runs use their
    /// own home.
    pub fn new(user: TestUser) -> Self {
        let home = user.make_home();
        let state = match user {
            TestUser::Same => ProgramCopies::shared().state_directory(),
            TestUser::Ordinary(_) => home.path().join("state"),
        };
        Self { user, state, flags: Vec::new(), home }
    }

    /// Uses a state directory of the test.
    pub fn state(mut self, directory: &Path) -> Self {
        self.state = directory.to_owned();
        self
    }

    /// Adds a flag and its value.
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.flags.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Adds a flag that has no value.
    pub fn switch(mut self, name: &str) -> Self {
        self.flags.push(name.to_owned());
        self
    }

    /// Mounts a host directory inside.
    pub fn mount(self, source: &Path, target: &str, access: &str) -> Self {
        let mount = format!("{}:{target}:{access}", source.display());
        self.flag("--mount", &mount)
    }

    /// Mounts the attacker's program as `/attacks/attacks`.
    pub fn with_attacks(self) -> Self {
        let directory = ProgramCopies::shared().attacks_directory();
        self.mount(&directory, "/attacks", "ro")
    }

    /// The state directory of the binary.
    pub fn state_directory(&self) -> &Path {
        &self.state
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// The command, ready to be started.
    pub fn command(&self, argv: &[&str]) -> Command {
        let mut command = ProgramCopies::shared().command();
        command
            .arg("run")
            .arg("--state-dir")
            .arg(&self.state)
            .args(&self.flags)
            .arg("--")
            .args(argv)
            .env("HOME", self.home.path())
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("XDG_STATE_HOME")
            .env_remove("TMPDIR")
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        self.user.apply_to(&mut command);
        command
    }

    /// Runs the command to its end.
    pub fn run_argv(&self, argv: &[&str]) -> CommandOutput {
        self.command(argv).output().expect("the binary can be run").into()
    }

    /// Runs shell text to its end.
    pub fn run_shell(&self, text: &str) -> CommandOutput {
        self.run_argv(&["sh", "-c", text])
    }
}

/// The same command, started by a shell that first runs the text of `prefix`, such as `ulimit -Sn 256`. A prefix that
/// ends with `exec PROGRAM "$0" "$@"` starts the command through that program.
pub fn with_shell_prefix(prefix: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!("{prefix}; exec \"$0\" \"$@\""))
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.stdin(Stdio::null());
    shell
}

/// Runs an attack on the host itself, as the user of the tests, in its own mount namespace and with an open
/// descriptor of the root directory, as a careless runtime would leave it.
pub fn attack_outside(attack: &[&str]) -> CommandOutput {
    let place = tempfile::tempdir().expect("the temporary directory can be written");
    let root = fs::File::open("/").expect("the root can be read");
    let mut command = Command::new(ProgramCopies::shared().attacks_path());
    command.arg("--apart").args(attack).env("TMPDIR", place.path()).current_dir(place.path());
    // std passes on descriptor 0 without closing it.
    command.stdin(Stdio::from(root));
    command.output().expect("the attacker can be run").into()
}

/// Runs a command to its end while it is given so many bytes of input, whether it reads them or not.
pub fn output_with_input(command: &mut Command, length: usize) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut input = child.stdin.take().expect("it is a pipe");
    let writer = std::thread::spawn(move || {
        // A command that ends before it has read everything closes the pipe.
        std::io::Write::write_all(&mut input, &vec![b'x'; length]).ok();
    });
    let output = child.wait_with_output().expect("it is our child");
    writer.join().expect("writing does not panic");
    output
}

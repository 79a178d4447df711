//! Finds the programs under test and puts copies where every user can run them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The programs under test, in a directory that every user can read: a build directory may lie in a private
/// home.
pub struct ProgramCopies {
    directory: PathBuf,
    /// Waits for the end of this process and removes the directory; shared values are never dropped.
    _sweeper: Child,
}

impl ProgramCopies {
    /// The copies of this test run, made at first use.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<ProgramCopies> = OnceLock::new();
        SHARED.get_or_init(|| Self::copy_programs(&find_coracle(), &find_attacks()))
    }

    fn copy_programs(coracle: &Path, attacks: &Path) -> Self {
        let directory = tempfile::Builder::new()
            .prefix("coracle-e2e-")
            .permissions(Permissions::from_mode(0o755))
            .tempdir()
            .expect("the temporary directory can be written")
            .keep();
        let sweeper = Command::new("sh")
            .args(["-c", "cat > /dev/null; rm -rf \"$0\""])
            .arg(&directory)
            .stdin(Stdio::piped())
            // The sweeper must outlive a signal to the process group of the tests.
            .process_group(0)
            .spawn()
            .expect("there is a shell");
        for (name, from) in [("coracle", coracle), ("attacks/attacks", attacks)] {
            let to = directory.join(name);
            let parent = to.parent().expect("the copy is inside the directory");
            fs::create_dir_all(parent).expect("a directory can be made");
            fs::copy(from, &to).unwrap_or_else(|error| panic!("could not copy {}: {error}", from.display()));
            fs::set_permissions(&to, Permissions::from_mode(0o755)).expect("our own file");
        }
        Self { directory, _sweeper: sweeper }
    }

    pub fn coracle_path(&self) -> PathBuf {
        self.directory.join("coracle")
    }

    /// The binary as a command, without the tests' own settings, which it does not know. Where
    /// `CORACLE_TEST_DELEGATED` names a control group that was delegated to this user, each command begins
    /// in its own group below it, as systemd would start it.
    pub fn command(&self) -> Command {
        const JOIN: &str = "mkdir \"$0/$$\" && echo $$ > \"$0/$$/cgroup.procs\" && exec \"$@\"";
        let mut command = match std::env::var_os("CORACLE_TEST_DELEGATED") {
            Some(group) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", JOIN]).arg(group).arg(self.coracle_path());
                shell
            }
            None => Command::new(self.coracle_path()),
        };
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CORACLE_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// A state directory that is removed with this test run.
    pub fn state_directory(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// The directory that contains only `attacks`, to be mounted into a sandbox.
    pub fn attacks_directory(&self) -> PathBuf {
        self.directory.join("attacks")
    }

    pub fn attacks_path(&self) -> PathBuf {
        self.attacks_directory().join("attacks")
    }
}

/// The binary under test: `CORACLE_BIN`, or the existing build, release before debug.
fn find_coracle() -> PathBuf {
    if let Some(named) = std::env::var_os("CORACLE_BIN") {
        return PathBuf::from(named);
    }
    let beside = build_directory();
    let builds = beside.parent().expect("a profile's directory is inside a target directory");
    ["release", "debug"]
        .into_iter()
        .map(|profile| builds.join(profile).join("coracle"))
        .find(|path| path.exists())
        .expect("no binary found; run `cargo build --release` or set CORACLE_BIN")
}

fn find_attacks() -> PathBuf {
    std::env::var_os("CORACLE_TEST_ATTACKS").map_or_else(|| build_directory().join("attacks"), PathBuf::from)
}

/// `target/TRIPLE/PROFILE`, derived from the location of the test executable.
fn build_directory() -> PathBuf {
    let tests = std::env::current_exe().expect("the path of the test executable is known");
    let deps = tests.parent().expect("a file has a parent directory");
    deps.parent().expect("tests are built in `deps`").to_owned()
}

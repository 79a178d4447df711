//! Finds the programs under test and puts copies where every user can run them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// The programs, in a directory that is open to all: a build directory may lie in a closed home.
pub struct Programs {
    directory: PathBuf,
    /// Waits for the end of this process, since nobody drops what is shared, and removes the
    /// directory.
    _sweeper: Child,
}

impl Programs {
    /// The copies of this test run, made at first use.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Programs> = OnceLock::new();
        SHARED.get_or_init(|| Self::copied(&coracle(), &attacks()))
    }

    fn copied(coracle: &Path, attacks: &Path) -> Self {
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
            // It must outlive a signal to the group of the tests.
            .process_group(0)
            .spawn()
            .expect("there is a shell");
        for (name, from) in [("coracle", coracle), ("attacks/attacks", attacks)] {
            let to = directory.join(name);
            let parent = to.parent().expect("it lies in the directory");
            fs::create_dir_all(parent).expect("a directory can be made");
            fs::copy(from, &to).unwrap_or_else(|error| panic!("could not copy {}: {error}", from.display()));
            fs::set_permissions(&to, Permissions::from_mode(0o755)).expect("our own file");
        }
        Self { directory, _sweeper: sweeper }
    }

    pub fn coracle(&self) -> PathBuf {
        self.directory.join("coracle")
    }

    /// The binary as a command, without the settings of the tests, which it does not know.
    /// Where `CORACLE_TEST_DELEGATED` names a control group that was given to this user, each
    /// command begins in a group of its own below it, as systemd would start it.
    pub fn command(&self) -> Command {
        const JOIN: &str = "mkdir \"$0/$$\" && echo $$ > \"$0/$$/cgroup.procs\" && exec \"$@\"";
        let mut command = match std::env::var_os("CORACLE_TEST_DELEGATED") {
            Some(group) => {
                let mut shell = Command::new("sh");
                shell.args(["-c", JOIN]).arg(group).arg(self.coracle());
                shell
            }
            None => Command::new(self.coracle()),
        };
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CORACLE_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// A state directory that goes with this test run.
    pub fn state_directory(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// The directory that holds `attacks` alone, to be mounted into a sandbox.
    pub fn attacks_directory(&self) -> PathBuf {
        self.directory.join("attacks")
    }

    pub fn attacks(&self) -> PathBuf {
        self.attacks_directory().join("attacks")
    }
}

/// The binary under test: `CORACLE_BIN`, or what was built last, release before debug.
fn coracle() -> PathBuf {
    if let Some(named) = std::env::var_os("CORACLE_BIN") {
        return PathBuf::from(named);
    }
    let beside = build_directory();
    let builds = beside.parent().expect("a profile's directory lies in a target directory");
    ["release", "debug"]
        .into_iter()
        .map(|profile| builds.join(profile).join("coracle"))
        .find(|path| path.exists())
        .expect("there is a binary; `cargo build --release` makes it, CORACLE_BIN names another")
}

fn attacks() -> PathBuf {
    std::env::var_os("CORACLE_TEST_ATTACKS").map_or_else(|| build_directory().join("attacks"), PathBuf::from)
}

/// `target/TRIPLE/PROFILE`, from where the tests themselves were built.
fn build_directory() -> PathBuf {
    let tests = std::env::current_exe().expect("the tests know where they are");
    let deps = tests.parent().expect("a file lies in a directory");
    deps.parent().expect("tests are built in `deps`").to_owned()
}

//! Attacks that must fail.
//!
//! Each is first run on the host itself, where it succeeds, which shows that it works; then from a command
//! in a sandbox, as root and as an ordinary user of the host, where it must be refused with an error that
//! matches the stated protection.

mod agent;
mod aio_neighbours;
mod aio_user;
mod devices;
mod exhaustion;
mod files;
mod filtered;
mod filtered_floods;
mod filtered_sockets;
mod hidden_files;
mod host_tables;
mod isolated_sessions;
mod kernel;
mod launcher;
mod malicious_agent;
mod mounts;
mod neighbours;
mod own_processes;
mod processes;
mod programs;
mod server;
mod sockets;
mod state_directory;

use e2e::run::{CommandOutput, RunCommand, TestUser, all_users, attack_outside};
use tempfile::TempDir;

/// One attack: its arguments, the errors with which it is refused inside, and the protection that refuses it.
struct Attack<'a> {
    words: &'a [&'a str],
    refusals: &'a [&'a str],
    stopped_by: &'a str,
}

/// The expected result of an attack on the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outside {
    /// The attack succeeds.
    Bites,
    /// The attack succeeds if the kernel was built with the feature; otherwise the kernel reports that.
    BitesIfOffered,
}

impl Attack<'_> {
    /// Checks that the attack succeeds outside and fails inside.
    fn check(&self) {
        self.check_outside(Outside::Bites);
        self.check_inside();
    }

    fn check_if_offered(&self) {
        self.check_outside(Outside::BitesIfOffered);
        self.check_inside();
    }

    /// Only root can show that an attack works; the permissions that an ordinary user lacks outside prove
    /// nothing about a sandbox.
    fn check_outside(&self, expected: Outside) {
        if !testkit::is_root() {
            testkit::skip_test("only root can show that an attack works outside");
            return;
        }
        let ended = attack_outside(self.words);
        let absent =
            ["ENOSYS", "EAFNOSUPPORT", "ENOENT", "EOPNOTSUPP"].iter().any(|name| ended.stdout.contains(name));
        if expected == Outside::BitesIfOffered && ended.code == Some(1) && absent {
            testkit::skip_test("this kernel does not offer what the attack uses; it was tried inside only");
            return;
        }
        assert_eq!(ended.code, Some(0), "the attack does not work outside: {:?} {ended:?}", self.words);
    }

    fn check_inside(&self) {
        for user in all_users() {
            let ended =
                RunCommand::new(user).with_attacks().run_argv(&[&["/attacks/attacks"], self.words].concat());
            self.check_refused(&ended, &format!("as {user:?}"));
        }
    }

    /// The program ran to its end and reports that it was stopped by the expected error, or the filter
    /// killed it.
    fn check_refused(&self, ended: &CommandOutput, circumstance: &str) {
        let Self { words, refusals, stopped_by } = self;
        let killed = ended.code == Some(128 + libc::SIGSYS) && refusals.contains(&"SIGSYS");
        assert!(
            killed || (ended.code == Some(1) && ended.stdout.starts_with("stopped: ")),
            "{words:?} {circumstance} was not stopped by {stopped_by}: {ended:?}"
        );
        assert!(
            killed || refusals.iter().any(|refusal| ended.stdout.contains(refusal)),
            "{words:?} {circumstance} was stopped, but not by {stopped_by}: {ended:?}"
        );
    }
}

/// A file that every user of the host may read, so that only the sandbox's isolation keeps it from being read.
struct Secret {
    directory: TempDir,
    token: String,
}

impl Secret {
    fn new() -> Self {
        let directory = TestUser::Same.make_home();
        let token =
            format!("secret-{}", directory.path().file_name().expect("it has a name").to_string_lossy());
        std::fs::write(directory.path().join("secret"), &token).expect("our own directory");
        Self { directory, token }
    }

    fn path(&self) -> String {
        self.directory.path().join("secret").to_string_lossy().into_owned()
    }
}

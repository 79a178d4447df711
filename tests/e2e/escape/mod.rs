//! Attacks that must fail.
//!
//! Each is first run on the host itself, where it succeeds, so that it is known to bite; then
//! from a command in a sandbox, as root and as an ordinary user of the host, where it must be
//! refused with an error that fits what is said to stop it.

mod agent;
mod devices;
mod exhaustion;
mod files;
mod kernel;
mod launcher;
mod liar;
mod mounts;
mod neighbours;
mod nests;
mod processes;
mod server;
mod sockets;

use e2e::run::{Ended, Run, User, attack_outside, users};
use tempfile::TempDir;

/// One attack: its words, the errors with which it is refused inside, and what refuses it.
struct Attack<'a> {
    words: &'a [&'a str],
    refusals: &'a [&'a str],
    stopped_by: &'a str,
}

/// What is true of an attack on the host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outside {
    /// It succeeds.
    Bites,
    /// It succeeds where the kernel was built with what it uses; else the kernel says so.
    BitesIfOffered,
}

impl Attack<'_> {
    /// The attack succeeds outside and fails inside.
    fn check(&self) {
        self.check_outside(Outside::Bites);
        self.check_inside();
    }

    fn check_if_offered(&self) {
        self.check_outside(Outside::BitesIfOffered);
        self.check_inside();
    }

    /// Only root can show that an attack bites; what an ordinary user lacks outside proves
    /// nothing about a sandbox.
    fn check_outside(&self, expected: Outside) {
        if !testkit::is_root() {
            testkit::skip("only root can show that an attack bites outside");
            return;
        }
        let ended = attack_outside(self.words);
        let absent =
            ["ENOSYS", "EAFNOSUPPORT", "ENOENT", "EOPNOTSUPP"].iter().any(|name| ended.stdout.contains(name));
        if expected == Outside::BitesIfOffered && ended.code == Some(1) && absent {
            return;
        }
        assert_eq!(ended.code, Some(0), "it does not bite outside: {:?} {ended:?}", self.words);
    }

    fn check_inside(&self) {
        for user in users() {
            let ended = Run::new(user).with_attacks().argv(&[&["/attacks/attacks"], self.words].concat());
            self.check_refused(&ended, &format!("as {user:?}"));
        }
    }

    /// The program ran to its end and says that it was stopped, and by the expected error; or
    /// the filter ended it.
    fn check_refused(&self, ended: &Ended, circumstance: &str) {
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

/// A file of the host that every user of the host may read, so that nothing but the sandbox's
/// borders keeps it from being read.
struct Secret {
    directory: TempDir,
    token: String,
}

impl Secret {
    fn new() -> Self {
        let directory = User::Same.home();
        let token =
            format!("secret-{}", directory.path().file_name().expect("it has a name").to_string_lossy());
        std::fs::write(directory.path().join("secret"), &token).expect("our own directory");
        Self { directory, token }
    }

    fn path(&self) -> String {
        self.directory.path().join("secret").to_string_lossy().into_owned()
    }
}

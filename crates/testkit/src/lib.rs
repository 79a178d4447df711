//! Helpers shared by the tests of all crates: how a test reports that it was skipped, the
//! agent without a jail, its recorded exchanges, a backend without sandboxes, and a server in the process of a test.
//!
//! A test that returns early looks like one that passed. So it prints `SKIPPED NAME: WHY` on a
//! separate line, and `cargo xtask test` repeats these lines at its end.

#![cfg_attr(feature = "agent", expect(clippy::unwrap_used, reason = "a failed unwrap fails the test"))]

#[cfg(feature = "backend")]
pub mod fake_backend;
pub mod recorded_exchange;
#[cfg(feature = "server")]
pub mod test_client;
#[cfg(feature = "server")]
pub mod test_server;
#[cfg(feature = "agent")]
pub mod unjailed_agent;

use std::io::Write;

/// Whether the tests may switch users, mount, and create control groups.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns `true` for root; otherwise reports the test as skipped.
#[must_use]
pub fn needs_root() -> bool {
    if !is_root() {
        skip_test("it needs root");
    }
    is_root()
}

/// Reports that this test, or a part of it, is skipped here, and why.
///
/// The message goes directly to standard error, because `eprintln!` output is only shown for
/// failing tests.
pub fn skip_test(why: &str) {
    print_line("SKIPPED", why);
}

/// Prints a note about a test that passed, such as the seed of its random choices.
pub fn print_note(what: &str) {
    print_line("NOTE", what);
}

fn print_line(word: &str, what: &str) {
    // The test harness names each test's thread after the test.
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Ignores write errors: if standard error is closed, the message is not needed.
    writeln!(std::io::stderr(), "{word} {name}: {what}").unwrap_or_default();
}

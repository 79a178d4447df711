//! What the tests of all crates share: how one says that it was left out.
//!
//! A test that returns early looks like one that passed. So it says `SKIPPED NAME: WHY` in a line
//! of its own, and `cargo xtask test` repeats these lines at its end.

use std::io::Write;

/// Whether the tests may become other users, mount, and make control groups.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `true` for root; anybody else is told that the test is left out.
#[must_use]
pub fn needs_root() -> bool {
    if !is_root() {
        skip("it needs root");
    }
    is_root()
}

/// Says that this test, or a part of it, is left out here, and why.
///
/// It goes straight to standard error: what goes through `eprintln!` is only shown for tests
/// that fail.
pub fn skip(why: &str) {
    say("SKIPPED", why);
}

/// Says what is worth knowing of a test that passed, such as the seed of its choices.
pub fn tell(what: &str) {
    say("NOTE", what);
}

fn say(word: &str, what: &str) {
    // The harness names the thread of a test after it.
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Whoever closed standard error does not want to know.
    writeln!(std::io::stderr(), "{word} {name}: {what}").unwrap_or_default();
}

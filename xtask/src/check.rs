//! `cargo xtask check`: the invariants of ARCHITECTURE.md that can be checked, as code.
//!
//! Who may depend on whom is read from cargo's own resolution; the rest is read from the
//! sources, with comments and strings told apart from code. Each rule carries its reason, which
//! is what a contributor reads when it fails.

mod crates;
mod fronts;
mod rust_text;
mod sources;
mod tree;

use anyhow::{Result, bail};

use crate::report::say;

/// What one rule found: each as `place: what is wrong, and why that is a rule`.
type Findings = Vec<String>;

pub(crate) fn check() -> Result<()> {
    let mut findings = crates::check()?;
    findings.extend(fronts::check()?);
    let files = tree::read()?;
    findings.extend(tree::check(&files));
    let sources = sources::parse(&files);
    findings.extend(sources::check(&sources));
    for warning in sources::long_files(&sources) {
        say(format_args!("warning: {warning}"));
    }
    for finding in &findings {
        say(format_args!("{finding}"));
    }
    if findings.is_empty() { Ok(()) } else { bail!("{} invariants are broken", findings.len()) }
}

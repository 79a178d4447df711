//! `cargo xtask check`: the invariants of ARCHITECTURE.md that can be checked, as code.
//!
//! Allowed dependencies are checked with cargo's own resolution; the rest is read from the sources, with
//! comments and strings separated from code. Each rule has a reason, which a contributor reads when it
//! fails.

mod crates;
mod fronts;
mod logs;
mod names;
mod packages_policy;
mod rust_text;
mod sources;
mod tree;
mod workspace_features;

use anyhow::{Result, bail};

use crate::report::say;

/// The findings of one rule: each is `location: the violation, and the reason for the rule`.
type Findings = Vec<String>;

pub(crate) fn check_invariants() -> Result<()> {
    let mut findings = crates::check_dependencies()?;
    findings.extend(packages_policy::check_packages()?);
    findings.extend(fronts::check_fronts()?);
    let files = tree::read_text_files()?;
    findings.extend(tree::check_texts(&files));
    findings.extend(fronts::check_conditions(&files));
    let sources = sources::parse_sources(&files);
    findings.extend(sources::check_sources(&sources));
    findings.extend(names::check_names(&sources));
    findings.extend(logs::check_log_messages(&sources));
    for warning in sources::long_files(&sources).into_iter().chain(names::full_folders(&sources)) {
        say(format_args!("warning: {warning}"));
    }
    for finding in &findings {
        say(format_args!("{finding}"));
    }
    if findings.is_empty() { Ok(()) } else { bail!("{} invariants are broken", findings.len()) }
}

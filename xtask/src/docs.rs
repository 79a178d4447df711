//! `cargo xtask docs`: runs the commands and Python snippets of the README and of all pages below
//! `docs`, in order, as a reader would. A page that says something untrue fails.

mod extract;
mod page;
mod script;

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::packages::has_python;
use crate::report::{TestReport, say};
use crate::tools::workspace_root;
use crate::vm::find_program;
use crate::{python, sdk};
use extract::{BlockAction, CodeBlock};
use page::PageTools;

/// The number of pages that run in parallel.
const PARALLEL_PAGES: usize = 3;

/// A page and its blocks.
struct DocPage {
    path: String,
    blocks: Vec<CodeBlock>,
}

/// Runs the given pages, or all if none is given, with `binary` as `coracle`.
pub(crate) fn test_pages(binary: &Path, pages: &[String], report: &mut TestReport) -> Result<()> {
    let pages = if pages.is_empty() { page::list_pages()? } else { pages.to_vec() };
    let mut failures = Vec::new();
    let mut parsed = Vec::new();
    for path in pages {
        let text = fs::read_to_string(workspace_root().join(&path));
        let text = text.with_context(|| format!("could not read `{path}`"))?;
        match extract::extract_blocks(&text) {
            Ok(blocks) => parsed.push(DocPage { path, blocks }),
            Err(error) => failures.push(format!("{path}: {error}")),
        }
    }
    let host = DocsHost::probe();
    for page in &mut parsed {
        for block in &mut page.blocks {
            host.choose_action(block);
            if let BlockAction::NotRun(reason) = &block.action {
                report.record_skip(&format!("{}:{}", page.path, block.line), reason);
            }
        }
    }
    match skip_reason() {
        Some(why) => report.record_skip("commands and snippets of the pages", why),
        None => {
            let python = python::make_environment("venv", sdk::REQUIREMENTS)?;
            let page_seconds = if host.runs_long { 900 } else { 300 };
            let tools = PageTools { binary: binary.to_owned(), python, page_seconds };
            failures.extend(run_in_parallel(parsed, &tools));
        }
    }
    if failures.is_empty() { Ok(()) } else { bail!("{}", failures.join("\n\n")) }
}

/// What this run and this host offer to blocks that need more than others.
struct DocsHost {
    /// Whether blocks run that take minutes.
    runs_long: bool,
    /// Whether the network of a page can be connected with that of the host.
    has_uplink: bool,
}

impl DocsHost {
    fn probe() -> Self {
        let runs_long = std::env::var_os("CORACLE_TEST_LONG").is_some();
        Self { runs_long, has_uplink: find_program("slirp4netns").is_some() }
    }

    /// Decides whether a block runs here.
    fn choose_action(&self, block: &mut CodeBlock) {
        if let BlockAction::LongShell(reason) = &block.action {
            block.action = match self.runs_long {
                true => BlockAction::ShellWithInternet,
                false => BlockAction::NotRun(format!("{reason}; CORACLE_TEST_LONG=1 runs it")),
            };
        }
        if block.action == BlockAction::ShellWithInternet && !self.has_uplink {
            let reason = "there is no slirp4netns to connect the page's network";
            block.action = BlockAction::NotRun(reason.to_owned());
        }
    }
}

/// The reason why pages cannot be run on this host.
fn skip_reason() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("only root can give each page a network of its own");
    }
    (!has_python()).then_some("there is no python3 on this host")
}

/// Runs the pages in parallel, and returns the failures.
fn run_in_parallel(pages: Vec<DocPage>, tools: &PageTools) -> Vec<String> {
    let runs = |block: &CodeBlock| !matches!(block.action, BlockAction::NotRun(_) | BlockAction::Show);
    let queue = Mutex::new(pages.into_iter().filter(|page| page.blocks.iter().any(runs)));
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let next = queue.lock().expect("no worker panics").next();
            let Some(page) = next else { break };
            let begun = Instant::now();
            let outcome = page::run_page(&page.path, &page.blocks, tools);
            let verdict = if outcome.is_ok() { "passed" } else { "FAILED" };
            say(format_args!("{} {verdict} in {:.1} s", page.path, begun.elapsed().as_secs_f64()));
            if let Err(error) = outcome {
                failures.lock().expect("no worker panics").push(format!("{error:#}"));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..PARALLEL_PAGES {
            scope.spawn(work);
        }
    });
    failures.into_inner().expect("no worker panics")
}

/// `cargo xtask docs [--binary PATH] [PAGE...]`.
pub(crate) fn run_docs(args: &[String]) -> Result<bool> {
    let (binary, pages) = match args {
        [flag, path, pages @ ..] if flag == "--binary" => (std::path::absolute(path)?, pages),
        [flag, ..] if flag.starts_with('-') => bail!("usage: cargo xtask docs [--binary PATH] [PAGE...]"),
        pages => (crate::test::build_release()?, pages),
    };
    let mut report = TestReport::default();
    report.run_stage("docs", |report| test_pages(&binary, pages, report));
    Ok(report.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_blocks_run_when_they_are_asked_for_and_need_a_network() {
        let settled = |runs_long, has_uplink| {
            let action = BlockAction::LongShell("needs a mirror".to_owned());
            let mut block = CodeBlock { line: 1, action, text: String::new() };
            DocsHost { runs_long, has_uplink }.choose_action(&mut block);
            block.action
        };
        assert_eq!(settled(true, true), BlockAction::ShellWithInternet);
        let reason = "needs a mirror; CORACLE_TEST_LONG=1 runs it".to_owned();
        assert_eq!(settled(false, true), BlockAction::NotRun(reason));
        assert!(matches!(settled(true, false), BlockAction::NotRun(why) if why.contains("slirp4netns")));
    }
}

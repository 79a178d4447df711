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
    for page in &parsed {
        for block in &page.blocks {
            if let BlockAction::NotRun(reason) = &block.action {
                report
                    .record_skip(&format!("{}:{}", page.path, block.line), format_args!("no-run, {reason}"));
            }
        }
    }
    match skip_reason() {
        Some(why) => report.record_skip("commands and snippets of the pages", why),
        None => {
            let python = python::make_environment("venv", sdk::REQUIREMENTS)?;
            let tools = PageTools { binary: binary.to_owned(), python };
            failures.extend(run_in_parallel(parsed, &tools));
        }
    }
    if failures.is_empty() { Ok(()) } else { bail!("{}", failures.join("\n\n")) }
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

//! Checks a release archive as a user would who has just downloaded it.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use serde_json::Value;

use super::COMPLETIONS;
use crate::build_paths::BuildPaths;
use crate::report::TestReport;
use crate::tools::{command_output, run_command};

/// The program header of a binary that needs a loader.
const PT_INTERP: u32 = 3;

pub(super) fn verify_archive(
    archive: &Path,
    name: &str,
    version: &str,
    report: &mut TestReport,
) -> Result<()> {
    let directory = tempfile::tempdir().context("could not make a temporary directory")?;
    let beside = archive.parent().context("an archive lies in a directory")?;
    check_sums(beside)?;
    let packed =
        fs::File::open(archive).with_context(|| format!("could not open `{}`", archive.display()))?;
    tar::Archive::new(GzDecoder::new(packed))
        .unpack(directory.path())
        .context("could not unpack the archive")?;
    let root = directory.path().join(name);
    check_sums(&root).context("a file does not match SHA256SUMS")?;
    let binary = root.join("coracle");
    let said = command_output(Command::new(&binary).arg("--version"))?;
    if said.trim() != format!("coracle {version}") {
        bail!("`coracle --version` of the archive says `{}`", said.trim());
    }
    check_static(&binary)?;
    BuildPaths::find()?.check_absent_from(&binary)?;
    check_pages(&binary, &root)?;
    check_completions(&root, report)?;
    let sbom = fs::read(root.join("sbom.cdx.json")).context("there is no sbom.cdx.json")?;
    let sbom: Value = serde_json::from_slice(&sbom).context("the SBOM is not JSON")?;
    let listed = |name: &str| {
        let components = sbom["components"].as_array();
        components.is_some_and(|list| list.iter().any(|component| component["name"] == name))
    };
    if sbom["bomFormat"] != "CycloneDX" || !listed("tokio") || !listed("coracle-service") {
        bail!("the SBOM lists neither its format nor what the binary is built of");
    }
    for unit in ["coracle.service", "coracle-user.service"] {
        fs::metadata(root.join("systemd").join(unit)).with_context(|| format!("there is no {unit}"))?;
    }
    Ok(())
}

/// Compares all files with the list, as docs/install.md says.
fn check_sums(directory: &Path) -> Result<()> {
    let mut command = Command::new("sha256sum");
    run_command(command.args(["--check", "--strict", "--quiet", "SHA256SUMS"]).current_dir(directory))
}

/// A static binary has no loader. The fields are those of elf(5), for 64 bits.
fn check_static(binary: &Path) -> Result<()> {
    let bytes = fs::read(binary).context("could not read the binary")?;
    let number = |at: usize, length: usize| -> Option<u64> {
        let field = bytes.get(at..at + length)?;
        Some(field.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    };
    let parsed = (|| {
        let table = usize::try_from(number(32, 8)?).ok()?;
        let (size, count) = (usize::try_from(number(54, 2)?).ok()?, usize::try_from(number(56, 2)?).ok()?);
        let kinds: Option<Vec<u64>> = (0..count).map(|index| number(table + index * size, 4)).collect();
        kinds
    })();
    let kinds =
        parsed.filter(|_| bytes.starts_with(b"\x7fELF\x02")).context("the binary is not an ELF file")?;
    if kinds.contains(&u64::from(PT_INTERP)) {
        bail!("the binary needs a loader: it is not static");
    }
    Ok(())
}

/// There is a manual page for the program and for each of its subcommands.
fn check_pages(binary: &Path, root: &Path) -> Result<()> {
    let mut open: Vec<Vec<String>> = vec![Vec::new()];
    let mut pages = 0;
    while let Some(words) = open.pop() {
        let name =
            ["coracle"].into_iter().chain(words.iter().map(String::as_str)).collect::<Vec<_>>().join("-");
        let page = root.join(format!("man/man1/{name}.1"));
        let text = fs::read_to_string(&page).with_context(|| format!("there is no manual page {name}.1"))?;
        if !text.contains(".SH NAME") {
            bail!("{name}.1 is not a manual page");
        }
        pages += 1;
        let help = command_output(Command::new(binary).args(&words).arg("--help"))?;
        for subcommand in parse_subcommands(&help) {
            open.push(words.iter().cloned().chain([subcommand]).collect());
        }
    }
    if pages < 20 { bail!("only {pages} manual pages were found") } else { Ok(()) }
}

/// The names below `Commands:` of a help text.
fn parse_subcommands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = list.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Each script is parsed by its shell, if that is installed.
fn check_completions(root: &Path, report: &mut TestReport) -> Result<()> {
    for (shell, name) in COMPLETIONS {
        let script = root.join("completions").join(name);
        fs::metadata(&script).with_context(|| format!("there is no completion script {name}"))?;
        let is_here = Command::new(shell).arg("--version").stdout(Stdio::null()).status().is_ok();
        if is_here {
            run_command(Command::new(shell).arg("-n").arg(&script))?;
        } else {
            report.record_skip("completions", format_args!("there is no {shell} to parse {name}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subcommands_are_read_from_help() {
        let help = "Usage: x\n\nCommands:\n  serve  Run the server\n  run    Run\n           more of it\n  help   Print\n\nOptions:\n  -h";
        assert_eq!(parse_subcommands(help), ["serve", "run"]);
        assert_eq!(parse_subcommands("Usage: x\n\nOptions:\n"), Vec::<String>::new());
    }
}

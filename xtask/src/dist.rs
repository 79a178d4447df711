//! `cargo xtask dist`: the release archive in target/dist.
//!
//! ```text
//! coracle-VERSION-TARGET.tar.gz       and beside it SHA256SUMS
//!   coracle-VERSION-TARGET/
//!     coracle                         the static binary
//!     completions/                    for bash, zsh and fish
//!     man/man1/                       a page for each subcommand
//!     systemd/                        the units of packaging/
//!     docs/                           the pages of docs/ that say how it is used
//!     README.md LICENSE CHANGELOG.md
//!     sbom.cdx.json                   every crate in the binary, as CycloneDX
//!     SHA256SUMS                      of all files above
//! ```
//!
//! The same binary and commit give the same bytes: names are sorted, owners are root and times are
//! those of the commit, or of `SOURCE_DATE_EPOCH`.

mod archive;
mod reproduce;
mod sbom;
mod verify;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::report::{TestReport, say};
use crate::test::build_release;
use crate::tools::{cargo_command, command_output, workspace_root};
use archive::{ArchiveEntryKind, ArchiveFiles};

/// Completion scripts: the shell as `coracle completions` names it, and where its script goes.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "coracle.bash"), ("zsh", "_coracle"), ("fish", "coracle.fish")];

/// Files that are packed as they are.
const COPIED_FILES: [(&str, &str); 5] = [
    ("LICENSE", "LICENSE"),
    ("README.md", "README.md"),
    ("CHANGELOG.md", "CHANGELOG.md"),
    ("packaging/coracle.service", "systemd/coracle.service"),
    ("packaging/coracle-user.service", "systemd/coracle-user.service"),
];

/// The chore: builds what is missing, packs and verifies.
pub(crate) fn run_dist(args: &[String]) -> Result<bool> {
    let binary = match args {
        [] => build_release()?,
        [flag, path] if flag == "--binary" => PathBuf::from(path),
        _ => bail!("usage: cargo xtask dist [--binary PATH]"),
    };
    let mut report = TestReport::default();
    report.run_stage("release archive", |report| pack_and_verify(&binary, report));
    if reproduce::is_requested() {
        report.run_stage("second build", |_| reproduce::check_reproducible(&binary));
    }
    Ok(report.finish())
}

/// Packs the archive of a binary that was built already, and checks it as a user would get it.
pub(crate) fn pack_and_verify(binary: &Path, report: &mut TestReport) -> Result<()> {
    let release = ReleaseArchive::for_binary(binary)?;
    let directory = workspace_root().join("target/dist");
    fs::create_dir_all(&directory).with_context(|| format!("could not make `{}`", directory.display()))?;
    let packed = release.pack(binary)?;
    if release.pack(binary)? != packed {
        bail!("packing twice gave different archives");
    }
    let bytes = archive::compress_archive(&packed)?;
    let name = format!("{}.tar.gz", release.name());
    let archive = directory.join(&name);
    fs::write(&archive, &bytes).with_context(|| format!("could not write `{}`", archive.display()))?;
    let sums = directory.join("SHA256SUMS");
    fs::write(&sums, format!("{}  {name}\n", sha256_hex(&bytes)))
        .with_context(|| format!("could not write `{}`", sums.display()))?;
    verify::verify_archive(&archive, &release.name(), &release.version, report)?;
    say(format_args!("{} ({} bytes)", archive.display(), bytes.len()));
    Ok(())
}

/// The name of the archive and the inputs that determine its bytes.
struct ReleaseArchive {
    version: String,
    /// As `rustc` names it.
    target: String,
    /// The modification time of every file, in seconds since 1970.
    time: u64,
    metadata: Value,
}

impl ReleaseArchive {
    fn for_binary(binary: &Path) -> Result<Self> {
        let target = target_triple(binary)?;
        let filter = format!("--filter-platform={target}");
        let metadata =
            command_output(&mut cargo_command(&["metadata", "--format-version=1", "--locked", &filter]))?;
        let metadata: Value = serde_json::from_str(&metadata).context("cargo's metadata is not JSON")?;
        let cli =
            sbom::package_named(&metadata, "coracle-cli").context("there is no package `coracle-cli`")?;
        let version = cli["version"].as_str().context("a package has a version")?.to_owned();
        Ok(Self { version, target, time: source_time()?, metadata })
    }

    fn name(&self) -> String {
        format!("coracle-{}-{}", self.version, self.target)
    }

    fn pack(&self, binary: &Path) -> Result<Vec<u8>> {
        let mut files = self.collect_files(binary)?;
        let sums: String =
            files.iter().map(|(path, (_, bytes))| format!("{}  {path}\n", sha256_hex(bytes))).collect();
        files.insert("SHA256SUMS".to_owned(), (ArchiveEntryKind::Plain, sums.into_bytes()));
        archive::pack_archive(&self.name(), &files, self.time)
    }

    /// All files except the checksums.
    fn collect_files(&self, binary: &Path) -> Result<ArchiveFiles> {
        let mut files = ArchiveFiles::new();
        files.insert("coracle".to_owned(), (ArchiveEntryKind::Program, read_file(binary)?));
        for (from, to) in COPIED_FILES {
            files.insert(to.to_owned(), (ArchiveEntryKind::Plain, read_file(&workspace_root().join(from))?));
        }
        for (shell, name) in COMPLETIONS {
            let script = command_output(Command::new(binary).args(["completions", shell]))?;
            files.insert(format!("completions/{name}"), (ArchiveEntryKind::Plain, script.into_bytes()));
        }
        let pages = tempfile::tempdir().context("could not make a temporary directory")?;
        command_output(Command::new(binary).arg("man").arg(pages.path()))?;
        add_directory(&mut files, pages.path(), "man/man1")?;
        add_directory(&mut files, &workspace_root().join("docs"), "docs")?;
        let sbom = sbom::build_sbom(&self.metadata, &self.version, self.time)?;
        files.insert("sbom.cdx.json".to_owned(), (ArchiveEntryKind::Plain, sbom));
        Ok(files)
    }
}

/// Adds the files of a directory and those below it.
fn add_directory(files: &mut ArchiveFiles, directory: &Path, below: &str) -> Result<()> {
    let about = || format!("could not read `{}`", directory.display());
    for entry in fs::read_dir(directory).with_context(about)? {
        let entry = entry.with_context(about)?;
        let name = entry.file_name().into_string().ok().with_context(about)?;
        let path = format!("{below}/{name}");
        if entry.file_type().with_context(about)?.is_dir() {
            add_directory(files, &entry.path(), &path)?;
        } else {
            files.insert(path, (ArchiveEntryKind::Plain, read_file(&entry.path())?));
        }
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("could not read `{}`", path.display()))
}

fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The target of a binary: the directory above its profile, or else the host target of `rustc`.
fn target_triple(binary: &Path) -> Result<String> {
    let above = binary.parent().and_then(Path::parent).and_then(Path::file_name);
    let named = above.and_then(|name| name.to_str()).filter(|name| name.split('-').count() >= 3);
    match named {
        Some(target) => Ok(target.to_owned()),
        None => {
            let version = command_output(Command::new("rustc").arg("-vV"))?;
            let host = version.lines().find_map(|line| line.strip_prefix("host: "));
            host.map(str::to_owned).context("rustc names no host")
        }
    }
}

/// The time that all files get. Outside a repository, as in an unpacked source, it is 1970.
fn source_time() -> Result<u64> {
    if let Ok(text) = std::env::var("SOURCE_DATE_EPOCH") {
        return text.parse().context("SOURCE_DATE_EPOCH is not a number");
    }
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"]).current_dir(workspace_root());
    Ok(command_output(&mut git).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

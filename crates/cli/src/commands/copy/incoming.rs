//! From a sandbox to this host.
//!
//! The sandbox chooses names and links, so everything is made beneath the descriptor of the
//! destination, which follows no link: a link that was copied does not lead a later file elsewhere.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use linux::fs::RootDirectory;
use rustix::io::Errno;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use super::base_name;
use crate::client::{FileInfo, FileKind, SandboxClient};
use crate::output::{Printer, WithHint};

pub(super) async fn copy_to_stdout(sandbox: &SandboxClient, path: &str, printer: &Printer) -> Result<()> {
    let found = stat_existing(sandbox, path).await?;
    download_to(sandbox, &found.path, &mut tokio::io::stdout(), printer).await
}

pub(super) async fn copy_to_local(
    sandbox: &SandboxClient,
    path: &str,
    destination: &Path,
    printer: &Printer,
) -> Result<()> {
    let found = stat_existing(sandbox, path).await?;
    let into = destination.is_dir() || destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let target = match (into, base_name(Path::new(path))) {
        (true, Some(name)) => destination.join(name),
        (true, None) => bail!("`{path}` has no name that a copy could have"),
        (false, _) => destination.to_owned(),
    };
    let name = target.file_name().with_context(|| format!("`{}` is not a file name", target.display()))?;
    let above = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match found.kind {
        // A link at the destination itself would lead the next copy, or a reader, to a place that the
        // sandbox chose.
        FileKind::Symlink => Err(anyhow!("`{path}` is a symbolic link"))
            .with_hint("name the file or directory that it leads to, or the directory that holds it"),
        FileKind::Directory => {
            let about = || format!("could not make `{}`", above.display());
            tokio::fs::create_dir_all(above).await.with_context(about)?;
            receive_directory(sandbox, path, &CopyDestination::open(above)?, Path::new(name), printer).await
        }
        FileKind::File | FileKind::Other => {
            CopyDestination::open(above)?.receive_entry(sandbox, &found, Path::new(name), printer).await
        }
    }
}

async fn stat_existing(sandbox: &SandboxClient, path: &str) -> Result<FileInfo> {
    sandbox
        .stat(path)
        .await?
        .ok_or_else(|| anyhow!("there is no `{path}` in the sandbox"))
        .with_hint("`coracle exec ID -- ls DIRECTORY` lists what is there")
}

/// Copies a directory to `name` beneath the destination. An earlier copy may have left a link there,
/// so `name` is not followed either.
async fn receive_directory(
    sandbox: &SandboxClient,
    source: &str,
    destination: &CopyDestination,
    name: &Path,
    printer: &Printer,
) -> Result<()> {
    destination.explain_write_error(name, destination.root.make_directories(name, 0o777))?;
    for entry in sandbox.list_tree(source).await? {
        let local = name.join(relative_below(source, &entry.path)?);
        if entry.kind == FileKind::Other {
            printer.warn(format_args!("`{}` is not a file, directory or link, left out", entry.path));
        } else {
            destination.receive_entry(sandbox, &entry, &local, printer).await?;
        }
    }
    Ok(())
}

/// The part of `path` below `source`. Programs in the sandbox chose the names, so anything but plain
/// ones is refused.
fn relative_below(source: &str, path: &str) -> Result<PathBuf> {
    let below = Path::new(path).strip_prefix(source);
    let below = below.with_context(|| format!("the sandbox listed `{path}`, which is not in `{source}`"))?;
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if !plain || below.as_os_str().is_empty() || path.contains('\0') {
        bail!("the sandbox listed `{path}`, which is not a plain name");
    }
    Ok(below.to_owned())
}

/// A directory of this host beneath which a copy is made.
struct CopyDestination {
    root: RootDirectory,
    path: PathBuf,
}

impl CopyDestination {
    /// The user named this directory, so links in its own path are followed.
    fn open(path: &Path) -> Result<Self> {
        let root =
            RootDirectory::open(path).with_context(|| format!("could not open `{}`", path.display()))?;
        Ok(Self { root, path: path.to_owned() })
    }

    /// Copies one entry of the sandbox to `local`.
    async fn receive_entry(
        &self,
        sandbox: &SandboxClient,
        entry: &FileInfo,
        local: &Path,
        printer: &Printer,
    ) -> Result<()> {
        match (entry.kind, &entry.link_target) {
            (FileKind::Directory, _) => {
                self.explain_write_error(local, self.root.make_directories(local, 0o777))
            }
            (FileKind::File, _) => self.receive_file(sandbox, entry, local, printer).await,
            (FileKind::Symlink, Some(target)) => self.make_link(local, Path::new(target)),
            (FileKind::Symlink, None) => {
                bail!("the server does not say where the link `{}` leads", entry.path)
            }
            (FileKind::Other, _) => bail!("`{}` is not a file, directory or link", entry.path),
        }
    }

    /// Fetches one file under a temporary name, so that an incomplete copy never looks complete.
    async fn receive_file(
        &self,
        sandbox: &SandboxClient,
        source: &FileInfo,
        local: &Path,
        printer: &Printer,
    ) -> Result<()> {
        let partial = partial_name(local);
        let created = self.root.create_file(&partial, 0o600);
        let mut out = tokio::fs::File::from_std(self.explain_write_error(local, created)?);
        let received = async {
            download_to(sandbox, &source.path, &mut out, printer).await?;
            let permissions = std::fs::Permissions::from_mode(source.permissions());
            self.explain_write_error(local, out.set_permissions(permissions).await)?;
            self.explain_write_error(local, self.root.rename(&partial, local))
        };
        self.remove_on_error(&partial, received.await)
    }

    /// Makes a link with the same target, which replaces an existing file or link.
    fn make_link(&self, local: &Path, target: &Path) -> Result<()> {
        let partial = partial_name(local);
        self.explain_write_error(local, self.root.create_symlink(target, &partial))?;
        let placed = self.explain_write_error(local, self.root.rename(&partial, local));
        self.remove_on_error(&partial, placed)
    }

    fn remove_on_error(&self, partial: &Path, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() {
            self.root.remove_file(partial).ok();
        }
        outcome
    }

    fn explain_write_error<T>(&self, local: &Path, outcome: io::Result<T>) -> Result<T> {
        let is_link = outcome.as_ref().is_err_and(|error| Errno::from_io_error(error) == Some(Errno::LOOP));
        let outcome =
            outcome.with_context(|| format!("could not write `{}`", self.path.join(local).display()));
        match outcome {
            Err(error) if is_link => {
                Err(error).with_hint("a symbolic link is in the way, and links are not followed")
            }
            outcome => outcome,
        }
    }
}

/// A temporary name beside `path` for an incomplete file.
fn partial_name(path: &Path) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(path.file_name().unwrap_or_default());
    hidden.push(format!(".coracle-{}", std::process::id()));
    path.with_file_name(hidden)
}

async fn download_to(
    sandbox: &SandboxClient,
    path: &str,
    out: &mut (impl AsyncWrite + Unpin),
    printer: &Printer,
) -> Result<()> {
    let mut download = sandbox.download(path).await.with_context(|| format!("could not read `{path}`"))?;
    let mut progress = printer.start_progress(format!("copying {path}"));
    let mut received = 0;
    while let Some(chunk) = download.next_bytes().await? {
        out.write_all(&chunk).await.context("could not write what was received")?;
        received += chunk.len() as u64;
        progress.show_bytes(received, download.size);
    }
    out.flush().await.context("could not write what was received")?;
    match download.size {
        Some(size) if size != received => bail!("`{path}` broke off after {received} of {size} bytes"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use domain::SandboxId;
    use serde_json::json;
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::client::ServerClient;

    /// Responds as a server would whose sandbox lists `entries` below `/d`; each file holds `stolen`.
    async fn hostile_sandbox(entries: serde_json::Value) -> SandboxClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("it is bound").to_string();
        let endpoint = json!({ "endpoint": address, "headers": {} }).to_string();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                answer(stream, &endpoint, &entries).await;
            }
        });
        let server = ServerClient::new(&format!("http://{address}"), None).expect("an address");
        let id = SandboxId::parse("abcdefghijklmnopqrst").expect("an id");
        server.open_sandbox(&id).await.expect("it answers")
    }

    async fn answer(mut stream: TcpStream, endpoint: &str, entries: &serde_json::Value) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => request.push(byte),
                Err(_closed) => return,
            }
        }
        let request = String::from_utf8_lossy(&request);
        let body = if request.contains("/endpoints/") {
            endpoint.to_owned()
        } else if request.contains("/files/info") {
            json!({ "/d": { "path": "/d", "type": "directory" } }).to_string()
        } else if request.contains("/directories/list") {
            entries.to_string()
        } else {
            "stolen".to_owned()
        };
        let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all((head + &body).as_bytes()).await.ok();
    }

    fn link(path: &str, target: &str) -> serde_json::Value {
        json!({ "path": path, "type": "symlink", "link_target": target })
    }

    async fn copied(entries: serde_json::Value, destination: &Path) -> Result<()> {
        let sandbox = hostile_sandbox(entries).await;
        copy_to_local(&sandbox, "/d", destination, &Printer::new(false).quiet()).await
    }

    #[tokio::test]
    async fn nothing_is_written_through_a_link_of_the_same_copy() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let outside = place.path().join("outside");
        std::fs::create_dir(&outside).expect("our own directory");
        let led = outside.to_str().expect("it is UTF-8");
        let below = [
            json!({ "path": "/d/way/file", "type": "file", "mode": 644 }),
            json!({ "path": "/d/way/sub", "type": "directory" }),
            link("/d/way/link", "/"),
            json!({ "path": "/d/way", "type": "directory" }),
        ];
        for (number, entry) in below.into_iter().enumerate() {
            for (way, target) in [("absolute", led), ("relative", "../outside")] {
                let destination = place.path().join(format!("{way}{number}"));
                let entries = json!([link("/d/way", target), entry]);
                let refused = copied(entries, &destination).await.expect_err("a link is in the way");
                assert!(format!("{refused:#}").contains("could not write"), "{refused:#}");
                assert_eq!(std::fs::read_dir(&outside).expect("our own").count(), 0, "{entry}");
            }
        }
    }

    #[tokio::test]
    async fn link_of_an_earlier_copy_does_not_lead_the_next_one_elsewhere() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let outside = place.path().join("outside");
        std::fs::create_dir(&outside).expect("our own directory");
        std::os::unix::fs::symlink(&outside, place.path().join("d")).expect("our own link");
        let entries = json!([json!({ "path": "/d/pre-commit", "type": "file", "mode": 755 })]);
        let refused = copied(entries, place.path()).await.expect_err("a link is in the way");
        assert!(format!("{refused:#}").contains("could not write"), "{refused:#}");
        assert_eq!(std::fs::read_dir(&outside).expect("our own").count(), 0);
    }

    #[tokio::test]
    async fn links_are_copied_as_links_and_files_take_their_place() {
        let place = tempfile::tempdir().expect("a temporary directory");
        let destination = place.path().join("d");
        let precious = place.path().join("precious");
        std::fs::write(&precious, "mine").expect("our own file");
        let entries = json!([
            json!({ "path": "/d/bin", "type": "directory" }),
            link("/d/bin/tool", "../lib/tool.js"),
            link("/d/gone", "/no/such"),
            link("/d/out", precious.to_str().expect("it is UTF-8")),
            json!({ "path": "/d/out", "type": "file", "mode": 644 }),
        ]);
        for _ in 0..2 {
            copied(entries.clone(), place.path()).await.expect("it is copied");
        }
        let led = |path: &str| std::fs::read_link(destination.join(path)).expect("it is a link");
        assert_eq!(
            (led("bin/tool"), led("gone")),
            (PathBuf::from("../lib/tool.js"), PathBuf::from("/no/such"))
        );
        // The file replaced the link and was not written to the target of the link.
        assert_eq!(std::fs::read_to_string(&precious).expect("our own file"), "mine");
        assert_eq!(std::fs::read_to_string(destination.join("out")).expect("it was copied"), "stolen");
        let names = std::fs::read_dir(&destination).expect("our own").filter_map(Result::ok);
        assert_eq!(names.count(), 3, "something was left behind");
    }

    #[test]
    fn names_below_the_source_keep_their_path() {
        assert_eq!(relative_below("/data", "/data/a/b c").expect("it is plain"), Path::new("a/b c"));
        assert_eq!(relative_below("/data/", "/data/a").expect("it is plain"), Path::new("a"));
    }

    #[test]
    fn a_name_that_leaves_the_destination_is_refused() {
        for path in
            ["/etc/passwd", "/data/../etc", "/data/a/../../b", "/data", "/database/a", "a", "/data/a\0b"]
        {
            assert!(relative_below("/data", path).is_err(), "{path}");
        }
    }
}

//! `image pull`: from a registry into the state directory of this host, without a server.

use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use backend::{Credentials, Here, Progress, Pull, Registry};
use backend_local::images::{self, Below, Digest, Existing, Import, Source};
use linux::fs::Root;
use registry::Registries;

use crate::config::Config;
use crate::output::{Printer, WithHint};

/// The longest password that is read.
const LONGEST: u64 = 64 << 10;

pub(super) fn pull(config: &Config, name: &str, username: Option<&str>, printer: &Printer) -> Result<()> {
    let credentials = username.map(credentials).transpose()?;
    crate::serve::make_state_dir(&config.state_dir)
        .with_context(|| format!("could not make `{}`", config.state_dir.display()))?;
    let downloads = Downloads::make(&config.state_dir)?;
    let most = config.images.max_bytes.map(|most| most.0);
    let here = Here {
        layers: images::layers(&config.state_dir)?.iter().map(ToString::to_string).collect(),
        room: images::room(&config.state_dir, most, name)?,
    };
    let digest = fetch(config, name, credentials.as_ref(), &here, downloads.path(), printer)?;
    if !printer.json() {
        printer.remark(format_args!("fetched {name}, {digest}"));
    }
    let root = Root::open(downloads.path()).context("could not open what was fetched")?;
    let wish = Import {
        name,
        source: Source::layout(&root, None)?,
        wanted: Some(Digest::parse(&digest)?),
        existing: Existing::Replace,
        most,
        below: Below::Nothing,
    };
    super::take_in(config, wish, printer).with_context(|| format!("`{name}` is not kept"))
}

/// Threads exist only while this runs; unpacking afterwards has none.
fn fetch(
    config: &Config,
    name: &str,
    credentials: Option<&Credentials>,
    here: &Here,
    into: &Path,
    printer: &Printer,
) -> Result<String> {
    let registries =
        Registries { allowed: config.images.allowed.clone(), plain: config.images.plain.clone() };
    let shown = Mutex::new(printer.progress(format!("fetching {name}")));
    let progress = |progress: Progress| {
        if let (Progress::Fetching { bytes, of }, Ok(mut shown)) = (progress, shown.lock()) {
            shown.bytes(bytes, Some(of));
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("could not start the event loop")?;
    let fetched =
        runtime.block_on(registries.fetch(Pull { name, credentials, progress: &progress }, here, into));
    drop(runtime);
    Ok(fetched?)
}

pub(super) fn credentials(username: &str) -> Result<Credentials> {
    let mut password = String::new();
    std::io::stdin().take(LONGEST).read_to_string(&mut password).context("could not read the password")?;
    let password = password.trim_end_matches(['\r', '\n']).to_owned();
    if password.is_empty() {
        bail!("there is no password on standard input");
    }
    Ok(Credentials { username: username.to_owned(), password })
}

/// A directory for downloads, removed when this value is dropped. Only one pull at a time uses it, and
/// leftovers of a killed one are removed.
struct Downloads {
    path: std::path::PathBuf,
    _lock: std::fs::File,
}

impl Downloads {
    fn make(state_dir: &Path) -> Result<Self> {
        let lock = state_dir.join("pull.lock");
        let locked = crate::serve::lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        let lock = locked.context("another `image pull` is on its way").hint("wait until it is done")?;
        let downloads = Self { path: state_dir.join("downloads"), _lock: lock };
        downloads.clear().context("could not clear what another pull left")?;
        let made = std::fs::DirBuilder::new().mode(0o700).create(&downloads.path);
        made.context("could not make room for what is fetched")?;
        Ok(downloads)
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn clear(&self) -> std::io::Result<()> {
        let parent = self.path.parent().unwrap_or(Path::new("/"));
        Root::open(parent)?.remove_tree(Path::new(self.path.file_name().unwrap_or_default()))
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        // The next pull removes what cannot be removed now.
        self.clear().unwrap_or_default();
    }
}

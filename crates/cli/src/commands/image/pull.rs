//! `image pull`: from a registry into the state directory of this host, without a server.

use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use backend::{ImagePull, ImageRegistry, LocalLayers, PullProgress, RegistryCredentials};
use launcher::images::{self, Digest, ExistingImagePolicy, ImageImport, ImportBase, ImportSource};
use linux::fs::RootDirectory;
use registry::RegistrySettings;

use crate::config::Config;
use crate::output::{Printer, WithHint};
use crate::pull_process::CommandLinePuller;

/// The longest password that is read.
const MAX_PASSWORD_BYTES: u64 = 64 << 10;

pub(super) fn pull_image(
    config: &Config,
    name: &str,
    username: Option<&str>,
    printer: &Printer,
) -> Result<()> {
    let credentials = username.map(read_credentials).transpose()?;
    crate::serve::make_state_dir(&config.state_dir)
        .with_context(|| format!("could not make `{}`", config.state_dir.display()))?;
    let downloads = DownloadDir::create(&config.state_dir)?;
    let most = config.images.max_bytes.map(|most| most.0);
    let here = LocalLayers {
        layers: images::list_layers(&config.state_dir)?.iter().map(ToString::to_string).collect(),
        room: images::space_for_image(&config.state_dir, most, name)?,
    };
    let digest = fetch_image(config, name, credentials.as_ref(), &here, downloads.path(), printer)?;
    if !printer.is_json() {
        printer.remark(format_args!("fetched {name}, {digest}"));
    }
    let root = RootDirectory::open(downloads.path()).context("could not open what was fetched")?;
    let import = ImageImport {
        name,
        source: ImportSource::from_layout(&root, None)?,
        wanted: Some(Digest::parse(&digest)?),
        existing: ExistingImagePolicy::Replace,
        most,
        below: ImportBase::Nothing,
    };
    super::store_image(config, import, printer).with_context(|| format!("`{name}` is not kept"))
}

/// Threads exist only while this runs; unpacking afterwards has none.
fn fetch_image(
    config: &Config,
    name: &str,
    credentials: Option<&RegistryCredentials>,
    here: &LocalLayers,
    into: &Path,
    printer: &Printer,
) -> Result<String> {
    let registries =
        RegistrySettings { allowed: config.images.allowed.clone(), plain: config.images.plain.clone() };
    let shown = Mutex::new(printer.start_progress(format!("fetching {name}")));
    let progress = |progress: PullProgress| {
        if let (PullProgress::Fetching { bytes, of }, Ok(mut shown)) = (progress, shown.lock()) {
            shown.show_bytes(bytes, Some(of));
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("could not start the event loop")?;
    let (puller, connection) = CommandLinePuller::start(config.uid_base)?;
    let fetched = runtime.block_on(registries.fetch_image(
        ImagePull { name, credentials, progress: &progress },
        here,
        into,
        connection,
    ));
    drop((puller, runtime));
    Ok(fetched?)
}

pub(super) fn read_credentials(username: &str) -> Result<RegistryCredentials> {
    let mut password = String::new();
    std::io::stdin()
        .take(MAX_PASSWORD_BYTES)
        .read_to_string(&mut password)
        .context("could not read the password")?;
    let password = password.trim_end_matches(['\r', '\n']).to_owned();
    if password.is_empty() {
        bail!("there is no password on standard input");
    }
    Ok(RegistryCredentials { username: username.to_owned(), password })
}

/// A directory for downloads, removed when this value is dropped. Only one pull at a time uses it, and
/// leftovers of a killed one are removed.
struct DownloadDir {
    path: std::path::PathBuf,
    _lock: std::fs::File,
}

impl DownloadDir {
    fn create(state_dir: &Path) -> Result<Self> {
        let lock = state_dir.join("pull.lock");
        let locked = crate::serve::lock_file(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        let lock = locked.context("another `image pull` is on its way").with_hint("wait until it is done")?;
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
        RootDirectory::open(parent)?.remove_tree(Path::new(self.path.file_name().unwrap_or_default()))
    }
}

impl Drop for DownloadDir {
    fn drop(&mut self) {
        // The next pull removes what cannot be removed now.
        self.clear().unwrap_or_default();
    }
}

//! The documents of an image: indexes, manifests and configurations, in the OCI and the Docker
//! format. Only the fields that matter here are read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::blobs::Blobs;
use super::record::ImageConfig;
use super::{Digest, ImageError};

/// An overlay supports more layers, but the descriptors of many more would not fit into one
/// message.
const MOST_LAYERS: usize = 200;
/// An index may lead to another one; this limits the chain.
const MOST_INDEXES: usize = 4;

/// The size limit for environment and command of an image together. They are part of every record
/// of a sandbox that uses it, and the kernel accepts not much more for one program.
const MOST_SETTINGS: usize = 128 << 10;
/// The size charged per word in addition to its bytes.
const WORD: usize = 8;

/// The content of a manifest.
pub(super) struct Manifest {
    pub(super) digest: Option<Digest>,
    pub(super) config: ImageConfig,
    /// From the bottom up.
    pub(super) layers: Vec<Part>,
}

/// One layer: its path, its expected digest and size as packed, and its digest unpacked.
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) packed: Option<(Digest, u64)>,
    pub(super) digest: Digest,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: Digest,
    size: u64,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// An index or a manifest, depending on which fields are present.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    layers: Vec<String>,
}

#[derive(Deserialize)]
struct Configuration {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<Settings>,
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<Digest>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Settings {
    #[serde(default)]
    entrypoint: Option<Vec<String>>,
    #[serde(default)]
    cmd: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<String>>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    working_dir: Option<String>,
}

/// The processor architecture of this host, as named by images.
pub fn architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

/// Reads an OCI layout. With `wanted`, it must lead to the manifest with that digest.
pub(super) fn of_layout(blobs: &Blobs, wanted: Option<&Digest>) -> Result<Manifest, ImageError> {
    let mut document = blobs.document(&PathBuf::from("index.json"))?;
    let mut digest = None;
    for _ in 0..MOST_INDEXES {
        let parsed: Document = parse(&document)?;
        if let (Some(config), Some(layers)) = (parsed.config, parsed.layers) {
            let digest = digest.unwrap_or_else(|| Digest::of(&document));
            return of_manifest(blobs, digest, &config, layers);
        }
        let manifests =
            parsed.manifests.ok_or_else(|| wrong("document is neither an index nor a manifest"))?;
        let next = match wanted {
            Some(wanted) if manifests.iter().any(|entry| entry.digest == *wanted) => wanted.clone(),
            _ => choose(manifests)?,
        };
        document = checked(blobs, &next, None)?;
        digest = Some(next);
    }
    Err(wrong("too many nested indexes"))
}

/// Returns the manifest for this host, or the only one there is.
fn choose(mut manifests: Vec<Descriptor>) -> Result<Digest, ImageError> {
    let fits = |platform: &Platform| platform.os == "linux" && platform.architecture == architecture();
    if let Some(found) = manifests.iter().find(|entry| entry.platform.as_ref().is_some_and(fits)) {
        return Ok(found.digest.clone());
    }
    manifests.retain(|entry| entry.platform.is_none());
    match manifests.as_slice() {
        [only] => Ok(only.digest.clone()),
        [] => Err(ImageError::NoPlatform(architecture())),
        _ => Err(wrong("the layout has several images; name one by its digest, or export a single image")),
    }
}

fn of_manifest(
    blobs: &Blobs,
    digest: Digest,
    config: &Descriptor,
    layers: Vec<Descriptor>,
) -> Result<Manifest, ImageError> {
    let document = checked(blobs, &config.digest, Some(config.size))?;
    let (config, digests) = configuration(&document)?;
    if digests.len() != layers.len() {
        return Err(wrong("manifest and configuration have different numbers of layers"));
    }
    let foreign = |layer: &Descriptor| {
        layer.media_type.contains("nondistributable") || layer.media_type.contains("foreign")
    };
    if layers.iter().any(foreign) {
        return Err(wrong("layers from external sources are not supported"));
    }
    let parts = layers.into_iter().zip(digests);
    let parts = parts.map(|(layer, digest)| Part {
        path: blob_path(&layer.digest),
        packed: Some((layer.digest, layer.size)),
        digest,
    });
    Ok(Manifest { digest: Some(digest), config, layers: parts.collect() })
}

/// Reads the output of `docker save`. It may contain several images; only a single one is accepted.
pub(super) fn of_docker(blobs: &Blobs) -> Result<Manifest, ImageError> {
    let all: Vec<DockerManifest> = parse(&blobs.document(&PathBuf::from("manifest.json"))?)?;
    let [one] = all.as_slice() else {
        return Err(wrong("the archive has several images; save a single image"));
    };
    let document = blobs.document(&PathBuf::from(&one.config))?;
    let (config, digests) = configuration(&document)?;
    if digests.len() != one.layers.len() {
        return Err(wrong("manifest and configuration have different numbers of layers"));
    }
    let parts = one.layers.iter().zip(digests);
    let parts = parts.map(|(path, digest)| Part { path: PathBuf::from(path), packed: None, digest });
    Ok(Manifest { digest: None, config, layers: parts.collect() })
}

fn configuration(document: &[u8]) -> Result<(ImageConfig, Vec<Digest>), ImageError> {
    let parsed: Configuration = parse(document)?;
    let other = |have: &str, want: &str| !have.is_empty() && have != want;
    if other(&parsed.os, "linux") || other(&parsed.architecture, architecture()) {
        return Err(ImageError::NoPlatform(architecture()));
    }
    if parsed.rootfs.diff_ids.len() > MOST_LAYERS {
        return Err(ImageError::TooLarge("200 layers"));
    }
    let settings = parsed.config.unwrap_or_default();
    let env: BTreeMap<String, String> = settings
        .env
        .unwrap_or_default()
        .iter()
        .filter_map(|pair| pair.split_once('='))
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let config = ImageConfig {
        entrypoint: settings.entrypoint.unwrap_or_default(),
        cmd: settings.cmd.unwrap_or_default(),
        env: env.into_iter().collect(),
        user: settings.user.filter(|user| !user.is_empty()),
        // The default working directory of an image is its root.
        workdir: Some(
            settings.working_dir.filter(|path| path.starts_with('/')).unwrap_or_else(|| "/".to_owned()),
        ),
    };
    check_words(&config)?;
    Ok((config, parsed.rootfs.diff_ids))
}

fn check_words(config: &ImageConfig) -> Result<(), ImageError> {
    let words = config.entrypoint.iter().chain(&config.cmd).chain(&config.user).chain(&config.workdir);
    let words = words.chain(config.env.iter().flat_map(|(name, value)| [name, value]));
    let mut length = 0;
    for word in words {
        if word.contains('\0') {
            return Err(wrong("the configuration contains a NUL byte"));
        }
        length += word.len() + WORD;
    }
    if length > MOST_SETTINGS {
        return Err(ImageError::TooLarge("128 KiB of environment and command"));
    }
    Ok(())
}

/// Reads a document and verifies its digest.
fn checked(blobs: &Blobs, digest: &Digest, size: Option<u64>) -> Result<Vec<u8>, ImageError> {
    let document = blobs.document(&blob_path(digest))?;
    if Digest::of(&document) != *digest || size.is_some_and(|size| size != document.len() as u64) {
        return Err(ImageError::Mismatch(digest.to_string()));
    }
    Ok(document)
}

pub(super) fn blob_path(digest: &Digest) -> PathBuf {
    PathBuf::from("blobs/sha256").join(digest.hex())
}

fn parse<'text, T: Deserialize<'text>>(text: &'text [u8]) -> Result<T, ImageError> {
    serde_json::from_slice(text).map_err(|error| ImageError::Malformed(error.to_string()))
}

fn wrong(why: &str) -> ImageError {
    ImageError::Malformed(why.to_owned())
}

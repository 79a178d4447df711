//! The documents of an image: indexes, manifests and configurations, in the OCI and the Docker
//! format. Only the fields that matter here are read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::blobs::ImageBlobs;
use super::record::ImageConfig;
use super::{Digest, ImageError};

/// An overlay supports more layers, but the descriptors of many more would not fit into one
/// message.
const MAX_LAYERS: usize = 200;
/// An index may lead to another one; this limits the chain.
const MAX_INDEXES: usize = 4;

/// The size limit for environment and command of an image together. They are part of every record
/// of a sandbox that uses it, and the kernel accepts not much more for one program.
const MAX_SETTINGS_SIZE: usize = 128 << 10;
/// The size charged per word in addition to its bytes.
const WORD_OVERHEAD: usize = 8;

/// The content of a manifest.
pub(super) struct ImageManifest {
    pub(super) digest: Option<Digest>,
    pub(super) config: ImageConfig,
    /// From the bottom up.
    pub(super) layers: Vec<LayerBlob>,
}

/// One layer: its path, its expected digest and size as packed, and its digest unpacked.
pub(super) struct LayerBlob {
    pub(super) path: PathBuf,
    pub(super) packed: Option<(Digest, u64)>,
    pub(super) digest: Digest,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BlobDescriptor {
    #[serde(default)]
    media_type: String,
    digest: Digest,
    size: u64,
    #[serde(default)]
    platform: Option<ImagePlatform>,
}

#[derive(Deserialize)]
struct ImagePlatform {
    architecture: String,
    os: String,
}

/// An index or a manifest, depending on which fields are present.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ManifestDocument {
    #[serde(default)]
    manifests: Option<Vec<BlobDescriptor>>,
    #[serde(default)]
    config: Option<BlobDescriptor>,
    #[serde(default)]
    layers: Option<Vec<BlobDescriptor>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    layers: Vec<String>,
}

#[derive(Deserialize)]
struct ConfigDocument {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<ConfigSettings>,
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<Digest>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ConfigSettings {
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
pub fn host_architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

/// Reads an OCI layout. With `wanted`, it must lead to the manifest with that digest.
pub(super) fn read_layout(blobs: &ImageBlobs, wanted: Option<&Digest>) -> Result<ImageManifest, ImageError> {
    let mut document = blobs.read_document(&PathBuf::from("index.json"))?;
    let mut digest = None;
    for _ in 0..MAX_INDEXES {
        let parsed: ManifestDocument = parse_json(&document)?;
        if let (Some(config), Some(layers)) = (parsed.config, parsed.layers) {
            let digest = digest.unwrap_or_else(|| Digest::of_content(&document));
            return read_manifest(blobs, digest, &config, layers);
        }
        let manifests =
            parsed.manifests.ok_or_else(|| malformed_image("document is neither an index nor a manifest"))?;
        let next = match wanted {
            Some(wanted) if manifests.iter().any(|entry| entry.digest == *wanted) => wanted.clone(),
            _ => choose_manifest(manifests)?,
        };
        document = read_verified(blobs, &next, None)?;
        digest = Some(next);
    }
    Err(malformed_image("too many nested indexes"))
}

/// Returns the manifest for this host, or the only one there is.
fn choose_manifest(mut manifests: Vec<BlobDescriptor>) -> Result<Digest, ImageError> {
    let fits =
        |platform: &ImagePlatform| platform.os == "linux" && platform.architecture == host_architecture();
    if let Some(found) = manifests.iter().find(|entry| entry.platform.as_ref().is_some_and(fits)) {
        return Ok(found.digest.clone());
    }
    manifests.retain(|entry| entry.platform.is_none());
    match manifests.as_slice() {
        [only] => Ok(only.digest.clone()),
        [] => Err(ImageError::NoPlatform(host_architecture())),
        _ => Err(malformed_image(
            "the layout has several images; name one by its digest, or export a single image",
        )),
    }
}

fn read_manifest(
    blobs: &ImageBlobs,
    digest: Digest,
    config: &BlobDescriptor,
    layers: Vec<BlobDescriptor>,
) -> Result<ImageManifest, ImageError> {
    let document = read_verified(blobs, &config.digest, Some(config.size))?;
    let (config, digests) = parse_configuration(&document)?;
    if digests.len() != layers.len() {
        return Err(malformed_image("manifest and configuration have different numbers of layers"));
    }
    let foreign = |layer: &BlobDescriptor| {
        layer.media_type.contains("nondistributable") || layer.media_type.contains("foreign")
    };
    if layers.iter().any(foreign) {
        return Err(malformed_image("layers from external sources are not supported"));
    }
    let parts = layers.into_iter().zip(digests);
    let parts = parts.map(|(layer, digest)| LayerBlob {
        path: blob_path(&layer.digest),
        packed: Some((layer.digest, layer.size)),
        digest,
    });
    Ok(ImageManifest { digest: Some(digest), config, layers: parts.collect() })
}

/// Reads the output of `docker save`. It may contain several images; only a single one is accepted.
pub(super) fn read_docker_save(blobs: &ImageBlobs) -> Result<ImageManifest, ImageError> {
    let all: Vec<DockerManifest> = parse_json(&blobs.read_document(&PathBuf::from("manifest.json"))?)?;
    let [one] = all.as_slice() else {
        return Err(malformed_image("the archive has several images; save a single image"));
    };
    let document = blobs.read_document(&PathBuf::from(&one.config))?;
    let (config, digests) = parse_configuration(&document)?;
    if digests.len() != one.layers.len() {
        return Err(malformed_image("manifest and configuration have different numbers of layers"));
    }
    let parts = one.layers.iter().zip(digests);
    let parts = parts.map(|(path, digest)| LayerBlob { path: PathBuf::from(path), packed: None, digest });
    Ok(ImageManifest { digest: None, config, layers: parts.collect() })
}

fn parse_configuration(document: &[u8]) -> Result<(ImageConfig, Vec<Digest>), ImageError> {
    let parsed: ConfigDocument = parse_json(document)?;
    let other = |have: &str, want: &str| !have.is_empty() && have != want;
    if other(&parsed.os, "linux") || other(&parsed.architecture, host_architecture()) {
        return Err(ImageError::NoPlatform(host_architecture()));
    }
    if parsed.rootfs.diff_ids.len() > MAX_LAYERS {
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
            return Err(malformed_image("the configuration contains a NUL byte"));
        }
        length += word.len() + WORD_OVERHEAD;
    }
    if length > MAX_SETTINGS_SIZE {
        return Err(ImageError::TooLarge("128 KiB of environment and command"));
    }
    Ok(())
}

/// Reads a document and verifies its digest.
fn read_verified(blobs: &ImageBlobs, digest: &Digest, size: Option<u64>) -> Result<Vec<u8>, ImageError> {
    let document = blobs.read_document(&blob_path(digest))?;
    if Digest::of_content(&document) != *digest || size.is_some_and(|size| size != document.len() as u64) {
        return Err(ImageError::Mismatch(digest.to_string()));
    }
    Ok(document)
}

pub(super) fn blob_path(digest: &Digest) -> PathBuf {
    PathBuf::from("blobs/sha256").join(digest.hex())
}

fn parse_json<'text, T: Deserialize<'text>>(text: &'text [u8]) -> Result<T, ImageError> {
    serde_json::from_slice(text).map_err(|error| ImageError::Malformed(error.to_string()))
}

fn malformed_image(why: &str) -> ImageError {
    ImageError::Malformed(why.to_owned())
}

//! The download of one image: documents first, then its layers, several at once.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use backend::{LocalLayers, PullProgress};
use futures_util::{StreamExt, TryStreamExt, stream};
use oci_client::client::{AsLayerDescriptor, LayerDescriptor};
use oci_client::manifest;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use crate::PullError;
use crate::documents::{self, RegistryDescriptor, RegistryDocument};

/// The number of layers fetched in parallel.
const MAX_PARALLEL_LAYERS: usize = 4;
/// The size limits for one document, for all layers, and for their number.
const MAX_DOCUMENT_BYTES: u64 = 8 << 20;
const MAX_IMAGE_BYTES: u64 = 64 << 30;
const MAX_LAYERS: usize = 200;
/// The disk space and file count that must stay free, and how often they are checked during a
/// download.
const MIN_FREE_BYTES: u64 = 256 << 20;
const MIN_FREE_FILES: u64 = 10_000;
const SPACE_CHECK_BYTES: u64 = 16 << 20;

const ACCEPTED_MEDIA_TYPES: &[&str] = &[
    manifest::OCI_IMAGE_MEDIA_TYPE,
    manifest::IMAGE_MANIFEST_MEDIA_TYPE,
    manifest::OCI_IMAGE_INDEX_MEDIA_TYPE,
    manifest::IMAGE_MANIFEST_LIST_MEDIA_TYPE,
];

pub(crate) struct ImageDownload<'a> {
    pub(crate) client: &'a Client,
    pub(crate) reference: &'a Reference,
    pub(crate) auth: &'a RegistryAuth,
    pub(crate) into: &'a Path,
}

impl AsLayerDescriptor for RegistryDescriptor {
    fn as_layer_descriptor(&self) -> LayerDescriptor<'_> {
        LayerDescriptor { digest: &self.digest, urls: &None }
    }
}

impl ImageDownload<'_> {
    /// Fetches everything and returns the digest of the manifest.
    pub(crate) async fn fetch_image(
        &self,
        here: &LocalLayers,
        progress: &(dyn Fn(PullProgress) + Send + Sync),
    ) -> Result<String, PullError> {
        let blobs = self.into.join("blobs/sha256");
        tokio::fs::create_dir_all(&blobs).await.map_err(PullError::Write)?;
        let (digest, manifest) = self.fetch_manifest().await?;
        let document = RegistryDocument::parse(&manifest)?;
        let (Some(config), Some(layers)) = (document.config, document.layers) else {
            return Err(PullError::Malformed("document is neither an index nor a manifest".to_owned()));
        };
        if config.size > MAX_DOCUMENT_BYTES {
            return Err(PullError::TooLarge("8 MiB of configuration"));
        }
        if layers.len() > MAX_LAYERS {
            return Err(PullError::TooLarge("200 layers"));
        }
        self.fetch_blob(&config, &|_| {}).await?;
        let configuration = tokio::fs::read(blobs.join(documents::digest_hex(&config.digest)?)).await;
        let contents = documents::layer_digests(&configuration.map_err(PullError::Write)?)?;
        let wanted = missing_layers(layers, &contents, &here.layers);
        self.fetch_layers(&wanted, here.room, progress).await?;
        self.write_file(&format!("blobs/sha256/{}", documents::digest_hex(&digest)?), &manifest).await?;
        let entry = json!({
            "mediaType": manifest::OCI_IMAGE_MEDIA_TYPE, "digest": digest, "size": manifest.len(),
        });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] });
        self.write_file("index.json", index.to_string().as_bytes()).await?;
        self.write_file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#).await?;
        Ok(digest)
    }

    /// Returns the manifest for this host and its digest, following an index if there is one.
    async fn fetch_manifest(&self) -> Result<(String, Vec<u8>), PullError> {
        let (digest, document) = self.fetch_document(self.reference).await?;
        let parsed = RegistryDocument::parse(&document)?;
        match parsed.entry_for_this_host()? {
            None => Ok((digest, document)),
            Some(entry) => {
                documents::digest_hex(&entry.digest)?;
                self.fetch_document(&self.reference.clone_with_digest(entry.digest.clone())).await
            }
        }
    }

    async fn fetch_document(&self, reference: &Reference) -> Result<(String, Vec<u8>), PullError> {
        let fetching = self.client.pull_manifest_raw(reference, self.auth, ACCEPTED_MEDIA_TYPES);
        let (document, _digest) = crate::with_response_timeout(fetching).await?;
        // The client has already read the whole document; a document rejected here is not used
        // further.
        if document.len() as u64 > MAX_DOCUMENT_BYTES {
            return Err(PullError::TooLarge("8 MiB of manifest"));
        }
        if let Some(pinned) = reference.digest() {
            documents::verify_digest(&document, pinned)?;
        }
        let mut hash = Sha256::new();
        hash.update(&document);
        Ok((documents::format_digest(hash), document.to_vec()))
    }

    async fn fetch_layers(
        &self,
        wanted: &[RegistryDescriptor],
        room: Option<u64>,
        progress: &(dyn Fn(PullProgress) + Send + Sync),
    ) -> Result<(), PullError> {
        let sizes = wanted.iter().try_fold(0_u64, |sum, layer| sum.checked_add(layer.size));
        let of = sizes.filter(|sum| *sum <= MAX_IMAGE_BYTES).ok_or(PullError::TooLarge("64 GiB"))?;
        check_size_limit(of, room)?;
        check_disk_space(self.into, of)?;
        let done = AtomicU64::new(0);
        let count = |more: u64| {
            let bytes = done.fetch_add(more, Ordering::Relaxed) + more;
            progress(PullProgress::Fetching { bytes, of });
        };
        count(0);
        // Collected in a loop: the compiler cannot infer the lifetimes of closures that await.
        let mut fetches = Vec::new();
        for layer in wanted {
            fetches.push(self.fetch_blob(layer, &count));
        }
        stream::iter(fetches).buffer_unordered(MAX_PARALLEL_LAYERS).try_collect::<()>().await
    }

    /// Fetches one blob and verifies its digest and size while writing it.
    async fn fetch_blob(
        &self,
        blob: &RegistryDescriptor,
        count: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), PullError> {
        let path = self.into.join("blobs/sha256").join(documents::digest_hex(&blob.digest)?);
        let mut content =
            crate::with_response_timeout(self.client.pull_blob_stream(self.reference, blob)).await?;
        let mut file = tokio::fs::File::create(&path).await.map_err(PullError::Write)?;
        let mut hash = Sha256::new();
        let mut length = 0;
        let mut looked_at = 0;
        while let Some(piece) = content.next().await {
            let piece = piece.map_err(|error| blob_read_error(error, blob))?;
            length += piece.len() as u64;
            if length > blob.size {
                return Err(PullError::Mismatch(blob.digest.clone()));
            }
            if length - looked_at >= SPACE_CHECK_BYTES {
                looked_at = length;
                check_disk_space(self.into, 0)?;
            }
            hash.update(&piece);
            file.write_all(&piece).await.map_err(PullError::Write)?;
            count(piece.len() as u64);
        }
        file.flush().await.map_err(PullError::Write)?;
        if length != blob.size || documents::format_digest(hash) != blob.digest {
            return Err(PullError::Mismatch(blob.digest.clone()));
        }
        Ok(())
    }

    async fn write_file(&self, name: &str, content: &[u8]) -> Result<(), PullError> {
        tokio::fs::write(self.into.join(name), content).await.map_err(PullError::Write)
    }
}

/// Rejects layers whose compressed size already exceeds the limit on images. Unpacked they are
/// larger, except for a few bytes of overhead around incompressible data.
fn check_size_limit(of: u64, room: Option<u64>) -> Result<(), PullError> {
    let around = (of / 64).max(1 << 20);
    if room.is_some_and(|room| of.saturating_sub(around) > room) {
        return Err(PullError::TooLarge("`images.max_bytes` minus the images in use"));
    }
    Ok(())
}

/// Refuses to write `bytes` more if that would fill the disk. Other writers use the same disk, so
/// this is checked repeatedly during a download.
fn check_disk_space(into: &Path, bytes: u64) -> Result<(), PullError> {
    let disk = rustix::fs::statvfs(into).map_err(|error| PullError::Write(error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    // File systems that allocate inodes on demand, like btrfs, report none.
    let files = disk.f_files == 0 || disk.f_favail >= MIN_FREE_FILES;
    if files && free >= bytes.saturating_add(MIN_FREE_BYTES) { Ok(()) } else { Err(PullError::NoRoom) }
}

/// The client itself verifies digests and reports a mismatch only in the text of its error.
fn blob_read_error(error: std::io::Error, blob: &RegistryDescriptor) -> PullError {
    let text = error.to_string();
    if text.contains("digest") {
        return PullError::Mismatch(blob.digest.clone());
    }
    PullError::Registry(Box::new(oci_client::errors::OciDistributionError::IoError(error)))
}

/// Returns the layers to fetch, each once: those whose content is not stored yet.
fn missing_layers(
    layers: Vec<RegistryDescriptor>,
    contents: &[String],
    have: &BTreeSet<String>,
) -> Vec<RegistryDescriptor> {
    let mut seen = BTreeSet::new();
    let known = |index: usize| contents.get(index).is_some_and(|content| have.contains(content));
    let wanted = layers.into_iter().enumerate().filter(|(index, _)| !known(*index));
    wanted.map(|(_, layer)| layer).filter(|layer| seen.insert(layer.digest.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_larger_than_the_image_limit_is_rejected() {
        let mib = 1 << 20;
        for (of, room) in [(500 * mib, None), (10 * mib, Some(10 * mib)), (6 * mib, Some(6 * mib - 100))] {
            assert!(check_size_limit(of, room).is_ok(), "{of} {room:?}");
        }
        for (of, room) in [(500 * mib, Some(100 * mib)), (2 * mib, Some(0)), (u64::MAX, Some(mib))] {
            assert!(matches!(check_size_limit(of, room), Err(PullError::TooLarge(_))), "{of} {room:?}");
        }
    }

    #[test]
    fn download_that_would_fill_the_disk_is_rejected() {
        let directory = tempfile::tempdir().expect("the temporary directory can be written");
        assert!(matches!(check_disk_space(directory.path(), u64::MAX), Err(PullError::NoRoom)));
    }
}

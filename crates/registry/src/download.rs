//! The download of one image: documents first, then its layers, several at once.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use backend::{Here, Progress};
use futures_util::{StreamExt, TryStreamExt, stream};
use oci_client::client::{AsLayerDescriptor, LayerDescriptor};
use oci_client::manifest;
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use crate::Failure;
use crate::choose::{self, Descriptor, Document};

/// The number of layers fetched in parallel.
const AT_ONCE: usize = 4;
/// The size limits for one document, for all layers, and for their number.
const LARGEST_DOCUMENT: u64 = 8 << 20;
const LARGEST_IMAGE: u64 = 64 << 30;
const MOST_LAYERS: usize = 200;
/// The disk space and file count that must stay free, and how often they are checked during a
/// download.
const LEAST_FREE: u64 = 256 << 20;
const LEAST_FREE_FILES: u64 = 10_000;
const EVERY: u64 = 16 << 20;

const ACCEPTED: &[&str] = &[
    manifest::OCI_IMAGE_MEDIA_TYPE,
    manifest::IMAGE_MANIFEST_MEDIA_TYPE,
    manifest::OCI_IMAGE_INDEX_MEDIA_TYPE,
    manifest::IMAGE_MANIFEST_LIST_MEDIA_TYPE,
];

pub(crate) struct Download<'a> {
    pub(crate) client: &'a Client,
    pub(crate) reference: &'a Reference,
    pub(crate) auth: &'a RegistryAuth,
    pub(crate) into: &'a Path,
}

impl AsLayerDescriptor for Descriptor {
    fn as_layer_descriptor(&self) -> LayerDescriptor<'_> {
        LayerDescriptor { digest: &self.digest, urls: &None }
    }
}

impl Download<'_> {
    /// Fetches everything and returns the digest of the manifest.
    pub(crate) async fn image(
        &self,
        here: &Here,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<String, Failure> {
        let blobs = self.into.join("blobs/sha256");
        tokio::fs::create_dir_all(&blobs).await.map_err(Failure::Write)?;
        let (digest, manifest) = self.manifest().await?;
        let document = Document::parse(&manifest)?;
        let (Some(config), Some(layers)) = (document.config, document.layers) else {
            return Err(Failure::Malformed("document is neither an index nor a manifest".to_owned()));
        };
        if config.size > LARGEST_DOCUMENT {
            return Err(Failure::TooLarge("8 MiB of configuration"));
        }
        if layers.len() > MOST_LAYERS {
            return Err(Failure::TooLarge("200 layers"));
        }
        self.blob(&config, &|_| {}).await?;
        let configuration = tokio::fs::read(blobs.join(choose::hex(&config.digest)?)).await;
        let contents = choose::layers_of(&configuration.map_err(Failure::Write)?)?;
        let wanted = missing(layers, &contents, &here.layers);
        self.layers(&wanted, here.room, progress).await?;
        self.write(&format!("blobs/sha256/{}", choose::hex(&digest)?), &manifest).await?;
        let entry = json!({
            "mediaType": manifest::OCI_IMAGE_MEDIA_TYPE, "digest": digest, "size": manifest.len(),
        });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] });
        self.write("index.json", index.to_string().as_bytes()).await?;
        self.write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#).await?;
        Ok(digest)
    }

    /// Returns the manifest for this host and its digest, following an index if there is one.
    async fn manifest(&self) -> Result<(String, Vec<u8>), Failure> {
        let (digest, document) = self.document(self.reference).await?;
        let parsed = Document::parse(&document)?;
        match parsed.for_this_host()? {
            None => Ok((digest, document)),
            Some(entry) => {
                choose::hex(&entry.digest)?;
                self.document(&self.reference.clone_with_digest(entry.digest.clone())).await
            }
        }
    }

    async fn document(&self, reference: &Reference) -> Result<(String, Vec<u8>), Failure> {
        let fetching = self.client.pull_manifest_raw(reference, self.auth, ACCEPTED);
        let (document, _digest) = crate::answered(fetching).await?;
        // The client has already read the whole document; a document rejected here is not used
        // further.
        if document.len() as u64 > LARGEST_DOCUMENT {
            return Err(Failure::TooLarge("8 MiB of manifest"));
        }
        if let Some(pinned) = reference.digest() {
            choose::check(&document, pinned)?;
        }
        let mut hash = Sha256::new();
        hash.update(&document);
        Ok((choose::written(hash), document.to_vec()))
    }

    async fn layers(
        &self,
        wanted: &[Descriptor],
        room: Option<u64>,
        progress: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<(), Failure> {
        let sizes = wanted.iter().try_fold(0_u64, |sum, layer| sum.checked_add(layer.size));
        let of = sizes.filter(|sum| *sum <= LARGEST_IMAGE).ok_or(Failure::TooLarge("64 GiB"))?;
        check_bound(of, room)?;
        check_room(self.into, of)?;
        let done = AtomicU64::new(0);
        let count = |more: u64| {
            let bytes = done.fetch_add(more, Ordering::Relaxed) + more;
            progress(Progress::Fetching { bytes, of });
        };
        count(0);
        // Collected in a loop: the compiler cannot infer the lifetimes of closures that await.
        let mut fetches = Vec::new();
        for layer in wanted {
            fetches.push(self.blob(layer, &count));
        }
        stream::iter(fetches).buffer_unordered(AT_ONCE).try_collect::<()>().await
    }

    /// Fetches one blob and verifies its digest and size while writing it.
    async fn blob(&self, blob: &Descriptor, count: &(dyn Fn(u64) + Send + Sync)) -> Result<(), Failure> {
        let path = self.into.join("blobs/sha256").join(choose::hex(&blob.digest)?);
        let mut content = crate::answered(self.client.pull_blob_stream(self.reference, blob)).await?;
        let mut file = tokio::fs::File::create(&path).await.map_err(Failure::Write)?;
        let mut hash = Sha256::new();
        let mut length = 0;
        let mut looked_at = 0;
        while let Some(piece) = content.next().await {
            let piece = piece.map_err(|error| failed_reading(error, blob))?;
            length += piece.len() as u64;
            if length > blob.size {
                return Err(Failure::Mismatch(blob.digest.clone()));
            }
            if length - looked_at >= EVERY {
                looked_at = length;
                check_room(self.into, 0)?;
            }
            hash.update(&piece);
            file.write_all(&piece).await.map_err(Failure::Write)?;
            count(piece.len() as u64);
        }
        file.flush().await.map_err(Failure::Write)?;
        if length != blob.size || choose::written(hash) != blob.digest {
            return Err(Failure::Mismatch(blob.digest.clone()));
        }
        Ok(())
    }

    async fn write(&self, name: &str, content: &[u8]) -> Result<(), Failure> {
        tokio::fs::write(self.into.join(name), content).await.map_err(Failure::Write)
    }
}

/// Rejects layers whose compressed size already exceeds the limit on images. Unpacked they are
/// larger, except for a few bytes of overhead around incompressible data.
fn check_bound(of: u64, room: Option<u64>) -> Result<(), Failure> {
    let around = (of / 64).max(1 << 20);
    if room.is_some_and(|room| of.saturating_sub(around) > room) {
        return Err(Failure::TooLarge("`images.max_bytes` minus the images in use"));
    }
    Ok(())
}

/// Refuses to write `bytes` more if that would fill the disk. Other writers use the same disk, so
/// this is checked repeatedly during a download.
fn check_room(into: &Path, bytes: u64) -> Result<(), Failure> {
    let disk = rustix::fs::statvfs(into).map_err(|error| Failure::Write(error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    // File systems that allocate inodes on demand, like btrfs, report none.
    let files = disk.f_files == 0 || disk.f_favail >= LEAST_FREE_FILES;
    if files && free >= bytes.saturating_add(LEAST_FREE) { Ok(()) } else { Err(Failure::NoRoom) }
}

/// The client itself verifies digests and reports a mismatch only in the text of its error.
fn failed_reading(error: std::io::Error, blob: &Descriptor) -> Failure {
    let text = error.to_string();
    if text.contains("digest") {
        return Failure::Mismatch(blob.digest.clone());
    }
    Failure::Registry(Box::new(oci_client::errors::OciDistributionError::IoError(error)))
}

/// Returns the layers to fetch, each once: those whose content is not stored yet.
fn missing(layers: Vec<Descriptor>, contents: &[String], have: &BTreeSet<String>) -> Vec<Descriptor> {
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
            assert!(check_bound(of, room).is_ok(), "{of} {room:?}");
        }
        for (of, room) in [(500 * mib, Some(100 * mib)), (2 * mib, Some(0)), (u64::MAX, Some(mib))] {
            assert!(matches!(check_bound(of, room), Err(Failure::TooLarge(_))), "{of} {room:?}");
        }
    }

    #[test]
    fn download_that_would_fill_the_disk_is_rejected() {
        let directory = tempfile::tempdir().expect("the temporary directory can be written");
        assert!(matches!(check_room(directory.path(), u64::MAX), Err(Failure::NoRoom)));
    }
}

//! The puller's side of a pull: documents first, then layers, several at once. Everything is sent to the
//! receiver as it arrives; this process writes no file.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::{StreamExt, TryStreamExt, stream};
use oci_spec::distribution::Reference;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWrite;
use tokio::sync::Mutex;

use crate::PullError;
use crate::client::RegistryClient;
use crate::documents::{self, RegistryDescriptor, RegistryDocument};
use crate::messages::{self, MAX_PIECE_BYTES, PullMessage};

/// The number of layers fetched in parallel.
const MAX_PARALLEL_LAYERS: usize = 4;
/// The size limits for one document, for all layers, and for their number.
pub(crate) const MAX_DOCUMENT_BYTES: u64 = 8 << 20;
pub(crate) const MAX_IMAGE_BYTES: u64 = 64 << 30;
pub(crate) const MAX_LAYERS: usize = 200;

pub(crate) struct ImageDownload<'a, W> {
    pub(crate) client: &'a RegistryClient,
    pub(crate) reference: &'a Reference,
    pub(crate) receiver: &'a Mutex<W>,
    pub(crate) next_blob: AtomicU32,
}

impl<W: AsyncWrite + Unpin + Send> ImageDownload<'_, W> {
    /// Fetches everything that is not in `stored_layers`, and returns the digest of the manifest.
    pub(crate) async fn fetch_image(&self, stored_layers: &BTreeSet<String>) -> Result<String, PullError> {
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
        self.send_blob(&digest, &manifest).await?;
        let mut configuration = Vec::new();
        self.fetch_blob(&config, &mut |piece| configuration.extend_from_slice(piece)).await?;
        let contents = documents::layer_digests(&configuration)?;
        let wanted = missing_layers(layers, &contents, stored_layers, &config.digest);
        self.fetch_layers(&wanted).await?;
        Ok(digest)
    }

    /// Returns the manifest for this host and its digest, following an index if there is one.
    async fn fetch_manifest(&self) -> Result<(String, Vec<u8>), PullError> {
        let pinned = self.reference.digest();
        let name = pinned.or(self.reference.tag()).unwrap_or("latest");
        let (digest, document) = self.fetch_document(name, pinned).await?;
        match RegistryDocument::parse(&document)?.entry_for_this_host()? {
            None => Ok((digest, document)),
            Some(entry) => {
                documents::digest_hex(&entry.digest)?;
                self.fetch_document(&entry.digest, Some(&entry.digest)).await
            }
        }
    }

    async fn fetch_document(&self, name: &str, pinned: Option<&str>) -> Result<(String, Vec<u8>), PullError> {
        let most = usize::try_from(MAX_DOCUMENT_BYTES).unwrap_or(usize::MAX);
        let document = self.client.fetch_document(name, most).await?;
        if let Some(pinned) = pinned {
            documents::verify_digest(&document, pinned)?;
        }
        let mut hash = Sha256::new();
        hash.update(&document);
        Ok((documents::format_digest(hash), document))
    }

    async fn fetch_layers(&self, wanted: &[RegistryDescriptor]) -> Result<(), PullError> {
        let sizes = wanted.iter().try_fold(0_u64, |sum, layer| sum.checked_add(layer.size));
        let bytes = sizes.filter(|sum| *sum <= MAX_IMAGE_BYTES).ok_or(PullError::TooLarge("64 GiB"))?;
        self.send(&PullMessage::Layers { bytes }).await?;
        // Collected in a loop: the compiler cannot infer the lifetimes of closures that await.
        let mut fetches = Vec::new();
        for layer in wanted {
            fetches.push(self.fetch_layer(layer));
        }
        stream::iter(fetches).buffer_unordered(MAX_PARALLEL_LAYERS).try_collect::<()>().await
    }

    async fn fetch_layer(&self, layer: &RegistryDescriptor) -> Result<(), PullError> {
        self.fetch_blob(layer, &mut |_| {}).await
    }

    /// Fetches one blob and verifies its digest and size while sending it.
    async fn fetch_blob(
        &self,
        blob: &RegistryDescriptor,
        keep: &mut (dyn FnMut(&[u8]) + Send),
    ) -> Result<(), PullError> {
        documents::digest_hex(&blob.digest)?;
        let mut content = self.client.open_blob(&blob.digest).await?;
        let index = self.begin_blob(&blob.digest, blob.size).await?;
        let mut hash = Sha256::new();
        let mut length = 0;
        while let Some(piece) =
            content.chunk().await.map_err(|error| PullError::Request(error.without_url()))?
        {
            length += piece.len() as u64;
            if length > blob.size {
                return Err(PullError::Mismatch(blob.digest.clone()));
            }
            hash.update(&piece);
            keep(&piece);
            self.send_pieces(index, &piece).await?;
        }
        if length != blob.size || documents::format_digest(hash) != blob.digest {
            return Err(PullError::Mismatch(blob.digest.clone()));
        }
        Ok(())
    }

    /// Sends a document as a blob.
    async fn send_blob(&self, digest: &str, content: &[u8]) -> Result<(), PullError> {
        let index = self.begin_blob(digest, content.len() as u64).await?;
        self.send_pieces(index, content).await
    }

    async fn begin_blob(&self, digest: &str, size: u64) -> Result<u32, PullError> {
        let index = self.next_blob.fetch_add(1, Ordering::Relaxed);
        self.send(&PullMessage::Blob { index, digest: digest.to_owned(), size }).await?;
        Ok(index)
    }

    async fn send_pieces(&self, index: u32, content: &[u8]) -> Result<(), PullError> {
        for piece in content.chunks(MAX_PIECE_BYTES) {
            let mut receiver = self.receiver.lock().await;
            messages::write_data(&mut *receiver, index, piece).await.map_err(PullError::Receiver)?;
        }
        Ok(())
    }

    async fn send(&self, message: &PullMessage) -> Result<(), PullError> {
        let mut receiver = self.receiver.lock().await;
        messages::write_message(&mut *receiver, message).await.map_err(PullError::Receiver)
    }
}

/// Returns the layers to fetch, each once: those whose content is not stored yet. A layer that is the
/// configuration as well was sent already.
fn missing_layers(
    layers: Vec<RegistryDescriptor>,
    contents: &[String],
    have: &BTreeSet<String>,
    configuration: &str,
) -> Vec<RegistryDescriptor> {
    let mut seen = BTreeSet::from([configuration.to_owned()]);
    let known = |index: usize| contents.get(index).is_some_and(|content| have.contains(content));
    let wanted = layers.into_iter().enumerate().filter(|(index, _)| !known(*index));
    wanted.map(|(_, layer)| layer).filter(|layer| seen.insert(layer.digest.clone())).collect()
}

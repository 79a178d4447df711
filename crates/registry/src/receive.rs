//! The receiver's side of a pull: it writes what the puller sends as an OCI layout. It parses neither TLS
//! nor HTTP nor documents of a registry, only our own frames.
//!
//! The puller is not trusted: names of files are digests, nothing is written twice, and every length is
//! bounded. The digests of the content are compared where the layout is unpacked.

use std::path::Path;

use backend::{LocalLayers, PullProgress};
use serde_json::json;
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncWriteExt};

use crate::PullError;
use crate::documents;
use crate::download::{MAX_DOCUMENT_BYTES, MAX_IMAGE_BYTES, MAX_LAYERS};
use crate::messages::{self, PullMessage, ReceivedFrame};

/// The disk space and file count that must stay free, and how often they are checked during a
/// download.
const MIN_FREE_BYTES: u64 = 256 << 20;
const MIN_FREE_FILES: u64 = 10_000;
const SPACE_CHECK_BYTES: u64 = 16 << 20;
/// The documents of an image: the manifest and the configuration.
const MAX_DOCUMENTS: usize = 2;

/// A blob that is being written.
struct ReceivedBlob {
    digest: String,
    size: u64,
    received: u64,
    /// Closed when it is complete.
    file: Option<File>,
}

/// The layout as it grows.
struct LayoutWriter<'a> {
    into: &'a Path,
    room: Option<u64>,
    blobs: Vec<ReceivedBlob>,
    /// What all blobs together may have.
    allowed_bytes: u64,
    /// The size of all layers, once it is known.
    layer_bytes: Option<u64>,
    layers_received: u64,
    unchecked_bytes: u64,
}

/// Receives an image into the empty directory `into`, and returns the digest of its manifest.
pub(crate) async fn receive_image(
    stream: &mut (impl AsyncRead + Unpin),
    here: &LocalLayers,
    into: &Path,
    progress: &(dyn Fn(PullProgress) + Send + Sync),
) -> Result<String, PullError> {
    tokio::fs::create_dir_all(into.join("blobs/sha256")).await.map_err(PullError::Write)?;
    let mut layout = LayoutWriter {
        into,
        room: here.room,
        blobs: Vec::new(),
        allowed_bytes: MAX_DOCUMENT_BYTES * MAX_DOCUMENTS as u64,
        layer_bytes: None,
        layers_received: 0,
        unchecked_bytes: 0,
    };
    loop {
        match messages::read_frame(stream).await.map_err(PullError::Puller)? {
            ReceivedFrame::Data { index, piece } => {
                layout.append(index, &piece).await?;
                if let Some(of) = layout.layer_bytes {
                    progress(PullProgress::Fetching { bytes: layout.layers_received, of });
                }
            }
            ReceivedFrame::Message(PullMessage::Blob { index, digest, size }) => {
                layout.begin_blob(index, digest, size).await?;
            }
            ReceivedFrame::Message(PullMessage::Layers { bytes }) => {
                layout.expect_layers(bytes)?;
                progress(PullProgress::Fetching { bytes: 0, of: bytes });
            }
            ReceivedFrame::Message(PullMessage::Done { digest }) => return layout.finish(digest).await,
            ReceivedFrame::Message(PullMessage::Failed { message, hint }) => {
                return Err(PullError::Failed {
                    message: bound_text(&message),
                    hint: hint.map(|hint| bound_text(&hint)),
                });
            }
        }
    }
}

impl LayoutWriter<'_> {
    async fn begin_blob(&mut self, index: u32, digest: String, size: u64) -> Result<(), PullError> {
        let most = if self.layer_bytes.is_some() { MAX_DOCUMENTS + MAX_LAYERS } else { MAX_DOCUMENTS };
        let is_next = usize::try_from(index).is_ok_and(|index| index == self.blobs.len());
        if !is_next || self.blobs.len() >= most || size > self.allowed_bytes {
            return Err(PullError::Protocol("it sends more than it announced"));
        }
        self.allowed_bytes -= size;
        let path = self.into.join("blobs/sha256").join(documents::digest_hex(&digest)?);
        let file = File::create_new(&path).await.map_err(PullError::Write)?;
        let mut blob = ReceivedBlob { digest, size, received: 0, file: Some(file) };
        blob.close_if_complete().await?;
        self.blobs.push(blob);
        Ok(())
    }

    fn expect_layers(&mut self, bytes: u64) -> Result<(), PullError> {
        if self.layer_bytes.is_some() {
            return Err(PullError::Protocol("it announces layers twice"));
        }
        if bytes > MAX_IMAGE_BYTES {
            return Err(PullError::TooLarge("64 GiB"));
        }
        check_size_limit(bytes, self.room)?;
        check_disk_space(self.into, bytes)?;
        self.layer_bytes = Some(bytes);
        self.allowed_bytes = bytes;
        Ok(())
    }

    async fn append(&mut self, index: u32, piece: &[u8]) -> Result<(), PullError> {
        let length = piece.len() as u64;
        let layers = self.layer_bytes.is_some();
        let blob = usize::try_from(index).ok().and_then(|index| self.blobs.get_mut(index));
        let blob = blob.ok_or(PullError::Protocol("it sends data without a blob"))?;
        let Some(file) = blob.file.as_mut().filter(|_| length <= blob.size - blob.received) else {
            return Err(PullError::Protocol("it sends more than it announced"));
        };
        file.write_all(piece).await.map_err(PullError::Write)?;
        blob.received += length;
        blob.close_if_complete().await?;
        self.layers_received += if layers { length } else { 0 };
        self.unchecked_bytes += length;
        if self.unchecked_bytes >= SPACE_CHECK_BYTES {
            self.unchecked_bytes = 0;
            check_disk_space(self.into, 0)?;
        }
        Ok(())
    }

    async fn finish(self, digest: String) -> Result<String, PullError> {
        let manifest = self.blobs.iter().find(|blob| blob.digest == digest);
        let manifest = manifest.ok_or(PullError::Protocol("it sends no manifest"))?;
        if self.blobs.iter().any(|blob| blob.file.is_some()) {
            return Err(PullError::Protocol("it sends less than it announced"));
        }
        let entry = json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": manifest.size,
        });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] });
        self.write_file("index.json", index.to_string().as_bytes()).await?;
        self.write_file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#).await?;
        Ok(digest)
    }

    async fn write_file(&self, name: &str, content: &[u8]) -> Result<(), PullError> {
        tokio::fs::write(self.into.join(name), content).await.map_err(PullError::Write)
    }
}

impl ReceivedBlob {
    async fn close_if_complete(&mut self) -> Result<(), PullError> {
        if self.received == self.size
            && let Some(mut file) = self.file.take()
        {
            file.flush().await.map_err(PullError::Write)?;
        }
        Ok(())
    }
}

/// Text of the puller, in one line of limited length.
fn bound_text(text: &str) -> String {
    text.chars().take(1000).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
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

    /// What a puller sends, and the words of the error that ends the pull.
    async fn check_refused(frames: &[(Option<PullMessage>, &[u8])], words: &str) {
        let (mut puller, mut receiver) = tokio::io::duplex(1 << 20);
        for (message, data) in frames {
            match message {
                Some(message) => messages::write_message(&mut puller, message).await,
                None => messages::write_data(&mut puller, 0, data).await,
            }
            .expect("it fits");
        }
        drop(puller);
        let directory = tempfile::tempdir().expect("the temporary directory can be written");
        let here = LocalLayers { room: Some(64 << 20), ..LocalLayers::default() };
        let received = receive_image(&mut receiver, &here, directory.path(), &|_| {}).await;
        let error = received.expect_err("the puller lies");
        assert!(crate::format_error_chain(&error).contains(words), "{error:?} for {frames:?}");
        assert!(!directory.path().join("index.json").exists());
    }

    #[tokio::test]
    async fn hijacked_puller_writes_only_what_it_announced() {
        let digest = || format!("sha256:{}", "0a".repeat(32));
        let blob = |digest: String, size| Some(PullMessage::Blob { index: 0, digest, size });
        let none: &[u8] = &[];
        let done = || Some(PullMessage::Done { digest: digest() });
        check_refused(&[(blob(digest(), 2), none), (None, b"abc")], "more than it announced").await;
        check_refused(&[(blob(digest(), 0), none), (None, b"a")], "more than it announced").await;
        check_refused(&[(blob(digest(), 17 << 20), none)], "more than it announced").await;
        check_refused(&[(blob("sha256:../../../x".to_owned(), 2), none)], "digest").await;
        check_refused(&[(None, b"a")], "without a blob").await;
        check_refused(&[(blob(digest(), 2), none), (None, b"a"), (done(), none)], "less than it announced")
            .await;
        check_refused(&[(done(), none)], "no manifest").await;
        check_refused(&[(Some(PullMessage::Layers { bytes: 1 << 40 }), none)], "64 GiB").await;
        check_refused(&[(Some(PullMessage::Layers { bytes: 1 << 30 }), none)], "max_bytes").await;
        check_refused(&[(blob(digest(), 2), none)], "ended early").await;
    }
}

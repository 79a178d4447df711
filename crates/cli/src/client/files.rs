//! Files of a sandbox: their attributes, and their bytes in both directions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Method, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::Deserialize;
use serde_json::json;
use tokio::io::AsyncRead;
use tokio_util::io::ReaderStream;

use super::commands::next_chunk;
use super::http as web;
use super::sandbox::SandboxClient;

const CHUNK_BYTES: usize = 256 << 10;
/// Deeper trees than this are not copied.
const MAX_DEPTH: &str = "64";

#[derive(Debug, Deserialize)]
pub(crate) struct FileInfo {
    pub path: String,
    #[serde(rename = "type")]
    pub kind: FileKind,
    /// Permission bits, their octal digits written as a decimal number.
    #[serde(default)]
    pub mode: u32,
    /// The target of a link.
    #[serde(default)]
    pub link_target: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FileKind {
    File,
    Directory,
    Symlink,
    #[serde(other)]
    Other,
}

impl FileInfo {
    /// The permission bits as the kernel has them.
    pub(crate) fn permissions(&self) -> u32 {
        u32::from_str_radix(&self.mode.to_string(), 8).unwrap_or(0o644) & 0o777
    }
}

/// Permission bits as the API writes them: 0o644 is 644.
fn encode_mode(permissions: u32) -> u32 {
    format!("{:o}", permissions & 0o777).parse().expect("octal digits are decimal digits")
}

/// A file that is being read from a sandbox.
#[derive(Debug)]
pub(crate) struct FileDownload {
    body: Incoming,
    pub size: Option<u64>,
}

impl FileDownload {
    pub(crate) async fn next_bytes(&mut self) -> Result<Option<Bytes>> {
        next_chunk(&mut self.body).await
    }
}

impl SandboxClient {
    /// Returns the attributes of `path`, or `None` if it does not exist.
    pub(crate) async fn stat(&self, path: &str) -> Result<Option<FileInfo>> {
        let answer = self.api.get(&format!("/files/info{}", web::encode_query(&[("path", path)]))).await;
        let answer = match answer {
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => return Ok(None),
            answer => answer?,
        };
        let mut found: BTreeMap<String, FileInfo> = web::read_json(answer).await?;
        Ok(found.remove(path))
    }

    /// Everything below `path`, parents before their children.
    pub(crate) async fn list_tree(&self, path: &str) -> Result<Vec<FileInfo>> {
        let query = web::encode_query(&[("path", path), ("depth", MAX_DEPTH)]);
        let answer = self.api.get(&format!("/directories/list{query}")).await?;
        web::read_json(answer).await
    }

    /// Makes a directory and its parents; an existing one stays as it is.
    pub(crate) async fn make_directory(&self, path: &str, permissions: u32) -> Result<()> {
        let body = json!({ path: { "mode": encode_mode(permissions) } });
        self.api.post_json("/directories", &body).await.map(drop)
    }

    /// Makes a symbolic link, which replaces an existing file or link.
    pub(crate) async fn make_link(&self, path: &str, target: &str) -> Result<()> {
        let body = json!({ path: { "target": target } });
        self.api.post_json("/files/links", &body).await.map(drop)
    }

    pub(crate) async fn download(&self, path: &str) -> Result<FileDownload> {
        let answer =
            self.api.get(&format!("/files/download{}", web::encode_query(&[("path", path)]))).await?;
        let length = answer.headers().get(header::CONTENT_LENGTH);
        let size = length.and_then(|value| value.to_str().ok()?.parse().ok());
        Ok(FileDownload { body: answer.into_body(), size })
    }

    /// Writes a file inside from `source`; the server puts it in place only when it is complete. `sent`
    /// counts the bytes as they leave.
    pub(crate) async fn upload(
        &self,
        path: &str,
        permissions: Option<u32>,
        source: impl AsyncRead + Send + 'static,
        sent: Arc<AtomicU64>,
    ) -> Result<()> {
        let boundary = random_boundary()?;
        let (head, tail) = multipart_envelope(&boundary, path, permissions);
        let content = ReaderStream::with_capacity(source, CHUNK_BYTES).inspect(move |chunk| {
            let length = chunk.as_ref().map_or(0, Bytes::len);
            sent.fetch_add(length as u64, Ordering::Relaxed);
        });
        let parts = stream::once(async { Ok(head) }).chain(content).chain(stream::once(async { Ok(tail) }));
        let body = StreamBody::new(parts.map(|part| part.map(Frame::data))).boxed_unsync();
        let content_type = format!("multipart/form-data; boundary={boundary}");
        // No time limit: the response comes after the last byte, however many there are.
        self.api.send(Method::POST, "/files/upload", Some(&content_type), body).await.map(drop)
    }
}

/// A line that no file contains by accident.
fn random_boundary() -> Result<String> {
    let mut entropy = [0; 16];
    rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty())
        .context("could not get random bytes")?;
    Ok(format!("coracle-{:032x}", u128::from_ne_bytes(entropy)))
}

/// The parts of the body before and after the bytes of the file.
fn multipart_envelope(boundary: &str, path: &str, permissions: Option<u32>) -> (Bytes, Bytes) {
    let mut metadata = json!({ "path": path });
    if let Some(permissions) = permissions {
        metadata["mode"] = json!(encode_mode(permissions));
    }
    let head = format!(
        "--{boundary}\r\n\
         Content-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\
         Content-Type: application/json\r\n\r\n\
         {metadata}\r\n\
         --{boundary}\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"file\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    (Bytes::from(head), Bytes::from(format!("\r\n--{boundary}--\r\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_digits_in_decimal() {
        assert_eq!(encode_mode(0o100_644), 644);
        assert_eq!(encode_mode(0o755), 755);
        let info = FileInfo { path: String::new(), kind: FileKind::File, mode: 4755, link_target: None };
        assert_eq!(info.permissions(), 0o755);
    }

    #[test]
    fn a_kind_of_file_that_we_do_not_know_is_other() {
        let info: FileInfo = serde_json::from_str(r#"{"path":"/x","type":"socket"}"#).expect("it reads");
        assert_eq!(info.kind, FileKind::Other);
    }

    #[test]
    fn the_envelope_is_two_parts_and_an_end() {
        let (head, tail) = multipart_envelope("B", "/a\"b", Some(0o600));
        let text = String::from_utf8(head.to_vec()).expect("text");
        assert!(text.starts_with("--B\r\nContent-Disposition: form-data; name=\"metadata\""), "{text}");
        assert!(text.contains(r#"{"mode":600,"path":"/a\"b"}"#), "{text}");
        assert_eq!(tail, "\r\n--B--\r\n");
    }
}

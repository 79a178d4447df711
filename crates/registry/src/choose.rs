//! The registry documents that a pull needs.

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::Failure;

/// An object in a registry: its digest and its size.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Clone, Debug, Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

/// An index or a manifest, depending on which fields are present.
#[derive(Debug, Deserialize)]
pub(crate) struct Document {
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    pub(crate) config: Option<Descriptor>,
    #[serde(default)]
    pub(crate) layers: Option<Vec<Descriptor>>,
}

#[derive(Deserialize)]
struct Configuration {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

impl Document {
    pub(crate) fn parse(text: &[u8]) -> Result<Self, Failure> {
        serde_json::from_slice(text).map_err(|error| Failure::Malformed(error.to_string()))
    }

    /// Returns the entry of an index for this host, or `None` if this is not an index.
    pub(crate) fn for_this_host(&self) -> Result<Option<&Descriptor>, Failure> {
        let Some(manifests) = &self.manifests else { return Ok(None) };
        let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let fits = |entry: &&Descriptor| {
            let platform = entry.platform.as_ref();
            platform.is_some_and(|platform| platform.os == "linux" && platform.architecture == here)
        };
        let found = manifests.iter().find(fits);
        let missing = || Failure::Malformed(format!("image has no entry for linux/{here}"));
        found.ok_or_else(missing).map(Some)
    }
}

/// Returns the digests of the uncompressed layers listed in a configuration.
pub(crate) fn layers_of(configuration: &[u8]) -> Result<Vec<String>, Failure> {
    let parsed: Configuration =
        serde_json::from_slice(configuration).map_err(|error| Failure::Malformed(error.to_string()))?;
    Ok(parsed.rootfs.diff_ids)
}

/// Returns the hex digits of a digest, which become a file name.
pub(crate) fn hex(digest: &str) -> Result<&str, Failure> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let hex = digest.strip_prefix("sha256:").filter(|hex| hex.len() == 64 && hex.bytes().all(is_hex));
    hex.ok_or_else(|| Failure::Malformed("a digest must be `sha256:` and 64 hex digits".to_owned()))
}

/// Compares content with its expected digest.
pub(crate) fn check(content: &[u8], digest: &str) -> Result<(), Failure> {
    let mut hash = Sha256::new();
    hash.update(content);
    if written(hash) == digest { Ok(()) } else { Err(Failure::Mismatch(digest.to_owned())) }
}

pub(crate) fn written(hash: Sha256) -> String {
    let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_cannot_name_another_file() {
        for wrong in ["", "sha256:..", "sha512:00", "sha256:../../../../etc/passwd"] {
            assert!(hex(wrong).is_err(), "{wrong}");
        }
        assert!(hex(&format!("sha256:{}", "0a".repeat(32))).is_ok());
    }

    #[test]
    fn index_without_this_platform_is_rejected() {
        let index = br#"{"manifests": [{"digest": "d", "size": 1, "platform": {"os": "linux", "architecture": "s390x"}}]}"#;
        let document = Document::parse(index).expect("the index parses");
        assert!(document.for_this_host().is_err());
        let manifest = Document::parse(br#"{"config": {"digest": "d", "size": 1}, "layers": []}"#);
        assert!(
            manifest
                .expect("the manifest parses")
                .for_this_host()
                .expect("a manifest needs no entry")
                .is_none()
        );
    }
}

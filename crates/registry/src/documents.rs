//! The registry documents that a pull needs.

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::PullError;

/// An object in a registry: its digest and its size.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RegistryDescriptor {
    pub(crate) digest: String,
    pub(crate) size: u64,
    #[serde(default)]
    platform: Option<RegistryPlatform>,
}

#[derive(Clone, Debug, Deserialize)]
struct RegistryPlatform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

/// An index or a manifest, depending on which fields are present.
#[derive(Debug, Deserialize)]
pub(crate) struct RegistryDocument {
    #[serde(default)]
    manifests: Option<Vec<RegistryDescriptor>>,
    #[serde(default)]
    pub(crate) config: Option<RegistryDescriptor>,
    #[serde(default)]
    pub(crate) layers: Option<Vec<RegistryDescriptor>>,
}

#[derive(Deserialize)]
struct ImageConfiguration {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

impl RegistryDocument {
    pub(crate) fn parse(text: &[u8]) -> Result<Self, PullError> {
        serde_json::from_slice(text).map_err(|error| PullError::Malformed(error.to_string()))
    }

    /// Returns the entry of an index for this host, or `None` if this is not an index.
    pub(crate) fn entry_for_this_host(&self) -> Result<Option<&RegistryDescriptor>, PullError> {
        let Some(manifests) = &self.manifests else { return Ok(None) };
        let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let fits = |entry: &&RegistryDescriptor| {
            let platform = entry.platform.as_ref();
            platform.is_some_and(|platform| platform.os == "linux" && platform.architecture == here)
        };
        let found = manifests.iter().find(fits);
        let missing = || PullError::Malformed(format!("image has no entry for linux/{here}"));
        found.ok_or_else(missing).map(Some)
    }
}

/// Returns the digests of the uncompressed layers listed in a configuration.
pub(crate) fn layer_digests(configuration: &[u8]) -> Result<Vec<String>, PullError> {
    let parsed: ImageConfiguration =
        serde_json::from_slice(configuration).map_err(|error| PullError::Malformed(error.to_string()))?;
    Ok(parsed.rootfs.diff_ids)
}

/// Returns the hex digits of a digest, which become a file name.
pub(crate) fn digest_hex(digest: &str) -> Result<&str, PullError> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let hex = digest.strip_prefix("sha256:").filter(|hex| hex.len() == 64 && hex.bytes().all(is_hex));
    hex.ok_or_else(|| PullError::Malformed("a digest must be `sha256:` and 64 hex digits".to_owned()))
}

/// Compares content with its expected digest.
pub(crate) fn verify_digest(content: &[u8], digest: &str) -> Result<(), PullError> {
    let mut hash = Sha256::new();
    hash.update(content);
    if format_digest(hash) == digest { Ok(()) } else { Err(PullError::Mismatch(digest.to_owned())) }
}

pub(crate) fn format_digest(hash: Sha256) -> String {
    let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_cannot_name_another_file() {
        for wrong in ["", "sha256:..", "sha512:00", "sha256:../../../../etc/passwd"] {
            assert!(digest_hex(wrong).is_err(), "{wrong}");
        }
        assert!(digest_hex(&format!("sha256:{}", "0a".repeat(32))).is_ok());
    }

    #[test]
    fn index_without_this_platform_is_rejected() {
        let index = br#"{"manifests": [{"digest": "d", "size": 1, "platform": {"os": "linux", "architecture": "s390x"}}]}"#;
        let document = RegistryDocument::parse(index).expect("the index parses");
        assert!(document.entry_for_this_host().is_err());
        let manifest = RegistryDocument::parse(br#"{"config": {"digest": "d", "size": 1}, "layers": []}"#);
        assert!(
            manifest
                .expect("the manifest parses")
                .entry_for_this_host()
                .expect("a manifest needs no entry")
                .is_none()
        );
    }
}

//! The documents of a registry, as far as a pull needs them.

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::Failure;

/// Something in a registry: what it is called and how long it is.
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

/// An index or a manifest; its fields tell which.
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

    /// The entry of an index that is for this host; `None` if this is no index.
    pub(crate) fn for_this_host(&self) -> Result<Option<&Descriptor>, Failure> {
        let Some(manifests) = &self.manifests else { return Ok(None) };
        let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let fits = |entry: &&Descriptor| {
            let platform = entry.platform.as_ref();
            platform.is_some_and(|platform| platform.os == "linux" && platform.architecture == here)
        };
        let found = manifests.iter().find(fits);
        let missing = || Failure::Malformed(format!("it has nothing for linux/{here}"));
        found.ok_or_else(missing).map(Some)
    }
}

/// The digests of the uncompressed layers, as a configuration has them.
pub(crate) fn layers_of(configuration: &[u8]) -> Result<Vec<String>, Failure> {
    let parsed: Configuration =
        serde_json::from_slice(configuration).map_err(|error| Failure::Malformed(error.to_string()))?;
    Ok(parsed.rootfs.diff_ids)
}

/// The digits of a digest, which become the name of a file.
pub(crate) fn hex(digest: &str) -> Result<&str, Failure> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let hex = digest.strip_prefix("sha256:").filter(|hex| hex.len() == 64 && hex.bytes().all(is_hex));
    hex.ok_or_else(|| Failure::Malformed("a digest is not `sha256:` and 64 digits".to_owned()))
}

/// Compares content with what it is called.
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
    fn a_digest_cannot_name_another_file() {
        for wrong in ["", "sha256:..", "sha512:00", "sha256:../../../../etc/passwd"] {
            assert!(hex(wrong).is_err(), "{wrong}");
        }
        assert!(hex(&format!("sha256:{}", "0a".repeat(32))).is_ok());
    }

    #[test]
    fn an_index_without_this_platform_is_refused() {
        let index = br#"{"manifests": [{"digest": "d", "size": 1, "platform": {"os": "linux", "architecture": "s390x"}}]}"#;
        let document = Document::parse(index).expect("it is an index");
        assert!(document.for_this_host().is_err());
        let manifest = Document::parse(br#"{"config": {"digest": "d", "size": 1}, "layers": []}"#);
        assert!(manifest.expect("a manifest").for_this_host().expect("no index").is_none());
    }
}

//! The certificate authority of one sandbox, and the leaf certificates of the hosts that are intercepted for it.
//!
//! Its certificate is trusted inside that sandbox alone. The private key is stored sealed, so that the authority is the
//! same after a restart of egress.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use domain::DomainName;
use egress_protocol::SealedSecret;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SerialNumber, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::ServerSessionMemoryCache;
use rustls::{ServerConfig, crypto};
use zeroize::Zeroizing;

use super::seal::fill_random;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const MAX_AUTHORITY_AGE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
const MAX_LEAF_AGE: Duration = Duration::from_secs(14 * 24 * 60 * 60);
/// A leaf that is older is issued anew, long before it ends.
const MAX_LEAF_REUSE_AGE: Duration = DAY;
/// Names below a wildcard are chosen by the sandbox, so the cache is bounded.
const MAX_CACHED_LEAVES: usize = 64;
/// TLS sessions that clients may resume, for each leaf and protocol.
const MAX_SESSIONS_PER_LEAF: usize = 16;
/// The longest common name in a certificate. See RFC 5280, appendix A.1.
const MAX_COMMON_NAME: usize = 64;

pub(super) struct SandboxAuthority {
    issuer: Issuer<'static, KeyPair>,
    sealed_key: Option<SealedSecret>,
    leaf_key: KeyPair,
    leaves: Mutex<HashMap<LeafKey, CachedLeaf>>,
}

/// TLS settings are the same for connections to one host by one protocol.
#[derive(Clone, PartialEq, Eq, Hash)]
struct LeafKey {
    host: DomainName,
    alpn: Option<Vec<u8>>,
}

struct CachedLeaf {
    config: Arc<ServerConfig>,
    issued: Instant,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum LeafError {
    #[error("could not issue a certificate")]
    Issue(#[from] rcgen::Error),
    #[error("could not use the issued certificate")]
    Tls(#[from] rustls::Error),
}

impl SandboxAuthority {
    /// Makes a new authority, and returns its certificate in PEM.
    pub(super) fn create(sandbox: &str) -> Result<(Self, String), rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let params = authority_params(sandbox)?;
        let certificate = params.self_signed(&key)?.pem();
        Ok((Self::new(params, key, None)?, certificate))
    }

    /// Takes up an authority again by its private key.
    pub(super) fn load(sandbox: &str, key: &[u8], sealed_key: SealedSecret) -> Result<Self, rcgen::Error> {
        let der = PrivatePkcs8KeyDer::from(key);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256)?;
        Self::new(authority_params(sandbox)?, key, Some(sealed_key))
    }

    fn new(
        params: CertificateParams,
        key: KeyPair,
        sealed_key: Option<SealedSecret>,
    ) -> Result<Self, rcgen::Error> {
        let leaf_key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        Ok(Self { issuer: Issuer::new(params, key), sealed_key, leaf_key, leaves: Mutex::default() })
    }

    pub(super) fn private_key(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(self.issuer.key().serialize_der())
    }

    pub(super) fn sealed_key(&self) -> Option<&SealedSecret> {
        self.sealed_key.as_ref()
    }

    /// TLS settings under which this process is `host`, speaking the given protocol of ALPN.
    pub(super) fn server_config(
        &self,
        host: &DomainName,
        alpn: Option<&[u8]>,
    ) -> Result<Arc<ServerConfig>, LeafError> {
        let key = LeafKey { host: host.clone(), alpn: alpn.map(<[u8]>::to_vec) };
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leaf) = leaves.get(&key).filter(|leaf| leaf.issued.elapsed() < MAX_LEAF_REUSE_AGE) {
            return Ok(Arc::clone(&leaf.config));
        }
        let config = Arc::new(self.build_config(host, alpn)?);
        if leaves.len() >= MAX_CACHED_LEAVES {
            let oldest = leaves.iter().min_by_key(|(_, leaf)| leaf.issued).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| leaves.remove(&oldest));
        }
        leaves.insert(key, CachedLeaf { config: Arc::clone(&config), issued: Instant::now() });
        Ok(config)
    }

    fn build_config(&self, host: &DomainName, alpn: Option<&[u8]>) -> Result<ServerConfig, LeafError> {
        let leaf: CertificateDer<'static> = self.issue_leaf(host)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let provider = Arc::new(crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf], key)?;
        config.alpn_protocols = alpn.map(<[u8]>::to_vec).into_iter().collect();
        config.session_storage = ServerSessionMemoryCache::new(MAX_SESSIONS_PER_LEAF);
        Ok(config)
    }

    fn issue_leaf(&self, host: &DomainName) -> Result<CertificateDer<'static>, rcgen::Error> {
        let mut params = CertificateParams::new(vec![host.to_string()])?;
        set_identity(&mut params, host.as_str(), MAX_LEAF_AGE);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(&self.leaf_key, &self.issuer)?.der().clone())
    }
}

/// What an authority's certificate says. Leaves name the authority by this, so it depends on the sandbox alone but for
/// the times and the serial number.
fn authority_params(sandbox: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    set_identity(&mut params, &format!("Coracle {sandbox}"), MAX_AUTHORITY_AGE);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn set_identity(params: &mut CertificateParams, name: &str, lifetime: Duration) {
    params.distinguished_name = DistinguishedName::new();
    if name.len() <= MAX_COMMON_NAME {
        params.distinguished_name.push(DnType::CommonName, name);
    } else {
        params.distinguished_name.push(DnType::OrganizationName, "Coracle");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    // Clocks may differ by some hours.
    params.not_before = epoch + now.saturating_sub(DAY);
    params.not_after = epoch + now + lifetime;
    let mut serial = [0; 16];
    // Without random numbers, rcgen derives a serial number from the key.
    if fill_random(&mut serial).is_ok() {
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
    }
}

impl fmt::Debug for SandboxAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxAuthority").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_cached_leaves_is_bounded() {
        let (authority, _) = SandboxAuthority::create("sb").expect("an authority");
        for number in 0..MAX_CACHED_LEAVES + 8 {
            let host = format!("h{number}.example.org").parse().expect("a name");
            authority.server_config(&host, None).expect("a leaf");
        }
        let leaves = authority.leaves.lock().expect("not poisoned");
        assert_eq!(leaves.len(), MAX_CACHED_LEAVES);
    }
}

//! TLS towards servers: always verified, with the roots that the host trusts.

use std::io;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore, crypto};

pub(super) const HTTP2: &[u8] = b"h2";
pub(super) const HTTP1: &[u8] = b"http/1.1";

/// The certificates that may vouch for a server.
#[derive(Clone, Debug)]
pub struct TrustedRoots(RootCertStore);

/// Client settings for each choice of protocols.
#[derive(Debug)]
pub(super) struct UpstreamTls {
    both: Arc<ClientConfig>,
    http2: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
    none: Arc<ClientConfig>,
}

impl Default for TrustedRoots {
    fn default() -> Self {
        Self(RootCertStore::empty())
    }
}

impl TrustedRoots {
    /// Reads what the host trusts, from its usual places or from SSL_CERT_FILE and SSL_CERT_DIR. To be called before
    /// the process gives up its view of the file system.
    pub fn load_from_host() -> Self {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!("could not read some of the host's certificates: {error}");
        }
        let mut roots = Self::default();
        let (added, _ignored) = roots.0.add_parsable_certificates(found.certs);
        if added == 0 {
            tracing::warn!("the host trusts no certificate; hosts with credentials cannot be reached");
        }
        roots
    }

    /// Adds certificates in PEM: an operator's own authority.
    pub fn add_pem(&mut self, pem: &[u8]) -> io::Result<()> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
        let mut added = 0;
        for certificate in CertificateDer::pem_slice_iter(pem) {
            let certificate =
                certificate.map_err(|error| invalid(format!("not a certificate in PEM: {error:?}")))?;
            self.0.add(certificate).map_err(|error| invalid(format!("not usable as a root: {error}")))?;
            added += 1;
        }
        if added == 0 { Err(invalid("there is no certificate".to_owned())) } else { Ok(()) }
    }
}

impl UpstreamTls {
    pub(super) fn new(roots: TrustedRoots) -> Self {
        let provider = Arc::new(crypto::ring::default_provider());
        let base = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring supports the default versions of TLS")
            .with_root_certificates(roots.0)
            .with_no_client_auth();
        let with = |protocols: &[&[u8]]| {
            let mut config = base.clone();
            config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
            Arc::new(config)
        };
        Self { both: with(&[HTTP2, HTTP1]), http2: with(&[HTTP2]), http1: with(&[HTTP1]), none: with(&[]) }
    }

    /// Settings that offer what the client offers, as far as this process speaks it.
    pub(super) fn offering<'a>(&self, offered: impl Iterator<Item = &'a [u8]>) -> Arc<ClientConfig> {
        let (mut http2, mut http1) = (false, false);
        for protocol in offered {
            http2 |= protocol == HTTP2;
            http1 |= protocol == HTTP1;
        }
        Arc::clone(match (http2, http1) {
            (true, true) => &self.both,
            (true, false) => &self.http2,
            (false, true) => &self.http1,
            (false, false) => &self.none,
        })
    }
}

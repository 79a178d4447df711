//! The certificate authority of the test internet, and a server's TLS settings for each host.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::hosts::{ANY_HOST, WORLD_HOSTS};

/// The authority, and the settings of every host by address. Each host has certificates for its own names only, so a
/// client notices when it is connected to another host.
pub(super) struct TestAuthority {
    certificate: String,
    servers: HashMap<IpAddr, Arc<ServerConfig>>,
    gateway: Arc<ServerConfig>,
}

impl TestAuthority {
    /// One for all tests of the process; keys take time to make.
    pub(super) fn shared() -> &'static Self {
        static SHARED: OnceLock<TestAuthority> = OnceLock::new();
        SHARED.get_or_init(Self::create)
    }

    fn create() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "test internet");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key can be made");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("it signs itself");
        let mut servers = HashMap::new();
        for host in WORLD_HOSTS {
            let settings = server_settings(host.names, &issuer);
            for address in [host.v4, host.v6] {
                servers.insert(super::parse_address(address), Arc::clone(&settings));
            }
        }
        let gateway = server_settings(&["gateway.example"], &issuer);
        let certificate = issuer.pem();
        let any = Arc::new(begin_settings().with_cert_resolver(Arc::new(AnyName { issuer })));
        for address in [ANY_HOST.v4, ANY_HOST.v6] {
            servers.insert(super::parse_address(address), Arc::clone(&any));
        }
        Self { certificate, servers, gateway }
    }

    /// The certificate that clients trust, as PEM.
    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The settings of the host with this address.
    pub(super) fn settings_of(&self, address: IpAddr) -> Arc<ServerConfig> {
        Arc::clone(self.servers.get(&address).unwrap_or(&self.gateway))
    }
}

/// Has a certificate for whatever name it is asked for.
#[derive(Debug)]
struct AnyName {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl ResolvesServerCert for AnyName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let (certificate, key) = sign_leaf(&[hello.server_name()?], &self.issuer);
        let key = rustls::crypto::ring::sign::any_supported_type(&key).ok()?;
        Some(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], key)))
    }
}

fn sign_leaf(
    names: &[&str],
    issuer: &CertifiedIssuer<'_, KeyPair>,
) -> (rcgen::Certificate, PrivateKeyDer<'static>) {
    let key = KeyPair::generate().expect("a key can be made");
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let params = CertificateParams::new(names).expect("they are names");
    let certificate = params.signed_by(&key, issuer).expect("the authority signs it");
    (certificate, PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())))
}

fn begin_settings() -> rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_no_client_auth()
}

fn server_settings(names: &[&str], issuer: &CertifiedIssuer<'_, KeyPair>) -> Arc<ServerConfig> {
    let (certificate, key) = sign_leaf(names, issuer);
    let settings = begin_settings().with_single_cert(vec![certificate.der().clone()], key);
    Arc::new(settings.expect("the key belongs to the certificate"))
}

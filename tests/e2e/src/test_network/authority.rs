//! The certificate authority of the test internet, and a server's TLS settings for each host.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use super::hosts::{WORLD_HOSTS, names_at};

/// The authority, and the settings of every host by address. Each host has certificates for its own names only, so a
/// client notices when it is connected to another host.
pub(super) struct TestAuthority {
    certificate: String,
    servers: HashMap<IpAddr, Arc<ServerConfig>>,
    fallback: Arc<ServerConfig>,
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
        let fallback = server_settings(names_at(IpAddr::from([0, 0, 0, 0])), &issuer);
        Self { certificate: issuer.pem(), servers, fallback }
    }

    /// The certificate that clients trust, as PEM.
    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// The settings of the host with this address.
    pub(super) fn settings_of(&self, address: IpAddr) -> Arc<ServerConfig> {
        Arc::clone(self.servers.get(&address).unwrap_or(&self.fallback))
    }
}

fn server_settings(names: &[&str], issuer: &CertifiedIssuer<'_, KeyPair>) -> Arc<ServerConfig> {
    let key = KeyPair::generate().expect("a key can be made");
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let params = CertificateParams::new(names).expect("they are names");
    let certificate = params.signed_by(&key, issuer).expect("the authority signs it");
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let settings = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has them")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("the key belongs to the certificate");
    Arc::new(settings)
}

//! Settings of the HTTP surface that the listener needs, or more than one front. Settings of a single front are in
//! its own `settings.rs`.

use std::net::SocketAddr;
use std::time::Duration;

use domain::NetworkAccess;
use metrics_exporter_prometheus::PrometheusHandle;

use crate::front_sandboxes::RootSandbox;
use crate::front_settings::FrontValues;
use crate::server::connection::{ClientPeer, ConnectionSettings};
use crate::server::peer_limits::TrustedNetwork;

/// Settings of the listener, and the sections of its fronts, validated and with defaults applied.
#[derive(Clone)]
pub struct HttpSettings {
    /// The address the server listens on. Without a key, only this address and loopback names are
    /// accepted as `Host`.
    pub listen: SocketAddr,
    /// `host[:port]` under which clients reach the server, if it differs from their `Host` header.
    pub public_address: Option<String>,
    /// The network mode of sandboxes whose request does not name one.
    pub default_network: NetworkAccess,
    /// The maximum size of a JSON body, in bytes.
    pub json_body_limit: usize,
    /// The maximum number of requests in progress, without long streams; further requests get 429.
    pub concurrent_requests: usize,
    /// The maximum number of open long streams; further ones get 429.
    pub concurrent_streams: usize,
    /// The maximum number of open connections; further ones wait until one is closed.
    pub connections: usize,
    /// The maximum number of connections of one address that have not presented a key.
    pub connections_per_address: usize,
    /// Reverse proxies, whose connections are not counted by address.
    pub trusted_proxies: Vec<TrustedNetwork>,
    /// How long a client may read nothing although there is output for it.
    pub write_timeout: Duration,
    /// How sandbox ports are addressed in addition to the paths of the API.
    pub gateway: GatewaySettings,
    /// How long a service inside a sandbox may take to start its response.
    pub answer_timeout: Duration,
    /// The settings in the section of each front, by its name.
    pub fronts: FrontValues,
    /// The one sandbox that is served at the root, instead of all fronts.
    pub root: Option<RootSandbox>,
    /// The source of the `/metrics` text; see [`crate::install_metrics`].
    pub metrics: Option<PrometheusHandle>,
}

/// How sandbox ports are addressed in addition to the paths of the API.
#[derive(Clone, Debug, Default)]
pub struct GatewaySettings {
    pub mode: GatewayMode,
    pub api_ports: ApiPorts,
    /// Whether ports of sandboxes without secure access are open without a token.
    pub public: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GatewayMode {
    #[default]
    Off,
    /// By host names below `domain`, which is `host[:port]` as clients write it.
    Wildcard { domain: String },
    /// By a header.
    Header,
}

/// How endpoint responses address a sandbox's execution and egress APIs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiPorts {
    /// In the form of the mode, like all other ports.
    #[default]
    ByMode,
    /// By path. SDKs connect to these ports at the returned address, so it must resolve for them.
    ByPath,
}

impl HttpSettings {
    pub fn new(listen: SocketAddr) -> Self {
        const DEFAULT_CONNECTIONS: usize = 4096;
        let ConnectionSettings { connections, per_address, trusted_proxies, write_timeout } =
            ConnectionSettings::with_connections(DEFAULT_CONNECTIONS);
        Self {
            listen,
            public_address: None,
            default_network: NetworkAccess::Off,
            json_body_limit: 1 << 20,
            concurrent_requests: 1024,
            concurrent_streams: 2048,
            connections,
            connections_per_address: per_address,
            trusted_proxies,
            write_timeout,
            gateway: GatewaySettings::default(),
            answer_timeout: Duration::from_secs(180),
            fronts: FrontValues::new(),
            root: None,
            metrics: None,
        }
    }

    /// The part that concerns connections rather than requests.
    pub fn connection_settings(&self) -> ConnectionSettings {
        ConnectionSettings {
            connections: self.connections,
            per_address: self.connections_per_address,
            trusted_proxies: self.trusted_proxies.clone(),
            write_timeout: self.write_timeout,
        }
    }

    /// Whether a request was sent by a proxy that the operator trusts, or by one on this machine. Only such a request may
    /// say in its headers how the client reaches the proxy.
    pub(crate) fn trusts_proxy(&self, extensions: &http::Extensions) -> bool {
        let Some(ClientPeer::Network(peer)) = extensions.get::<ClientPeer>() else { return false };
        let address = peer.ip().to_canonical();
        address.is_loopback() || self.trusted_proxies.iter().any(|network| network.contains(address))
    }
}

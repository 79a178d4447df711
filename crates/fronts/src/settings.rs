//! What an operator can set about the HTTP surface.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use domain::Network;
use metrics_exporter_prometheus::PrometheusHandle;

/// Settings of the listener and its fronts, checked and with defaults in.
#[derive(Clone)]
pub struct Settings {
    /// Where the server listens; without a key only this address and loopback names are
    /// accepted as `Host`.
    pub listen: SocketAddr,
    /// `host[:port]` by which clients reach the server, if it is not what they put into `Host`.
    pub public_address: Option<String>,
    /// How output is cut into events where a sandbox does not say.
    pub default_lines: Lines,
    /// The network of a sandbox whose client names none.
    pub default_network: Network,
    /// The longest JSON body that is read, in bytes.
    pub json_body_limit: usize,
    /// Requests in progress, streams included; past them the answer is 429.
    pub concurrent_requests: usize,
    /// Connections that are open at once; past them the next ones wait until one is closed.
    pub connections: usize,
    /// How ports of sandboxes are addressed beside the paths of the API.
    pub gateway: Gateway,
    /// How long a service inside a sandbox may take to begin its answer.
    pub answer_timeout: Duration,
    /// Accesses closer together than this renew a sandbox once.
    pub renewal_interval: Duration,
    /// Where `/metrics` takes its text from; see [`crate::install_metrics`].
    pub metrics: Option<PrometheusHandle>,
}

/// The two dialects in which output is cut into events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lines {
    /// `P`: each line with its terminator.
    #[default]
    Preserving,
    /// `S`: each line without it.
    Stripping,
}

/// The text is not a dialect.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a line dialect: write `P` or `S`")]
pub struct NotADialect(String);

/// How ports of sandboxes are addressed beside the paths of the API, and how addresses are signed.
#[derive(Clone, Debug, Default)]
pub struct Gateway {
    pub mode: GatewayMode,
    pub api_ports: ApiPorts,
    /// Whether services of sandboxes without secure access need no token there.
    pub public: bool,
    /// Keys of signed routes. The first signs, all are good; without any the server has its own.
    pub keys: Vec<RouteKey>,
    pub short: Short,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GatewayMode {
    #[default]
    Off,
    /// By hosts below `domain`, which is `host[:port]` as clients write it.
    Wildcard { domain: String },
    /// By a header.
    Header,
}

/// How a sandbox's execution and egress APIs are addressed in answers about their ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ApiPorts {
    /// In the form of the mode, as all other ports.
    #[default]
    ByMode,
    /// By path. SDKs connect to these ports by the address in the answer, so it must be one that
    /// resolves for them.
    ByPath,
}

/// A key of signed routes. It never prints its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct RouteKey {
    /// A digit or a lower-case letter.
    pub name: char,
    pub secret: Vec<u8>,
}

impl fmt::Debug for RouteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=***", self.name)
    }
}

/// Whether signatures of 32 bits are made and accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Short {
    #[default]
    Refused,
    Accepted,
}

impl Settings {
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            public_address: None,
            default_lines: Lines::default(),
            default_network: Network::Off,
            json_body_limit: 1 << 20,
            concurrent_requests: 1024,
            connections: 4096,
            gateway: Gateway::default(),
            answer_timeout: Duration::from_secs(180),
            renewal_interval: Duration::from_secs(60),
            metrics: None,
        }
    }
}

impl Lines {
    pub fn parse(text: &str) -> Result<Self, NotADialect> {
        match text {
            "P" | "p" => Ok(Self::Preserving),
            "S" | "s" => Ok(Self::Stripping),
            _ => Err(NotADialect(text.to_owned())),
        }
    }

    pub fn letter(self) -> &'static str {
        match self {
            Self::Preserving => "P",
            Self::Stripping => "S",
        }
    }
}

//! The messages to and from the egress process, which carries the traffic of sandboxes without a link.
//!
//! ```text
//! launcher                     ── sockets of sandboxes ───────────►  supervisor, which keeps them
//! supervisor or `coracle run`  ── sockets of sandboxes, settings ──►  egress
//! server or `coracle run`      ── policies, questions ────────────►  egress
//!                              ◄── answers ────────────────────────
//! ```
//!
//! Each message is one packet of `linux::packet` on a SOCK_SEQPACKET socket. Every [`EgressRequest`] gets one
//! [`EgressReply`] with the same number, in any order. A connection may send only what its [`ConnectionRole`] allows: the
//! keeper of sockets is inherited, all others connect to a socket in the state directory.

mod vault;

use std::net::{IpAddr, SocketAddr};

use domain::{NetworkPolicy, PolicyAction, PolicyError, PolicyRule};
use serde::{Deserialize, Serialize};

pub use vault::{
    AuthMessage, BindingMessage, CredentialMessage, HeaderMessage, SealedSecret, SecretScope, SecretValue,
    SubstitutionMessage, SurfaceMessage, VaultMessage, VaultReply, VaultRequest,
};

/// The name of the socket in the state directory at which the server reaches egress.
pub const EGRESS_SOCKET: &str = "egress.sock";

/// What a connection may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionRole {
    /// Everything: the supervisor's connection, or that of `coracle run`.
    Keeper,
    /// Policies and questions: the server's connection.
    Server,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressRequest {
    pub number: u64,
    pub body: EgressRequestBody,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressRequestBody {
    /// Keeper only. Replaces the settings. The first message of a keeper; until it arrives, nothing passes.
    Configure(EgressSettings),
    /// Keeper only, with two descriptors: the TCP listener and the UDP socket. Serves a sandbox, or replaces how it is
    /// served.
    Serve(ServedSandbox),
    /// Keeper only. Closes the sockets of a sandbox and its connections, and forgets its policy and log.
    Forget { sandbox: String },
    /// Asks a keeper for the sandboxes whose sockets it keeps.
    ListServed,
    /// Sets the policy of a sandbox, also before its sockets arrive. Open connections that the new policy denies are
    /// reset before the reply is sent.
    SetPolicy { sandbox: String, policy: PolicyMessage },
    /// Forgets policies that were set for other sandboxes than these and are not served: what a server sends when it has
    /// set all of its policies again.
    KeepPolicies { sandboxes: Vec<String> },
    /// Asks for records of connections with a number above `after`, the oldest first. With `wait`, the reply is sent
    /// when there is at least one, or after some seconds without any.
    ReadLog { sandbox: String, after: u64, limit: u32, wait: bool },
    /// Asks for the counters of all sandboxes that are served.
    ReadCounters,
    /// About secrets and the vaults of sandboxes.
    Vault(VaultRequest),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressReply {
    pub number: u64,
    pub body: EgressReplyBody,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressReplyBody {
    Done,
    /// The answer to `ListServed`.
    Served {
        sandboxes: Vec<String>,
    },
    Log(LogPage),
    Counters(EgressCounters),
    Vault(VaultReply),
    /// The request was refused; nothing has changed.
    Refused {
        message: String,
    },
}

/// What the operator has set for all sandboxes, as text that `domain` parses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressSettings {
    /// Name servers to ask; if empty, those of the host's resolv.conf.
    pub resolvers: Vec<IpAddr>,
    /// `network.allow`: reachable, even if a list below forbids it. Targets of `domain::NetworkTarget`.
    pub allow: Vec<String>,
    /// Never reachable: the fixed list and `network.deny`. Prefixes of `domain::AddressPrefix`.
    pub deny: Vec<String>,
    /// `network.filter.always_deny` and `always_allow`: targets of `domain::PolicyTarget` that precede every policy
    /// of a filtered sandbox, in this order.
    pub always_deny: Vec<String>,
    pub always_allow: Vec<String>,
    pub limits: EgressLimits,
    /// A proxy through which all connections leave.
    pub upstream_proxy: Option<String>,
}

/// Bounds of what sandboxes may use of egress and of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressLimits {
    pub connections_per_sandbox: u32,
    pub connections_in_total: u32,
    pub new_connections_per_second: u32,
    /// The bytes that a sandbox may send and receive each second; `None` for no limit.
    pub bytes_per_second: Option<u64>,
    pub queries_per_second: u32,
}

impl Default for EgressLimits {
    fn default() -> Self {
        Self {
            connections_per_sandbox: 1024,
            connections_in_total: 8192,
            new_connections_per_second: 500,
            bytes_per_second: None,
            queries_per_second: 200,
        }
    }
}

/// A sandbox whose sockets egress holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedSandbox {
    pub sandbox: String,
    pub mode: ServeMode,
    /// The addresses of the sandbox itself. A connection to one of them, or to its loopback, is never carried.
    pub own: Vec<IpAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServeMode {
    /// By its policy. Without one, nothing passes.
    Filtered,
    /// Network `on` without a link: everything but the operator's lists passes, and no first bytes are read.
    Open,
}

/// A policy as text that `domain` parses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyMessage {
    pub rules: Vec<RuleMessage>,
    pub default: ActionMessage,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleMessage {
    pub action: ActionMessage,
    pub target: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionMessage {
    Allow,
    Deny,
}

/// Some records of a sandbox's log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPage {
    pub records: Vec<LogRecord>,
    /// How many records between `after` and the first of these are gone: the log is bounded.
    pub dropped: u64,
}

/// One connection, when it was decided and again when it ended, or one denied query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRecord {
    /// Rises by one for each record of a sandbox. A new egress process continues with higher numbers.
    pub number: u64,
    pub unix_ms: u64,
    pub kind: LogKind,
    pub name: Option<String>,
    pub address: Option<SocketAddr>,
    pub verdict: ActionMessage,
    /// What decided: the text of a rule, `default`, or the name of a list or limit.
    pub reason: String,
    /// Known when the connection has ended.
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogKind {
    /// A connection was allowed and dialled, or denied.
    Connection,
    /// An allowed connection ended.
    ConnectionEnd,
    /// A name was asked for and denied.
    Query,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressCounters {
    pub open_connections: u64,
    pub sandboxes: Vec<SandboxCounters>,
}

/// Totals of a sandbox since egress first served it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxCounters {
    pub sandbox: String,
    pub allowed_connections: u64,
    pub denied_connections: u64,
    pub denied_queries: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
}

impl From<&NetworkPolicy> for PolicyMessage {
    fn from(policy: &NetworkPolicy) -> Self {
        let rule =
            |rule: &PolicyRule| RuleMessage { action: rule.action.into(), target: rule.target.to_string() };
        Self { rules: policy.rules().iter().map(rule).collect(), default: policy.default_action().into() }
    }
}

impl TryFrom<&PolicyMessage> for NetworkPolicy {
    type Error = PolicyError;

    fn try_from(message: &PolicyMessage) -> Result<Self, PolicyError> {
        let rule =
            |rule: &RuleMessage| Ok(PolicyRule { action: rule.action.into(), target: rule.target.parse()? });
        let rules = message.rules.iter().map(rule).collect::<Result<_, PolicyError>>()?;
        Self::new(rules, message.default.into())
    }
}

impl From<PolicyAction> for ActionMessage {
    fn from(action: PolicyAction) -> Self {
        match action {
            PolicyAction::Allow => Self::Allow,
            PolicyAction::Deny => Self::Deny,
        }
    }
}

impl From<ActionMessage> for PolicyAction {
    fn from(action: ActionMessage) -> Self {
        match action {
            ActionMessage::Allow => Self::Allow,
            ActionMessage::Deny => Self::Deny,
        }
    }
}

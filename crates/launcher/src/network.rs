//! The connection of a sandbox to other machines, and the packet filters that restrict it.
//!
//! ```text
//!  sandbox's namespace            host's namespace
//!   eth0 ─ link with two ends ─ cora…-0001 ─► one static table: guard, resolver, NAT ─► world
//! ```
//!
//! As root, [`uplink`] maintains the table and makes the links. The table matches links by the prefix
//! of their names, so no rule changes when a sandbox comes or goes. A second guard inside each
//! sandbox's namespace stays in force if another program empties the host's filters.
//!
//! A sandbox without a link is set up by [`filtered`]: a process outside, egress, carries its connections. So are those
//! with network `filtered`, and those with network `on` where the host does not forward packets or the user is not root.

pub mod address;
pub mod filtered;
pub mod guard;
pub mod resolver;
pub mod settings;
pub mod uplink;

use egress_protocol::ServeMode;

pub use settings::{FilterSettings, NetworkMode, NetworkSettings};

/// How a new sandbox reaches other machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UplinkKind {
    /// Not at all: the sandbox has only its own loopback.
    Nothing,
    /// Over a link to the host, which forwards packets.
    Link,
    /// Through egress, which carries its connections.
    Egress(ServeMode),
}

/// The reason why sandboxes cannot have a network here.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("this host does not forward packets: net.ipv4.ip_forward is 0")]
    NoForwarding,
    #[error("address range {0} is in use on this host")]
    RangeTaken(String),
    #[error("could not install the packet filter")]
    Filter(#[source] std::io::Error),
    #[error("could not read the links and routes of this host")]
    Links(#[source] std::io::Error),
    #[error("only root can make links to the host")]
    NotRoot,
    #[error("the egress process is not available here")]
    NoEgress,
    #[error("this kernel cannot divert connections: {0}")]
    NoDiversion(String),
}

impl NetworkError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoForwarding => {
                "`sysctl -w net.ipv4.ip_forward=1` (and net.ipv6.conf.all.forwarding=1 for IPv6), and the same \
                 lines without `sysctl -w` in /etc/sysctl.d/90-coracle.conf"
            }
            Self::RangeTaken(_) => "set `network.range` to a private range that nothing on this host uses",
            Self::Filter(_) => {
                "`modprobe nf_tables nft_fib_inet nft_masq`; the kernel needs nftables with NAT"
            }
            Self::Links(_) => "`coracle doctor` shows what is missing on this host",
            Self::NotRoot => "run as root, or set `network.default` to let egress carry the connections",
            Self::NoEgress => "it belongs to `coracle serve` and `coracle run`; use network `off` elsewhere",
            Self::NoDiversion(_) => {
                "`modprobe nft_tproxy nft_reject_inet`; the kernel needs CONFIG_NFT_TPROXY, and CONFIG_IPV6"
            }
        }
    }
}

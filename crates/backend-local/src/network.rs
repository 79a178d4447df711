//! The way from a sandbox to other machines, and what it never leads to.
//!
//! ```text
//!  sandbox's namespace            host's namespace
//!   eth0 ─ link with two ends ─ cora…-0001 ─► one static table: guard, resolver, NAT ─► world
//! ```
//!
//! As root, [`uplink`] keeps the table and makes the links; the table knows links by the start
//! of their names, so no sandbox changes a rule. A second guard inside each sandbox's namespace
//! holds while somebody else empties the host's filters. Without root, [`userspace`] starts a
//! program that carries the packets, and the guard inside is the only one.

pub mod address;
pub mod guard;
pub mod resolver;
pub mod settings;
pub mod uplink;
pub mod userspace;

pub use address::{Prefix, Target};
pub use settings::{NetworkSettings, Wish};

/// How a new sandbox reaches other machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Its own loopback and nothing else.
    Nothing,
    /// A link to the host, which forwards for it.
    Link,
    /// A program of an ordinary user carries its packets.
    Userspace,
}

/// Why sandboxes reach nothing here.
#[derive(Debug, thiserror::Error)]
pub enum Down {
    #[error("this host forwards no packets: net.ipv4.ip_forward is 0")]
    NoForwarding,
    #[error("the addresses {0} are in use on this host")]
    RangeTaken(String),
    #[error("the kernel does not take the packet filter")]
    Filter(#[source] std::io::Error),
    #[error("the links and routes of this host cannot be seen")]
    Links(#[source] std::io::Error),
    #[error("/dev/net/tun cannot be opened")]
    NoTun(#[source] std::io::Error),
    #[error("neither `pasta` nor `slirp4netns` is on this host")]
    NoProgram,
}

impl Down {
    /// What somebody could do about it.
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
            Self::Links(_) => "`coracle doctor` says what this host lacks",
            Self::NoTun(_) => {
                "`modprobe tun` and `chmod 666 /dev/net/tun` as root, which is how most systems have it"
            }
            Self::NoProgram => "install the package `passt` or `slirp4netns`, or run as root",
        }
    }
}

//! The network of root's sandboxes: links from net namespaces to the host, which forwards packets.
//!
//! The name of a link is `cora` + six digits of the instance + the number of its address, so the
//! kernel's list of links shows which addresses are taken, and nothing has to be stored. Both ends
//! have a permanent neighbour entry for each other, so no sandbox sends or answers neighbour requests.
//! No machine has the gateway's address; it only refers to the other end of the link. Links are removed
//! with their namespaces and never one by one, because that takes the kernel a long time.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use linux::netlink::route::{MacAddress, RoutingSocket, VethEnd};
use linux::netlink::watch::{FilterWatch, LinkWatch};
use linux::netlink::{conntrack, nftables};

use super::address::{self, AddressRange};
use super::settings::NetworkSettings;
use super::{NetworkError, guard, resolver};

/// The name of the link inside a sandbox.
pub const SANDBOX_LINK_NAME: &str = "eth0";
/// The MAC addresses of both ends. Links are not connected to each other, so all may have the same
/// ones. Because they are set explicitly, programs that replace random MAC addresses do not change them.
const HOST_MAC: MacAddress = [0x02, 0xc0, 0x7a, 0xc1, 0xe0, 0x01];
const SANDBOX_MAC: MacAddress = [0x02, 0xc0, 0x7a, 0xc1, 0xe0, 0x02];

/// How many addresses are tried if some are taken, for instance by another server.
const MAX_ADDRESS_ATTEMPTS: u32 = 64;
/// The number of removed sandboxes whose connections are dropped at once.
const MAX_DROPPED_AT_ONCE: usize = 64;

pub struct Uplink {
    settings: NetworkSettings,
    /// The prefix of the names of our links.
    links: String,
    table: String,
    up: Option<ActiveUplink>,
    /// The address index that is tried next.
    next: u32,
    /// Address indexes whose links were removed and whose connections the kernel still tracks.
    left: Vec<u32>,
}

/// The state of an uplink whose table is installed.
struct ActiveUplink {
    routing: RoutingSocket,
    range: AddressRange,
    upstreams: Vec<IpAddr>,
    stamp: Vec<(u64, i64, i64)>,
    links: LinkWatch,
    filters: FilterWatch,
}

impl Uplink {
    /// Makes an uplink that is not active yet. This changes nothing on the host.
    pub fn new(settings: NetworkSettings, instance: &str) -> Self {
        let digest = blake3::hash(instance.as_bytes()).to_hex();
        let mut start = [0; 4];
        // If there is no randomness, the search starts at the first address.
        rustix::rand::getrandom(&mut start, rustix::rand::GetRandomFlags::empty()).unwrap_or_default();
        Self {
            settings,
            links: format!("{}{}-", guard::LINK_PREFIX, &digest[..6]),
            table: format!("coracle-{instance}"),
            up: None,
            next: u32::from_ne_bytes(start),
            left: Vec::new(),
        }
    }

    pub fn settings(&self) -> &NetworkSettings {
        &self.settings
    }

    /// Checks that sandboxes can get a link now. This installs the table if necessary: the first time,
    /// after another program emptied the host's filters, or when the host's name servers changed.
    pub fn ensure_ready(&mut self) -> Result<(), NetworkError> {
        if !forwards_packets() {
            return Err(NetworkError::NoForwarding);
        }
        let stands = match &mut self.up {
            Some(up) => {
                let same = !up.refresh_name_servers(&self.settings.resolvers);
                same && nftables::table_exists(&self.table).map_err(NetworkError::Filter)?
            }
            None => {
                let mut routing = RoutingSocket::open().map_err(NetworkError::Links)?;
                let range = address::choose_range(&self.settings, &mut routing)?;
                self.up = Some(
                    ActiveUplink::new(routing, range, &self.settings.resolvers)
                        .map_err(NetworkError::Links)?,
                );
                false
            }
        };
        if stands { Ok(()) } else { self.install_table() }
    }

    /// Like [`Uplink::ensure_ready`], without changing the host.
    pub fn check_ready(&self) -> Result<(), NetworkError> {
        if !forwards_packets() {
            return Err(NetworkError::NoForwarding);
        }
        nftables::table_exists(&self.table).map_err(NetworkError::Filter)?;
        let mut routing = RoutingSocket::open().map_err(NetworkError::Links)?;
        address::choose_range(&self.settings, &mut routing).map(drop)
    }

    /// Installs the table. If that fails, the uplink counts as not active.
    fn install_table(&mut self) -> Result<(), NetworkError> {
        let Some(up) = &self.up else { return Ok(()) };
        let table =
            guard::build_host_table(&self.table, &self.links, &self.settings, &up.range, &up.upstreams);
        let installed = table.install().map_err(NetworkError::Filter);
        if installed.is_err() {
            self.up = None;
        }
        installed
    }

    /// Connects a net namespace that has none of our links; `inside` is its routing. Call
    /// [`Uplink::ensure_ready`] first.
    pub fn connect_namespace(
        &mut self,
        namespace: BorrowedFd<'_>,
        inside: &mut RoutingSocket,
    ) -> io::Result<()> {
        let up = self.up.as_mut().ok_or_else(|| io::Error::other("the network is not ready"))?;
        let v6 = forwards_ipv6();
        for _ in 0..MAX_ADDRESS_ATTEMPTS {
            let index = self.next % up.range.sandbox_count();
            self.next = index + 1;
            let name = link_name(&self.links, index);
            match up.create_link(&name, index, v6, namespace, inside) {
                // Another link has the name, or another server uses the address.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => return done,
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "no free address found in the network range"))
    }

    /// Returns descriptors that become readable when links or filters of the host change; see
    /// [`Uplink::handle_host_changes`].
    pub fn watched_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.up.iter().flat_map(|up| [up.links.as_fd(), up.filters.as_fd()]).collect()
    }

    /// Handles changes on this host: reinstalls the table if another program removed it. `true` if
    /// links were removed and [`Uplink::drop_stale_connections`] has work to do.
    pub fn handle_host_changes(&mut self) -> io::Result<bool> {
        let Some(up) = &mut self.up else { return Ok(false) };
        let removed = up.links.removed_links()?;
        let indexes = removed.iter().filter_map(|name| name.strip_prefix(&self.links));
        self.left.extend(indexes.filter_map(|index| u32::from_str_radix(index, 16).ok()));
        if up.filters.has_changed()? && !nftables::table_exists(&self.table)? {
            tracing::warn!(
                table = self.table,
                "packet filter was removed by another program; installing it again"
            );
            self.install_table().map_err(io::Error::other)?;
        }
        Ok(!self.left.is_empty())
    }

    /// Drops the tracked connections of some removed sandboxes; `true` if there are more. The kernel
    /// walks all connections of the host for this, so it should run when the launcher is idle.
    pub fn drop_stale_connections(&mut self) -> io::Result<bool> {
        let Some(up) = &mut self.up else { return Ok(false) };
        let rest = self.left.split_off(self.left.len().min(MAX_DROPPED_AT_ONCE));
        let mut indexes = std::mem::replace(&mut self.left, rest);
        // A new sandbox that uses the same address now keeps its connections.
        let mut taken = Vec::new();
        for index in &indexes {
            taken.push(up.routing.find_link(&link_name(&self.links, *index))?.is_some());
        }
        let mut taken = taken.into_iter();
        indexes.retain(|_| taken.next() == Some(false));
        if !indexes.is_empty() {
            up.drop_connections(&indexes, if forwards_ipv6() { &[false, true] } else { &[false] });
        }
        Ok(!self.left.is_empty())
    }

    /// Returns the second guard, for the namespace of a sandbox. It contains no address of this host,
    /// because those change, but programs that empty the host's filters do not touch it.
    pub fn inner_guard(&self) -> Option<nftables::FilterTable> {
        let up = self.up.as_ref()?;
        let resolvers: Vec<IpAddr> = (0..resolver::MAX_NAME_SERVERS)
            .flat_map(|number| [false, true].map(|v6| up.range.resolver_address(v6, number)))
            .collect();
        Some(guard::build_sandbox_table(&self.settings, &[up.range.v4, up.range.v6], &resolvers))
    }

    /// Returns the resolv.conf of a sandbox.
    pub fn resolv_conf(&self) -> String {
        let file = |up: &ActiveUplink| resolver::build_resolv_conf(&up.range, &up.upstreams, forwards_ipv6());
        self.up.as_ref().map(file).unwrap_or_default()
    }

    /// Describes what connects a sandbox that has a link.
    pub fn describe(&self) -> String {
        let resolved = self.up.as_ref().is_some_and(|up| !up.upstreams.is_empty());
        let resolver = if resolved { "" } else { ", without a resolver: set `network.resolvers`" };
        format!("NAT of {}{resolver}", describe_families())
    }

    /// Takes over the table that an earlier launcher left. If running sandboxes have links, the table
    /// is installed again with the current settings; if no sandbox is running, it is removed.
    pub fn take_over_table(&mut self, sandboxes_live: bool) -> Result<(), NetworkError> {
        if !sandboxes_live {
            return self.remove_table();
        }
        let mut routing = RoutingSocket::open().map_err(NetworkError::Links)?;
        let links = routing.list_links().map_err(NetworkError::Links)?;
        if !links.iter().any(|(_, name)| name.starts_with(&self.links)) {
            return Ok(());
        }
        // No new sandbox gets a link while the range is taken or the host does not forward. Sandboxes
        // that have a link still reach this host, so the guard is installed first.
        let (range, taken) = match address::choose_range(&self.settings, &mut routing) {
            Ok(range) => (range, None),
            Err(down) => (
                AddressRange { v4: address::candidate_ranges(&self.settings)[0], v6: self.settings.range6 },
                Some(down),
            ),
        };
        self.up =
            Some(ActiveUplink::new(routing, range, &self.settings.resolvers).map_err(NetworkError::Links)?);
        self.install_table()?;
        let Some(down) = taken else { return Ok(()) };
        self.up = None;
        Err(down)
    }

    /// Removes the table. Call this only if no sandbox is running.
    pub fn remove_table(&mut self) -> Result<(), NetworkError> {
        self.up = None;
        match nftables::table_exists(&self.table) {
            Ok(true) => nftables::remove_table(&self.table).map_err(NetworkError::Filter),
            Ok(false) | Err(_) => Ok(()),
        }
    }
}

impl ActiveUplink {
    fn new(routing: RoutingSocket, range: AddressRange, resolvers: &[IpAddr]) -> io::Result<Self> {
        let (links, filters) = (LinkWatch::open()?, FilterWatch::open()?);
        let stamp = resolver::resolv_conf_stamps();
        Ok(Self {
            routing,
            range,
            upstreams: resolver::usable_name_servers(resolvers),
            stamp,
            links,
            filters,
        })
    }

    /// Makes the kernel drop the connections of the sandboxes that had these addresses. A failure is
    /// only logged: a link with stale connections is better than none on a kernel without this
    /// interface.
    fn drop_connections(&self, indexes: &[u32], families: &[bool]) {
        let addresses: Vec<IpAddr> = indexes
            .iter()
            .flat_map(|index| families.iter().map(|v6| self.range.sandbox_address(*v6, *index)))
            .collect();
        if let Err(error) = conntrack::remove_connections(&addresses) {
            tracing::warn!(%error, "failed to drop connections of removed sandboxes; they stay until they time out");
        }
    }

    /// Reads the host's name servers again if their files changed; `true` if they differ.
    fn refresh_name_servers(&mut self, resolvers: &[IpAddr]) -> bool {
        let stamp = resolver::resolv_conf_stamps();
        if stamp == self.stamp {
            return false;
        }
        self.stamp = stamp;
        let former = std::mem::replace(&mut self.upstreams, resolver::usable_name_servers(resolvers));
        former != self.upstreams
    }

    /// Makes the link and sets both ends up. A half-made link stays in the namespace, and the next
    /// attempt removes it.
    fn create_link(
        &mut self,
        name: &str,
        index: u32,
        v6: bool,
        namespace: BorrowedFd<'_>,
        inside: &mut RoutingSocket,
    ) -> io::Result<()> {
        if let Some(half) = inside.find_link(SANDBOX_LINK_NAME)? {
            inside.remove_link(half.index)?;
        }
        let own = VethEnd { name, mac: HOST_MAC };
        self.routing.create_veth_pair(
            own,
            VethEnd { name: SANDBOX_LINK_NAME, mac: SANDBOX_MAC },
            namespace.as_fd(),
        )?;
        let missing = || io::Error::other("the new link was not found");
        let outer = self.routing.find_link(name)?.ok_or_else(missing)?.index;
        let inner = inside.find_link(SANDBOX_LINK_NAME)?.ok_or_else(missing)?.index;
        if kernel_has_ipv6() {
            self.routing.disable_automatic_addresses(outer)?;
        }
        // An earlier sandbox may have left connections that were not dropped, for instance because
        // no launcher was running. Searching for IPv6 connections takes too long here.
        self.drop_connections(&[index], &[false]);
        self.routing.set_link_up(outer)?;
        inside.set_link_up(inner)?;
        let families = if v6 { &[false, true][..] } else { &[false] };
        for v6 in families {
            let (address, gateway) =
                (self.range.sandbox_address(*v6, index), self.range.gateway_address(*v6));
            self.routing.add_route(outer, address)?;
            self.routing.add_neighbour(outer, address, SANDBOX_MAC)?;
            inside.add_address(inner, address)?;
            inside.add_neighbour(inner, gateway, HOST_MAC)?;
            inside.add_route(inner, gateway)?;
            inside.add_default_route(inner, gateway)?;
        }
        Ok(())
    }
}

/// Removes the link of the sandbox in whose net namespace this thread is, if it has one.
pub fn remove_inner_link() -> io::Result<()> {
    let mut inside = RoutingSocket::open()?;
    match inside.find_link(SANDBOX_LINK_NAME)? {
        Some(link) => inside.remove_link(link.index),
        None => Ok(()),
    }
}

/// Returns the name of the link for an address index.
fn link_name(links: &str, index: u32) -> String {
    format!("{links}{index:04x}")
}

/// Describes the address families that sandboxes get.
pub fn describe_families() -> &'static str {
    if forwards_ipv6() { "IPv4 and IPv6" } else { "IPv4" }
}

/// Whether this host forwards packets.
pub fn forwards_packets() -> bool {
    is_forwarding("ipv4/ip_forward")
}

/// Whether sandboxes get IPv6 addresses: only if the host forwards IPv6.
fn forwards_ipv6() -> bool {
    is_forwarding("ipv6/conf/all/forwarding")
}

/// Whether the kernel has IPv6 at all.
fn kernel_has_ipv6() -> bool {
    fs::exists("/proc/sys/net/ipv6").unwrap_or(false)
}

/// Reads a setting of the net namespace that this process is in.
fn is_forwarding(setting: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/net/{setting}")).is_ok_and(|text| text.trim() != "0")
}

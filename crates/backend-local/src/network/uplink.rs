//! Root's way out: links from net namespaces to the host, which forwards for them.
//!
//! A link is known by its name, `cora` + six digits of the instance + the number of its address;
//! so the kernel itself says which addresses are taken, and nothing has to be remembered. Both
//! ends know each other's link address for good: no sandbox ever asks or answers for neighbours.
//! The gateway's address belongs to nobody; it only stands for the other end of the link.
//! Links go with their namespaces and are never deleted one by one: that takes the kernel long.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use linux::netlink::route::{End, Mac, Routing};
use linux::netlink::watch::{FilterWatch, LinkWatch};
use linux::netlink::{filter, tracking};

use super::address::{Prefix, Range};
use super::settings::{NetworkSettings, RANGES, parsed};
use super::{Down, guard, resolver};

/// The link inside a sandbox.
pub const INSIDE: &str = "eth0";
/// The link addresses of both ends. Each link stands alone, so all may have the same; and being
/// set they are not changed by programs that give random ones a lasting form.
const HOST_MAC: Mac = [0x02, 0xc0, 0x7a, 0xc1, 0xe0, 0x01];
const SANDBOX_MAC: Mac = [0x02, 0xc0, 0x7a, 0xc1, 0xe0, 0x02];

/// How often another address is tried when one is taken, by another server for instance.
const TRIES: u32 = 64;
/// Of how many former sandboxes connections are forgotten at once.
const FORGOTTEN_AT_ONCE: usize = 64;

pub struct Uplink {
    settings: NetworkSettings,
    /// The start of the names of our links.
    links: String,
    table: String,
    up: Option<Up>,
    /// The place that is tried next.
    next: u32,
    /// Places whose links went away and whose connections the kernel still knows.
    left: Vec<u32>,
}

/// What holds once the table is there.
struct Up {
    routing: Routing,
    range: Range,
    upstreams: Vec<IpAddr>,
    stamp: Vec<(u64, i64, i64)>,
    links: LinkWatch,
    filters: FilterWatch,
}

impl Uplink {
    /// Changes nothing on the host.
    pub fn new(settings: NetworkSettings, instance: &str) -> Self {
        let digest = blake3::hash(instance.as_bytes()).to_hex();
        let mut start = [0; 4];
        // Without randomness the first place is as good as any.
        rustix::rand::getrandom(&mut start, rustix::rand::GetRandomFlags::empty()).unwrap_or_default();
        Self {
            settings,
            links: format!("{}{}-", guard::ANY_LINK, &digest[..6]),
            table: format!("coracle-{instance}"),
            up: None,
            next: u32::from_ne_bytes(start),
            left: Vec::new(),
        }
    }

    pub fn settings(&self) -> &NetworkSettings {
        &self.settings
    }

    /// Whether sandboxes can be given a link now, and why not. This puts the table in place where
    /// it is not: the first time, after somebody emptied the host's filters, or when the host has
    /// other name servers.
    pub fn ready(&mut self) -> Result<(), Down> {
        if !forwards("ipv4/ip_forward") {
            return Err(Down::NoForwarding);
        }
        let stands = match &mut self.up {
            Some(up) => {
                let same = !up.renew(&self.settings.resolvers);
                same && filter::table_exists(&self.table).map_err(Down::Filter)?
            }
            None => {
                let mut routing = Routing::open().map_err(Down::Links)?;
                let range = self.choose_range(&mut routing)?;
                self.up = Some(Up::new(routing, range, &self.settings.resolvers).map_err(Down::Links)?);
                false
            }
        };
        if stands { Ok(()) } else { self.install() }
    }

    /// As [`Uplink::ready`], without a change to the host.
    pub fn look(&self) -> Result<(), Down> {
        if !forwards("ipv4/ip_forward") {
            return Err(Down::NoForwarding);
        }
        filter::table_exists(&self.table).map_err(Down::Filter)?;
        let mut routing = Routing::open().map_err(Down::Links)?;
        self.choose_range(&mut routing).map(drop)
    }

    /// Puts the table in place. Where that fails, nothing is taken for granted any more.
    fn install(&mut self) -> Result<(), Down> {
        let Some(up) = &self.up else { return Ok(()) };
        let table = guard::for_host(&self.table, &self.links, &self.settings, &up.range, &up.upstreams);
        let installed = table.install().map_err(Down::Filter);
        if installed.is_err() {
            self.up = None;
        }
        installed
    }

    /// Takes the range that was set, or the first of the usual ones that this host does not use.
    fn choose_range(&self, routing: &mut Routing) -> Result<Range, Down> {
        let links = routing.links().map_err(Down::Links)?;
        let ours: Vec<u32> = links
            .iter()
            .filter(|(_, name)| name.starts_with(guard::ANY_LINK))
            .map(|(index, _)| *index)
            .collect();
        let routes = routing.routes().map_err(Down::Links)?;
        let theirs: Vec<Prefix> = routes
            .into_iter()
            .filter(|route| route.prefix > 0 && !route.link.is_some_and(|link| ours.contains(&link)))
            .map(|route| Prefix { address: route.target, bits: route.prefix })
            .collect();
        let free = |range: &Prefix| !theirs.iter().any(|other| other.overlaps(range));
        let v6 = self.settings.range6;
        if !free(&v6) {
            return Err(Down::RangeTaken(v6.to_string()));
        }
        let choices = self.choices();
        match choices.iter().find(|range| free(range)) {
            Some(v4) => Ok(Range { v4: *v4, v6 }),
            None => {
                Err(Down::RangeTaken(choices.iter().map(Prefix::to_string).collect::<Vec<_>>().join(", ")))
            }
        }
    }

    /// The ranges of IPv4 that may be taken, in their order.
    fn choices(&self) -> Vec<Prefix> {
        match self.settings.range {
            Some(range) => vec![range],
            None => RANGES.into_iter().map(parsed).collect(),
        }
    }

    /// Connects a net namespace that has none of our links; `inside` is its routing. Call
    /// [`Uplink::ready`] first.
    pub fn connect(&mut self, namespace: BorrowedFd<'_>, inside: &mut Routing) -> io::Result<()> {
        let up = self.up.as_mut().ok_or_else(|| io::Error::other("the way out is not ready"))?;
        let v6 = has_v6();
        for _ in 0..TRIES {
            let place = self.next % up.range.places();
            self.next = place + 1;
            let name = link_name(&self.links, place);
            match up.connect(&name, place, v6, namespace, inside) {
                // Another link has the name, or another server gave the address away.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => return done,
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "every address of the range is taken"))
    }

    /// What is readable when others have changed something; see [`Uplink::hear`].
    pub fn watched(&self) -> Vec<BorrowedFd<'_>> {
        self.up.iter().flat_map(|up| [up.links.as_fd(), up.filters.as_fd()]).collect()
    }

    /// Hears what changed on this host: a table that somebody removed is put back. `true` if
    /// links went away, and [`Uplink::forget_some`] has something to do.
    pub fn hear(&mut self) -> io::Result<bool> {
        let Some(up) = &mut self.up else { return Ok(false) };
        let removed = up.links.removed()?;
        let places = removed.iter().filter_map(|name| name.strip_prefix(&self.links));
        self.left.extend(places.filter_map(|place| u32::from_str_radix(place, 16).ok()));
        if up.filters.changed()? && !filter::table_exists(&self.table)? {
            tracing::warn!(table = self.table, "somebody removed the packet filter: it is put back");
            self.install().map_err(io::Error::other)?;
        }
        Ok(!self.left.is_empty())
    }

    /// Forgets connections of some sandboxes that are gone; `true` if there are more. The kernel
    /// walks all connections of the host for that, so it is for quiet moments.
    pub fn forget_some(&mut self) -> io::Result<bool> {
        let Some(up) = &mut self.up else { return Ok(false) };
        let rest = self.left.split_off(self.left.len().min(FORGOTTEN_AT_ONCE));
        let mut places = std::mem::replace(&mut self.left, rest);
        // Who has the place by now keeps his connections.
        let mut taken = Vec::new();
        for place in &places {
            taken.push(up.routing.find(&link_name(&self.links, *place))?.is_some());
        }
        let mut taken = taken.into_iter();
        places.retain(|_| taken.next() == Some(false));
        if !places.is_empty() {
            up.forget(&places, if has_v6() { &[false, true] } else { &[false] });
        }
        Ok(!self.left.is_empty())
    }

    /// The second guard, for the namespace of a sandbox. It knows no address of this host, since
    /// those change; but nobody who empties the host's filters touches it.
    pub fn inner_guard(&self) -> Option<filter::Table> {
        let up = self.up.as_ref()?;
        let resolvers: Vec<IpAddr> = (0..resolver::MOST)
            .flat_map(|number| [false, true].map(|v6| up.range.resolver(v6, number)))
            .collect();
        Some(guard::for_sandbox(&self.settings, &[up.range.v4, up.range.v6], &resolvers))
    }

    /// What a sandbox writes into its resolv.conf.
    pub fn resolv_conf(&self) -> String {
        let file = |up: &Up| resolver::file_for(&up.range, &up.upstreams, has_v6());
        self.up.as_ref().map(file).unwrap_or_default()
    }

    /// What is in force for a sandbox with a link.
    pub fn describe(&self) -> String {
        let resolved = self.up.as_ref().is_some_and(|up| !up.upstreams.is_empty());
        let resolver = if resolved { "" } else { ", without a resolver: set `network.resolvers`" };
        format!("on, by NAT of {}{resolver}", families())
    }

    /// Looks at what an earlier launcher left: while sandboxes live that have links, the table is
    /// put in place anew with today's settings, whether somebody removed it or not; when none
    /// lives it goes.
    pub fn take_over(&mut self, sandboxes_live: bool) -> Result<(), Down> {
        if !sandboxes_live {
            return self.remove();
        }
        let mut routing = Routing::open().map_err(Down::Links)?;
        let links = routing.links().map_err(Down::Links)?;
        if !links.iter().any(|(_, name)| name.starts_with(&self.links)) {
            return Ok(());
        }
        // No new sandbox gets a link while the range is taken or nothing is forwarded, but those
        // that have one reach this host all the same: they are guarded first.
        let (range, taken) = match self.choose_range(&mut routing) {
            Ok(range) => (range, None),
            Err(down) => (Range { v4: self.choices()[0], v6: self.settings.range6 }, Some(down)),
        };
        self.up = Some(Up::new(routing, range, &self.settings.resolvers).map_err(Down::Links)?);
        self.install()?;
        let Some(down) = taken else { return Ok(()) };
        self.up = None;
        Err(down)
    }

    /// Takes the table away. Only when no sandbox lives.
    pub fn remove(&mut self) -> Result<(), Down> {
        self.up = None;
        match filter::table_exists(&self.table) {
            Ok(true) => filter::remove_table(&self.table).map_err(Down::Filter),
            Ok(false) | Err(_) => Ok(()),
        }
    }
}

impl Up {
    fn new(routing: Routing, range: Range, resolvers: &[IpAddr]) -> io::Result<Self> {
        let (links, filters) = (LinkWatch::open()?, FilterWatch::open()?);
        let stamp = resolver::stamp();
        Ok(Self { routing, range, upstreams: resolver::upstreams(resolvers), stamp, links, filters })
    }

    /// Has the kernel forget the connections of whoever had these places. A link without that is
    /// better than none: a kernel without this interface has few uses, but they exist.
    fn forget(&self, places: &[u32], families: &[bool]) {
        let addresses: Vec<IpAddr> = places
            .iter()
            .flat_map(|place| families.iter().map(|v6| self.range.sandbox(*v6, *place)))
            .collect();
        if let Err(error) = tracking::forget(&addresses) {
            tracing::warn!(%error, "connections of former sandboxes stay until they time out");
        }
    }

    /// Looks for other name servers of the host; `true` if there are.
    fn renew(&mut self, resolvers: &[IpAddr]) -> bool {
        let stamp = resolver::stamp();
        if stamp == self.stamp {
            return false;
        }
        self.stamp = stamp;
        let former = std::mem::replace(&mut self.upstreams, resolver::upstreams(resolvers));
        former != self.upstreams
    }

    /// Makes the link and sets both ends up. One that fails half-way stays with the namespace; the
    /// next attempt removes it.
    fn connect(
        &mut self,
        name: &str,
        place: u32,
        v6: bool,
        namespace: BorrowedFd<'_>,
        inside: &mut Routing,
    ) -> io::Result<()> {
        if let Some(half) = inside.find(INSIDE)? {
            inside.remove(half.index)?;
        }
        let own = End { name, mac: HOST_MAC };
        self.routing.make_pair(own, End { name: INSIDE, mac: SANDBOX_MAC }, namespace.as_fd())?;
        let missing = || io::Error::other("the link that was made is not there");
        let outer = self.routing.find(name)?.ok_or_else(missing)?.index;
        let inner = inside.find(INSIDE)?.ok_or_else(missing)?.index;
        if knows_v6() {
            self.routing.forbid_own_addresses(outer)?;
        }
        // Those of an earlier sandbox that nobody was there to forget. To look for such of IPv6
        // takes too long here.
        self.forget(&[place], &[false]);
        self.routing.set_up(outer)?;
        inside.set_up(inner)?;
        let families = if v6 { &[false, true][..] } else { &[false] };
        for v6 in families {
            let (address, gateway) = (self.range.sandbox(*v6, place), self.range.gateway(*v6));
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

/// The name of the link of the sandbox at a place.
fn link_name(links: &str, place: u32) -> String {
    format!("{links}{place:04x}")
}

/// Which addresses sandboxes get.
pub fn families() -> &'static str {
    if has_v6() { "IPv4 and IPv6" } else { "IPv4" }
}

/// Whether sandboxes get addresses of IPv6: the host forwards them.
fn has_v6() -> bool {
    forwards("ipv6/conf/all/forwarding")
}

/// Whether the kernel has IPv6 at all.
fn knows_v6() -> bool {
    fs::exists("/proc/sys/net/ipv6").unwrap_or(false)
}

/// Reads a setting of the net namespace that this process is in.
fn forwards(setting: &str) -> bool {
    fs::read_to_string(format!("/proc/sys/net/{setting}")).is_ok_and(|text| text.trim() != "0")
}

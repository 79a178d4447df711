//! Net namespaces that are made in advance: without a network, with a link to the host, or with sockets for egress. No
//! process uses them yet.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::namespaces::{self, NamespaceSet};
use linux::netlink::nftables::FilterTable;
use linux::netlink::route::RoutingSocket;
use linux::procfs::DetachedProc;

use crate::network::filtered::{ERROR_LIMITS, FilteredLayout, FilteredNetwork};
use crate::network::uplink::Uplink;
use crate::network::{NetworkError, NetworkMode, UplinkKind};

/// Prepared net namespaces, and the launcher's own, to return to.
pub(crate) struct NetnsPool {
    home: OwnedFd,
    /// Namespaces without a link.
    unlinked: VecDeque<OwnedFd>,
    linked: VecDeque<OwnedFd>,
    filtered: VecDeque<TakenNamespace>,
    wanted: usize,
    pub uplink: Uplink,
    /// Whether a sandbox has asked for a link, so that more are made in advance.
    links_wanted: bool,
    /// Whether a sandbox has asked for sockets for egress, so that more are made in advance.
    filtered_wanted: bool,
    /// The `/proc` through which namespaces are configured, and how many were since it was mounted.
    settings_proc: Option<(DetachedProc, u32)>,
}

/// A net namespace for a new sandbox.
pub(crate) struct TakenNamespace {
    pub namespace: OwnedFd,
    /// Its sockets, if egress carries its connections.
    pub filtered: Option<FilteredNetwork>,
}

/// How many namespaces are configured through the same `/proc`. The kernel keeps the names of each
/// namespace's settings side by side in one chain, so this bounds how long the chain grows. In the host's
/// `/proc` it would grow with the number of sandboxes.
const MAX_NAMESPACES_PER_PROC: u32 = 32;

impl NetnsPool {
    pub(crate) fn open(wanted: usize, uplink: Uplink) -> io::Result<Self> {
        let default = uplink.settings().default;
        Ok(Self {
            home: current_namespace()?,
            unlinked: VecDeque::new(),
            linked: VecDeque::new(),
            filtered: VecDeque::new(),
            wanted,
            uplink,
            links_wanted: matches!(default, NetworkMode::On | NetworkMode::Auto),
            filtered_wanted: default == NetworkMode::Filtered,
            settings_proc: None,
        })
    }

    pub(crate) fn home_namespace(&self) -> io::Result<OwnedFd> {
        self.home.try_clone()
    }

    /// Returns the number of namespaces of the kind that is requested most.
    pub(crate) fn ready_count(&self) -> usize {
        if self.links_wanted && !self.linked.is_empty() {
            self.linked.len()
        } else if self.filtered_wanted && !self.filtered.is_empty() {
            self.filtered.len()
        } else {
            self.unlinked.len()
        }
    }

    /// Takes a prepared namespace, or makes one.
    pub(crate) fn take(&mut self, reach: UplinkKind) -> io::Result<TakenNamespace> {
        let namespace = match reach {
            UplinkKind::Link => {
                self.links_wanted = true;
                self.linked.pop_front().map_or_else(|| self.make_linked(), Ok)?
            }
            UplinkKind::Egress(_) => {
                self.filtered_wanted = true;
                return self.filtered.pop_front().map_or_else(|| self.make_filtered(), Ok);
            }
            UplinkKind::Nothing => self
                .unlinked
                .pop_front()
                .map_or_else(|| self.make_namespace(&[]).map(|(namespace, _)| namespace), Ok)?,
        };
        Ok(TakenNamespace { namespace, filtered: None })
    }

    /// Adds one if there are too few; `true` if more are missing.
    pub(crate) fn refill(&mut self) -> io::Result<bool> {
        if self.links_wanted && self.linked.len() < self.wanted && self.can_link()? {
            let namespace = self.make_linked()?;
            self.linked.push_back(namespace);
            return Ok(true);
        }
        if self.filtered_wanted && self.filtered.len() < self.wanted {
            // The next create reports the reason; there is no point in trying again before.
            let namespace = self.make_filtered().inspect_err(|_| self.filtered_wanted = false)?;
            self.filtered.push_back(namespace);
            return Ok(true);
        }
        if self.unlinked.len() < self.wanted {
            let (namespace, _) = self.make_namespace(&[])?;
            self.unlinked.push_back(namespace);
        }
        Ok(self.unlinked.len() < self.wanted)
    }

    /// Whether links can be made in advance: not while the host does not forward. Other problems are
    /// errors.
    fn can_link(&mut self) -> io::Result<bool> {
        match self.uplink.ensure_ready() {
            Ok(()) => Ok(true),
            Err(NetworkError::NoForwarding) => Ok(false),
            Err(error) => {
                // The next create reports the reason; there is no point in trying again before.
                self.links_wanted = false;
                Err(io::Error::other(error))
            }
        }
    }

    fn make_linked(&mut self) -> io::Result<OwnedFd> {
        let (namespace, mut inside) = self.make_namespace(&[])?;
        self.install_guard(namespace.as_fd(), FilterTable::add_if_missing)?;
        self.uplink.connect_namespace(namespace.as_fd(), &mut inside)?;
        Ok(namespace)
    }

    fn make_filtered(&mut self) -> io::Result<TakenNamespace> {
        let layout = FilteredLayout::choose(self.uplink.settings())?;
        let (namespace, _) = self.make_namespace(&ERROR_LIMITS)?;
        let set_up = || layout.set_up(self.uplink.settings());
        let filtered = Some(self.run_inside(namespace.as_fd(), set_up)?);
        Ok(TakenNamespace { namespace, filtered })
    }

    /// Adds a link to a namespace in use that has none.
    pub(crate) fn add_link(&mut self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        let mut inside = self.run_inside(namespace, RoutingSocket::open)?;
        self.install_guard(namespace, FilterTable::add_if_missing)?;
        self.uplink.connect_namespace(namespace, &mut inside)
    }

    /// Installs the guard with the current settings in a namespace in use.
    pub(crate) fn reinstall_guard(&self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        self.install_guard(namespace, FilterTable::install)
    }

    fn install_guard(
        &self,
        namespace: BorrowedFd<'_>,
        put: fn(FilterTable) -> io::Result<()>,
    ) -> io::Result<()> {
        self.run_inside(namespace, || self.uplink.inner_guard().map_or(Ok(()), put))
    }

    /// Makes a namespace with its loopback up. The launcher's user namespace owns it, so root inside the
    /// sandbox has no privileges over it. So what services inside need is allowed here: low ports and
    /// ping for all users.
    fn make_namespace(&mut self, settings: &[(&str, &str)]) -> io::Result<(OwnedFd, RoutingSocket)> {
        let proc = match self.settings_proc.take() {
            Some((proc, used)) if used < MAX_NAMESPACES_PER_PROC => (proc, used + 1),
            _ => (DetachedProc::mount()?, 1),
        };
        let proc = &self.settings_proc.insert(proc).0;
        namespaces::unshare_namespaces(NamespaceSet::NET)?;
        let made = configure_namespace(proc, settings);
        // This process must leave the namespace even after an error.
        namespaces::enter_namespace(self.home.as_fd(), NamespaceSet::NET)?;
        made
    }

    /// Runs `work` in another namespace and returns to the launcher's own.
    pub(crate) fn run_inside<T>(
        &self,
        namespace: BorrowedFd<'_>,
        work: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        namespaces::enter_namespace(namespace, NamespaceSet::NET)?;
        let done = work();
        namespaces::enter_namespace(self.home.as_fd(), NamespaceSet::NET)?;
        done
    }
}

fn configure_namespace(
    proc: &DetachedProc,
    settings: &[(&str, &str)],
) -> io::Result<(OwnedFd, RoutingSocket)> {
    namespaces::set_loopback_up()?;
    proc.write_setting("net/ipv4/ip_unprivileged_port_start", "0")?;
    proc.write_setting("net/ipv4/ping_group_range", "0 2147483647")?;
    // Links that are added later must have only the addresses that the launcher sets.
    let links = [
        ("net/ipv6/conf/default/addr_gen_mode", "1"),
        ("net/ipv6/conf/default/accept_ra", "0"),
        ("net/ipv6/conf/default/autoconf", "0"),
        ("net/ipv6/conf/default/accept_redirects", "0"),
    ];
    for (setting, value) in links.iter().chain(settings) {
        match proc.write_setting(setting, value) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // A kernel without IPv6 does not have these settings.
            _ => {}
        }
    }
    Ok((current_namespace()?, RoutingSocket::open()?))
}

fn current_namespace() -> io::Result<OwnedFd> {
    fs::File::open("/proc/thread-self/ns/net").map(Into::into)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
    use std::time::Duration;

    use egress_protocol::ServeMode;
    use linux::netlink::nftables;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::network::{NetworkSettings, uplink};
    use domain::NetworkTarget;

    /// Runs a test in a net namespace that represents a separate host; only root can make one.
    fn on_another_host(test: fn() -> io::Result<()>) {
        if !testkit::needs_root() {
            return;
        }
        let host = std::thread::spawn(move || {
            namespaces::unshare_namespaces(NamespaceSet::NET)?;
            namespaces::set_loopback_up()?;
            fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            test()
        });
        host.join().expect("the test does not panic").expect("the test succeeds");
    }

    fn send(to: Ipv4Addr) -> io::Result<usize> {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.send_to(b"?", (to, 9))
    }

    #[test]
    fn sandbox_is_guarded_after_the_host_lost_its_filters() {
        on_another_host(|| {
            let mut nets = NetnsPool::open(0, Uplink::new(NetworkSettings::default(), "test"))?;
            nets.uplink.ensure_ready().map_err(io::Error::other)?;
            let namespace = nets.take(UplinkKind::Link)?.namespace;
            nftables::remove_table("coracle-test")?;
            nets.run_inside(namespace.as_fd(), || {
                for refused in [[10, 0, 0, 1], [169, 254, 169, 254], [198, 19, 0, 1], [198, 19, 0, 200]] {
                    assert!(send(refused.into()).is_err(), "{refused:?}");
                }
                send([203, 0, 113, 1].into()).map(drop)
            })?;
            nets.uplink.ensure_ready().map_err(io::Error::other)?;
            assert!(nftables::table_exists("coracle-test")?);
            Ok(())
        });
    }

    /// Waits until the uplink has an event.
    fn wait_for_uplink_event(uplink: &Uplink) -> io::Result<()> {
        let watched = uplink.watched_descriptors();
        let mut watched: Vec<_> = watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))?;
        if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    #[test]
    fn removed_filter_is_installed_again() {
        on_another_host(|| {
            let mut nets = NetnsPool::open(0, Uplink::new(NetworkSettings::default(), "test"))?;
            nets.uplink.ensure_ready().map_err(io::Error::other)?;
            nets.uplink.handle_host_changes()?;
            nftables::remove_table("coracle-test")?;
            wait_for_uplink_event(&nets.uplink)?;
            nets.uplink.handle_host_changes()?;
            assert!(nftables::table_exists("coracle-test")?);
            Ok(())
        });
    }

    #[test]
    fn filtered_namespaces_are_made_ahead_once_one_was_taken() {
        on_another_host(|| {
            let mut nets = NetnsPool::open(2, Uplink::new(NetworkSettings::default(), "test"))?;
            while nets.refill()? {}
            assert!(nets.filtered.is_empty());
            let taken = nets.take(UplinkKind::Egress(ServeMode::Filtered))?;
            let port = taken.filtered.as_ref().map(|network| network.sockets.tcp_port);
            while nets.refill()? {}
            assert_eq!(nets.filtered.len(), 2);
            // The host routes nothing, so only the resolver can be asked.
            let resolver = || TcpStream::connect(("198.19.0.1", 53)).map(drop);
            nets.run_inside(taken.namespace.as_fd(), resolver)?;
            let listener = taken.filtered.map(|network| TcpListener::from(network.sockets.tcp));
            let listener = listener.ok_or(io::ErrorKind::NotFound)?;
            let (carried, _) = listener.accept()?;
            assert_eq!(carried.local_addr()?.to_string(), "[::ffff:198.19.0.1]:53");
            assert_eq!(Some(listener.local_addr()?.port()), port);
            Ok(())
        });
    }

    #[test]
    fn link_of_a_running_sandbox_is_replaced_by_sockets() {
        on_another_host(|| {
            let mut nets = NetnsPool::open(0, Uplink::new(NetworkSettings::default(), "test"))?;
            nets.uplink.ensure_ready().map_err(io::Error::other)?;
            let namespace = nets.take(UplinkKind::Link)?.namespace;
            let settings = nets.uplink.settings().clone();
            let layout = FilteredLayout::choose(&settings)?;
            let network = nets.run_inside(namespace.as_fd(), || {
                uplink::remove_inner_link()?;
                let network = layout.set_up(&settings)?;
                assert!(RoutingSocket::open()?.find_link(uplink::SANDBOX_LINK_NAME)?.is_none());
                TcpStream::connect(("198.19.0.1", 53))?;
                assert!(TcpStream::connect(("10.0.0.1", 443)).is_err());
                Ok(network)
            })?;
            TcpListener::from(network.sockets.tcp).accept()?;
            Ok(())
        });
    }

    #[test]
    fn connections_are_dropped_with_their_sandbox() {
        on_another_host(|| {
            let here = IpAddr::from([203, 0, 113, 7]);
            let mut routing = RoutingSocket::open()?;
            let loopback = routing.find_link("lo")?.ok_or(io::ErrorKind::NotFound)?.index;
            routing.add_address(loopback, here)?;
            let allow = vec![NetworkTarget { prefix: here.into(), port: None }];
            let settings = NetworkSettings { allow, ..NetworkSettings::default() };
            let mut nets = NetnsPool::open(0, Uplink::new(settings, "test"))?;
            nets.uplink.ensure_ready().map_err(io::Error::other)?;
            let namespace = nets.take(UplinkKind::Link)?.namespace;
            let listener = UdpSocket::bind((here, 9))?;
            listener.set_read_timeout(Some(Duration::from_secs(20)))?;
            nets.run_inside(namespace.as_fd(), || send([203, 0, 113, 7].into()))?;
            let (_, sandbox) = listener.recv_from(&mut [0; 8])?;
            let known = || {
                let all = fs::read_to_string("/proc/thread-self/net/nf_conntrack")?;
                io::Result::Ok(all.contains(&format!("src={} ", sandbox.ip())))
            };
            assert!(known()?);
            drop(namespace);
            while !nets.uplink.handle_host_changes()? {
                wait_for_uplink_event(&nets.uplink)?;
            }
            assert!(!nets.uplink.drop_stale_connections()?);
            assert!(!known()?);
            Ok(())
        });
    }
}

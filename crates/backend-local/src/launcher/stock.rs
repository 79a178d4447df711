//! Net namespaces that are made in advance, with and without a link to the host. No process uses them
//! yet.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::namespaces::{self, Namespaces};
use linux::netlink::filter::Table;
use linux::netlink::route::Routing;

use crate::network::uplink::Uplink;
use crate::network::{Down, Reach, Wish};

/// Prepared net namespaces, and the launcher's own, to return to.
pub struct NetStock {
    home: OwnedFd,
    /// Namespaces without a link.
    apart: VecDeque<OwnedFd>,
    linked: VecDeque<OwnedFd>,
    wanted: usize,
    pub uplink: Uplink,
    /// Whether a sandbox has asked for a link, so that more are made in advance.
    links_wanted: bool,
}

impl NetStock {
    pub fn open(wanted: usize, uplink: Uplink) -> io::Result<Self> {
        let links_wanted = uplink.settings().default != Wish::Off;
        let (apart, linked) = Default::default();
        Ok(Self { home: current()?, apart, linked, wanted, uplink, links_wanted })
    }

    pub fn home(&self) -> io::Result<OwnedFd> {
        self.home.try_clone()
    }

    /// Returns the number of namespaces of the kind that is requested most.
    pub fn count(&self) -> usize {
        if self.links_wanted && !self.linked.is_empty() { self.linked.len() } else { self.apart.len() }
    }

    /// Takes a prepared namespace, or makes one.
    pub fn take(&mut self, reach: Reach) -> io::Result<OwnedFd> {
        match reach {
            Reach::Link => {
                self.links_wanted = true;
                self.linked.pop_front().map_or_else(|| self.make_linked(), Ok)
            }
            Reach::Nothing | Reach::Userspace => {
                self.apart.pop_front().map_or_else(|| self.make().map(|(namespace, _)| namespace), Ok)
            }
        }
    }

    /// Adds one if there are too few; `true` if more are missing.
    pub fn refill(&mut self) -> io::Result<bool> {
        if self.links_wanted && self.linked.len() < self.wanted && self.can_link()? {
            let namespace = self.make_linked()?;
            self.linked.push_back(namespace);
            return Ok(true);
        }
        if self.apart.len() < self.wanted {
            let (namespace, _) = self.make()?;
            self.apart.push_back(namespace);
        }
        Ok(self.apart.len() < self.wanted)
    }

    /// Whether links can be made in advance: not while the host does not forward. Other problems are
    /// errors.
    fn can_link(&mut self) -> io::Result<bool> {
        match self.uplink.ready() {
            Ok(()) => Ok(true),
            Err(Down::NoForwarding) => Ok(false),
            Err(error) => {
                // The next create reports the reason; there is no point in trying again before.
                self.links_wanted = false;
                Err(io::Error::other(error))
            }
        }
    }

    fn make_linked(&mut self) -> io::Result<OwnedFd> {
        let (namespace, mut inside) = self.make()?;
        self.guard(namespace.as_fd(), Table::add)?;
        self.uplink.connect(namespace.as_fd(), &mut inside)?;
        Ok(namespace)
    }

    /// Adds a link to a namespace in use that has none.
    pub fn connect(&mut self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        let mut inside = self.within(namespace, Routing::open)?;
        self.guard(namespace, Table::add)?;
        self.uplink.connect(namespace, &mut inside)
    }

    /// Installs the guard with the current settings in a namespace in use.
    pub fn guard_again(&self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        self.guard(namespace, Table::install)
    }

    fn guard(&self, namespace: BorrowedFd<'_>, put: fn(Table) -> io::Result<()>) -> io::Result<()> {
        self.within(namespace, || self.uplink.inner_guard().map_or(Ok(()), put))
    }

    /// Makes a namespace with its loopback up. The launcher's user namespace owns it, so root inside the
    /// sandbox has no privileges over it. So what services inside need is allowed here: low ports and
    /// ping for all users.
    fn make(&self) -> io::Result<(OwnedFd, Routing)> {
        namespaces::unshare(Namespaces::NET)?;
        let made = prepare();
        // This process must leave the namespace even after an error.
        namespaces::enter(self.home.as_fd(), Namespaces::NET)?;
        made
    }

    /// Runs `work` in another namespace and returns to the launcher's own.
    fn within<T>(&self, namespace: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        namespaces::enter(namespace, Namespaces::NET)?;
        let done = work();
        namespaces::enter(self.home.as_fd(), Namespaces::NET)?;
        done
    }
}

fn prepare() -> io::Result<(OwnedFd, Routing)> {
    namespaces::raise_loopback()?;
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    // Links that are added later must have only the addresses that the launcher sets.
    for (setting, value) in
        [("addr_gen_mode", "1"), ("accept_ra", "0"), ("autoconf", "0"), ("accept_redirects", "0")]
    {
        match fs::write(format!("/proc/sys/net/ipv6/conf/default/{setting}"), value) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // A kernel without IPv6 does not have these settings.
            _ => {}
        }
    }
    Ok((current()?, Routing::open()?))
}

fn current() -> io::Result<OwnedFd> {
    fs::File::open("/proc/thread-self/ns/net").map(Into::into)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, UdpSocket};
    use std::time::Duration;

    use linux::netlink::filter;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::network::{NetworkSettings, Target};

    /// Runs a test in a net namespace that represents a separate host; only root can make one.
    fn on_another_host(test: fn() -> io::Result<()>) {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let host = std::thread::spawn(move || {
            namespaces::unshare(Namespaces::NET)?;
            namespaces::raise_loopback()?;
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
            let mut nets = NetStock::open(0, Uplink::new(NetworkSettings::default(), "test"))?;
            nets.uplink.ready().map_err(io::Error::other)?;
            let namespace = nets.take(Reach::Link)?;
            filter::remove_table("coracle-test")?;
            nets.within(namespace.as_fd(), || {
                for refused in [[10, 0, 0, 1], [169, 254, 169, 254], [198, 19, 0, 1], [198, 19, 0, 200]] {
                    assert!(send(refused.into()).is_err(), "{refused:?}");
                }
                send([203, 0, 113, 1].into()).map(drop)
            })?;
            nets.uplink.ready().map_err(io::Error::other)?;
            assert!(filter::table_exists("coracle-test")?);
            Ok(())
        });
    }

    /// Waits until the uplink has an event.
    fn wait_for_news(uplink: &Uplink) -> io::Result<()> {
        let watched = uplink.watched();
        let mut watched: Vec<_> = watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&timeout)))?;
        if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    #[test]
    fn removed_filter_is_installed_again() {
        on_another_host(|| {
            let mut nets = NetStock::open(0, Uplink::new(NetworkSettings::default(), "test"))?;
            nets.uplink.ready().map_err(io::Error::other)?;
            nets.uplink.hear()?;
            filter::remove_table("coracle-test")?;
            wait_for_news(&nets.uplink)?;
            nets.uplink.hear()?;
            assert!(filter::table_exists("coracle-test")?);
            Ok(())
        });
    }

    #[test]
    fn connections_are_dropped_with_their_sandbox() {
        on_another_host(|| {
            let here = IpAddr::from([203, 0, 113, 7]);
            let mut routing = Routing::open()?;
            let loopback = routing.find("lo")?.ok_or(io::ErrorKind::NotFound)?.index;
            routing.add_address(loopback, here)?;
            let allow = vec![Target { prefix: here.into(), port: None }];
            let settings = NetworkSettings { allow, ..NetworkSettings::default() };
            let mut nets = NetStock::open(0, Uplink::new(settings, "test"))?;
            nets.uplink.ready().map_err(io::Error::other)?;
            let namespace = nets.take(Reach::Link)?;
            let listener = UdpSocket::bind((here, 9))?;
            listener.set_read_timeout(Some(Duration::from_secs(20)))?;
            nets.within(namespace.as_fd(), || send([203, 0, 113, 7].into()))?;
            let (_, sandbox) = listener.recv_from(&mut [0; 8])?;
            let known = || {
                let all = fs::read_to_string("/proc/thread-self/net/nf_conntrack")?;
                io::Result::Ok(all.contains(&format!("src={} ", sandbox.ip())))
            };
            assert!(known()?);
            drop(namespace);
            while !nets.uplink.hear()? {
                wait_for_news(&nets.uplink)?;
            }
            assert!(!nets.uplink.forget_some()?);
            assert!(!known()?);
            Ok(())
        });
    }
}

//! Net namespaces made ahead of need, with and without a link to the host. No process exists for
//! them yet.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::namespaces::{self, Namespaces};
use linux::netlink::filter::Table;
use linux::netlink::route::Routing;

use crate::network::uplink::Uplink;
use crate::network::{Down, Reach, Wish};

/// Net namespaces in stock, and ours to come back to.
pub struct NetStock {
    home: OwnedFd,
    /// Without a link.
    apart: VecDeque<OwnedFd>,
    linked: VecDeque<OwnedFd>,
    wanted: usize,
    pub uplink: Uplink,
    /// Whether somebody has wanted a link, so that more are made ahead.
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

    /// How many there are of what is asked for most.
    pub fn count(&self) -> usize {
        if self.links_wanted && !self.linked.is_empty() { self.linked.len() } else { self.apart.len() }
    }

    /// One from the stock, or one made now.
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

    /// Links are not made ahead while the host does not forward; everything else is an error.
    fn can_link(&mut self) -> io::Result<bool> {
        match self.uplink.ready() {
            Ok(()) => Ok(true),
            Err(Down::NoForwarding) => Ok(false),
            Err(error) => {
                // A create says why; nothing is gained by trying again and again meanwhile.
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

    /// Gives a namespace that is in use a link, if it has none.
    pub fn connect(&mut self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        let mut inside = self.within(namespace, Routing::open)?;
        self.guard(namespace, Table::add)?;
        self.uplink.connect(namespace, &mut inside)
    }

    /// Gives the guard in a namespace that is in use today's settings.
    pub fn guard_again(&self, namespace: BorrowedFd<'_>) -> io::Result<()> {
        self.guard(namespace, Table::install)
    }

    fn guard(&self, namespace: BorrowedFd<'_>, put: fn(Table) -> io::Result<()>) -> io::Result<()> {
        self.within(namespace, || self.uplink.inner_guard().map_or(Ok(()), put))
    }

    /// Makes a namespace with its loopback up. It belongs to us, so root inside the sandbox has
    /// no power over it; what a service inside needs is therefore allowed here: low ports and
    /// ping for everybody.
    fn make(&self) -> io::Result<(OwnedFd, Routing)> {
        namespaces::unshare(Namespaces::NET)?;
        let made = prepare();
        // Whatever happened, this process must not stay there.
        namespaces::enter(self.home.as_fd(), Namespaces::NET)?;
        made
    }

    /// Does something in another namespace and comes back.
    fn within<T>(&self, place: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        namespaces::enter(place, Namespaces::NET)?;
        let done = work();
        namespaces::enter(self.home.as_fd(), Namespaces::NET)?;
        done
    }
}

fn prepare() -> io::Result<(OwnedFd, Routing)> {
    namespaces::raise_loopback()?;
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    // Links that come later have the addresses we give them, and no others.
    for (setting, value) in
        [("addr_gen_mode", "1"), ("accept_ra", "0"), ("autoconf", "0"), ("accept_redirects", "0")]
    {
        match fs::write(format!("/proc/sys/net/ipv6/conf/default/{setting}"), value) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // A kernel without IPv6 has none of them.
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

    /// Runs a test in a net namespace that stands for a host of its own; only root can make one.
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
        host.join().expect("it does not panic").expect("it succeeds");
    }

    fn send(to: Ipv4Addr) -> io::Result<usize> {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.send_to(b"?", (to, 9))
    }

    #[test]
    fn a_sandbox_is_guarded_although_the_host_lost_its_filters() {
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

    /// Waits until the uplink has heard something.
    fn wait_for_news(uplink: &Uplink) -> io::Result<()> {
        let watched = uplink.watched();
        let mut watched: Vec<_> = watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
        let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&patience)))?;
        if ready == 0 { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    #[test]
    fn a_filter_that_somebody_removes_is_put_back() {
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
    fn connections_are_forgotten_with_their_sandbox() {
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

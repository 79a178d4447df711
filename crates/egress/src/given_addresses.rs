//! The addresses that a sandbox was given for names, so that a connection to one can be judged by its name.
//!
//! An address is remembered for the time to live of its record, at least a minute, and while a connection by that name is
//! open. The number of addresses, and of names for one, is bounded; those that expire first are forgotten first.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use domain::DomainName;
use tokio::time::Instant;

const MAX_ADDRESSES: usize = 4096;
const MAX_NAMES_OF_ADDRESS: usize = 16;
const MIN_REMEMBERED_TIME: Duration = Duration::from_secs(60);
const MAX_REMEMBERED_TIME: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug, Default)]
pub(crate) struct GivenAddresses {
    names: HashMap<IpAddr, Vec<GivenName>>,
}

#[derive(Debug)]
struct GivenName {
    name: DomainName,
    expires: Instant,
    /// How many connections by this name to this address are open.
    connections: u32,
}

impl GivenName {
    fn is_valid(&self, now: Instant) -> bool {
        self.connections > 0 || self.expires > now
    }
}

impl GivenAddresses {
    /// Remembers that this address was given out for a name.
    pub(crate) fn remember(&mut self, address: IpAddr, name: &DomainName, time_to_live: Duration) {
        let now = Instant::now();
        let expires = now + time_to_live.clamp(MIN_REMEMBERED_TIME, MAX_REMEMBERED_TIME);
        let address = address.to_canonical();
        if !self.names.contains_key(&address) && self.names.len() >= MAX_ADDRESSES {
            self.make_room(now);
        }
        let names = self.names.entry(address).or_default();
        let connections = match names.iter().position(|given| given.name == *name) {
            Some(index) => names.remove(index).connections,
            None => 0,
        };
        if names.len() >= MAX_NAMES_OF_ADDRESS {
            let oldest = names.iter().position(|given| given.connections == 0).unwrap_or(0);
            names.remove(oldest);
        }
        // The last one is the most recent.
        names.push(GivenName { name: name.clone(), expires, connections });
    }

    /// Returns the names that this address was given out for, the most recent first.
    pub(crate) fn names_of(&self, address: IpAddr) -> Vec<DomainName> {
        let now = Instant::now();
        let names = self.names.get(&address.to_canonical()).into_iter().flatten().rev();
        names.filter(|given| given.is_valid(now)).map(|given| given.name.clone()).collect()
    }

    pub(crate) fn was_given(&self, address: IpAddr, name: &DomainName) -> bool {
        let now = Instant::now();
        let names = self.names.get(&address.to_canonical());
        names.into_iter().flatten().any(|given| given.name == *name && given.is_valid(now))
    }

    /// Notes that a connection by this name to this address is open.
    pub(crate) fn connection_opened(&mut self, address: IpAddr, name: &DomainName) {
        if let Some(given) = self.find(address, name) {
            given.connections += 1;
        }
    }

    pub(crate) fn connection_closed(&mut self, address: IpAddr, name: &DomainName) {
        if let Some(given) = self.find(address, name) {
            given.connections = given.connections.saturating_sub(1);
            given.expires = given.expires.max(Instant::now() + MIN_REMEMBERED_TIME);
        }
    }

    fn find(&mut self, address: IpAddr, name: &DomainName) -> Option<&mut GivenName> {
        let names = self.names.get_mut(&address.to_canonical())?;
        names.iter_mut().find(|given| given.name == *name)
    }

    /// Forgets what has expired, and if that is nothing, the address that expires first.
    fn make_room(&mut self, now: Instant) {
        self.names.retain(|_, names| {
            names.retain(|given| given.is_valid(now));
            !names.is_empty()
        });
        if self.names.len() < MAX_ADDRESSES {
            return;
        }
        let last_use =
            |names: &[GivenName]| names.iter().map(|given| (given.connections > 0, given.expires)).max();
        let first = self.names.iter().min_by_key(|(_, names)| last_use(names)).map(|(address, _)| *address);
        if let Some(first) = first {
            self.names.remove(&first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn name(text: &str) -> DomainName {
        text.parse().expect("a name")
    }

    fn address(number: u32) -> IpAddr {
        Ipv4Addr::from(0xc000_0200 + number).into()
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_are_remembered_for_at_least_a_minute() {
        let mut given = GivenAddresses::default();
        given.remember(address(1), &name("a.org"), Duration::from_secs(1));
        given.remember(address(1), &name("b.org"), Duration::from_secs(600));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(given.names_of(address(1)), [name("b.org"), name("a.org")]);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(given.names_of(address(1)), [name("b.org")]);
        assert!(!given.was_given(address(1), &name("a.org")));
        assert!(given.was_given("::ffff:192.0.2.1".parse().expect("an address"), &name("b.org")));
    }

    #[tokio::test(start_paused = true)]
    async fn open_connection_keeps_its_address() {
        let mut given = GivenAddresses::default();
        given.remember(address(1), &name("a.org"), Duration::ZERO);
        given.connection_opened(address(1), &name("a.org"));
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(given.was_given(address(1), &name("a.org")));
        given.connection_closed(address(1), &name("a.org"));
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(given.was_given(address(1), &name("a.org")));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(!given.was_given(address(1), &name("a.org")));
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_of_addresses_and_names_are_bounded() {
        let mut given = GivenAddresses::default();
        given.remember(address(0), &name("open.org"), Duration::ZERO);
        given.connection_opened(address(0), &name("open.org"));
        for number in 1..5000 {
            given.remember(address(number), &name("a.org"), Duration::from_secs(u64::from(number)));
        }
        assert_eq!(given.names.len(), MAX_ADDRESSES);
        assert!(given.was_given(address(0), &name("open.org")));
        assert!(given.was_given(address(4999), &name("a.org")));
        for number in 0..100 {
            given.remember(address(0), &name(&format!("n{number}.org")), Duration::ZERO);
        }
        assert_eq!(given.names_of(address(0)).len(), MAX_NAMES_OF_ADDRESS);
        assert!(given.was_given(address(0), &name("open.org")));
    }
}

//! nftables tables, each created and replaced in one transaction. See nft(8).
//!
//! A rule is a list of expressions that the kernel evaluates from left to right: each loads a value
//! into a register, compares it, or decides. The builder has only those needed here; a method's
//! name states the condition that a packet must meet for the rule to continue.

use std::io;
use std::net::IpAddr;

use super::message::{Message, attributes};
use super::{ACKNOWLEDGE, CREATE, Family, Socket};

const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const GET_TABLE: u16 = (SUBSYSTEM << 8) | 1;
const DELETE_TABLE: u16 = (SUBSYSTEM << 8) | 2;
const NEW_CHAIN: u16 = (SUBSYSTEM << 8) | 3;
const GET_CHAIN: u16 = (SUBSYSTEM << 8) | 4;
const NEW_RULE: u16 = (SUBSYSTEM << 8) | 6;
const NEW_SET: u16 = (SUBSYSTEM << 8) | 9;
const BEGIN: u16 = 0x10;
const END: u16 = 0x11;

/// `NFPROTO_*`: both families in one table, and each alone.
const INET: u8 = 1;
const V4: u8 = 2;
const V6: u8 = 10;

const APPEND: u16 = 0x800;
/// The meta key of a packet's protocol family.
const FAMILY: u32 = 15;
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;

/// The point in packet processing at which a chain runs, and its priority there.
#[derive(Clone, Copy, Debug)]
pub enum Hook {
    /// After connection tracking, before any address is changed.
    Arrival,
    /// Where the destination may be changed.
    ChangeDestination,
    Input,
    Forward,
    Output,
    /// Where the source may be changed.
    ChangeSource,
}

impl Hook {
    /// Returns the chain type, the hook number and the priority.
    fn place(self) -> (&'static str, u32, i32) {
        match self {
            Self::Arrival => ("filter", 0, -150),
            Self::ChangeDestination => ("nat", 0, -100),
            Self::Input => ("filter", 1, 0),
            Self::Forward => ("filter", 2, 0),
            Self::Output => ("filter", 3, 0),
            Self::ChangeSource => ("nat", 4, 100),
        }
    }
}

/// The state of a packet in connection tracking.
#[derive(Clone, Copy, Debug)]
pub enum State {
    Invalid,
    /// It belongs to an accepted connection, or is an error about one.
    Known,
}

/// A limit for one source.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// The maximum number of simultaneous connections.
    Connections(u32),
    /// The maximum number of new connections per second, and the burst allowed after a quiet time.
    NewEachSecond { rate: u64, burst: u32 },
}

/// A table under construction.
#[derive(Clone, Debug)]
pub struct Table {
    name: String,
    parts: Vec<(Message, u16)>,
    /// The number of sets; each has a number within the transaction.
    sets: u32,
}

impl Table {
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), parts: Vec::new(), sets: 0 }
    }

    /// Adds a chain at a hook; packets that no rule decides are accepted.
    pub fn base_chain(&mut self, chain: &str, hook: Hook) {
        let (kind, number, priority) = hook.place();
        let message = object(NEW_CHAIN)
            .text(1, &self.name)
            .text(3, chain)
            .nested(4, |hook| hook.big(1, number).big(2, priority.cast_unsigned()))
            .big(5, 1)
            .text(7, kind);
        self.parts.push((message, CREATE));
    }

    /// Adds a chain that rules can jump to.
    pub fn chain(&mut self, chain: &str) {
        self.parts.push((object(NEW_CHAIN).text(1, &self.name).text(3, chain), CREATE));
    }

    /// Adds a set with state for each source of one family, for [`Rule::source_exceeds`]. Quiet
    /// sources are removed from it again.
    pub fn sources(&mut self, set: &str, v6: bool) {
        // The type only matters to tools that list the table.
        let (kind, length) = if v6 { (8, 16) } else { (7, 4) };
        self.remembering(set, kind, length);
    }

    /// Adds a set with state for each group of sources, for [`Rule::share_exceeds`].
    pub fn shares(&mut self, set: &str) {
        // The only one-byte number type that listing tools can display.
        const PROTOCOL: u32 = 12;
        self.remembering(set, PROTOCOL, 1);
    }

    fn remembering(&mut self, set: &str, kind: u32, length: u32) {
        const CHANGED_BY_RULES: u32 = 0x20;
        const MOST: u32 = 0xffff;
        self.sets += 1;
        let message = object(NEW_SET)
            .text(1, &self.name)
            .text(2, set)
            .big(3, CHANGED_BY_RULES)
            .big(4, kind)
            .big(5, length)
            .nested(9, |shape| shape.big(1, MOST))
            .big(10, self.sets);
        self.parts.push((message, CREATE));
    }

    pub fn rule(&mut self, chain: &str, rule: &Rule) {
        let message = object(NEW_RULE).text(1, &self.name).text(2, chain);
        let message = message.nested(4, |list| {
            rule.expressions.iter().fold(list, |list, expression| {
                list.nested(1, |one| {
                    one.text(1, expression.name).nested(2, |data| data.fixed(&expression.data))
                })
            })
        });
        self.parts.push((message, CREATE | APPEND));
    }

    /// Adds the table if none has its name. This is much faster than [`Table::install`], because
    /// the kernel waits for users of the objects it deletes.
    pub fn add(self) -> io::Result<()> {
        let mut parts = vec![(object(NEW_TABLE).text(1, &self.name), CREATE)];
        parts.extend(self.parts);
        commit(parts)
    }

    /// Atomically replaces the table of the same name, if any.
    pub fn install(self) -> io::Result<()> {
        let name = self.name.clone();
        let named = |kind| object(kind).text(1, &name);
        // Created first, so that the deletion cannot fail.
        let mut parts =
            vec![(named(NEW_TABLE), CREATE), (named(DELETE_TABLE), 0), (named(NEW_TABLE), CREATE)];
        parts.extend(self.parts);
        commit(parts)
    }
}

/// Removes a table; a missing table is not an error.
pub fn remove_table(name: &str) -> io::Result<()> {
    match commit(vec![(object(DELETE_TABLE).text(1, name), 0)]) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub fn table_exists(name: &str) -> io::Result<bool> {
    let mut socket = Socket::open(Family::Netfilter)?;
    match socket.look(object(GET_TABLE).text(1, name), |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A chain that drops every forwarded packet it does not accept itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropping {
    pub table: String,
    pub chain: String,
}

/// Returns the forward chains whose policy is to drop. Rules in other tables cannot accept a packet
/// that one of these drops.
pub fn dropping_forward_chains() -> io::Result<Vec<Dropping>> {
    const FORWARD: u32 = 2;
    const DROP: u32 = 0;
    let mut found = Vec::new();
    let request = Message::new(GET_CHAIN, 0, &[0; 4]);
    Socket::open(Family::Netfilter)?.dump(request, |_, body| {
        let text = |wanted| {
            let value = attributes(body, 4).find(|(kind, _)| *kind == wanted)?.1;
            Some(String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned())
        };
        let value = |wanted| attributes(body, 4).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let hook = value(4).and_then(|hook| attributes(hook, 0).find(|(kind, _)| *kind == 1));
        let forwards = hook.is_some_and(|(_, number)| number == FORWARD.to_be_bytes());
        let drops = value(5).is_some_and(|policy| policy == DROP.to_be_bytes());
        if let (true, true, Some(table), Some(chain)) = (forwards, drops, text(1), text(3)) {
            found.push(Dropping { table, chain });
        }
    })?;
    Ok(found)
}

/// Creates a message about an object; its fixed part names the family, and all our objects apply to
/// both.
fn object(kind: u16) -> Message {
    Message::new(kind, 0, &[INET, 0, 0, 0])
}

fn commit(mut parts: Vec<(Message, u16)>) -> io::Result<()> {
    let boundary = |kind| {
        let [high, low] = SUBSYSTEM.to_be_bytes();
        (Message::new(kind, 0, &[0, 0, high, low]), 0)
    };
    if let Some((_, flags)) = parts.last_mut() {
        *flags |= ACKNOWLEDGE;
    }
    parts.insert(0, boundary(BEGIN));
    parts.push(boundary(END));
    Socket::open(Family::Netfilter)?.transact(parts)
}

/// The expressions of one rule.
#[derive(Clone, Debug, Default)]
pub struct Rule {
    expressions: Vec<Expression>,
}

#[derive(Clone, Debug)]
struct Expression {
    name: &'static str,
    data: Vec<u8>,
}

impl Rule {
    pub fn new() -> Self {
        Self::default()
    }

    /// The packet came in by a link whose name begins with `prefix`.
    pub fn from_link(self, prefix: &str) -> Self {
        const NAME_IN: u32 = 6;
        self.meta(NAME_IN).equals(prefix.as_bytes())
    }

    /// The packet leaves by a link whose name begins with `prefix`.
    pub fn to_link(self, prefix: &str) -> Self {
        const NAME_OUT: u32 = 7;
        self.meta(NAME_OUT).equals(prefix.as_bytes())
    }

    /// The packet has this protocol: 6 is TCP, 17 is UDP, 1 and 58 are ICMP.
    pub fn protocol(self, number: u8) -> Self {
        const PROTOCOL: u32 = 16;
        self.meta(PROTOCOL).equals(&[number])
    }

    /// The packet belongs to an established TCP connection; the first packet of one has only SYN
    /// set.
    pub fn goes_on(self) -> Self {
        const TCP: u8 = 6;
        const TRANSPORT: u32 = 2;
        const FLAGS: u32 = 13;
        const SYN: u8 = 0x02;
        const ACK: u8 = 0x10;
        self.protocol(TCP).payload(TRANSPORT, FLAGS, 1).masked(&[SYN | ACK]).differs(&[SYN])
    }

    pub fn port(self, port: u16) -> Self {
        const TRANSPORT: u32 = 2;
        self.payload(TRANSPORT, 2, 2).equals(&port.to_be_bytes())
    }

    /// The first `bits` bits of the destination equal those of `address`.
    pub fn destination(self, address: IpAddr, bits: u8) -> Self {
        const NETWORK: u32 = 1;
        let (family, octets, place) = match address {
            IpAddr::V4(v4) => (V4, v4.octets().to_vec(), 16),
            IpAddr::V6(v6) => (V6, v6.octets().to_vec(), 24),
        };
        let length = u32::try_from(octets.len()).expect("an address is short");
        let mask = mask(octets.len(), bits);
        let kept: Vec<u8> = octets.iter().zip(&mask).map(|(byte, mask)| byte & mask).collect();
        let loaded = self.meta(FAMILY).equals(&[family]).payload(NETWORK, place, length);
        let masked = if mask.iter().all(|byte| *byte == 0xff) { loaded } else { loaded.masked(&mask) };
        masked.equals(&kept)
    }

    pub fn state(self, state: State) -> Self {
        const STATE: u32 = 0;
        let bits: u32 = match state {
            State::Invalid => 1,
            State::Known => 2 | 4,
        };
        self.tracked(STATE).masked(&bits.to_ne_bytes()).differs(&0u32.to_ne_bytes())
    }

    /// The destination was changed by NAT.
    pub fn was_redirected(self) -> Self {
        const STATUS: u32 = 2;
        const DESTINATION_CHANGED: u32 = 1 << 5;
        self.tracked(STATUS).masked(&DESTINATION_CHANGED.to_ne_bytes()).differs(&0u32.to_ne_bytes())
    }

    /// A reply to its source would not leave by the link it came from.
    pub fn has_foreign_source(self) -> Self {
        const LINK: u32 = 1;
        const SOURCE: u32 = 1;
        const BY_THIS_LINK: u32 = 8;
        const EXISTS: u32 = 32;
        self.route(LINK, SOURCE | BY_THIS_LINK | EXISTS).equals(&[0])
    }

    /// The destination is not a single other machine: it is local, broadcast or multicast.
    pub fn destination_is_not_elsewhere(self) -> Self {
        const KIND: u32 = 3;
        const DESTINATION: u32 = 2;
        const UNICAST: u32 = 1;
        self.route(KIND, DESTINATION).differs(&UNICAST.to_ne_bytes())
    }

    /// The source exceeds its limit; see [`Table::sources`].
    pub fn source_exceeds(self, set: &str, v6: bool, bound: Bound) -> Self {
        const NETWORK: u32 = 1;
        let (family, place, length) = if v6 { (V6, 8, 16) } else { (V4, 12, 4) };
        self.meta(FAMILY).equals(&[family]).payload(NETWORK, place, length).exceeds(set, bound)
    }

    /// The sources whose addresses end alike together exceed their limit. `mask` selects the bits
    /// of the last byte; see [`Table::shares`].
    pub fn share_exceeds(self, set: &str, v6: bool, mask: u8, bound: Bound) -> Self {
        const NETWORK: u32 = 1;
        let (family, place) = if v6 { (V6, 8 + 15) } else { (V4, 12 + 3) };
        self.meta(FAMILY).equals(&[family]).payload(NETWORK, place, 1).masked(&[mask]).exceeds(set, bound)
    }

    /// The loaded value exceeds its limit.
    fn exceeds(self, set: &str, bound: Bound) -> Self {
        const OVER: u32 = 1;
        const ADD: u32 = 0;
        let (name, data) = match bound {
            Bound::Connections(most) => ("connlimit", fields(|data| data.big(1, most).big(2, OVER))),
            Bound::NewEachSecond { rate, burst } => {
                let long = |number: u64| number.to_be_bytes();
                let data = fields(|data| {
                    data.attribute(1, &long(rate)).attribute(2, &long(1)).big(3, burst).big(4, 0).big(5, OVER)
                });
                ("limit", data)
            }
        };
        let data = fields(|dynamic| {
            dynamic
                .text(1, set)
                .big(3, ADD)
                .big(4, REGISTER)
                .nested(7, |inner| inner.text(1, name).nested(2, |inner| inner.fixed(&data)))
        });
        self.add("dynset", data)
    }

    pub fn accept(self) -> Self {
        self.verdict(1, None)
    }

    pub fn drop(self) -> Self {
        self.verdict(0, None)
    }

    /// Continues in another chain and does not return.
    pub fn go_to(self, chain: &str) -> Self {
        self.verdict((-4i32).cast_unsigned(), Some(chain))
    }

    /// Drops the packet and notifies the sender that it is prohibited.
    pub fn reject(self) -> Self {
        const OF_EITHER_FAMILY: u32 = 2;
        const FORBIDDEN: u8 = 3;
        let data = fields(|data| data.big(1, OF_EITHER_FAMILY).attribute(2, &[FORBIDDEN]));
        self.add("reject", data)
    }

    /// Replaces the source address by one of this machine.
    pub fn masquerade(self) -> Self {
        self.add("masq", Vec::new())
    }

    /// Replaces the destination address.
    pub fn redirect(self, address: IpAddr) -> Self {
        const DESTINATION: u32 = 1;
        let (family, octets) = match address {
            IpAddr::V4(v4) => (V4, v4.octets().to_vec()),
            IpAddr::V6(v6) => (V6, v6.octets().to_vec()),
        };
        let load = fields(|data| data.big(1, REGISTER).nested(2, |value| value.attribute(1, &octets)));
        let nat = fields(|data| data.big(1, DESTINATION).big(2, family.into()).big(3, REGISTER));
        self.add("immediate", load).add("nat", nat)
    }

    fn meta(self, key: u32) -> Self {
        self.add("meta", fields(|data| data.big(1, REGISTER).big(2, key)))
    }

    fn tracked(self, key: u32) -> Self {
        self.add("ct", fields(|data| data.big(1, REGISTER).big(2, key)))
    }

    fn route(self, result: u32, flags: u32) -> Self {
        self.add("fib", fields(|data| data.big(1, REGISTER).big(2, result).big(3, flags)))
    }

    fn payload(self, base: u32, place: u32, length: u32) -> Self {
        self.add("payload", fields(|data| data.big(1, REGISTER).big(2, base).big(3, place).big(4, length)))
    }

    fn masked(self, mask: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).expect("a mask is short");
        let nothing = vec![0; mask.len()];
        let data = fields(|data| {
            data.big(1, REGISTER)
                .big(2, REGISTER)
                .big(3, length)
                .nested(4, |value| value.attribute(1, mask))
                .nested(5, |value| value.attribute(1, &nothing))
        });
        self.add("bitwise", data)
    }

    fn equals(self, value: &[u8]) -> Self {
        self.compared(0, value)
    }

    fn differs(self, value: &[u8]) -> Self {
        self.compared(1, value)
    }

    fn compared(self, operator: u32, value: &[u8]) -> Self {
        let data = fields(|data| {
            data.big(1, REGISTER).big(2, operator).nested(3, |inner| inner.attribute(1, value))
        });
        self.add("cmp", data)
    }

    fn verdict(self, code: u32, chain: Option<&str>) -> Self {
        let data = fields(|data| {
            data.big(1, VERDICT_REGISTER).nested(2, |value| {
                value.nested(2, |verdict| {
                    let verdict = verdict.big(1, code);
                    chain.map_or(verdict.clone(), |chain| verdict.text(2, chain))
                })
            })
        });
        self.add("immediate", data)
    }

    fn add(mut self, name: &'static str, data: Vec<u8>) -> Self {
        self.expressions.push(Expression { name, data });
        self
    }
}

/// Encodes attributes alone, without a message around them.
fn fields(write: impl FnOnce(Message) -> Message) -> Vec<u8> {
    let header = Message::new(0, 0, &[]).finish(0, 0).len();
    write(Message::new(0, 0, &[])).finish(0, 0).split_off(header)
}

fn mask(length: usize, bits: u8) -> Vec<u8> {
    let byte = |index: usize| {
        let kept = usize::from(bits).saturating_sub(index * 8).min(8);
        u8::try_from(0xff00_u16 >> kept & 0xff).expect("one byte is kept")
    };
    (0..length).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a packet to each of some ports and counts those that were accepted.
    fn let_through(source: &str) -> io::Result<usize> {
        let socket = std::net::UdpSocket::bind((source, 0))?;
        Ok((1..20).filter(|port| socket.send_to(b"?", ("127.0.0.1", *port)).is_ok()).count())
    }

    fn sources_share_a_bound() -> io::Result<()> {
        crate::namespaces::unshare(crate::namespaces::Namespaces::NET)?;
        crate::namespaces::raise_loopback()?;
        let mut table = Table::new("shares");
        table.shares("share");
        table.base_chain("output", Hook::Output);
        table.rule("output", &Rule::new().state(State::Known).accept());
        let bound = Bound::Connections(5);
        table.rule("output", &Rule::new().share_exceeds("share", false, 1, bound).drop());
        table.install()?;
        assert_eq!(let_through("127.0.0.2")?, 5);
        assert_eq!(let_through("127.0.0.4")?, 0);
        assert_eq!(let_through("127.0.0.3")?, 5);
        Ok(())
    }

    #[test]
    fn sources_that_end_alike_share_a_bound() {
        // Only root can create a net namespace; a separate thread gets its own.
        if rustix::process::geteuid().is_root() {
            let done = std::thread::spawn(sources_share_a_bound).join();
            done.expect("the thread does not panic").expect("the test succeeds");
        }
    }

    #[test]
    fn mask_covers_the_leading_bits() {
        assert_eq!(mask(4, 12), [0xff, 0xf0, 0, 0]);
        assert_eq!(mask(4, 0), [0; 4]);
        assert_eq!(mask(4, 32), [0xff; 4]);
        assert_eq!(mask(16, 7)[..2], [0xfe, 0]);
    }
}

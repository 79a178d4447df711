//! nftables tables, each created and replaced in one transaction. See nft(8).
//!
//! A rule is a list of expressions that the kernel evaluates from left to right: each loads a value
//! into a register, compares it, or decides. The builder has only those needed here; a method's
//! name states the condition that a packet must meet for the rule to continue.

use std::io;
use std::net::IpAddr;

use super::message::{NetlinkMessage, parse_attributes};
use super::{FLAG_ACKNOWLEDGE, FLAG_CREATE, NetlinkFamily, NetlinkSocket};

const SUBSYSTEM: u16 = 10;
const NEW_TABLE: u16 = SUBSYSTEM << 8;
const GET_TABLE: u16 = (SUBSYSTEM << 8) | 1;
const DELETE_TABLE: u16 = (SUBSYSTEM << 8) | 2;
const NEW_CHAIN: u16 = (SUBSYSTEM << 8) | 3;
const GET_CHAIN: u16 = (SUBSYSTEM << 8) | 4;
const NEW_RULE: u16 = (SUBSYSTEM << 8) | 6;
const NEW_SET: u16 = (SUBSYSTEM << 8) | 9;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// `NFPROTO_*`: both families in one table, and each alone.
const INET: u8 = 1;
const V4: u8 = 2;
const V6: u8 = 10;

const FLAG_APPEND: u16 = 0x800;
/// The meta key of a packet's protocol family.
const META_FAMILY: u32 = 15;
/// The meta key of a packet's mark.
const META_MARK: u32 = 3;
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;

/// The point in packet processing at which a chain runs, and its priority there.
#[derive(Clone, Copy, Debug)]
pub enum ChainHook {
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

impl ChainHook {
    /// Returns the chain type, the hook number and the priority.
    fn chain_parameters(self) -> (&'static str, u32, i32) {
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
pub enum ConntrackState {
    Invalid,
    /// It belongs to an accepted connection, or is an error about one.
    Known,
}

/// The protocols that have ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortProtocol {
    Tcp,
    Udp,
}

/// A limit for one source.
#[derive(Clone, Copy, Debug)]
pub enum SourceLimit {
    /// The maximum number of simultaneous connections.
    Connections(u32),
    /// The maximum number of new connections per second, and the burst allowed after a quiet time.
    NewEachSecond { rate: u64, burst: u32 },
}

/// A table under construction.
#[derive(Clone, Debug)]
pub struct FilterTable {
    name: String,
    parts: Vec<(NetlinkMessage, u16)>,
    /// The number of sets; each has a number within the transaction.
    sets: u32,
}

impl FilterTable {
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), parts: Vec::new(), sets: 0 }
    }

    /// Adds a chain at a hook; packets that no rule decides are accepted.
    pub fn add_base_chain(&mut self, chain: &str, hook: ChainHook) {
        let (kind, number, priority) = hook.chain_parameters();
        let message = object_message(NEW_CHAIN)
            .text(1, &self.name)
            .text(3, chain)
            .nested(4, |hook| hook.big_endian(1, number).big_endian(2, priority.cast_unsigned()))
            .big_endian(5, 1)
            .text(7, kind);
        self.parts.push((message, FLAG_CREATE));
    }

    /// Adds a chain that rules can jump to.
    pub fn add_chain(&mut self, chain: &str) {
        self.parts.push((object_message(NEW_CHAIN).text(1, &self.name).text(3, chain), FLAG_CREATE));
    }

    /// Adds a set with state for each source of one family, for [`FilterRule::source_exceeds`]. Quiet
    /// sources are removed from it again.
    pub fn add_source_set(&mut self, set: &str, v6: bool) {
        // The type only matters to tools that list the table.
        let (kind, length) = if v6 { (8, 16) } else { (7, 4) };
        self.add_stateful_set(set, kind, length);
    }

    /// Adds a set with state for each group of sources, for [`FilterRule::share_exceeds`].
    pub fn add_share_set(&mut self, set: &str) {
        // The only one-byte number type that listing tools can display.
        const PROTOCOL: u32 = 12;
        self.add_stateful_set(set, PROTOCOL, 1);
    }

    fn add_stateful_set(&mut self, set: &str, kind: u32, length: u32) {
        const CHANGED_BY_RULES: u32 = 0x20;
        const MAX_SET_ELEMENTS: u32 = 0xffff;
        self.sets += 1;
        let message = object_message(NEW_SET)
            .text(1, &self.name)
            .text(2, set)
            .big_endian(3, CHANGED_BY_RULES)
            .big_endian(4, kind)
            .big_endian(5, length)
            .nested(9, |shape| shape.big_endian(1, MAX_SET_ELEMENTS))
            .big_endian(10, self.sets);
        self.parts.push((message, FLAG_CREATE));
    }

    pub fn add_rule(&mut self, chain: &str, rule: &FilterRule) {
        let message = object_message(NEW_RULE).text(1, &self.name).text(2, chain);
        let message = message.nested(4, |list| {
            rule.expressions.iter().fold(list, |list, expression| {
                list.nested(1, |one| {
                    one.text(1, expression.name).nested(2, |data| data.append_fixed(&expression.data))
                })
            })
        });
        self.parts.push((message, FLAG_CREATE | FLAG_APPEND));
    }

    /// Adds the table if none has its name. This is much faster than [`FilterTable::install`], because
    /// the kernel waits for users of the objects it deletes.
    pub fn add_if_missing(self) -> io::Result<()> {
        let mut parts = vec![(object_message(NEW_TABLE).text(1, &self.name), FLAG_CREATE)];
        parts.extend(self.parts);
        commit_transaction(parts)
    }

    /// Atomically replaces the table of the same name, if any.
    pub fn install(self) -> io::Result<()> {
        let name = self.name.clone();
        let named = |kind| object_message(kind).text(1, &name);
        // Created first, so that the deletion cannot fail.
        let mut parts =
            vec![(named(NEW_TABLE), FLAG_CREATE), (named(DELETE_TABLE), 0), (named(NEW_TABLE), FLAG_CREATE)];
        parts.extend(self.parts);
        commit_transaction(parts)
    }
}

/// Removes a table; a missing table is not an error.
pub fn remove_table(name: &str) -> io::Result<()> {
    match commit_transaction(vec![(object_message(DELETE_TABLE).text(1, name), 0)]) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub fn table_exists(name: &str) -> io::Result<bool> {
    let mut socket = NetlinkSocket::open(NetlinkFamily::Netfilter)?;
    match socket.request_object(object_message(GET_TABLE).text(1, name), |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// A chain that drops every forwarded packet it does not accept itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppingChain {
    pub table: String,
    pub chain: String,
}

/// Returns the forward chains whose policy is to drop. Rules in other tables cannot accept a packet
/// that one of these drops.
pub fn dropping_forward_chains() -> io::Result<Vec<DroppingChain>> {
    const FORWARD: u32 = 2;
    const DROP: u32 = 0;
    let mut found = Vec::new();
    let request = NetlinkMessage::new(GET_CHAIN, 0, &[0; 4]);
    NetlinkSocket::open(NetlinkFamily::Netfilter)?.request_dump(request, |_, body| {
        let text = |wanted| {
            let value = parse_attributes(body, 4).find(|(kind, _)| *kind == wanted)?.1;
            Some(String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned())
        };
        let value =
            |wanted| parse_attributes(body, 4).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let hook = value(4).and_then(|hook| parse_attributes(hook, 0).find(|(kind, _)| *kind == 1));
        let forwards = hook.is_some_and(|(_, number)| number == FORWARD.to_be_bytes());
        let drops = value(5).is_some_and(|policy| policy == DROP.to_be_bytes());
        if let (true, true, Some(table), Some(chain)) = (forwards, drops, text(1), text(3)) {
            found.push(DroppingChain { table, chain });
        }
    })?;
    Ok(found)
}

/// Creates a message about an object; its fixed part names the family, and all our objects apply to
/// both.
fn object_message(kind: u16) -> NetlinkMessage {
    NetlinkMessage::new(kind, 0, &[INET, 0, 0, 0])
}

fn commit_transaction(mut parts: Vec<(NetlinkMessage, u16)>) -> io::Result<()> {
    let boundary = |kind| {
        let [high, low] = SUBSYSTEM.to_be_bytes();
        (NetlinkMessage::new(kind, 0, &[0, 0, high, low]), 0)
    };
    if let Some((_, flags)) = parts.last_mut() {
        *flags |= FLAG_ACKNOWLEDGE;
    }
    parts.insert(0, boundary(BATCH_BEGIN));
    parts.push(boundary(BATCH_END));
    NetlinkSocket::open(NetlinkFamily::Netfilter)?.send_transaction(parts)
}

/// The expressions of one rule.
#[derive(Clone, Debug, Default)]
pub struct FilterRule {
    expressions: Vec<RuleExpression>,
}

#[derive(Clone, Debug)]
struct RuleExpression {
    name: &'static str,
    data: Vec<u8>,
}

impl FilterRule {
    pub fn new() -> Self {
        Self::default()
    }

    /// The packet came in by a link whose name begins with `prefix`.
    pub fn from_link(self, prefix: &str) -> Self {
        const NAME_IN: u32 = 6;
        self.load_meta(NAME_IN).equals(prefix.as_bytes())
    }

    /// The packet leaves by a link whose name begins with `prefix`.
    pub fn to_link(self, prefix: &str) -> Self {
        const NAME_OUT: u32 = 7;
        self.load_meta(NAME_OUT).equals(prefix.as_bytes())
    }

    /// The packet was sent by a process of this user of the host.
    pub fn sender_is(self, uid: u32) -> Self {
        const SENDER_UID: u32 = 10;
        self.load_meta(SENDER_UID).equals(&uid.to_ne_bytes())
    }

    /// The packet has this mark.
    pub fn has_mark(self, mark: u32) -> Self {
        self.load_meta(META_MARK).equals(&mark.to_ne_bytes())
    }

    /// The packet has this protocol: 6 is TCP, 17 is UDP, 1 and 58 are ICMP.
    pub fn protocol(self, number: u8) -> Self {
        const PROTOCOL: u32 = 16;
        self.load_meta(PROTOCOL).equals(&[number])
    }

    /// The packet belongs to an established TCP connection; the first packet of one has only SYN
    /// set.
    pub fn belongs_to_tcp_connection(self) -> Self {
        const TCP: u8 = 6;
        const TRANSPORT: u32 = 2;
        const FLAGS: u32 = 13;
        const SYN: u8 = 0x02;
        const ACK: u8 = 0x10;
        self.protocol(TCP).load_payload(TRANSPORT, FLAGS, 1).apply_mask(&[SYN | ACK]).differs(&[SYN])
    }

    pub fn destination_port(self, port: u16) -> Self {
        const TRANSPORT: u32 = 2;
        self.load_payload(TRANSPORT, 2, 2).equals(&port.to_be_bytes())
    }

    pub fn source_port(self, port: u16) -> Self {
        const TRANSPORT: u32 = 2;
        self.load_payload(TRANSPORT, 0, 2).equals(&port.to_be_bytes())
    }

    /// The first `bits` bits of the source equal those of `address`.
    pub fn source_in(self, address: IpAddr, bits: u8) -> Self {
        self.address_in(address, bits, if address.is_ipv4() { 12 } else { 8 })
    }

    /// The first `bits` bits of the destination equal those of `address`.
    pub fn destination_in(self, address: IpAddr, bits: u8) -> Self {
        self.address_in(address, bits, if address.is_ipv4() { 16 } else { 24 })
    }

    /// The address at `place` in the network header begins with the first `bits` bits of `address`.
    fn address_in(self, address: IpAddr, bits: u8, place: u32) -> Self {
        const NETWORK: u32 = 1;
        let (family, octets) = match address {
            IpAddr::V4(v4) => (V4, v4.octets().to_vec()),
            IpAddr::V6(v6) => (V6, v6.octets().to_vec()),
        };
        let length = u32::try_from(octets.len()).expect("an address is short");
        let mask = prefix_mask(octets.len(), bits);
        let kept: Vec<u8> = octets.iter().zip(&mask).map(|(byte, mask)| byte & mask).collect();
        let loaded = self.load_meta(META_FAMILY).equals(&[family]).load_payload(NETWORK, place, length);
        let masked = if mask.iter().all(|byte| *byte == 0xff) { loaded } else { loaded.apply_mask(&mask) };
        masked.equals(&kept)
    }

    pub fn connection_state(self, state: ConntrackState) -> Self {
        const STATE: u32 = 0;
        let bits: u32 = match state {
            ConntrackState::Invalid => 1,
            ConntrackState::Known => 2 | 4,
        };
        self.load_conntrack(STATE).apply_mask(&bits.to_ne_bytes()).differs(&0u32.to_ne_bytes())
    }

    /// The destination was changed by NAT.
    pub fn was_redirected(self) -> Self {
        const STATUS: u32 = 2;
        const DESTINATION_CHANGED: u32 = 1 << 5;
        self.load_conntrack(STATUS)
            .apply_mask(&DESTINATION_CHANGED.to_ne_bytes())
            .differs(&0u32.to_ne_bytes())
    }

    /// A reply to its source would not leave by the link it came from.
    pub fn has_foreign_source(self) -> Self {
        const LINK: u32 = 1;
        const SOURCE: u32 = 1;
        const BY_THIS_LINK: u32 = 8;
        const EXISTS: u32 = 32;
        self.load_route(LINK, SOURCE | BY_THIS_LINK | EXISTS).equals(&[0])
    }

    /// The destination is not a single other machine: it is local, broadcast or multicast.
    pub fn destination_is_not_elsewhere(self) -> Self {
        const KIND: u32 = 3;
        const DESTINATION: u32 = 2;
        const UNICAST: u32 = 1;
        self.load_route(KIND, DESTINATION).differs(&UNICAST.to_ne_bytes())
    }

    /// The source exceeds its limit; see [`FilterTable::add_source_set`].
    pub fn source_exceeds(self, set: &str, v6: bool, bound: SourceLimit) -> Self {
        const NETWORK: u32 = 1;
        let (family, place, length) = if v6 { (V6, 8, 16) } else { (V4, 12, 4) };
        self.load_meta(META_FAMILY)
            .equals(&[family])
            .load_payload(NETWORK, place, length)
            .exceeds_limit(set, bound)
    }

    /// The sources whose addresses end alike together exceed their limit. `mask` selects the bits
    /// of the last byte; see [`FilterTable::add_share_set`].
    pub fn share_exceeds(self, set: &str, v6: bool, mask: u8, bound: SourceLimit) -> Self {
        const NETWORK: u32 = 1;
        let (family, place) = if v6 { (V6, 8 + 15) } else { (V4, 12 + 3) };
        self.load_meta(META_FAMILY)
            .equals(&[family])
            .load_payload(NETWORK, place, 1)
            .apply_mask(&[mask])
            .exceeds_limit(set, bound)
    }

    /// The loaded value exceeds its limit.
    fn exceeds_limit(self, set: &str, bound: SourceLimit) -> Self {
        const OVER: u32 = 1;
        const ADD: u32 = 0;
        let (name, data) = match bound {
            SourceLimit::Connections(most) => {
                ("connlimit", encode_attributes(|data| data.big_endian(1, most).big_endian(2, OVER)))
            }
            SourceLimit::NewEachSecond { rate, burst } => {
                let long = |number: u64| number.to_be_bytes();
                let data = encode_attributes(|data| {
                    data.attribute(1, &long(rate))
                        .attribute(2, &long(1))
                        .big_endian(3, burst)
                        .big_endian(4, 0)
                        .big_endian(5, OVER)
                });
                ("limit", data)
            }
        };
        let data = encode_attributes(|dynamic| {
            dynamic
                .text(1, set)
                .big_endian(3, ADD)
                .big_endian(4, REGISTER)
                .nested(7, |inner| inner.text(1, name).nested(2, |inner| inner.append_fixed(&data)))
        });
        self.push_expression("dynset", data)
    }

    pub fn accept(self) -> Self {
        self.set_verdict(1, None)
    }

    pub fn drop(self) -> Self {
        self.set_verdict(0, None)
    }

    /// Continues in another chain and does not return.
    pub fn go_to(self, chain: &str) -> Self {
        self.set_verdict((-4i32).cast_unsigned(), Some(chain))
    }

    /// Drops the packet and notifies the sender that it is prohibited.
    pub fn reject(self) -> Self {
        const OF_EITHER_FAMILY: u32 = 2;
        const FORBIDDEN: u8 = 3;
        let data = encode_attributes(|data| data.big_endian(1, OF_EITHER_FAMILY).attribute(2, &[FORBIDDEN]));
        self.push_expression("reject", data)
    }

    /// Refuses the packet as if nothing listened at its port: with a reset, or a message of ICMP for UDP.
    pub fn refuse_port(self, protocol: PortProtocol) -> Self {
        const RESET: u32 = 1;
        const OF_EITHER_FAMILY: u32 = 2;
        const PORT_UNREACHABLE: u8 = 1;
        let data = encode_attributes(|data| match protocol {
            PortProtocol::Tcp => data.big_endian(1, RESET),
            PortProtocol::Udp => data.big_endian(1, OF_EITHER_FAMILY).attribute(2, &[PORT_UNREACHABLE]),
        });
        self.push_expression("reject", data)
    }

    /// Gives the packet to the transparent socket at this port of the same protocol, which the rule must have checked. The
    /// rule continues only if there is such a socket.
    pub fn divert_to_port(self, port: u16) -> Self {
        const ANY_FAMILY: u32 = 0;
        let data = encode_attributes(|data| data.big_endian(1, ANY_FAMILY).big_endian(3, REGISTER));
        self.load_immediate(&port.to_be_bytes()).push_expression("tproxy", data)
    }

    /// Marks the packet, until it has been delivered.
    pub fn set_mark(self, mark: u32) -> Self {
        let data = encode_attributes(|data| data.big_endian(2, META_MARK).big_endian(3, REGISTER));
        self.load_immediate(&mark.to_ne_bytes()).push_expression("meta", data)
    }

    /// Replaces the source port of a UDP packet.
    pub fn set_udp_source_port(self, port: u16) -> Self {
        const TRANSPORT: u32 = 2;
        const SOURCE_PORT: u32 = 0;
        const PORT_LENGTH: u32 = 2;
        const INTERNET_CHECKSUM: u32 = 1;
        const CHECKSUM: u32 = 6;
        let data = encode_attributes(|data| {
            data.big_endian(2, TRANSPORT)
                .big_endian(3, SOURCE_PORT)
                .big_endian(4, PORT_LENGTH)
                .big_endian(5, REGISTER)
                .big_endian(6, INTERNET_CHECKSUM)
                .big_endian(7, CHECKSUM)
        });
        self.load_immediate(&port.to_be_bytes()).push_expression("payload", data)
    }

    /// Replaces the source address by one of this machine.
    pub fn masquerade(self) -> Self {
        self.push_expression("masq", Vec::new())
    }

    /// Replaces the destination address.
    pub fn redirect(self, address: IpAddr) -> Self {
        const DESTINATION: u32 = 1;
        let (family, octets) = match address {
            IpAddr::V4(v4) => (V4, v4.octets().to_vec()),
            IpAddr::V6(v6) => (V6, v6.octets().to_vec()),
        };
        let nat = encode_attributes(|data| {
            data.big_endian(1, DESTINATION).big_endian(2, family.into()).big_endian(3, REGISTER)
        });
        self.load_immediate(&octets).push_expression("nat", nat)
    }

    fn load_immediate(self, value: &[u8]) -> Self {
        let data = encode_attributes(|data| {
            data.big_endian(1, REGISTER).nested(2, |inner| inner.attribute(1, value))
        });
        self.push_expression("immediate", data)
    }

    fn load_meta(self, key: u32) -> Self {
        self.push_expression(
            "meta",
            encode_attributes(|data| data.big_endian(1, REGISTER).big_endian(2, key)),
        )
    }

    fn load_conntrack(self, key: u32) -> Self {
        self.push_expression("ct", encode_attributes(|data| data.big_endian(1, REGISTER).big_endian(2, key)))
    }

    fn load_route(self, result: u32, flags: u32) -> Self {
        self.push_expression(
            "fib",
            encode_attributes(|data| data.big_endian(1, REGISTER).big_endian(2, result).big_endian(3, flags)),
        )
    }

    fn load_payload(self, base: u32, place: u32, length: u32) -> Self {
        self.push_expression(
            "payload",
            encode_attributes(|data| {
                data.big_endian(1, REGISTER).big_endian(2, base).big_endian(3, place).big_endian(4, length)
            }),
        )
    }

    fn apply_mask(self, mask: &[u8]) -> Self {
        let length = u32::try_from(mask.len()).expect("a mask is short");
        let nothing = vec![0; mask.len()];
        let data = encode_attributes(|data| {
            data.big_endian(1, REGISTER)
                .big_endian(2, REGISTER)
                .big_endian(3, length)
                .nested(4, |value| value.attribute(1, mask))
                .nested(5, |value| value.attribute(1, &nothing))
        });
        self.push_expression("bitwise", data)
    }

    fn equals(self, value: &[u8]) -> Self {
        self.compare_with(0, value)
    }

    fn differs(self, value: &[u8]) -> Self {
        self.compare_with(1, value)
    }

    fn compare_with(self, operator: u32, value: &[u8]) -> Self {
        let data = encode_attributes(|data| {
            data.big_endian(1, REGISTER).big_endian(2, operator).nested(3, |inner| inner.attribute(1, value))
        });
        self.push_expression("cmp", data)
    }

    fn set_verdict(self, code: u32, chain: Option<&str>) -> Self {
        let data = encode_attributes(|data| {
            data.big_endian(1, VERDICT_REGISTER).nested(2, |value| {
                value.nested(2, |verdict| {
                    let verdict = verdict.big_endian(1, code);
                    chain.map_or(verdict.clone(), |chain| verdict.text(2, chain))
                })
            })
        });
        self.push_expression("immediate", data)
    }

    fn push_expression(mut self, name: &'static str, data: Vec<u8>) -> Self {
        self.expressions.push(RuleExpression { name, data });
        self
    }
}

/// Encodes attributes alone, without a message around them.
fn encode_attributes(write: impl FnOnce(NetlinkMessage) -> NetlinkMessage) -> Vec<u8> {
    let header = NetlinkMessage::new(0, 0, &[]).finish(0, 0).len();
    write(NetlinkMessage::new(0, 0, &[])).finish(0, 0).split_off(header)
}

fn prefix_mask(length: usize, bits: u8) -> Vec<u8> {
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
        crate::namespaces::unshare_namespaces(crate::namespaces::NamespaceSet::NET)?;
        crate::namespaces::set_loopback_up()?;
        let mut table = FilterTable::new("shares");
        table.add_share_set("share");
        table.add_base_chain("output", ChainHook::Output);
        table.add_rule("output", &FilterRule::new().connection_state(ConntrackState::Known).accept());
        let bound = SourceLimit::Connections(5);
        table.add_rule("output", &FilterRule::new().share_exceeds("share", false, 1, bound).drop());
        table.install()?;
        assert_eq!(let_through("127.0.0.2")?, 5);
        assert_eq!(let_through("127.0.0.4")?, 0);
        assert_eq!(let_through("127.0.0.3")?, 5);
        Ok(())
    }

    #[test]
    fn sources_that_end_alike_share_a_bound() {
        // Only root can create a net namespace; a separate thread gets its own.
        if testkit::needs_root() {
            let done = std::thread::spawn(sources_share_a_bound).join();
            done.expect("the thread does not panic").expect("the test succeeds");
        }
    }

    #[test]
    fn mask_covers_the_leading_bits() {
        assert_eq!(prefix_mask(4, 12), [0xff, 0xf0, 0, 0]);
        assert_eq!(prefix_mask(4, 0), [0; 4]);
        assert_eq!(prefix_mask(4, 32), [0xff; 4]);
        assert_eq!(prefix_mask(16, 7)[..2], [0xfe, 0]);
    }
}

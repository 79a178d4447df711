//! A host and an internet for tests, each a net namespace; only root can make them.
//!
//! ```text
//! host 10.77.0.1 ── veth ── 10.77.0.2 world: 203.0.113.1, .2, .53 and 198.51.100.1, with servers that the test opens
//! ```
//!
//! The test runs on a thread of the host's namespace. Clients reach egress over the host's loopback, and the test says to
//! which address they meant to connect.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener, UdpSocket as StdUdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use egress_protocol::{EgressSettings, ServeMode};
use hickory_proto::op::{Message, MessageType, Metadata, OpCode, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use linux::namespaces::{NamespaceSet, enter_namespace, set_loopback_up, unshare_namespaces};
use linux::netlink::route::{RoutingSocket, VethEnd};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use crate::policy::tests::parse_policy;
use crate::relay::tests::connected_pair;
use crate::sandbox::Sandbox;
use crate::serve::start_connection;
use crate::settings::OperatorSettings;
use crate::shared::EgressState;

const HOST: &str = "10.77.0.1";
const GATEWAY: &str = "10.77.0.2";
const WORLD_ADDRESSES: [&str; 4] = ["203.0.113.1", "203.0.113.2", "203.0.113.53", "198.51.100.1"];
const RESOLVER: &str = "203.0.113.53";

/// The records of the world's name server: addresses, or an alias.
type Zone = Arc<Mutex<HashMap<String, Vec<String>>>>;

pub(crate) struct TestWorld {
    pub(crate) egress: Arc<EgressState>,
    pub(crate) sandbox: Arc<Sandbox>,
    world: OwnedFd,
    host: OwnedFd,
    zone: Zone,
}

/// Runs a test in a world of its own.
pub(crate) fn in_world<F: Future<Output = ()>>(policy: &str, test: impl FnOnce(TestWorld) -> F + Send) {
    if !testkit::needs_root() {
        return;
    }
    std::thread::scope(|scope| {
        let run = || {
            let (host, world) = make_namespaces().expect("the namespaces can be made");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                test(TestWorld::open(host, world, policy).await).await;
            });
        };
        scope.spawn(run).join().expect("the test succeeds");
    });
}

fn make_namespaces() -> io::Result<(OwnedFd, OwnedFd)> {
    let current = || File::open("/proc/thread-self/ns/net").map(OwnedFd::from);
    unshare_namespaces(NamespaceSet::NET)?;
    set_loopback_up()?;
    let host = current()?;
    let mut host_routes = RoutingSocket::open()?;
    unshare_namespaces(NamespaceSet::NET)?;
    set_loopback_up()?;
    let world = current()?;
    let mut world_routes = RoutingSocket::open()?;
    enter_namespace(host.as_fd(), NamespaceSet::NET)?;
    let mac = |last| [2, 0, 0, 0, 0, last];
    let (out, inside) = (VethEnd { name: "out0", mac: mac(1) }, VethEnd { name: "in0", mac: mac(2) });
    host_routes.create_veth_pair(out, inside, world.as_fd())?;
    let parse = |text: &str| text.parse::<IpAddr>().map_err(io::Error::other);
    let own = [(&mut host_routes, "out0", HOST, GATEWAY), (&mut world_routes, "in0", GATEWAY, HOST)];
    for (routes, link, own, other) in own {
        let index = routes.find_link(link)?.ok_or(io::ErrorKind::NotFound)?.index;
        routes.add_address(index, parse(own)?)?;
        routes.set_link_up(index)?;
        routes.add_route(index, parse(other)?)?;
        routes.add_default_route(index, parse(other)?)?;
    }
    let loopback = world_routes.find_link("lo")?.ok_or(io::ErrorKind::NotFound)?.index;
    for address in WORLD_ADDRESSES {
        world_routes.add_address(loopback, parse(address)?)?;
    }
    Ok((host, world))
}

impl TestWorld {
    async fn open(host: OwnedFd, world: OwnedFd, policy: &str) -> Self {
        let egress = Arc::new(
            EgressState::open(crate::vault::VaultStore::ephemeral().expect("random numbers"))
                .expect("a netlink socket"),
        );
        let settings = EgressSettings {
            resolvers: vec![RESOLVER.parse().expect("an address")],
            deny: vec!["10.0.0.0/8".into(), "198.51.100.0/24".into()],
            ..EgressSettings::default()
        };
        let _closing = egress.configure(OperatorSettings::try_from(&settings).expect("valid settings"));
        let sandbox = egress.find_or_add("one").expect("there are few");
        let _closing = sandbox.set_served(ServeMode::Filtered, &["198.19.0.16".parse().expect("an address")]);
        let _closing = sandbox.set_policy(parse_policy(policy));
        let opened = Self { egress, sandbox, world, host, zone: Zone::default() };
        opened.start_resolver();
        opened
    }

    /// Sets what the world's name server says of a name: addresses, or one other name.
    pub(crate) fn set_name(&self, name: &str, values: &[&str]) {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        self.zone.lock().expect("no panic").insert(name.to_owned(), values);
    }

    /// Opens a listener in the world.
    pub(crate) fn listen(&self, address: &str) -> TcpListener {
        let listener = self.in_world(|| StdListener::bind(address));
        listener.set_nonblocking(true).expect("an option of every socket");
        TcpListener::from_std(listener).expect("the runtime takes it")
    }

    /// Connects as a program in the sandbox that means `destination`.
    pub(crate) async fn connect(&self, destination: &str) -> TcpStream {
        let (client, near) = connected_pair().await;
        let destination: SocketAddr = destination.parse().expect("an address");
        start_connection(&self.egress, &self.sandbox, near, destination);
        client
    }

    /// The verdicts, names and reasons in the log of connections and queries.
    pub(crate) fn log(&self) -> Vec<String> {
        let records = self.sandbox.log.read(0, 100).records;
        let line = |record: egress_protocol::LogRecord| {
            let name = record.name.unwrap_or_default();
            format!("{:?} {:?} {name} {}", record.kind, record.verdict, record.reason)
        };
        records.into_iter().map(line).collect()
    }

    fn in_world<T>(&self, open: impl FnOnce() -> io::Result<T>) -> T {
        enter_namespace(self.world.as_fd(), NamespaceSet::NET).expect("the namespace exists");
        let opened = open();
        enter_namespace(self.host.as_fd(), NamespaceSet::NET).expect("the namespace exists");
        opened.expect("the address is free")
    }

    fn start_resolver(&self) {
        let socket = self.in_world(|| StdUdpSocket::bind((RESOLVER, 53)));
        socket.set_nonblocking(true).expect("an option of every socket");
        let socket = UdpSocket::from_std(socket).expect("the runtime takes it");
        let zone = Arc::clone(&self.zone);
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((length, client)) = socket.recv_from(&mut buffer).await {
                let query = Message::from_vec(&buffer[..length]).expect("a query");
                let answer = answer_from_zone(&query, &zone).to_vec().expect("it can be written");
                socket.send_to(&answer, client).await.expect("sent");
            }
        });
    }
}

fn answer_from_zone(query: &Message, zone: &Zone) -> Message {
    let mut answer = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    answer.metadata = Metadata::response_from_request(&query.metadata);
    answer.metadata.recursion_available = true;
    let question = query.queries[0].clone();
    let zone = zone.lock().expect("no panic");
    let mut name = question.name.to_ascii().trim_end_matches('.').to_ascii_lowercase();
    answer.add_query(question.clone());
    answer.metadata.response_code = ResponseCode::NXDomain;
    while let Some(values) = zone.get(&name) {
        answer.metadata.response_code = ResponseCode::NoError;
        let owner = Name::from_ascii(format!("{name}.")).expect("a name");
        let addresses: Vec<IpAddr> = values.iter().filter_map(|value| value.parse().ok()).collect();
        for address in &addresses {
            if let (IpAddr::V4(v4), RecordType::A) = (address, question.query_type) {
                answer.add_answer(Record::from_rdata(owner.clone(), 30, RData::A(A(*v4))));
            }
        }
        match values.first() {
            Some(alias) if addresses.is_empty() => {
                let target = Name::from_ascii(format!("{alias}.")).expect("a name");
                answer.add_answer(Record::from_rdata(owner, 30, RData::CNAME(CNAME(target))));
                name.clone_from(alias);
            }
            _ => break,
        }
    }
    answer
}

/// Reads until the end and says whether it was a reset.
pub(crate) async fn read_to_end(stream: &mut TcpStream) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let outcome = stream.read_to_end(&mut bytes).await;
    (bytes, outcome.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset))
}

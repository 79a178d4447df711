//! Asks the name servers of the host, or those that the operator chose. Answers are cached for all sandboxes.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::DomainName;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Name, Record, RecordType};
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::{Resolver, TokioResolver};
use tokio::time::Instant;

use super::cache::AnswerCache;
use crate::limits::OpenCount;
use crate::settings::OperatorSettings;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The number of name servers that programs read from a resolv.conf, and the largest part of it that is read.
const MAX_NAME_SERVERS: usize = 3;
const MAX_FILE_BYTES: usize = 64 << 10;
/// How often the file is examined for changes.
const EXAMINE_INTERVAL: Duration = Duration::from_secs(5);

const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(2500);
const ATTEMPTS: usize = 2;
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(8);
const MAX_OPEN_LOOKUPS: u32 = 1024;
/// How many records of an answer are used. More than any honest name has.
const MAX_RECORDS: usize = 64;

/// Why a lookup has no records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupError {
    /// The name does not exist.
    NoName,
    /// The name has no records of this type.
    NoRecords,
    /// No server answered, or none is known.
    Unavailable,
}

/// The resolver with the servers that are configured now.
#[derive(Default)]
pub(crate) struct UpstreamResolver {
    current: Mutex<ResolverState>,
    open: OpenCount,
}

#[derive(Default)]
struct ResolverState {
    resolver: Option<Arc<TokioResolver>>,
    /// What its servers have answered.
    cache: AnswerCache,
    servers: Vec<(IpAddr, u16)>,
    /// Whether the servers are those of the host, which can change.
    from_host: bool,
    examined: Option<Instant>,
    stamp: Option<FileStamp>,
}

/// Tells whether a file was written: its inode and time.
type FileStamp = (u64, i64, i64);

impl UpstreamResolver {
    /// Uses other servers from now on.
    pub(crate) fn configure(&self, settings: &OperatorSettings) {
        let mut state = self.lock();
        state.from_host = settings.resolvers.is_empty();
        if state.from_host {
            (state.stamp, state.examined) = (None, None);
        } else {
            let servers = settings.resolvers.iter().map(|address| (*address, settings.resolver_port));
            state.use_servers(servers.collect());
        }
    }

    /// Returns the records of a name, with the aliases that lead to them.
    pub(crate) async fn lookup(
        &self,
        name: &DomainName,
        record_type: RecordType,
    ) -> Result<Vec<Record>, LookupError> {
        let Some(_slot) = self.open.try_open(MAX_OPEN_LOOKUPS) else {
            return Err(LookupError::Unavailable);
        };
        let resolver = self.current_resolver().ok_or(LookupError::Unavailable)?;
        let key = (name.clone(), record_type);
        if let Some(cached) = self.lock().cache.find(&key) {
            return cached;
        }
        // The final dot keeps the search list of the host out of it.
        let name = Name::from_ascii(format!("{name}.")).ok().ok_or(LookupError::NoName)?;
        let found = match tokio::time::timeout(LOOKUP_TIMEOUT, resolver.lookup(name, record_type)).await {
            Ok(Ok(found)) => Ok(found.answers().iter().take(MAX_RECORDS).cloned().collect()),
            Ok(Err(error)) => Err(classify(&error)),
            Err(_elapsed) => Err(LookupError::Unavailable),
        };
        self.lock().cache.store(key, &found);
        found
    }

    /// Whether more than half of the lookups that may be open are.
    pub(crate) fn is_busy(&self) -> bool {
        self.open.open() > MAX_OPEN_LOOKUPS / 2
    }

    fn current_resolver(&self) -> Option<Arc<TokioResolver>> {
        let mut state = self.lock();
        let now = Instant::now();
        let is_due = state.examined.is_none_or(|examined| now >= examined + EXAMINE_INTERVAL);
        if state.from_host && is_due {
            state.examined = Some(now);
            state.examine_host();
        }
        state.resolver.clone()
    }

    fn lock(&self) -> MutexGuard<'_, ResolverState> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResolverState {
    /// Reads the host's servers if their file was written.
    fn examine_host(&mut self) {
        let stamp = fs::metadata(RESOLV_CONF).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec()));
        if stamp.is_some() && stamp == self.stamp {
            return;
        }
        self.stamp = stamp;
        let text = fs::read(RESOLV_CONF).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[..text.len().min(MAX_FILE_BYTES)]);
        let servers = parse_name_servers(&text);
        self.use_servers(servers.into_iter().map(|address| (address, 53)).collect());
    }

    /// Keeps the cache if nothing changes.
    fn use_servers(&mut self, servers: Vec<(IpAddr, u16)>) {
        if self.servers == servers && self.resolver.is_some() {
            return;
        }
        self.cache = AnswerCache::default();
        self.resolver = match build_resolver(&servers) {
            Ok(resolver) if !servers.is_empty() => Some(Arc::new(resolver)),
            Ok(_) => {
                tracing::warn!("host has no name server; names are not resolved until it has one");
                None
            }
            Err(error) => {
                tracing::warn!(%error, "name servers could not be used; names are not resolved");
                None
            }
        };
        self.servers = servers;
    }
}

fn build_resolver(servers: &[(IpAddr, u16)]) -> Result<TokioResolver, NetError> {
    let servers = servers.iter().map(|(address, port)| {
        let mut server = NameServerConfig::udp_and_tcp(*address);
        server.connections.iter_mut().for_each(|connection| connection.port = *port);
        server
    });
    let config = ResolverConfig::from_parts(None, Vec::new(), servers.collect());
    let mut options = ResolverOpts::default();
    options.timeout = ATTEMPT_TIMEOUT;
    options.attempts = ATTEMPTS;
    options.edns0 = true;
    options.use_hosts_file = ResolveHosts::Never;
    // Its cache is bounded by the number of answers and not by their size.
    options.cache_size = 1;
    options.try_tcp_on_error = true;
    options.preserve_intermediates = true;
    options.max_active_requests = usize::try_from(MAX_OPEN_LOOKUPS).unwrap_or(usize::MAX);
    Resolver::builder_with_config(config, TokioRuntimeProvider::default()).with_options(options).build()
}

fn classify(error: &NetError) -> LookupError {
    match error {
        NetError::Dns(DnsError::NoRecordsFound(found)) => match found.response_code {
            ResponseCode::NXDomain => LookupError::NoName,
            ResponseCode::NoError => LookupError::NoRecords,
            _ => LookupError::Unavailable,
        },
        NetError::Dns(DnsError::ResponseCode(ResponseCode::NXDomain)) => LookupError::NoName,
        error => {
            tracing::debug!(%error, "lookup failed");
            LookupError::Unavailable
        }
    }
}

/// Returns the servers of a resolv.conf. Those on the host's loopback count: they are asked from the host.
fn parse_name_servers(text: &str) -> Vec<IpAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == "nameserver").then(|| words.next()?.parse().ok())?
    });
    servers.take(MAX_NAME_SERVERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_parsed_like_other_programs_do() {
        let text = "# nameserver 1.1.1.1\nsearch x\nnameserver 127.0.0.53\n nameserver\t2001:db8::1 # two\n\
                    nameserver fe80::1%eth0\nnameserver 192.0.2.1\nnameserver 192.0.2.2\n";
        let expected =
            ["127.0.0.53", "2001:db8::1", "192.0.2.1"].map(|text| text.parse().expect("an address"));
        assert_eq!(parse_name_servers(text), expected as [IpAddr; 3]);
    }
}

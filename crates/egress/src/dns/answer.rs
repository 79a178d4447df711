//! Decides what a query gets.

use std::net::IpAddr;
use std::time::Duration;

use domain::DomainName;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{RData, Record, RecordType};

use super::message::{NoQuery, ReceivedQuery, Transport};
use super::upstream::LookupError;
use crate::policy::PolicyView;
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

/// How many queries of one sandbox may wait for an answer.
const MAX_OPEN_QUERIES: u32 = 64;
/// How many records one answer has.
const MAX_ANSWER_RECORDS: usize = 256;

/// Why a name has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupFailure {
    /// The name does not exist, or has no address.
    NoAddress,
    /// No name server answered.
    Unavailable,
}

/// What happens to a query.
pub(super) enum QueryOutcome {
    /// There is no answer.
    Ignored,
    /// The answer is known.
    Answer(Option<Vec<u8>>),
    /// The name is allowed and is looked up.
    Lookup(Box<PendingLookup>),
}

/// An allowed query for which upstream servers are asked.
pub(super) struct PendingLookup {
    query: ReceivedQuery,
    name: DomainName,
    view: PolicyView,
    transport: Transport,
}

/// Judges a query, without waiting.
pub(super) fn judge_query(sandbox: &Sandbox, bytes: &[u8], transport: Transport) -> QueryOutcome {
    let Some(view) = sandbox.view() else { return QueryOutcome::Ignored };
    if !sandbox.queries.try_use(view.settings.limits.queries_per_second) {
        if sandbox.query_limit_records.try_use(1) {
            sandbox.log_denied_query(None, "limit of queries per second");
        }
        return QueryOutcome::Ignored;
    }
    let query = match ReceivedQuery::parse(bytes) {
        Ok(query) => query,
        Err(NoQuery::Ignored) => return QueryOutcome::Ignored,
        Err(NoQuery::Refused(answer)) => return QueryOutcome::Answer(Some(answer)),
    };
    let empty = |code| QueryOutcome::Answer(query.answer(code, Vec::new(), transport));
    if view.lacks_policy() {
        sandbox.log_denied_query(Some(query.shown_name()), "no policy");
        return empty(ResponseCode::Refused);
    }
    let Some(name) = query.name() else {
        sandbox.log_denied_query(Some(query.shown_name()), "not the name of a host");
        return empty(ResponseCode::NXDomain);
    };
    if is_discovery_name(&name) {
        return empty(ResponseCode::NXDomain);
    }
    let judgement = view.judge_query(&name);
    if !judgement.is_allowed() {
        sandbox.log_denied_query(Some(name.to_string()), &judgement.reason);
        return empty(ResponseCode::NXDomain);
    }
    match treatment(query.record_type()) {
        TypeTreatment::Empty => empty(ResponseCode::NoError),
        TypeTreatment::Refused => empty(ResponseCode::NotImp),
        TypeTreatment::Lookup => {
            QueryOutcome::Lookup(Box::new(PendingLookup { query, name, view, transport }))
        }
    }
}

impl PendingLookup {
    /// Looks the name up and writes the answer.
    pub(super) async fn run(self, egress: &EgressState, sandbox: &Sandbox) -> Option<Vec<u8>> {
        let Some(_slot) = sandbox.open_queries.try_open(open_query_limit(egress)) else {
            sandbox.log_denied_query(Some(self.name.to_string()), "limit of open queries");
            return self.query.answer(ResponseCode::ServFail, Vec::new(), self.transport);
        };
        let record_type = self.query.record_type();
        let (code, records) = match egress.resolver.lookup(&self.name, record_type).await {
            Ok(records) => (ResponseCode::NoError, records),
            Err(LookupError::NoRecords) => (ResponseCode::NoError, Vec::new()),
            Err(LookupError::NoName) => (ResponseCode::NXDomain, Vec::new()),
            Err(LookupError::Unavailable) => {
                sandbox.log_denied_query(Some(self.name.to_string()), "name servers do not answer");
                (ResponseCode::ServFail, Vec::new())
            }
        };
        let records = shown_records(egress, &self.view, records, record_type);
        remember_addresses(sandbox, &self.name, &records);
        self.query.answer(code, records, self.transport)
    }
}

/// Returns how many lookups of one sandbox may be open: fewer while all sandboxes together have many, so that those that ask
/// servers which do not answer leave room for the others.
fn open_query_limit(egress: &EgressState) -> u32 {
    if egress.resolver.is_busy() { MAX_OPEN_QUERIES / 8 } else { MAX_OPEN_QUERIES }
}

/// Returns the addresses of a name that may be dialled, those of the family of `like` first. They count as given out.
pub(crate) async fn resolve_addresses(
    egress: &EgressState,
    sandbox: &Sandbox,
    view: &PolicyView,
    name: &DomainName,
    like: IpAddr,
) -> Result<Vec<IpAddr>, LookupFailure> {
    let lookup = async |record_type| {
        let slot = sandbox.open_queries.try_open(open_query_limit(egress));
        let _slot = slot.ok_or(LookupError::Unavailable)?;
        let records = egress.resolver.lookup(name, record_type).await?;
        Ok(shown_records(egress, view, records, record_type))
    };
    let (v4, v6) = tokio::join!(lookup(RecordType::A), lookup(RecordType::AAAA));
    if let (Err(LookupError::Unavailable), Err(LookupError::Unavailable)) = (&v4, &v6) {
        return Err(LookupFailure::Unavailable);
    }
    let (first, second) = if like.to_canonical().is_ipv4() { (v4, v6) } else { (v6, v4) };
    let records = [first.unwrap_or_default(), second.unwrap_or_default()].concat();
    remember_addresses(sandbox, name, &records);
    let found: Vec<IpAddr> = records.iter().filter_map(|record| record_address(&record.data)).collect();
    if found.is_empty() { Err(LookupFailure::NoAddress) } else { Ok(found) }
}

/// How a type of record is treated, for an allowed name.
enum TypeTreatment {
    Lookup,
    /// There is no such record.
    Empty,
    Refused,
}

fn treatment(record_type: RecordType) -> TypeTreatment {
    match record_type {
        // These would give clients keys to encrypt the name in a ClientHello, and lead them to QUIC.
        RecordType::HTTPS | RecordType::SVCB => TypeTreatment::Empty,
        RecordType::ANY | RecordType::AXFR | RecordType::IXFR | RecordType::OPT | RecordType::TSIG => {
            TypeTreatment::Refused
        }
        RecordType::ZERO | RecordType::Unknown(_) | RecordType::NULL => TypeTreatment::Refused,
        _ => TypeTreatment::Lookup,
    }
}

/// Whether clients ask for this name to find an encrypted resolver, which they are not to find.
fn is_discovery_name(name: &DomainName) -> bool {
    const DISABLED: &str = "use-application-dns.net";
    const DESIGNATED: &str = "resolver.arpa";
    let text = name.as_str();
    text == DISABLED
        || text == DESIGNATED
        || text.strip_suffix(DESIGNATED).is_some_and(|rest| rest.ends_with('.'))
}

/// Keeps the aliases and the records that were asked for, without addresses that are never reachable. An address to
/// which there is no route is one of these, so a host without IPv6 gives out no IPv6 addresses.
fn shown_records(
    egress: &EgressState,
    view: &PolicyView,
    records: Vec<Record>,
    record_type: RecordType,
) -> Vec<Record> {
    let is_shown = |record: &Record| match record.record_type() {
        RecordType::CNAME => true,
        found if found != record_type => false,
        _ => match record_address(&record.data) {
            Some(address) => egress.judge_address(view, address, None).is_ok(),
            None => true,
        },
    };
    records.into_iter().filter(is_shown).take(MAX_ANSWER_RECORDS).collect()
}

fn remember_addresses(sandbox: &Sandbox, name: &DomainName, records: &[Record]) {
    let mut given = sandbox.given();
    for record in records {
        if let Some(address) = record_address(&record.data) {
            given.remember(address, name, Duration::from_secs(record.ttl.into()));
        }
    }
}

fn record_address(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(address) => Some(address.0.into()),
        RData::AAAA(address) => Some(address.0.into()),
        _ => None,
    }
}

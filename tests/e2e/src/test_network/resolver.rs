//! The name servers of the test internet: DNS over UDP and TCP, over TLS and over HTTPS.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use super::hosts::{self, RecordData, ZoneAnswer, ZoneRecord, record_type};

/// A question that arrived at any name server of the test internet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenQuery {
    pub name: String,
    pub kind: u16,
}

/// All name servers: they share what they were asked for.
#[derive(Clone, Default)]
pub(super) struct WorldResolver {
    seen: Arc<Mutex<Vec<SeenQuery>>>,
    /// How often each name was asked for, by type: some names change.
    counts: Arc<Mutex<HashMap<(String, u16), usize>>>,
}

const HEADER_LENGTH: usize = 12;
/// What fits into a datagram without EDNS; see RFC 1035, 4.2.1.
const MAX_DATAGRAM: usize = 512;
const CLASS_INTERNET: u16 = 1;
const TRUNCATED: u8 = 0x02;

impl WorldResolver {
    pub(super) fn seen(&self) -> Vec<SeenQuery> {
        self.seen.lock().expect("no thread panics while holding the lock").clone()
    }

    /// Answers messages with a length in front, as over TCP and TLS.
    pub(super) fn answer_stream(&self, mut stream: impl Read + Write) {
        let mut length = [0; 2];
        while stream.read_exact(&mut length).is_ok() {
            let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
            if stream.read_exact(&mut query).is_err() {
                return;
            }
            let Some(answer) = self.answer(&query) else { return };
            let length = u16::try_from(answer.len()).expect("answers are short").to_be_bytes();
            if stream.write_all(&[&length[..], &answer].concat()).is_err() || stream.flush().is_err() {
                return;
            }
        }
    }

    /// Answers one datagram; an answer that is too long is cut and says so.
    pub(super) fn answer_datagram(&self, query: &[u8]) -> Option<Vec<u8>> {
        let mut answer = self.answer(query)?;
        if answer.len() > MAX_DATAGRAM {
            let (question, _, _) = parse_question(query)?;
            answer = message(query, question, 0, &[]);
            answer[2] |= TRUNCATED;
        }
        Some(answer)
    }

    /// Answers one message; `None` if it is not a question.
    pub(super) fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        const NO_SUCH_NAME: u8 = 3;
        let (question, name, kind) = parse_question(query)?;
        let times = self.count(&name, kind);
        Some(match hosts::look_up(&name, kind, times) {
            ZoneAnswer::NoSuchName => message(query, question, NO_SUCH_NAME, &[]),
            ZoneAnswer::Records(records) => message(query, question, 0, &records),
        })
    }

    /// Notes a question and returns how often it was asked before.
    fn count(&self, name: &str, kind: u16) -> usize {
        let query = SeenQuery { name: name.to_ascii_lowercase(), kind };
        let mut counts = self.counts.lock().expect("no thread panics while holding the lock");
        let count = counts.entry((query.name.clone(), kind)).or_default();
        let times = *count;
        *count += 1;
        self.seen.lock().expect("no thread panics while holding the lock").push(query);
        times
    }
}

/// The bytes of the question, its name and its type.
fn parse_question(query: &[u8]) -> Option<(&[u8], String, u16)> {
    let mut labels = Vec::new();
    let mut position = HEADER_LENGTH;
    loop {
        let length = usize::from(*query.get(position)?);
        position += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(query.get(position..position + length)?).into_owned());
        position += length;
    }
    let kind = u16::from_be_bytes([*query.get(position)?, *query.get(position + 1)?]);
    Some((query.get(HEADER_LENGTH..position + 4)?, labels.join("."), kind))
}

fn message(query: &[u8], question: &[u8], code: u8, records: &[ZoneRecord]) -> Vec<u8> {
    let count = u16::try_from(records.len()).expect("answers are short").to_be_bytes();
    let mut answer = query[..2].to_vec();
    answer.extend_from_slice(&[0x81, 0x80 | code, 0, 1, count[0], count[1], 0, 0, 0, 0]);
    answer.extend_from_slice(question);
    for record in records {
        append_record(record, &mut answer);
    }
    answer
}

fn append_record(record: &ZoneRecord, answer: &mut Vec<u8>) {
    let (kind, data) = match &record.data {
        RecordData::Address(IpAddr::V4(address)) => (record_type::A, address.octets().to_vec()),
        RecordData::Address(IpAddr::V6(address)) => (record_type::AAAA, address.octets().to_vec()),
        RecordData::Alias(target) => (record_type::CNAME, encode_name(target)),
        RecordData::Text(text) => {
            let length = u8::try_from(text.len()).expect("a text is short");
            (record_type::TXT, [&[length][..], text.as_bytes()].concat())
        }
        // Priority 1, target `.`, and the parameter 5 (`ech`) with four bytes; see RFC 9460 and RFC 9848.
        RecordData::EchKeys => (record_type::HTTPS, vec![0, 1, 0, 0, 5, 0, 4, 0xfe, 0x0d, 0, 0]),
    };
    answer.extend_from_slice(&encode_name(&record.owner));
    answer.extend_from_slice(&kind.to_be_bytes());
    answer.extend_from_slice(&CLASS_INTERNET.to_be_bytes());
    answer.extend_from_slice(&record.ttl.to_be_bytes());
    answer.extend_from_slice(&u16::try_from(data.len()).expect("a record is short").to_be_bytes());
    answer.extend_from_slice(&data);
}

fn encode_name(name: &str) -> Vec<u8> {
    let mut encoded = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        encoded.push(u8::try_from(label.len()).expect("a label is short"));
        encoded.extend_from_slice(label.as_bytes());
    }
    encoded.push(0);
    encoded
}

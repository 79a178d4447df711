//! Reads queries and writes answers.

use domain::DomainName;
use hickory_proto::op::{Edns, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};

const HEADER_BYTES: usize = 12;
/// What a client without EDNS receives over UDP, and what one with it receives at most.
const MIN_UDP_BYTES: u16 = 512;
const MAX_UDP_BYTES: u16 = 4096;

/// A query that can be answered.
#[derive(Debug)]
pub(super) struct ReceivedQuery {
    message: Message,
    /// The question as it was asked: the case of its letters is repeated.
    pub(super) question: Query,
}

/// What was received instead of one.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoQuery {
    /// It gets no answer.
    Ignored,
    /// It gets this answer.
    Refused(Vec<u8>),
}

/// Over what the answer goes, which bounds its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Udp,
    Tcp,
}

impl ReceivedQuery {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, NoQuery> {
        const RESPONSE_FLAG: u8 = 0x80;
        if bytes.len() < HEADER_BYTES || bytes[2] & RESPONSE_FLAG != 0 {
            return Err(NoQuery::Ignored);
        }
        let id = u16::from_be_bytes([bytes[0], bytes[1]]);
        let Ok(message) = Message::from_vec(bytes) else {
            return Err(NoQuery::refused(id, ResponseCode::FormErr));
        };
        if message.metadata.op_code != OpCode::Query {
            return Err(NoQuery::refused(id, ResponseCode::NotImp));
        }
        match message.queries.as_slice() {
            [question] if question.query_class == DNSClass::IN => {
                let question = question.clone();
                Ok(Self { message, question })
            }
            [_] => Err(NoQuery::refused(id, ResponseCode::Refused)),
            _ => Err(NoQuery::refused(id, ResponseCode::FormErr)),
        }
    }

    pub(super) fn record_type(&self) -> RecordType {
        self.question.query_type
    }

    /// Returns the name that is asked for; `None` if no host can have it.
    pub(super) fn name(&self) -> Option<DomainName> {
        self.question.name.to_ascii().parse().ok()
    }

    /// Returns the name for the log, also if no host can have it.
    pub(super) fn shown_name(&self) -> String {
        let name = self.question.name.to_ascii();
        name.strip_suffix('.').unwrap_or(&name).to_ascii_lowercase()
    }

    /// Writes an answer. One that is too long for the transport is empty and says so, and the client asks over TCP.
    pub(super) fn answer(
        &self,
        code: ResponseCode,
        records: Vec<Record>,
        transport: Transport,
    ) -> Option<Vec<u8>> {
        let mut response = Message::new(self.message.metadata.id, MessageType::Response, OpCode::Query);
        response.metadata = Metadata::response_from_request(&self.message.metadata);
        response.metadata.recursion_available = true;
        response.metadata.response_code = code;
        response.add_query(self.question.clone());
        if let Some(asked) = &self.message.edns {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_UDP_BYTES);
            edns.set_dnssec_ok(asked.flags().dnssec_ok);
            response.set_edns(edns);
        }
        let asked = Name::to_lowercase(&self.question.name);
        response.add_answers(records.into_iter().map(|mut record| {
            if record.name.to_lowercase() == asked {
                record.name = self.question.name.clone();
            }
            record
        }));
        let bytes = response.to_vec().ok()?;
        if bytes.len() <= self.max_length(transport) {
            return Some(bytes);
        }
        response.answers.clear();
        response.metadata.truncation = transport == Transport::Udp;
        response.to_vec().ok()
    }

    fn max_length(&self, transport: Transport) -> usize {
        match (transport, &self.message.edns) {
            (Transport::Tcp, _) => u16::MAX.into(),
            (Transport::Udp, None) => MIN_UDP_BYTES.into(),
            (Transport::Udp, Some(edns)) => edns.max_payload().clamp(MIN_UDP_BYTES, MAX_UDP_BYTES).into(),
        }
    }
}

impl NoQuery {
    fn refused(id: u16, code: ResponseCode) -> Self {
        let message = Message::error_msg(id, OpCode::Query, code);
        message.to_vec().map_or(Self::Ignored, Self::Refused)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use hickory_proto::rr::RData;
    use hickory_proto::rr::rdata::A;

    /// The bytes of a query.
    pub(in crate::dns) fn query(name: &str, record_type: RecordType) -> Vec<u8> {
        let mut message = Message::new(77, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.add_query(Query::query(Name::from_ascii(name).expect("a name"), record_type));
        message.to_vec().expect("it can be written")
    }

    fn address_record(name: &str, last: u8) -> Record {
        Record::from_rdata(Name::from_ascii(name).expect("a name"), 60, RData::A(A::new(192, 0, 2, last)))
    }

    #[test]
    fn question_is_repeated_with_its_case() {
        let received = ReceivedQuery::parse(&query("ExAmple.oRg.", RecordType::A)).expect("a query");
        assert_eq!(received.name().expect("a name").as_str(), "example.org");
        let records = vec![address_record("example.org.", 1)];
        let bytes = received.answer(ResponseCode::NoError, records, Transport::Udp).expect("an answer");
        let answer = Message::from_vec(&bytes).expect("it can be read");
        assert_eq!(answer.metadata.id, 77);
        assert!(answer.metadata.recursion_available && answer.metadata.recursion_desired);
        assert_eq!(answer.queries[0].name.to_ascii(), "ExAmple.oRg.");
        assert_eq!(answer.answers[0].name.to_ascii(), "ExAmple.oRg.");
    }

    #[test]
    fn long_answers_over_udp_are_truncated() {
        let received = ReceivedQuery::parse(&query("example.org.", RecordType::A)).expect("a query");
        let records: Vec<Record> = (0..100).map(|last| address_record("example.org.", last)).collect();
        let read = |transport| {
            let bytes =
                received.answer(ResponseCode::NoError, records.clone(), transport).expect("an answer");
            let answer = Message::from_vec(&bytes).expect("it can be read");
            (answer.answers.len(), answer.metadata.truncation)
        };
        assert_eq!(read(Transport::Udp), (0, true));
        assert_eq!(read(Transport::Tcp), (100, false));
    }

    #[test]
    fn what_is_no_query_is_ignored_or_refused() {
        let code = |bytes: &[u8]| match ReceivedQuery::parse(bytes) {
            Err(NoQuery::Refused(bytes)) => {
                Some(Message::from_vec(&bytes).expect("it can be read").metadata.response_code)
            }
            Err(NoQuery::Ignored) => None,
            Ok(query) => panic!("{query:?}"),
        };
        assert_eq!(code(&[]), None);
        assert_eq!(code(&[0; 11]), None);
        let mut bytes = query("example.org.", RecordType::A);
        bytes[2] |= 0x80;
        assert_eq!(code(&bytes), None);
        let mut bytes = query("example.org.", RecordType::A);
        bytes[5] = 2;
        assert_eq!(code(&bytes), Some(ResponseCode::FormErr));
        let mut bytes = query("example.org.", RecordType::A);
        bytes[2] |= 5 << 3;
        assert!(code(&bytes).is_some());
        let mut bytes = query("example.org.", RecordType::A);
        *bytes.last_mut().expect("bytes") = 3;
        assert_eq!(code(&bytes), Some(ResponseCode::Refused));
        let bytes = query("example.org.", RecordType::A);
        assert_eq!(code(&bytes[..bytes.len() - 3]), Some(ResponseCode::FormErr));
    }

    #[test]
    fn numbers_are_no_names() {
        for name in ["192.0.2.1.", "2130706433.", "0x7f.1.", "."] {
            let received = ReceivedQuery::parse(&query(name, RecordType::A)).expect("a query");
            assert_eq!(received.name(), None, "{name}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_handled(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..600)) {
            if let Ok(query) = ReceivedQuery::parse(&bytes) {
                let _name = (query.name(), query.shown_name());
                query.answer(ResponseCode::NXDomain, Vec::new(), Transport::Udp);
            }
        }
    }
}

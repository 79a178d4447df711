//! Queries through the whole resolver, to a name server in another namespace.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::answer::{QueryOutcome, judge_query};
use super::message::Transport;
use super::message::tests::query;
use crate::test_world::{TestWorld, in_world};

/// Returns the code and the records of an answer as text.
async fn ask(world: &TestWorld, name: &str, record_type: RecordType) -> (ResponseCode, Vec<String>) {
    let bytes = match judge_query(&world.sandbox, &query(name, record_type), Transport::Udp) {
        QueryOutcome::Ignored => panic!("no answer"),
        QueryOutcome::Answer(answer) => answer,
        QueryOutcome::Lookup(lookup) => lookup.run(&world.egress, &world.sandbox).await,
    };
    let answer = Message::from_vec(&bytes.expect("an answer")).expect("it can be read");
    let shown = answer.answers.iter().map(|record| match &record.data {
        RData::A(address) => address.0.to_string(),
        RData::CNAME(target) => target.0.to_ascii(),
        other => format!("{other:?}"),
    });
    (answer.metadata.response_code, shown.collect())
}

#[test]
fn allowed_names_are_resolved_with_their_aliases() {
    in_world("allow good.test, allow *.below.test", |world| async move {
        world.set_name("good.test", &["alias.elsewhere.test"]);
        world.set_name("alias.elsewhere.test", &["203.0.113.1", "203.0.113.2"]);
        world.set_name("a.below.test", &["203.0.113.2"]);
        let (code, records) = ask(&world, "Good.Test.", RecordType::A).await;
        assert_eq!(code, ResponseCode::NoError);
        assert_eq!(records, ["alias.elsewhere.test.", "203.0.113.1", "203.0.113.2"]);
        assert_eq!(ask(&world, "a.below.test.", RecordType::A).await.1, ["203.0.113.2"]);
        let name = "good.test".parse().expect("a name");
        assert!(world.sandbox.given().was_given("203.0.113.2".parse().expect("an address"), &name));
        // A name that an alias leads to is not itself allowed.
        assert_eq!(ask(&world, "alias.elsewhere.test.", RecordType::A).await.0, ResponseCode::NXDomain);
        assert_eq!(ask(&world, "missing.below.test.", RecordType::A).await.0, ResponseCode::NXDomain);
        assert_eq!(ask(&world, "good.test.", RecordType::HTTPS).await, (ResponseCode::NoError, vec![]));
        assert_eq!(ask(&world, "good.test.", RecordType::ANY).await.0, ResponseCode::NotImp);
    });
}

#[test]
fn denied_names_do_not_exist_and_are_logged() {
    in_world("allow good.test, deny bad.test, allow default", |world| async move {
        for name in
            ["bad.test.", "192.0.2.1.", "use-application-dns.net.", "_dns.resolver.arpa.", "dns.google."]
        {
            assert_eq!(ask(&world, name, RecordType::A).await.0, ResponseCode::NXDomain, "{name}");
        }
        let expected = [
            "Query Deny bad.test bad.test",
            "Query Deny 192.0.2.1 not the name of a host",
            "Query Deny dns.google encrypted DNS",
        ];
        assert_eq!(world.log(), expected);
    });
}

#[test]
fn unreachable_addresses_are_removed_from_answers() {
    in_world("allow rebound.test", |world| async move {
        world.set_name("rebound.test", &["10.77.0.1", "203.0.113.1", "127.0.0.1", "198.51.100.1", "0.0.0.0"]);
        let (code, records) = ask(&world, "rebound.test.", RecordType::A).await;
        assert_eq!((code, records), (ResponseCode::NoError, vec!["203.0.113.1".to_owned()]));
    });
}

#[test]
fn queries_beyond_the_limit_get_no_answer() {
    in_world("allow good.test", |world| async move {
        let mut settings = crate::settings::tests::sample(|_| {});
        settings.limits.queries_per_second = 3;
        let _closing = world.sandbox.set_settings(&std::sync::Arc::new(settings));
        let bytes = query("bad.test.", RecordType::A);
        let answered = (0..20).filter(|_| {
            !matches!(judge_query(&world.sandbox, &bytes, Transport::Udp), QueryOutcome::Ignored)
        });
        assert!((3..=4).contains(&answered.count()));
        let limited = world.log().into_iter().filter(|line| line.contains("limit of queries")).count();
        assert_eq!(limited, 1);
    });
}

#[test]
fn queries_over_tcp_are_answered_at_every_address() {
    in_world("allow good.test", |world| async move {
        world.set_name("good.test", &["203.0.113.1"]);
        let mut client = world.connect("192.0.2.99:53").await;
        for _ in 0..2 {
            let bytes = query("good.test.", RecordType::A);
            client.write_u16(u16::try_from(bytes.len()).expect("small")).await.expect("sent");
            client.write_all(&bytes).await.expect("sent");
            let length = client.read_u16().await.expect("an answer");
            let mut answer = vec![0; length.into()];
            client.read_exact(&mut answer).await.expect("an answer");
            let answer = Message::from_vec(&answer).expect("it can be read");
            assert_eq!(answer.answers.len(), 1);
        }
    });
}

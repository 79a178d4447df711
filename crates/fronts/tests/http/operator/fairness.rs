//! No owner can take the slots of all others.

use testkit::fake_backend::FakeBackend;
use testkit::test_server::TestServer;

use crate::setup::{OPERATOR_KEY, issue_key, start_with, with_key};

const EVENTS: &str = "/coracle/v1/events";

/// Opens an event stream; `None` if it is refused, as it should be.
async fn open_stream(server: &TestServer, key: &str) -> Option<http::Response<hyper::body::Incoming>> {
    let response = with_key(server, key, "GET", EVENTS).send_and_stream().await;
    match response.status().as_u16() {
        200 => Some(response),
        429 => {
            assert_eq!(response.headers()["retry-after"], "1");
            None
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn streams_of_one_owner_leave_room_for_others() {
    let server = start_with(FakeBackend::new(), |_| {}, |http| http.concurrent_streams = 8).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    let (_, one) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let mut streams = Vec::new();
    while let Some(stream) = open_stream(&server, &one).await {
        streams.push(stream);
    }
    assert_eq!(streams.len(), 6);
    let refused = with_key(&server, &one, "GET", EVENTS).send().await;
    assert_eq!(refused.expect(429)["message"], "limit of open streams of one owner reached (6)");
    // Requests are counted apart from streams.
    with_key(&server, &one, "GET", "/coracle/v1/sandboxes").send().await.expect(200);
    let others = open_stream(&server, &other).await;
    assert!(others.is_some());
    // The last one is the operator's.
    assert!(open_stream(&server, &other).await.is_none());
    let operators = open_stream(&server, OPERATOR_KEY).await;
    assert!(operators.is_some());
    // A client that goes away gives its slot back, as soon as the server notices.
    drop(streams);
    while open_stream(&server, &one).await.is_none() {
        tokio::task::yield_now().await;
    }
}

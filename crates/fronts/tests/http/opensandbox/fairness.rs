//! No owner, and no holder of the token of one sandbox, can take the slots of all others.

use serde_json::json;
use testkit::test_client::TestRequest;

use super::{create_body, id_of, inside, path_of};
use crate::setup::{issue_key, start_with_keys_and_agents, with_key};

#[tokio::test]
async fn token_of_a_sandbox_takes_only_slots_of_its_owner() {
    let server = start_with_keys_and_agents(|http| http.concurrent_streams = 4).await;
    let (_, one) = issue_key(&server, "one").await;
    let (_, other) = issue_key(&server, "other").await;
    let create = async |key: &str| {
        id_of(&with_key(&server, key, "POST", "/v1/sandboxes").json(&create_body()).send().await)
    };
    let (ones, others) = (create(&one).await, create(&other).await);
    let endpoint = format!("{}/endpoints/44772", path_of(&ones));
    let endpoint = with_key(&server, &one, "GET", &endpoint).send().await.expect(200);
    let token = endpoint["headers"]["X-EXECD-ACCESS-TOKEN"].as_str().unwrap().to_owned();
    let sleep = |request: TestRequest| request.json(&json!({"command": "sleep 60"}));
    let by_token = || {
        let request = server.request("POST", &inside(&ones, "command"));
        sleep(request.header("x-execd-access-token", &token))
    };
    let mut streams = Vec::new();
    for _ in 0..3 {
        let stream = by_token().send_and_stream().await;
        assert_eq!(stream.status(), 200);
        streams.push(stream);
    }
    let refused = by_token().send().await;
    let body = refused.expect(429);
    assert_eq!(body["code"], "TOO_MANY_REQUESTS");
    assert_eq!(body["message"], "limit of open streams of one owner reached (3)");
    assert_eq!(refused.header("retry-after"), Some("1"));
    let others = sleep(with_key(&server, &other, "POST", &inside(&others, "command")));
    assert_eq!(others.send_and_stream().await.status(), 200);
}

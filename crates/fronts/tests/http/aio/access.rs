//! Credentials of the sandbox API.

use serde_json::json;

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

#[tokio::test]
async fn address_with_a_code_needs_no_credentials() {
    let server = start_with_keys_and_agents(|settings| {
        let values = json!({"api_key": "k3y"}).as_object().unwrap().clone();
        settings.fronts.insert("aio".to_owned(), values);
    })
    .await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let context = sandbox.get("/v1/sandbox?api_key=wrong").await;
    assert_eq!(context.expect(200)["success"], true);
    assert_eq!(context.header("referrer-policy"), Some("no-referrer"));
    assert_eq!(sandbox.get("/auth").await.expect(200), json!({"status": "ok", "method": "none"}));
    let ticket = sandbox.request("POST", "/tickets").send().await;
    assert_eq!(ticket.header("cache-control"), Some("no-store"));
    let ticket = ticket.expect(200);
    assert_eq!(ticket["expires_in"], 30);
    assert_eq!(ticket["ticket"].as_str().unwrap().len(), 43);
}

//! Documents about the API of one sandbox.

use serde_json::{Value, json};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

#[tokio::test]
async fn documents_describe_the_api_below_its_address() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let document = sandbox.get("/v1/openapi.json").await;
    assert_eq!(document.header("content-type"), Some("application/json"));
    let paths = document.expect(200)["paths"].as_object().unwrap().clone();
    // Every described path without parameters exists.
    for (path, methods) in paths.iter().filter(|(path, _)| !path.contains('{')) {
        let method = methods.as_object().unwrap().keys().next().unwrap().to_ascii_uppercase();
        let response = sandbox.request(&method, path).body("[]").send().await;
        assert_ne!((response.status.as_u16(), response.text()), (404, NOT_FOUND), "{method} {path}");
        assert!(![405, 500, 501].contains(&response.status.as_u16()), "{method} {path}: {}", response.text());
    }
}

const NOT_FOUND: &str = r#"{"success":false,"message":"Not Found","data":null,"hint":null}"#;

#[tokio::test]
async fn pages_load_nothing_and_link_below_the_address() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for path in ["", "/", "/index.html", "/v1/docs"] {
        let page = sandbox.get(path).await;
        assert_eq!(page.status.as_u16(), 200, "{path}");
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
        assert!(!page.text().contains("<script") && !page.text().contains("://"), "{path}");
    }
    let home = sandbox.get("").await;
    for link in home.text().split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(link.starts_with(&sandbox.path), "{link}");
        assert_eq!(server.get(link).await.status.as_u16(), 200, "{link}");
    }
    let manual = sandbox.get("/llms.txt").await;
    assert_eq!(manual.header("content-type"), Some("text/plain; charset=utf-8"));
    assert!(manual.text().contains("- `POST /v1/shell/exec`: Run a command in a session\n"));
    assert!(!manual.text().contains("/v1/browser"));
}

#[tokio::test]
async fn parts_that_do_not_exist_answer_501_at_all_their_paths() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for part in ["/vnc", "/cdp", "/code-server", "/jupyter"] {
        for path in ["", "/", "/index.html", "/a/b"] {
            for method in ["GET", "POST"] {
                let response = sandbox.request(method, &format!("{part}{path}")).send().await;
                let body = response.expect(501);
                assert_eq!((&body["success"], &body["data"]), (&json!(false), &Value::Null), "{part}{path}");
                assert!(!body["message"].as_str().unwrap().is_empty(), "{part}{path}");
            }
        }
    }
    sandbox.get("/vncs").await.expect(404);
}

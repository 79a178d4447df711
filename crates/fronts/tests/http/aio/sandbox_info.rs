//! What a sandbox tells about itself.

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

#[tokio::test]
async fn j01_context_describes_the_sandbox() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for _ in 0..2 {
        let response = sandbox.get("/v1/sandbox").await;
        let context = response.expect(200);
        assert_eq!(
            (&context["success"], &context["home_dir"]),
            (&true.into(), &"/home/gem".into()),
            "{context}"
        );
        assert_eq!(context["detail"]["system"]["os"], "Linux");
        assert!(
            context["detail"]["runtime"]["python"][0]["ver"].as_str().unwrap().starts_with('3'),
            "{context}"
        );
        assert!(context["data"].as_str().unwrap().contains("Python: 3"), "{context}");
    }
}

#[tokio::test]
async fn python_packages_are_listed() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let listed = sandbox.get("/v1/sandbox/packages/python").await;
    assert!(listed.expect(200)["data"].is_array(), "{}", listed.text());
}

//! The provisioner, and addresses. The numbers are those of DeerFlow's acceptance list.

use std::time::Duration;

use domain::{EndCause, MountSource, NetworkAccess, Owner, Phase, SandboxId};
use fronts::HttpSettings;
use futures_util::future::join_all;
use serde_json::{Value, json};
use service::FeedItem;
use testkit::fake_backend::FakeBackend;
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;
use testkit::unjailed_agent::example_program;

use super::{AioSandbox, path_of_url, provision};
use crate::setup::{OPERATOR_KEY, issue_key, start, start_with, start_with_keys_and_agents};

/// A server with these settings of the provisioner.
async fn start_with_settings(values: Value) -> TestServer {
    start_with_keys_and_agents(|http| configure(http, values)).await
}

fn configure(http: &mut HttpSettings, values: Value) {
    http.fronts.insert("deerflow".to_owned(), values.as_object().unwrap().clone());
}

async fn post(server: &TestServer, body: Value) -> TestResponse {
    provision(server, "POST", "/api/sandboxes").json(&body).send().await
}

async fn get(server: &TestServer, path: &str) -> TestResponse {
    provision(server, "GET", path).send().await
}

async fn create(server: &TestServer, id: &str) -> Value {
    post(server, json!({"sandbox_id": id})).await.expect(200)
}

async fn listed_ids(server: &TestServer) -> Vec<String> {
    let list = get(server, "/api/sandboxes").await.expect(200);
    let sandboxes = list["sandboxes"].as_array().unwrap();
    assert_eq!(list["count"], sandboxes.len());
    sandboxes.iter().map(|one| one["sandbox_id"].as_str().unwrap().to_owned()).collect()
}

/// Kills the sandbox of a response, and returns when the server knows.
async fn crash(server: &TestServer, sandbox: &Value) {
    let id = SandboxId::parse(sandbox["container_id"].as_str().unwrap()).unwrap();
    let mut events = server.service.follow_events(None, None);
    server.backend.kill(&id, EndCause::AgentDied);
    loop {
        let items = events.next_batch().await.unwrap();
        let has_failed = |item: &FeedItem| match item {
            FeedItem::Event(event) => event.sandbox == id && matches!(event.phase, Phase::Failed(_)),
            _ => false,
        };
        if items.iter().any(has_failed) {
            return;
        }
    }
}

/// Asks the API of a sandbox by the path of its address.
async fn ask_path(server: &TestServer, path: &str) -> TestResponse {
    server.get(&format!("{path}/v1/browser/info")).await
}

fn path_of(sandbox: &Value) -> String {
    path_of_url(sandbox["sandbox_url"].as_str().unwrap())
}

#[tokio::test]
async fn n124_every_route_needs_a_key() {
    let keyless = start().await;
    let server = start_with_keys_and_agents(|_| {}).await;
    for (method, path) in [
        ("GET", "/api/sandboxes"),
        ("POST", "/api/sandboxes"),
        ("GET", "/api/capabilities"),
        ("GET", "/api/sandboxes/a/presence"),
        ("DELETE", "/api/sandboxes/a"),
    ] {
        for response in [
            keyless.request(method, path).header("x-api-key", "any").send().await,
            server.request(method, path).send().await,
            server.request(method, path).header("x-api-key", "wrong").send().await,
            server.request(method, path).header("x-api-key", "schlüssel").send().await,
        ] {
            assert_eq!((response.status.as_u16(), response.text()), (401, "Unauthorized"), "{method} {path}");
        }
    }
}

#[tokio::test]
async fn n110_response_describes_the_sandbox() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let body = json!({
        "sandbox_id": "0123456789abcdef", "thread_id": "t-1", "user_id": "ann", "include_legacy_skills": true,
        "provision_lark_cli_runtime": true, "provision_lark_cli_broker": false, "max_shell_sessions": 7,
        "extra_mounts": [{"host_path": "/x", "container_path": "/mnt/acp-workspace", "read_only": true}],
    });
    let created = post(&server, body.clone()).await.expect(200);
    assert_eq!(created["sandbox_id"], "0123456789abcdef");
    assert_eq!((&created["user_id"], &created["thread_id"]), (&json!("ann"), &json!("t-1")));
    assert_eq!((&created["status"], &created["max_shell_sessions"]), (&json!("Running"), &json!(7)));
    assert_eq!(created["lark_cli_broker"], false);
    assert!(created["container_id"].is_string());
    assert_eq!(post(&server, body).await.expect(200), created);
    assert_eq!(get(&server, "/api/sandboxes/0123456789abcdef").await.expect(200), created);
    assert_eq!(get(&server, "/api/sandboxes").await.expect(200)["sandboxes"], json!([created]));
    assert_eq!(server.backend.times_asked_to("create"), 1);
    ask_path(&server, &path_of(&created)).await.expect(501);
}

#[tokio::test]
async fn n111_thread_id_may_be_null() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let created = post(&server, json!({"sandbox_id": "a", "thread_id": null})).await.expect(200);
    assert_eq!((&created["user_id"], &created["thread_id"]), (&json!("default"), &Value::Null));
    assert_eq!(created["max_shell_sessions"], 50);
}

#[tokio::test]
async fn n119_n126_refused_requests_create_nothing() {
    let server = start_with_settings(json!({"state_root": "/srv/flow", "max_shell_sessions": 9})).await;
    let mount = |path: &str| json!([{"host_path": path, "container_path": "/mnt/skills/custom"}]);
    for (body, status) in [
        (json!({}), 422),
        (json!({"sandbox_id": "a.b"}), 422),
        (json!({"sandbox_id": "a", "thread_id": "../escape"}), 422),
        (json!({"sandbox_id": "a", "user_id": "a/b"}), 422),
        (json!({"sandbox_id": "a", "max_shell_sessions": 0}), 422),
        (json!({"sandbox_id": "a", "max_shell_sessions": 10}), 400),
        (json!({"sandbox_id": "a", "skills_container_path": "/"}), 400),
        (json!({"sandbox_id": "a", "extra_mounts": mount("/etc")}), 400),
        (json!({"sandbox_id": "a", "extra_mounts": mount("/srv/flow/../etc")}), 400),
        (json!({"sandbox_id": "a", "extra_mounts": mount("/srv/flow/users/bob/x")}), 400),
        (json!({"sandbox_id": "a", "provision_lark_cli_broker": true}), 503),
    ] {
        let response = post(&server, body.clone()).await;
        assert!(!response.expect(status)["detail"].is_null(), "{body}");
        let refresh = response.header("x-deerflow-capability-refresh");
        assert_eq!(refresh, (status == 503).then_some("lark-broker"), "{body}");
    }
    let many = post(&server, json!({"sandbox_id": "a", "max_shell_sessions": 10})).await.expect(400);
    assert!(many["detail"].as_str().unwrap().contains("maximum of 9"), "{many}");
    let text = provision(&server, "POST", "/api/sandboxes").body("no json").send().await;
    text.expect(422);
    assert!(!server.backend.was_asked_to("create asked"));
    assert_eq!(listed_ids(&server).await, [""; 0]);
}

#[tokio::test]
async fn existing_sandbox_with_too_few_sessions_is_a_conflict() {
    let server = start_with_keys_and_agents(|_| {}).await;
    post(&server, json!({"sandbox_id": "a", "max_shell_sessions": 5})).await.expect(200);
    for (count, status) in [(4, 200), (5, 200), (6, 409)] {
        let again = post(&server, json!({"sandbox_id": "a", "max_shell_sessions": count})).await;
        let body = again.expect(status);
        assert_eq!(body["detail"].is_string(), status == 409, "{body}");
    }
    let other = post(&server, json!({"sandbox_id": "a", "user_id": "bob"})).await;
    assert!(other.expect(409)["detail"].as_str().unwrap().contains("another user"));
}

#[tokio::test]
async fn n116_unknown_sandbox_is_absent() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let missing = get(&server, "/api/sandboxes/none").await.expect(404);
    assert_eq!(missing, json!({"detail": "Sandbox 'none' not found"}));
    let presence = get(&server, "/api/sandboxes/none/presence").await.expect(200);
    assert_eq!(presence, json!({"sandbox_id": "none", "exists": false, "container_id": null}));
}

#[tokio::test]
async fn n117_delete_is_idempotent_and_frees_the_id() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let made = create(&server, "a").await;
    for _ in 0..2 {
        let deleted = provision(&server, "DELETE", "/api/sandboxes/a").send().await.expect(200);
        assert_eq!(deleted, json!({"ok": true, "sandbox_id": "a"}));
    }
    get(&server, "/api/sandboxes/a").await.expect(404);
    let next = create(&server, "a").await;
    assert_ne!(made["container_id"], next["container_id"]);
    assert_ne!(made["sandbox_url"], next["sandbox_url"]);
}

#[tokio::test]
async fn failed_delete_is_reported_and_keeps_no_id() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let made = create(&server, "a").await;
    server.backend.fail("destroy", 1);
    let failed = provision(&server, "DELETE", "/api/sandboxes/a").send().await.expect(500);
    assert!(failed["detail"].as_str().unwrap().starts_with("Partial cleanup: "), "{failed}");
    get(&server, "/api/sandboxes/a").await.expect(404);
    ask_path(&server, &path_of(&made)).await.expect(404);
    assert_ne!(create(&server, "a").await["container_id"], made["container_id"]);
}

#[tokio::test]
async fn sandbox_that_is_being_removed_is_shown_as_terminating() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let made = create(&server, "a").await;
    server.backend.destroy_gate.forget_permits(usize::MAX);
    let mut events = server.service.follow_events(None, None);
    let delete = provision(&server, "DELETE", "/api/sandboxes/a");
    let delete = tokio::spawn(delete.send());
    events.next_batch().await.unwrap();
    let list = get(&server, "/api/sandboxes").await.expect(200);
    assert_eq!(list["sandboxes"][0]["status"], "Terminating");
    get(&server, "/api/sandboxes/a").await.expect(404);
    let presence = get(&server, "/api/sandboxes/a/presence").await.expect(200);
    assert_eq!((&presence["exists"], &presence["container_id"]), (&json!(true), &made["container_id"]));
    let refused = post(&server, json!({"sandbox_id": "a"})).await.expect(409);
    assert!(refused["detail"].as_str().unwrap().contains("being removed"), "{refused}");
    ask_path(&server, &path_of(&made)).await.expect(404);
    server.backend.destroy_gate.add_permits(1);
    delete.await.unwrap().expect(200);
    create(&server, "a").await;
}

#[tokio::test]
async fn n120_j25_many_creates_of_one_id_make_one_sandbox() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let made = join_all((0..50).map(|_| create(&server, "a"))).await;
    assert!(made.iter().all(|one| *one == made[0]), "{made:?}");
    assert_eq!(server.backend.times_asked_to("create"), 1);
    assert_eq!(listed_ids(&server).await, ["a"]);
}

#[tokio::test]
async fn j23_crashed_sandbox_is_absent_until_it_is_created_again() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let made = create(&server, "a").await;
    crash(&server, &made).await;
    get(&server, "/api/sandboxes/a").await.expect(404);
    assert_eq!(listed_ids(&server).await, [""; 0]);
    let presence = get(&server, "/api/sandboxes/a/presence").await.expect(200);
    assert_eq!((&presence["exists"], &presence["container_id"]), (&json!(true), &made["container_id"]));
    let again = create(&server, "a").await;
    assert_ne!(again["container_id"], made["container_id"]);
    assert_eq!(again["sandbox_url"], made["sandbox_url"]);
    ask_path(&server, &path_of(&made)).await.expect(501);
    assert_eq!(listed_ids(&server).await, ["a"]);
}

#[tokio::test]
async fn request_to_a_crashed_sandbox_is_served_by_its_successor() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let body = json!({"sandbox_id": "a", "user_id": "ann", "thread_id": "t", "max_shell_sessions": 3});
    let made = post(&server, body).await.expect(200);
    crash(&server, &made).await;
    let path = path_of(&made);
    let responses = join_all((0..20).map(|_| ask_path(&server, &path))).await;
    for response in &responses {
        response.expect(501);
    }
    assert_eq!(server.backend.times_asked_to("create"), 2, "one successor for all");
    let successor = get(&server, "/api/sandboxes/a").await.expect(200);
    assert_ne!(successor["container_id"], made["container_id"]);
    for field in ["sandbox_url", "user_id", "thread_id", "max_shell_sessions"] {
        assert_eq!(successor[field], made[field], "{field}");
    }
    let id = SandboxId::parse(successor["container_id"].as_str().unwrap()).unwrap();
    let sandbox = server.service.sandbox(&Owner::operator(), &id).unwrap();
    assert_eq!(sandbox.lifecycle_events(1)[0].sandbox, id);
    assert_eq!(sandbox.lifecycle_events(10)[0].cause, Some(EndCause::Replaced));
}

#[tokio::test]
async fn create_reports_a_replacement_and_a_substituted_image() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let change = |config: &mut service::ServiceConfig| {
        config.aliases.table = vec![("alias of other".to_owned(), "other".to_owned())];
    };
    let server =
        start_with(backend, change, |http| configure(http, json!({"image": "alias of other"}))).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    let reported = |response: &TestResponse| {
        let header = |name| response.header(name).map(str::to_owned);
        (header("coracle-restarted"), header("coracle-restart-cause"), header("coracle-image-stand-in"))
    };
    let create = || post(&server, json!({"sandbox_id": "a"}));
    let made = create().await;
    let (restarted, cause, stand_in) = reported(&made);
    assert_eq!((restarted, cause), (None, None));
    assert!(stand_in.as_ref().is_some_and(|text| text.contains("alias of other")), "{stand_in:?}");
    crash(&server, &made.expect(200)).await;
    let replaced = (Some("replace".to_owned()), Some("agent died".to_owned()), stand_in.clone());
    assert_eq!(reported(&create().await), replaced);
    assert_eq!(reported(&create().await), (None, None, stand_in), "it is alive again");
}

#[tokio::test]
async fn crashed_sandbox_stays_absent_without_automatic_restart() {
    let server = start_with_settings(json!({"auto_restart": false})).await;
    let made = create(&server, "a").await;
    crash(&server, &made).await;
    let refused = ask_path(&server, &path_of(&made)).await.expect(404);
    assert_eq!((&refused["success"], &refused["message"]), (&json!(false), &json!("Not Found")));
    assert_eq!(create(&server, "a").await["sandbox_url"], made["sandbox_url"]);
    ask_path(&server, &path_of(&made)).await.expect(501);
}

#[tokio::test]
async fn removed_sandboxes_are_never_revived_by_their_address() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let deleted = create(&server, "deleted").await;
    crash(&server, &deleted).await;
    provision(&server, "DELETE", "/api/sandboxes/deleted").send().await.expect(200);
    ask_path(&server, &path_of(&deleted)).await.expect(404);
    let evicted = create(&server, "evicted").await;
    let id = SandboxId::parse(evicted["container_id"].as_str().unwrap()).unwrap();
    server.service.sandbox(&Owner::operator(), &id).unwrap().destroy().await.unwrap();
    ask_path(&server, &path_of(&evicted)).await.expect(404);
    let again = create(&server, "evicted").await;
    assert_ne!(again["sandbox_url"], evicted["sandbox_url"]);
    assert_eq!(server.backend.times_asked_to("create"), 3);
}

#[tokio::test]
async fn soft_limit_evicts_the_sandbox_that_was_unused_for_longest() {
    let backend = FakeBackend::with_agents(example_program("bare-agent"));
    let change = |config: &mut service::ServiceConfig| {
        config.soft_sandboxes = Some(2);
        config.park_after = Duration::ZERO;
    };
    let server = start_with(backend, change, |_| {}).await;
    server.service.set_operator_key(Some(OPERATOR_KEY));
    let first = create(&server, "first").await;
    create(&server, "second").await;
    create(&server, "third").await;
    assert_eq!(listed_ids(&server).await, ["second", "third"]);
    ask_path(&server, &path_of(&first)).await.expect(404);
}

#[tokio::test]
async fn n121_guest_has_its_user_and_all_directories() {
    let settings =
        json!({"uid": 1001, "gid": 1002, "image": "other", "network": "on", "memory": "64m", "pids": 9});
    let server = start_with_settings(settings).await;
    post(&server, json!({"sandbox_id": "a", "skills_container_path": "/opt/skills"})).await.expect(200);
    let spec = server.backend.newest_spec().unwrap().spec;
    let user = &spec.guest.users[0];
    assert_eq!((user.name.as_str(), user.uid, user.gid), ("gem", 1001, 1002));
    assert_eq!(
        (spec.guest.default_user.as_str(), spec.guest.default_directory.as_str()),
        ("gem", "/home/gem")
    );
    let owned = |owner: &str| -> Vec<&str> {
        let own = spec.guest.directories.iter().filter(|(_, of)| of == owner);
        own.map(|(path, _)| path.as_str()).collect()
    };
    let expected = [
        "/home/gem",
        "/mnt/user-data",
        "/mnt/user-data/workspace",
        "/mnt/user-data/uploads",
        "/mnt/user-data/outputs",
    ];
    assert_eq!(owned("gem"), expected);
    let skills = ["public", "custom", "legacy", "integrations"].map(|name| format!("/opt/skills/{name}"));
    assert_eq!(owned("root"), skills);
    assert_eq!((spec.image.as_str(), spec.network), ("real other", NetworkAccess::On));
    assert_eq!((spec.resources.memory.map(|bytes| bytes.0), spec.resources.pids), (Some(64 << 20), Some(9)));
    assert!(spec.mounts.is_empty());
}

#[tokio::test]
async fn n127_host_directories_are_mounted_for_one_owner() {
    let server = start_with_settings(json!({"user_data": "host", "state_root": "/srv/flow"})).await;
    let body = json!({"sandbox_id": "a", "user_id": "ann", "thread_id": "t"});
    post(&server, body.clone()).await.expect(200);
    let mounts = server.backend.newest_spec().unwrap().spec.mounts;
    let reserved = |source: &MountSource| {
        matches!(source, MountSource::Reserved { purpose, path }
            if purpose == "deerflow" && path.starts_with("/srv/flow"))
    };
    assert_eq!((mounts.len(), mounts.iter().all(|mount| reserved(&mount.source))), (8, true));
    let (_, key) = issue_key(&server, "team").await;
    let other = server.request("POST", "/api/sandboxes").header("x-api-key", &key).json(&body).send().await;
    other.expect(200);
    let mounts = server.backend.newest_spec().unwrap().spec.mounts;
    assert!(
        matches!(mounts.as_slice(), [mount] if matches!(mount.source, MountSource::Volume(_))),
        "{mounts:?}"
    );
}

#[tokio::test]
async fn volume_of_a_conversation_outlives_its_sandboxes() {
    let server = start_with_settings(json!({"user_data": "volume"})).await;
    let volume = |server: &TestServer| match &server.backend.newest_spec().unwrap().spec.mounts[..] {
        [mount] => {
            assert_eq!(mount.target, "/mnt/user-data");
            mount.source.clone()
        }
        mounts => panic!("{mounts:?}"),
    };
    let body = |id: &str, thread: &str| json!({"sandbox_id": id, "user_id": "ann", "thread_id": thread});
    let made = post(&server, body("a", "t")).await.expect(200);
    let first = volume(&server);
    crash(&server, &made).await;
    ask_path(&server, &path_of(&made)).await.expect(501);
    assert_eq!(volume(&server), first, "after a crash");
    provision(&server, "DELETE", "/api/sandboxes/a").send().await.expect(200);
    post(&server, body("b", "t")).await.expect(200);
    assert_eq!(volume(&server), first, "after a removal, under another id");
    post(&server, body("c", "u")).await.expect(200);
    assert_ne!(volume(&server), first, "another conversation");
}

#[tokio::test]
async fn address_opens_its_sandbox_until_it_is_deleted() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let again = AioSandbox::create(&server, "one").await;
    assert_eq!(sandbox.path, again.path);
    sandbox.get("/v1/browser/info").await.expect(501);
    assert_eq!(sandbox.get("/v1/unknown").await.expect(404)["message"], "Not Found");
    let wrong = format!("{}0", &sandbox.path[..sandbox.path.len() - 1]);
    let wrong = if wrong == sandbox.path { format!("{}1", &wrong[..wrong.len() - 1]) } else { wrong };
    let refused = server.get(&format!("{wrong}/v1/browser/info")).await;
    assert_eq!(refused.expect(404), sandbox.get("/v1/unknown").await.expect(404));
    provision(&server, "DELETE", "/api/sandboxes/one").send().await.expect(200);
    sandbox.get("/v1/browser/info").await.expect(404);
    let successor = AioSandbox::create(&server, "one").await;
    assert_ne!(sandbox.path, successor.path);
    sandbox.get("/v1/browser/info").await.expect(404);
    successor.get("/v1/browser/info").await.expect(501);
}

#[tokio::test]
async fn owners_have_ids_of_their_own() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let (_, key) = issue_key(&server, "team").await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let created = server.request("POST", "/api/sandboxes").header("x-api-key", &key);
    let created = created.json(&json!({"sandbox_id": "one"})).send().await;
    assert!(!created.expect(200)["sandbox_url"].as_str().unwrap().ends_with(&sandbox.path));
    let listed = provision(&server, "GET", "/api/sandboxes").send().await;
    assert_eq!(listed.expect(200)["count"], 1);
}

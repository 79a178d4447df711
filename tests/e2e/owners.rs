//! Owners: each has its own key and quota, and no access to others' resources.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use e2e::binary::ProgramCopies;
use e2e::http::HttpClient;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

/// A server with an operator and, for tenant `small`, a quota of one sandbox.
struct Tenants {
    server: TestServer,
    _config: tempfile::NamedTempFile,
}

impl Tenants {
    fn start() -> Self {
        let config = tempfile::NamedTempFile::new().expect("the temporary directory can be written");
        let text = "[owners.small]\nsandboxes = 1\n[owners.\"*\"]\nmemory = \"8g\"\n";
        std::fs::write(config.path(), text).expect("our own file");
        let path = config.path().to_str().expect("it is UTF-8");
        let start = ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).argument("--config").argument(path);
        Self { server: start.start(), _config: config }
    }

    fn client(&self, key: &str) -> HttpClient {
        let mut client = self.server.client();
        client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
        client
    }

    /// Runs `coracle --json key ...` as the operator.
    fn key(&self, words: &[&str]) -> Value {
        let url = format!("http://{}", self.server.address());
        let mut command = ProgramCopies::shared().command();
        command.args(["--json", "--url", &url, "key"]).args(words).env("CORACLE_API_KEY", OPERATOR);
        let output = command.output().expect("the binary runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("it is JSON")
    }

    fn tenant(&self, owner: &str) -> HttpClient {
        let made = self.key(&["create", owner]);
        self.client(made["key"].as_str().expect("it is shown once"))
    }
}

fn create_request() -> Value {
    json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]})
}

fn create(client: &mut HttpClient) -> String {
    let answer = client.post("/v1/sandboxes", &create_request()).expect("the server answers");
    assert_eq!(answer.status, 202, "{}", answer.text());
    answer.json()["id"].as_str().expect("it has an id").to_owned()
}

fn delete(client: &mut HttpClient, id: &str) {
    assert_eq!(client.delete(&format!("/v1/sandboxes/{id}")).expect("the server answers").status, 204);
}

#[test]
fn foreign_sandbox_is_not_found() {
    let tenants = Tenants::start();
    let (mut one, mut other) = (tenants.tenant("one"), tenants.tenant("other"));
    let id = create(&mut one);
    let execd = format!("/v1/sandboxes/{id}/proxy/44772");
    for (method, path) in [
        ("GET", format!("/v1/sandboxes/{id}")),
        ("DELETE", format!("/v1/sandboxes/{id}")),
        ("PATCH", format!("/v1/sandboxes/{id}/metadata")),
        ("POST", format!("/v1/sandboxes/{id}/renew-expiration")),
        ("POST", format!("/v1/sandboxes/{id}/pause")),
        ("POST", format!("/v1/sandboxes/{id}/resume")),
        ("GET", format!("/v1/sandboxes/{id}/endpoints/44772")),
        ("GET", format!("/v1/sandboxes/{id}/endpoints/8000")),
        ("POST", format!("{execd}/command")),
        ("GET", format!("{execd}/files/info?path=/etc/passwd")),
        ("GET", format!("{execd}/files/download?path=/etc/passwd")),
        ("POST", format!("{execd}/session")),
        ("GET", format!("{execd}/ping")),
        ("GET", format!("/v1/sandboxes/{id}/proxy/18080/policy")),
        ("GET", format!("/v1/sandboxes/{id}/proxy/8000/")),
        ("GET", format!("/coracle/v1/sandboxes/{id}")),
    ] {
        // The bodies are valid for each route, so that only the owner is wrong.
        let body = match path.rsplit('/').next() {
            Some("renew-expiration") => json!({"expiresAt": "2999-01-01T00:00:00Z"}),
            Some("command") => json!({"command": "true"}),
            _ => json!({}),
        }
        .to_string();
        let ask = |client: &mut HttpClient, path: &str| {
            client.request(method, path, "application/json", body.as_bytes()).expect("the server answers")
        };
        let foreign = ask(&mut other, &path);
        assert_eq!(foreign.status, 404, "{method} {path}: {}", foreign.text());
        // The response is the same as for an id that never existed.
        let never = ask(&mut other, &path.replace(&id, "aaaaaaaaaaaaaaaaaaaa"));
        assert_eq!(never.status, 404, "{method} {path}: {}", never.text());
        assert_eq!(never.text().replace("aaaaaaaaaaaaaaaaaaaa", &id), foreign.text(), "{method} {path}");
    }
    let mut secure = create_request();
    secure["secureAccess"] = json!(true);
    let answer = one.post("/v1/sandboxes", &secure).expect("the server answers");
    let guarded = answer.json()["id"].as_str().expect("an id is a text").to_owned();
    for path in ["44772/ping", "18080/policy", "8000/"] {
        let path = format!("/v1/sandboxes/{guarded}/proxy/{path}");
        assert_eq!(one.get(&path).expect("the server answers").status, 401, "{path}");
        assert_eq!(other.get(&path).expect("the server answers").status, 404, "{path}");
    }
    delete(&mut one, &guarded);
    let listed = |client: &mut HttpClient| client.get("/v1/sandboxes").expect("the server answers").json();
    assert_eq!(listed(&mut other)["items"], json!([]));
    assert_eq!(listed(&mut one)["items"][0]["id"], json!(id));
    delete(&mut one, &id);
}

#[test]
fn the_same_key_of_two_owners_leads_to_two_sandboxes() {
    let tenants = Tenants::start();
    let mut ids = Vec::new();
    for owner in ["one", "other"] {
        let mut client = tenants.tenant(owner);
        let mut named = create_request();
        named["extensions"] = json!({"coracle.key": "mine"});
        let answer = client.post("/v1/sandboxes", &named).expect("the server answers");
        ids.push((answer.json()["id"].as_str().expect("it has an id").to_owned(), client));
    }
    assert_ne!(ids[0].0, ids[1].0);
    for (id, client) in &mut ids {
        delete(client, id);
    }
}

#[test]
fn owner_over_quota_is_asked_to_retry_later() {
    let tenants = Tenants::start();
    let (mut small, mut other) = (tenants.tenant("small"), tenants.tenant("other"));
    let first = create(&mut small);
    let refused = small.post("/v1/sandboxes", &create_request()).expect("the server answers");
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{}", refused.text());
    let second = create(&mut other);
    delete(&mut small, &first);
    let again = create(&mut small);
    delete(&mut small, &again);
    delete(&mut other, &second);
}

#[test]
fn only_operators_manage_keys() {
    let tenants = Tenants::start();
    let made = tenants.key(&["create", "one", "--expires", "30d"]);
    let (id, key) = (made["id"].as_str().expect("an id"), made["key"].as_str().expect("a key"));
    assert!(made["expiresAt"].is_string(), "{made}");
    let mut one = tenants.client(key);
    let answer = one.post("/coracle/v1/keys", &json!({"owner": "default"})).expect("the server answers");
    assert_eq!(answer.status, 403, "{}", answer.text());
    for path in ["/coracle/v1/keys", "/metrics"] {
        assert_eq!(one.get(path).expect("the server answers").status, 403, "{path}");
    }
    let listed = tenants.key(&["ls"]);
    assert_eq!(listed[0]["owner"], json!("one"), "{listed}");
    assert!(!listed.to_string().contains(key), "a key is shown once");
    assert_eq!(one.get("/v1/sandboxes").expect("the server answers").status, 200);
    tenants.key(&["rm", id]);
    assert_eq!(one.get("/v1/sandboxes").expect("the server answers").status, 401);
    assert!(!tenants.server.log().contains(key), "a key is in the log");
    // A server without a key issues no keys, since then no client could manage it any more.
    let keyless = TestServer::start();
    let answer = keyless.client().post("/coracle/v1/keys", &json!({"owner": "one"})).expect("it answers");
    assert_eq!((answer.status, answer.json()["code"].as_str()), (409, Some("NO_OPERATOR_KEY")));
}

#[test]
fn revoked_key_loses_its_open_streams() {
    let tenants = Tenants::start();
    let made = tenants.key(&["create", "one"]);
    let url = format!("http://{}", tenants.server.address());
    let mut command = ProgramCopies::shared().command();
    command.args(["--json", "--url", &url, "events", "-f"]);
    command.env("CORACLE_API_KEY", made["key"].as_str().expect("a key")).stdout(Stdio::piped());
    let mut following = command.spawn().expect("the binary runs");
    let mut lines = BufReader::new(following.stdout.take().expect("it is a pipe")).lines();
    let mut one = tenants.tenant("one");
    let id = create(&mut one);
    for phase in ["starting", "running"] {
        let line = lines.next().expect("the stream continues").expect("it is text");
        assert!(line.contains(phase), "{line}");
    }
    tenants.key(&["rm", made["id"].as_str().expect("an id")]);
    delete(&mut one, &id);
    let next = lines.next();
    drop(tenants);
    following.wait().expect("it is our child");
    assert!(next.is_none(), "{next:?}");
}

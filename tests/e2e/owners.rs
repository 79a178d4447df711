//! The keys of owners, as the command line manages them. What owners see of each other is tested with the
//! fronts.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use e2e::binary::ProgramCopies;
use e2e::http::HttpClient;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

const OPERATOR: &str = "the-operators-own-key";

/// A server with an operator.
struct Tenants {
    server: TestServer,
}

impl Tenants {
    fn start() -> Self {
        Self { server: ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).start() }
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

fn create(client: &mut HttpClient) -> String {
    let request =
        json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]});
    let answer = client.post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(answer.status, 202, "{}", answer.text());
    answer.json()["id"].as_str().expect("it has an id").to_owned()
}

fn delete(client: &mut HttpClient, id: &str) {
    assert_eq!(client.delete(&format!("/v1/sandboxes/{id}")).expect("the server answers").status, 204);
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

//! Ports of sandboxes on their own hosts and by header, and signed addresses.

use std::io::Read;
use std::time::SystemTime;

use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::http::{HttpClient, HttpResponse};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer, resident_memory};
use serde_json::{Value, json};

const KEY: &str = "key-of-the-gateway-tests";
const GIBIBYTE: u64 = 1 << 30;
/// How much memory buffers may take.
const MAX_MEMORY_GROWTH: u64 = 48 << 20;

fn wildcard() -> ServerBuilder {
    ServerBuilder::new().env("CORACLE_GATEWAY_MODE", "wildcard").env("CORACLE_GATEWAY_DOMAIN", "boxes.test")
}

/// A sandbox in which a service listens on port 7000.
fn serving(server: &TestServer) -> RemoteSandbox {
    let mut sandbox = server.create_sandbox();
    sandbox.upload(
        "/root/service",
        &std::fs::read(ProgramCopies::shared().attacks_path()).expect("it was built"),
    );
    let service = sandbox.start_background("exec /root/service serve 7000");
    e2e::eventually("the service listens", || sandbox.logs(&service).contains("listening"));
    sandbox
}

fn ask(server: &TestServer, host: &str, path: &str, headers: &[(&str, &str)]) -> HttpResponse {
    let mut client = server.client().with_host(host);
    let headers: Vec<_> =
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    client.set_headers(&headers);
    client.get(path).expect("the server answers")
}

fn endpoint(server: &TestServer, query: &str) -> Value {
    let mut client = keyed(server);
    let answer = client.get(query).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn keyed(server: &TestServer) -> HttpClient {
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), KEY.to_owned())]);
    client
}

fn expiry_soon() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    now.as_secs() + 600
}

#[test]
fn sandbox_host_without_a_key_isolates_its_pages() {
    let server = wildcard().start();
    let one = serving(&server);
    let other = serving(&server);
    let (here, there) = (format!("{}-7000.boxes.test", one.id), format!("{}-7000.boxes.test", other.id));
    let answer = ask(&server, &here, "/v1/sandboxes", &[]);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.text().starts_with("GET /v1/sandboxes HTTP/1.1\n"), "the API answered: {}", answer.text());
    // A cookie stays with the host that set it.
    assert_eq!(answer.header("set-cookie"), Some("a=1"));
    let origin = format!("http://{here}");
    for (host, path, status) in [
        (here.as_str(), "/", 200),
        // A page may not act on another sandbox or on the API, under any name.
        (there.as_str(), "/", 403),
        (server.address(), "/v1/sandboxes", 403),
        ("boxes.test", "/v1/sandboxes", 403),
        ("evil.example", "/", 403),
    ] {
        let answer = ask(&server, host, path, &[("Origin", &origin)]);
        assert_eq!(answer.status, status, "{host}{path}: {}", answer.text());
    }
    // A path that is open elsewhere is not open here either.
    assert_eq!(ask(&server, &there, "/health", &[("Origin", &origin)]).status, 403);
    let execution = format!("{}-44772.boxes.test", one.id);
    assert_eq!(ask(&server, &execution, "/ping", &[]).status, 200);
    let page = [("Origin", format!("http://{execution}"))];
    let page: Vec<_> = page.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(ask(&server, &execution, "/ping", &page).status, 403);
}

#[test]
fn a_gibibyte_passes_a_port_both_ways_in_flat_memory() {
    let server = wildcard().start();
    let sandbox = serving(&server);
    let before = resident_memory(server.pid()) + host::agent_memory(&sandbox.id);
    let mut highest = before;
    let mut look = || highest = highest.max(resident_memory(server.pid()) + host::agent_memory(&sandbox.id));
    let name = format!("{}-7000.boxes.test", sandbox.id);
    let mut down = server.client().with_host(&name);
    let mut answer =
        down.start_request("GET", &format!("/zeros/{GIBIBYTE}"), "", &[]).expect("the server answers");
    let (mut taken, mut piece) = (0_u64, vec![0; 1 << 20]);
    loop {
        match answer.body.read(&mut piece).expect("the service continues") {
            0 => break,
            count => taken += count as u64,
        }
        if (taken >> 20).is_multiple_of(64) {
            look();
        }
    }
    assert_eq!(taken, GIBIBYTE);
    let (mut zeros, mut pieces) = (std::io::repeat(0).take(GIBIBYTE), 0_u64);
    let mut up = server.client().with_host(&name);
    let answer = up.send_streamed("/count", "application/octet-stream", GIBIBYTE, &mut zeros, || {
        pieces += 1;
        if pieces.is_multiple_of(256) {
            look();
        }
    });
    assert_eq!(answer.expect("the service answers").text(), GIBIBYTE.to_string());
    assert!(highest < before + MAX_MEMORY_GROWTH, "memory rose from {before} to {highest} bytes");
}

#[test]
fn silent_service_times_out_and_slow_client_does_not() {
    let server = wildcard().env("CORACLE_ANSWER_TIMEOUT", "3s").start();
    let sandbox = serving(&server);
    let name = format!("{}-7000.boxes.test", sandbox.id);
    let answer = ask(&server, &name, "/silent", &[]);
    assert_eq!(
        (answer.status, &answer.json()["code"]),
        (504, &json!("BACKEND_TIMEOUT")),
        "{}",
        answer.text()
    );
    // Each piece arrives within the timeout, and all of them together take longer.
    let mut slow = SlowReader { left: 6 };
    let answer = server.client().with_host(&name).send_streamed("/count", "text/plain", 6, &mut slow, || {});
    assert_eq!(answer.expect("the service answers").text(), "6");
}

/// A byte every 700 ms.
struct SlowReader {
    left: usize,
}

impl Read for SlowReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            return Ok(0);
        }
        self.left -= 1;
        // There is no event to wait for: slowness is what is tested.
        std::thread::park_timeout(std::time::Duration::from_millis(700));
        buffer[0] = b'x';
        Ok(1)
    }
}

/// Two secrets of 32 bytes.
const FIRST: &str = "a=QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWY=";
const SECOND: &str = "b=MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

#[test]
fn signing_keys_rotate_without_breaking_routes_in_use() {
    let with_keys =
        |keys: &str| ServerBuilder::new().env("CORACLE_API_KEY", KEY).env("CORACLE_GATEWAY_KEYS", keys);
    let mut server = with_keys(FIRST).start();
    let made = keyed(&server).post(
        "/v1/sandboxes",
        &json!({"image": {"uri": "host"}, "timeout": 3600, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]}),
    );
    let id = made.expect("the server answers").json()["id"].as_str().expect("an id").to_owned();
    let query =
        format!("/v1/sandboxes/{id}/endpoints/44772?use_server_proxy=false&expires={}", expiry_soon());
    let path = |endpoint: &Value| {
        let whole = endpoint["endpoint"].as_str().expect("a text").to_owned();
        format!("{}/ping", &whole[whole.find('/').expect("it has a path")..])
    };
    let old = path(&endpoint(&server, &query));
    let status =
        |server: &TestServer, path: &str| server.client().get(path).expect("the server answers").status;
    assert!(old.ends_with("a/ping"), "{old} is not signed by the first key");
    assert_eq!(status(&server, &old), 200);
    let mut restart = |keys: &str| {
        assert!(server.terminate().success());
        server.restart(&with_keys(keys));
        let new = path(&endpoint(&server, &query));
        (status(&server, &old), status(&server, &new), new)
    };
    let both = restart(&format!("{SECOND},{FIRST}"));
    assert_eq!((both.0, both.1, both.2.ends_with("b/ping")), (200, 200, true), "{both:?}");
    let one = restart(SECOND);
    assert_eq!((one.0, one.1, &one.2), (401, 200, &both.2), "{one:?}");
    keyed(&server).delete(&format!("/v1/sandboxes/{id}")).expect("the server answers");
}

#[test]
fn public_access_reaches_services_but_no_api() {
    let server = wildcard().env("CORACLE_API_KEY", KEY).env("CORACLE_GATEWAY_PUBLIC", "true").start();
    let mut client = keyed(&server);
    let mut create = |secure: bool| {
        let request = json!({
            "image": {"uri": "host"}, "timeout": 3600, "resourceLimits": {}, "secureAccess": secure,
            "entrypoint": ["tail", "-f", "/dev/null"],
        });
        let made = client.post("/v1/sandboxes", &request).expect("the server answers");
        made.json()["id"].as_str().unwrap_or_else(|| panic!("{}", made.text())).to_owned()
    };
    let (open, secure) = (create(false), create(true));
    for (id, port, path, status) in [
        // Nothing listens there, which every client may know.
        (&open, 9, "/", 502),
        (&open, 44772, "/ping", 401),
        (&open, 18080, "/policy", 401),
        (&secure, 9, "/", 401),
        (&secure, 44772, "/ping", 401),
    ] {
        let answer = ask(&server, &format!("{id}-{port}.boxes.test"), path, &[]);
        assert_eq!(answer.status, status, "{id}-{port}: {}", answer.text());
    }
    let below = format!("/v1/sandboxes/{open}/proxy/9/");
    assert_eq!(server.client().get(&below).expect("the server answers").status, 401, "paths are not public");
    for id in [open, secure] {
        keyed(&server).delete(&format!("/v1/sandboxes/{id}")).expect("the server answers");
    }
}

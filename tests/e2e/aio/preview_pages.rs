//! A page of a service inside a sandbox attacks the APIs of its own and of other sandboxes. By host it reaches none;
//! below a path, where it shares the origin of the server, at most that of its own sandbox.

use e2e::aio::{self, AioSandbox};
use e2e::http::HttpResponse;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

/// A service that records every request, and whose responses try to take over the origin.
const EVIL_SERVICE: &str = r#"
import http.server
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open("/home/gem/seen", "a") as seen:
            seen.write(f"{self.path}\n{self.headers}\n")
        self.send_response(200)
        for name, value in [("Service-Worker-Allowed", "/"), ("Clear-Site-Data", "\"*\""), ("Alt-Svc", "h2=\"evil:1\""),
                            ("Set-Cookie", "a=1; Domain=127.0.0.1; Path=/"), ("Referrer-Policy", "unsafe-url"),
                            ("Strict-Transport-Security", "max-age=9"), ("Content-Length", "2")]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"ok")
http.server.HTTPServer(("127.0.0.1", 8000), Page).serve_forever()
"#;

/// Paths of the server's own APIs.
const SERVER_APIS: [&str; 5] =
    ["/api/sandboxes", "/api/capabilities", "/v1/sandboxes", "/coracle/v1/volumes", "/metrics"];

fn start_service(sandbox: &mut AioSandbox) {
    sandbox.post("/v1/file/write", &json!({"file": "/home/gem/evil.py", "content": EVIL_SERVICE}));
    let command = json!({"session_id": "page", "command": "python3 evil.py", "exec_dir": "/home/gem", "async_mode": true});
    sandbox.post("/v1/bash/exec", &command);
    e2e::eventually("the service answers", || {
        sandbox.try_get("/proxy/8000/").is_ok_and(|answer| answer.status == 200)
    });
}

/// A request with these headers, to a host.
fn request(server: &TestServer, host: &str, path: &str, headers: &[(&str, &str)]) -> HttpResponse {
    let mut client = server.client().with_host(host);
    let headers: Vec<_> =
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    client.set_headers(&headers);
    client.get(path).expect("the server answers")
}

/// The service got no secret, and its response cannot affect anything else at the address.
fn check_page(sandbox: &mut AioSandbox, page: &HttpResponse, secrets: &[&str]) {
    assert_eq!(page.status, 200, "{}", page.text());
    for name in ["service-worker-allowed", "clear-site-data", "alt-svc", "strict-transport-security"] {
        assert_eq!(page.header(name), None, "{name} reached the browser");
    }
    assert_eq!(page.header("set-cookie"), Some("a=1; Path=/"));
    assert!(matches!(page.header("referrer-policy"), Some("no-referrer" | "same-origin")));
    let seen = String::from_utf8(sandbox.download("/home/gem/seen")).expect("headers are text");
    for secret in secrets {
        assert!(!seen.contains(secret), "the service saw `{secret}`: {seen}");
    }
}

#[test]
fn a_page_below_a_path_reaches_its_own_sandbox_at_most() {
    let server = super::start_server();
    let mut own = AioSandbox::create(&server, "own");
    let other = AioSandbox::create(&server, "other");
    start_service(&mut own);
    let origin = format!("http://{}", server.address());
    let page_path = format!("{}/proxy/8000/page", own.path);
    let page = request(
        &server,
        server.address(),
        &page_path,
        &[
            ("Referer", &format!("{origin}{page_path}")),
            ("Origin", &origin),
            ("Cookie", "session=of-another-page"),
            ("Authorization", "Bearer of-another-page"),
            ("X-API-Key", aio::KEY),
        ],
    );
    let (mac, other_mac) = (own.mac().to_owned(), other.mac().to_owned());
    check_page(&mut own, &page, &[&mac, aio::KEY, "of-another-page"]);

    // Scripts of the page have the origin of the server.
    let fetch = |path: &str| request(&server, server.address(), path, &[("Origin", &origin)]);
    assert_eq!(fetch(&format!("{}/v1/sandbox", own.path)).status, 200, "this is documented");
    let unknown = fetch("/aio/unknown/v1/sandbox").json();
    let handle = |path: &str| path.split_once('.').expect("it has a code").0.to_owned();
    for address in [
        format!("{}.{mac}", handle(&other.path)),
        format!("{}.{other_mac}", handle(&own.path)),
        handle(&other.path),
        format!("{}/..{}", own.path, handle(&other.path)),
    ] {
        let answer = fetch(&format!("{address}/v1/sandbox"));
        assert!(matches!(answer.status, 400 | 404), "{address}: {} {}", answer.status, answer.text());
        if answer.status == 404 {
            assert_eq!(answer.json(), unknown, "{address} is told from an unknown one");
        }
    }
    for path in SERVER_APIS {
        assert_eq!(fetch(path).status, 401, "{path}");
        // Neither does the port lead to them.
        let through = fetch(&format!("{}/proxy/{}{path}", own.path, server.port()));
        assert_eq!(through.status, 502, "{path}: {}", through.text());
    }
}

#[test]
fn a_page_by_host_reaches_no_api() {
    let server = ServerBuilder::new()
        .env("CORACLE_API_KEY", aio::KEY)
        .env("CORACLE_ON_STOP", "remove")
        .env("CORACLE_GATEWAY_MODE", "wildcard")
        .env("CORACLE_GATEWAY_DOMAIN", "boxes.example")
        .start();
    let mut own = AioSandbox::create(&server, "own");
    let other = AioSandbox::create(&server, "other");
    start_service(&mut own);
    let label = |sandbox: &AioSandbox| format!("aio-{}", sandbox.path["/aio/".len()..].replace('.', "-"));
    let page_host = format!("8000-{}.boxes.example", label(&own));
    let page_origin = format!("http://{page_host}");
    let headers =
        [("Origin", page_origin.as_str()), ("Referer", page_origin.as_str()), ("X-API-Key", aio::KEY)];
    let page = request(&server, &page_host, "/page", &headers);
    let mac = own.mac().to_owned();
    check_page(&mut own, &page, &[&mac, aio::KEY]);
    // The whole host belongs to the service.
    assert_eq!(request(&server, &page_host, "/v1/sandbox", &[]).text(), "ok");

    for sandbox in [&own, &other] {
        let api_host = format!("{}.boxes.example", label(sandbox));
        let places = [(api_host.as_str(), String::new()), (server.address(), sandbox.path.clone())];
        for (host, mount) in places {
            for path in ["/v1/sandbox", "/v1/shell/sessions", "/v1/shell/ws", "/v1/bash/ws", "/terminal"] {
                for origin in [page_origin.as_str(), "null"] {
                    let upgrade = [
                        ("Origin", origin),
                        ("Connection", "Upgrade"),
                        ("Upgrade", "websocket"),
                        ("Sec-WebSocket-Version", "13"),
                        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
                    ];
                    let answer = request(&server, host, &format!("{mount}{path}"), &upgrade);
                    assert_eq!(answer.status, 403, "{host}{mount}{path} from {origin}: {}", answer.text());
                }
            }
        }
    }
    for path in SERVER_APIS {
        let answer = request(&server, server.address(), path, &[("Origin", &page_origin)]);
        assert_eq!(answer.status, 401, "{path}");
    }
}

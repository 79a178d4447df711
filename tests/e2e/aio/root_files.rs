//! `sudo: true` of the file API: root's files are out of reach of `gem`, and in reach of requests that ask for root.

use e2e::aio::AioSandbox;
use serde_json::{Value, json};

/// Sends a request about files, and returns its status and the reason of a failure.
fn outcome(sandbox: &mut AioSandbox, path: &str, body: &Value) -> (u16, Value) {
    let answer = sandbox.try_post(path, body).expect("the server answers");
    (answer.status, answer.json()["data"]["errno_name"].take())
}

#[test]
fn sudo_works_on_files_as_root_and_gem_cannot() {
    if !testkit::needs_root() {
        return;
    }
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "roots");
    let file = "/etc/made-by-root";
    let requests = [
        ("/v1/file/write", json!({"file": file, "content": "one\ntwo\n"})),
        (
            "/v1/file/write",
            json!({"file": file, "content": "dGhyZWUK", "encoding": "base64", "append": true}),
        ),
        ("/v1/file/replace", json!({"file": file, "old_str": "two", "new_str": "2"})),
    ];
    let as_root = |body: &Value| {
        let mut body = body.clone();
        body["sudo"] = json!(true);
        body
    };
    let (path, write) = &requests[0];
    assert_eq!(
        outcome(&mut sandbox, path, write),
        (403, json!("EACCES")),
        "gem writes to a directory of root"
    );
    assert_eq!(sandbox.run(&format!("test -e {file} || echo absent")), "absent");
    assert_eq!(outcome(&mut sandbox, path, &as_root(write)), (200, Value::Null));
    // What root has made stays out of reach of gem.
    for (path, body) in &requests {
        assert_eq!(outcome(&mut sandbox, path, body), (403, json!("EACCES")), "{path} {body} as gem");
    }
    for (path, body) in &requests[1..] {
        assert_eq!(outcome(&mut sandbox, path, &as_root(body)), (200, Value::Null), "{path} {body} as root");
        assert_eq!(sandbox.run(&format!("stat -c %u:%g {file}")), "0:0", "{path}");
    }
    assert_eq!(sandbox.run(&format!("cat {file}")), "one\n2\nthree");

    // A file that only root may read.
    sandbox.post("/v1/file/write", &json!({"file": "/root/secret", "content": "needle\n", "sudo": true}));
    let readings = [
        ("/v1/file/read", json!({"file": "/root/secret"})),
        ("/v1/file/search", json!({"file": "/root/secret", "regex": "needle"})),
    ];
    for (path, body) in readings {
        assert_eq!(outcome(&mut sandbox, path, &body), (403, json!("EACCES")), "{path} as gem");
        assert!(sandbox.post(path, &as_root(&body)).to_string().contains("needle"), "{path} as root");
    }
    // It is root of the sandbox alone.
    let body = json!({"file": "/proc/sys/kernel/hostname", "content": "x", "sudo": true});
    let refused = outcome(&mut sandbox, "/v1/file/write", &body);
    assert!((400..500).contains(&refused.0), "root of the host: {refused:?}");
    // A command has no such way.
    assert_ne!(sandbox.run("sudo -n id -u 2>/dev/null || echo refused"), "0");
}

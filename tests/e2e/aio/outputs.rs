//! Parallel calls never mix their output, and parallel appends all survive.

use std::sync::Mutex;

use e2e::aio::AioSandbox;
use e2e::http::HttpClient;
use serde_json::{Value, json};

/// Runs `work` in so many threads, each with its own connection to the sandbox.
fn in_threads(sandbox: &AioSandbox, address: &str, count: usize, work: impl Fn(usize, AioSandbox) + Sync) {
    std::thread::scope(|scope| {
        for number in 0..count {
            let own = sandbox.with_client(HttpClient::new(address));
            let work = &work;
            scope.spawn(move || work(number, own));
        }
    });
}

/// Runs a command and checks that the whole response is about it alone.
fn check_own_output(sandbox: &mut AioSandbox, session: Option<&str>, mark: &str) {
    let command = format!("echo begin {mark}; sleep 0.02; echo end {mark}");
    let request = match session {
        Some(id) => json!({"command": command, "id": id}),
        None => json!({"command": command}),
    };
    let answer = sandbox.try_post("/v1/shell/exec", &request).expect("the server answers");
    let text = answer.text();
    assert_eq!(answer.status, 200, "{text}");
    assert!(!text.contains("ErrorObservation"), "{text}");
    let done = answer.json()["data"].take();
    assert_eq!((&done["status"], &done["exit_code"]), (&json!("completed"), &json!(0)), "{done}");
    assert_eq!(done["output"], format!("begin {mark}\nend {mark}"), "outputs were mixed");
}

#[test]
fn n1_threads_on_one_sandbox_never_mix_output() {
    let server = super::start_server();
    let sandbox = AioSandbox::create(&server, "threads");
    sandbox.with_client(server.client()).post("/v1/shell/sessions/create", &json!({"id": "shared by all"}));
    in_threads(&sandbox, server.address(), 3, |number, mut own| {
        for round in 0..10 {
            check_own_output(&mut own, None, &format!("{number}-{round}"));
            check_own_output(&mut own, Some("shared by all"), &format!("shared-{number}-{round}"));
        }
    });
}

#[test]
fn j03_fifty_calls_without_an_id_never_mix_output() {
    let server = super::start_server();
    let sandbox = AioSandbox::create(&server, "calls");
    in_threads(&sandbox, server.address(), 50, |number, mut own| {
        check_own_output(&mut own, None, &number.to_string());
    });
}

#[test]
fn n22_appends_of_clients_and_of_a_shell_all_survive() {
    const LINES: usize = 40;
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "appends");
    let file = "/home/gem/log";
    sandbox.post("/v1/file/write", &json!({"file": file, "content": ""}));
    let kept_connection = Mutex::new(sandbox.with_client(server.client()));
    let append = |own: &mut AioSandbox, line: String| {
        own.post("/v1/file/write", &json!({"file": file, "content": line, "append": true}));
    };
    // Two threads of one client, two clients, and a shell.
    in_threads(&sandbox, server.address(), 5, |number, mut own| match number {
        0 | 1 => (0..LINES).for_each(|line| {
            append(&mut kept_connection.lock().expect("no thread panics"), format!("{number} {line}\n"));
        }),
        2 | 3 => (0..LINES).for_each(|line| append(&mut own, format!("{number} {line}\n"))),
        _ => {
            let text =
                format!("for i in $(seq 0 {}); do echo \"4 $i\" >> {file}; sleep 0.005; done", LINES - 1);
            own.run(&text);
        }
    });
    let found = String::from_utf8(sandbox.download(file)).expect("lines are text");
    for number in 0..5 {
        let own: Vec<&str> =
            found.lines().filter_map(|line| line.strip_prefix(&format!("{number} "))).collect();
        let expected: Vec<String> = (0..LINES).map(|line| line.to_string()).collect();
        assert_eq!(own, expected, "lines of writer {number} were lost, doubled or exchanged");
    }
    assert_eq!(found.lines().count(), 5 * LINES, "a line was torn: {found}");
}

#[test]
fn closing_twice_is_the_same_as_once() {
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "twice");
    sandbox.post("/v1/shell/sessions/create", &json!({"id": "s"}));
    let closed = [sandbox.delete("/v1/shell/sessions/s"), sandbox.delete("/v1/shell/sessions/s")];
    assert_eq!(closed.each_ref().map(|answer| answer.status), [200, 200]);
    assert_eq!(closed.map(|answer| answer.json()["success"].take()), [json!(true), json!(false)]);
    sandbox.post("/v1/bash/sessions/create", &json!({"session_id": "b"}));
    assert!(sandbox.get("/v1/bash/sessions").to_string().contains("\"b\""));
    let close = |sandbox: &mut AioSandbox| {
        let answer = sandbox.try_post("/v1/bash/sessions/b/close", &json!({})).expect("the server answers");
        (answer.status, answer.json()["success"].take())
    };
    for _ in 0..2 {
        assert_eq!(close(&mut sandbox), (200, json!(true)));
        assert!(!sandbox.get("/v1/bash/sessions").to_string().contains("\"b\""));
    }
    for _ in 0..2 {
        assert_eq!(sandbox.delete("/v1/shell/sessions").status, 200);
    }
    let mut provisioner = e2e::aio::keyed_client(server.address());
    for _ in 0..2 {
        let deleted = provisioner.delete("/api/sandboxes/twice").expect("the server answers");
        assert_eq!((deleted.status, deleted.json()), (200, json!({"ok": true, "sandbox_id": "twice"})));
        let list = provisioner.get("/api/sandboxes").expect("the server answers").json();
        assert_eq!(list, json!({"sandboxes": [], "count": 0}));
        let presence = provisioner.get("/api/sandboxes/twice/presence").expect("the server answers").json();
        assert_eq!((&presence["exists"], &presence["container_id"]), (&json!(false), &Value::Null));
    }
}

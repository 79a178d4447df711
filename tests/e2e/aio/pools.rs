//! Warm sandboxes with the guest `aio`: a claim binds everything that a create asks for.

use std::fs;

use e2e::aio::{self, AioSandbox, StateRoot, keyed_client};
use e2e::server::TestServer;
use serde_json::{Value, json};

/// Other limits than those of the creates, so that each claim has to change them.
const POOL: &str = r#"
[[pool]]
name = "threads"
guest = "aio"
level = 2
memory = "512Mi"
"#;
const MEMORY: u64 = 192 << 20;

fn wait_until_warm(server: &TestServer) {
    e2e::eventually("the pool is full", || {
        let pool = keyed_client(server.address()).get("/v1/pools/threads").expect("the server answers");
        pool.json()["status"]["available"] == 2
    });
}

fn inspect(server: &TestServer, container: &str) -> Value {
    keyed_client(server.address()).inspect_sandbox(container)
}

#[test]
fn claim_of_a_warm_sandbox_binds_mounts_variables_limits_and_key() {
    if !testkit::needs_root() {
        return;
    }
    let root = StateRoot::make();
    let file = root.parent().join("coracle.toml");
    let workspace = root.path().join("users/ann/threads/t/user-data/workspace");
    fs::create_dir_all(&workspace).expect("our own directory");
    fs::write(workspace.join("from-gateway"), "outside").expect("our own directory");
    fs::write(&file, POOL).expect("our own directory");
    let builder = || {
        root.server()
            .argument("--config")
            .argument(&file.to_string_lossy())
            .env("CORACLE_DEERFLOW_MEMORY", &MEMORY.to_string())
    };
    let mut server = builder().start();
    wait_until_warm(&server);

    let fields = json!({"user_id": "ann", "thread_id": "t", "max_shell_sessions": 7});
    let mut sandbox = AioSandbox::create_with(&server, "pooled", &fields);
    let report = inspect(&server, &sandbox.container);
    assert_eq!(report["pool"], "threads", "{report}");
    assert_eq!(report["usage"]["memoryLimitBytes"], MEMORY, "{report}");
    let seen = "id -un; pwd; cd /mnt/user-data/workspace && cat from-gateway && rm from-gateway && \
                echo inside > from-sandbox; touch /mnt/skills/public/x 2>/dev/null || echo read-only";
    assert_eq!(sandbox.run(seen), "gem\n/home/gem\noutsideread-only");
    assert_eq!(fs::read_to_string(workspace.join("from-sandbox")).expect("it is shared"), "inside\n");
    assert!(!workspace.join("from-gateway").exists());

    // The key leads to the same sandbox, also after a crash of the server, and its address stays.
    let found =
        |server: &TestServer| aio::try_provision(server.address(), "pooled", &fields).expect("it answers");
    let before = found(&server).json();
    assert_eq!(
        (&before["container_id"], &before["max_shell_sessions"]),
        (&json!(sandbox.container), &json!(7))
    );
    server.kill();
    let address = server.address().to_owned();
    server.restart(&builder().listen(&address));
    assert_eq!(found(&server).json(), before);
    assert_eq!(sandbox.run("cat /mnt/user-data/workspace/from-sandbox"), "inside");

    // Another conversation gets another sandbox, with files of its own.
    wait_until_warm(&server);
    let mut other = AioSandbox::create_with(&server, "other", &json!({"user_id": "bob", "thread_id": "t"}));
    assert_eq!(inspect(&server, &other.container)["pool"], "threads");
    assert_eq!(
        other.run("ls -A /mnt/user-data/workspace /home/gem"),
        "/home/gem:\n\n/mnt/user-data/workspace:"
    );

    // A create with variables takes a warm sandbox as well, and no other sandbox has them.
    wait_until_warm(&server);
    let request =
        json!({"guest": "aio", "name": "with variables", "env": {"GIVEN": "a b"}, "memoryBytes": MEMORY});
    let made = keyed_client(server.address()).post("/coracle/v1/sandboxes", &request).expect("it answers");
    assert_eq!(made.status, 201, "{}", made.text());
    let made = made.json();
    assert_eq!(inspect(&server, made["id"].as_str().expect("it has an id"))["pool"], "threads");
    let url = made["url"].as_str().expect("it has an address").to_owned();
    let described = json!({"sandbox_id": "with variables", "container_id": made["id"], "sandbox_url": url});
    let mut with_variables = AioSandbox::from_response(server.address(), &described);
    server.add_secret(with_variables.mac());
    assert_eq!(with_variables.run("echo \"$GIVEN\""), "a b");
    assert_eq!(
        with_variables.post("/v1/bash/exec", &json!({"command": "echo \"$GIVEN\""}))["stdout"],
        "a b\n"
    );
    for sandbox in [&mut sandbox, &mut other] {
        assert_eq!(sandbox.run("echo \"[$GIVEN]\""), "[]");
    }
}

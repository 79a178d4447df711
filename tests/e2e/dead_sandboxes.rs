//! Files outlive processes: a sandbox whose agent was killed is restarted with its files, or replaced.

use std::process::{Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::{ORDINARY_USER, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn coracle(server: &TestServer, words: &[&str]) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(words).stdin(Stdio::null());
    command.output().expect("the binary runs")
}

/// The output of a command that must succeed, on both streams.
fn successful_output(server: &TestServer, words: &[&str]) -> (String, String) {
    let output = coracle(server, words);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words:?}: {said}");
    (String::from_utf8(output.stdout).expect("it is text").trim_end().to_owned(), said)
}

fn text(server: &TestServer, words: &[&str]) -> String {
    successful_output(server, words).0
}

/// Kills the first process of a sandbox, and waits until the server has noticed.
fn kill_agent(server: &TestServer, id: &str) {
    let record = std::fs::read(server.state_directory().join("boxes").join(id)).expect("it has a record");
    let record: Value = serde_json::from_slice(&record).expect("it is JSON");
    let pid =
        record["process"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("its process runs");
    let pid = rustix::process::Pid::from_raw(pid).expect("it is one");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it can be killed");
    let mut client = server.client();
    while client.get(&format!("/v1/sandboxes/{id}")).expect("an answer").json()["status"]["state"] != "Failed"
    {
        std::thread::yield_now();
    }
}

/// Everything about a sandbox that a restart keeps.
fn kept_settings(server: &TestServer, id: &str) -> Value {
    let shown = server.client().inspect_sandbox(id);
    let kept = ["id", "name", "labels", "image", "createdAt", "expiresAt", "onDeath", "inForce"];
    let mut kept: Value = kept.iter().map(|field| ((*field).to_owned(), shown[*field].clone())).collect();
    for limit in ["memoryLimitBytes", "pidsLimit"] {
        kept[limit] = shown["usage"][limit].clone();
    }
    let absent = kept.as_object().and_then(|fields| fields.iter().find(|(_, value)| value.is_null()));
    assert_eq!(absent, None, "{shown}");
    kept
}

/// Everything that a dead sandbox with a name must do, on disks of one kind.
fn check_survives_agent_death(build: fn() -> ServerBuilder) {
    let mut server = build().start();
    let own = ["create", "--key", "box", "--timeout", "1h", "-e", "GIVEN=yes", "-l", "team=blue"];
    let confined = ["-v", "data:/data", "--memory", "300m", "--pids", "50", "--network", "off"];
    let id = text(&server, &[own.as_slice(), &confined].concat());
    text(&server, &["exec", "box", "-c", "echo kept > /root/file; mkdir /root/d; echo too > /root/d/f"]);
    text(&server, &["exec", "box", "-c", "echo mine > /data/file"]);
    let settings = kept_settings(&server, &id);
    assert_eq!((&settings["name"], &settings["labels"]), (&json!("box"), &json!({"team": "blue"})));
    assert_eq!((&settings["memoryLimitBytes"], &settings["pidsLimit"]), (&json!(300 << 20), &json!(50)));
    assert!(settings["inForce"]["mount /data"].is_string(), "{settings}");
    kill_agent(&server, &id);
    // A request by id starts nothing.
    assert!(!coracle(&server, &["exec", "box", "--", "true"]).status.success());
    let shown = server.client().get(&format!("/v1/sandboxes/{id}")).expect("an answer").json();
    assert_eq!(shown["status"]["state"], "Failed");
    assert!(shown["status"]["message"].as_str().is_some_and(|why| why.contains("files are kept")), "{shown}");
    // The files of a dead sandbox can be snapshotted and copied.
    text(&server, &["snapshot", "create", &id]);
    let out = server.directory().join("out");
    text(&server, &["cp", "box:/root/d", out.to_str().expect("it is text")]);
    assert_eq!(std::fs::read_to_string(out.join("f")).expect("it was copied"), "too\n");
    assert_eq!(text(&server, &["ls", "-q"]), id, "the temporary mount for reading them is gone");
    // A server that was killed meanwhile has all of it again.
    server.kill();
    server.restart(&build());
    let (again, said) = successful_output(&server, &["create", "--key", "box"]);
    assert_eq!(again, id);
    assert!(said.contains("agent died") && said.contains("restarted with its files"), "{said}");
    let look = "cat /root/file /data/file; echo $GIVEN";
    assert_eq!(text(&server, &["exec", "box", "-c", look]), "kept\nmine\nyes");
    assert_eq!(kept_settings(&server, &id), settings);
    // The API's resume, and the command.
    kill_agent(&server, &id);
    let resumed = server.client().post(&format!("/v1/sandboxes/{id}/resume"), &json!({})).expect("an answer");
    assert_eq!((resumed.status, resumed.header("coracle-restarted")), (202, Some("restart")));
    assert_eq!(resumed.header("coracle-restart-cause"), Some("agent died"));
    for command in ["resume", "restart"] {
        kill_agent(&server, &id);
        let (_, said) = successful_output(&server, &[command, &id]);
        assert!(said.contains("restarted with its files"), "{command}: {said}");
    }
    assert_eq!(text(&server, &["exec", "box", "-c", look]), "kept\nmine\nyes");
    assert_eq!(kept_settings(&server, &id), settings);
    let events = text(&server, &["--json", "events"]);
    assert!(events.contains("\"restart\":\"restart\""), "{events}");
    text(&server, &["rm", &id]);
    assert!(!server.state_directory().join("boxes").join(&id).exists());
}

#[test]
fn dead_sandbox_keeps_its_files_and_restarts_on_demand() {
    if !testkit::needs_root() {
        return;
    }
    check_survives_agent_death(ServerBuilder::new);
}

/// A server with disks as on a kernel without btrfs.
fn with_ext4_disks() -> ServerBuilder {
    ServerBuilder::new().env("CORACLE_DISKS", "ext4")
}

#[test]
fn dead_sandbox_on_ext4_keeps_its_files_and_restarts_on_demand() {
    if !testkit::needs_root() {
        return;
    }
    check_survives_agent_death(with_ext4_disks);
}

#[test]
fn dead_sandbox_on_ext4_is_evicted_with_its_disk_but_not_to_be_read() {
    if !testkit::needs_root() {
        return;
    }
    let server = with_ext4_disks().env("CORACLE_LIMITS_MAX_SANDBOXES", "1").start();
    let id = text(&server, &["create", "--key", "first"]);
    let disk = server.client().inspect_sandbox(&id)["inForce"]["disk"].to_string();
    assert!(disk.contains("ext4 image"), "{disk}");
    let image = server.state_directory().join("disk/ext4").join(format!("{id}.img"));
    assert!(image.exists());
    text(&server, &["exec", "first", "-c", "echo kept > /root/file"]);
    kill_agent(&server, &id);
    let refused = coracle(&server, &["cp", "first:/root/file", "/dev/null"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("sandbox limit reached"), "{said}");
    let snapshots = server.client().get("/v1/snapshots").expect("an answer").json();
    assert_eq!(snapshots["items"], json!([]), "the snapshot for reading the files is gone");
    let (again, said) = successful_output(&server, &["create", "--key", "first"]);
    assert!(again == id && said.contains("restarted with its files"), "{said}");
    assert_eq!(text(&server, &["exec", "first", "--", "cat", "/root/file"]), "kept");
    kill_agent(&server, &id);
    assert_ne!(text(&server, &["create", "--key", "second"]), id);
    e2e::eventually("the disk of the evicted sandbox is removed", || !image.exists());
}

#[test]
fn restart_runs_the_hook_before_the_main_process_again() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let hook = json!({"command": ["sh", "-c", "echo ran >> /root/runs"]});
    let mut sandbox = server.create_sandbox_with(&json!({"lifecycle": {"preStart": hook}}));
    for runs in ["ran\n", "ran\nran\n"] {
        assert_eq!(sandbox.run("cat /root/runs").stdout, runs);
        kill_agent(&server, &sandbox.id);
        successful_output(&server, &["restart", &sandbox.id]);
    }
}

/// An ordinary user's disks are in memory, which is lost with the processes.
#[test]
fn files_in_memory_are_lost_and_the_next_use_of_the_name_says_so() {
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let refused = coracle(&server, &["create", "--key", "box", "--on-death", "restart"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("memory"), "{said}");
    let id = text(&server, &["create", "--key", "box"]);
    text(&server, &["exec", "box", "-c", "echo gone > /root/file"]);
    kill_agent(&server, &id);
    let refused = coracle(&server, &["restart", "box"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("memory"), "{said}");
    for words in
        [["resume", "box"].as_slice(), &["cp", "box:/root/file", "/dev/null"], &["exec", "box", "--", "true"]]
    {
        let refused = coracle(&server, words);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && !said.contains("coracle restart"), "{words:?}: {said}");
        assert!(!said.contains("can be resumed") && said.contains("create --key"), "{words:?}: {said}");
    }
    let (again, said) = successful_output(&server, &["create", "--key", "box"]);
    assert_ne!(again, id);
    assert!(said.contains("its files were lost"), "{said}");
    let events = text(&server, &["--json", "events"]);
    assert!(events.contains("\"restart\":\"files-lost\""), "{events}");
    text(&server, &["exec", "box", "-c", "test ! -e /root/file"]);
}

#[test]
fn the_key_of_a_retry_makes_a_new_sandbox() {
    let server = TestServer::start();
    let mut client = server.client();
    client.set_headers(&[("idempotency-key".to_owned(), "r".to_owned())]);
    let body = json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["sleep", "infinity"]});
    let first = client.post("/v1/sandboxes", &body).expect("an answer");
    let id = first.json()["id"].as_str().expect("it has one").to_owned();
    kill_agent(&server, &id);
    let second = client.post("/v1/sandboxes", &body).expect("an answer");
    assert_ne!(second.json()["id"], json!(id));
    assert_eq!(second.header("coracle-restarted"), None);
}

#[test]
fn a_replacement_has_an_empty_disk_and_the_same_volume() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let own = ["create", "--key", "box", "--on-death", "replace", "-v", "data:/data"];
    let confined = ["--network", "off", "--memory", "300m", "--pids", "50", "--timeout", "1h", "-l", "a=b"];
    let id = text(&server, &[own.as_slice(), &confined].concat());
    let settings = |id: &str| {
        let shown = server.client().get(&format!("/coracle/v1/sandboxes/{id}")).expect("an answer").json();
        let limits = (shown["usage"]["memoryLimitBytes"].clone(), shown["usage"]["pidsLimit"].clone());
        let expires = shown["expiresAt"].is_string();
        (
            limits,
            shown["inForce"]["network"].clone(),
            shown["labels"].clone(),
            shown["onDeath"].clone(),
            expires,
        )
    };
    let former = settings(&id);
    assert_eq!((&former.2, &former.3, former.4), (&json!({"a": "b"}), &json!("replace"), true));
    text(&server, &["exec", "box", "-c", "echo kept > /data/file; echo gone > /root/file"]);
    kill_agent(&server, &id);
    let (again, said) = successful_output(&server, &["create", "--key", "box"]);
    assert_ne!(again, id);
    assert!(said.contains("was replaced"), "{said}");
    assert_eq!(settings(&again), former, "it is confined as its predecessor");
    let events = text(&server, &["--json", "events"]);
    assert!(events.contains("\"restart\":\"replace\""), "{events}");
    let look = "cat /data/file; test ! -e /root/file && echo none";
    assert_eq!(text(&server, &["exec", "box", "-c", look]), "kept\nnone");
    kill_agent(&server, &again);
    let (_, said) = successful_output(&server, &["restart", "box"]);
    assert!(said.contains("was replaced"), "{said}");
    assert_eq!(text(&server, &["exec", "box", "-c", look]), "kept\nnone");
}

//! Images: from archives and a real registry to a sandbox, with nothing left after a crash.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

use e2e::binary::ProgramCopies;
use e2e::oci::{TestImage, build_layer};
use e2e::registry::{PASSWORD, RegistryReaders, StallingProxy, TestRegistry, USERNAME, serve_same_document};
use e2e::run::{RunCommand, TestUser, all_users};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// An image with every setting that an image can have.
fn image() -> TestImage {
    let base = TestImage::with_shell().with_layer(&[
        ("gone", b"x", 0o644, (0, 0)),
        ("opt/old/file", b"x", 0o644, (0, 0)),
        ("srv/app/", b"", 0o755, (1234, 1235)),
        ("srv/app/mine", b"mine", 0o4750, (1234, 50)),
    ]);
    let top = base.with_layer(&[
        (".wh.gone", b"", 0o644, (0, 0)),
        ("opt/old/.wh..wh..opq", b"", 0o644, (0, 0)),
        ("opt/old/new", b"x", 0o644, (0, 0)),
    ]);
    top.with_settings(json!({
        "Env": ["PATH=/usr/bin", "COLOR=blue", "SHAPE=round"], "User": "app:staff", "WorkingDir": "/srv/app",
        "Entrypoint": ["/usr/bin/sh", "-c", "echo started > /tmp/started; sleep 1000"],
    }))
}

/// Runs `coracle image …` on a state directory.
fn coracle(state: &Path, arguments: &[&str], input: &str) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.arg("image").args(arguments).arg("--state-dir").arg(state).arg("--json");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary can be run");
    child.stdin.take().expect("it is a pipe").write_all(input.as_bytes()).unwrap_or_default();
    child.wait_with_output().expect("it is our child")
}

fn parse_output(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("it is JSON")
}

fn refused(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn count(state: &Path, name: &str) -> usize {
    fs::read_dir(state.join("images").join(name)).map_or(0, Iterator::count)
}

/// A server that fetches what is missing from these registries.
fn server(registries: &[&str]) -> TestServer {
    ServerBuilder::new()
        .env("CORACLE_IMAGES_PULL", "missing")
        .env("CORACLE_IMAGES_REGISTRIES", &registries.join(","))
        .start()
}

fn create(server: &TestServer, image: &Value, extensions: &Value) -> e2e::http::HttpResponse {
    let request = json!({
        "image": image, "timeout": 600, "entrypoint": ["tail", "-f", "/dev/null"],
        "resourceLimits": {}, "env": {"SHAPE": "square"}, "extensions": extensions,
    });
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

fn created(server: &TestServer, image: &Value, extensions: &Value) -> RemoteSandbox {
    let answer = create(server, image, extensions);
    assert_eq!(answer.status, 202, "{}", answer.text());
    RemoteSandbox::existing(server.client(), answer.json()["id"].as_str().expect("an id is a text"))
}

#[test]
fn image_is_pulled_on_demand_and_defines_how_commands_start() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/app", "1", &image());
    let server = server(&[registry.address()]);
    let name = registry.image_name("test/app:1");
    let mut sandbox = std::thread::scope(|scope| {
        let another = scope.spawn(|| created(&server, &json!({"uri": name}), &json!({})));
        let one = created(&server, &json!({"uri": name}), &json!({}));
        another.join().expect("it was created");
        one
    });
    assert_eq!(server.log().matches("image pulled").count(), 1, "both waited for one pull");
    let ran =
        sandbox.run("id -u; id -g; pwd; echo $COLOR $SHAPE $PATH; stat -c '%u %g %a' mine; ls /opt/old /");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    let shown = ["1234", "50", "/srv/app", "blue square /usr/bin", "1234 50 4750"];
    if testkit::is_root() {
        assert_eq!(lines[..5], shown, "{ran:?}");
    } else {
        testkit::skip_test("only root has the users of an image; the rest was tested");
    }
    assert!(lines.contains(&"new") && !lines.contains(&"file") && !lines.contains(&"gone"), "{ran:?}");

    let mut client = server.client();
    let listed = client.get("/coracle/v1/images").expect("the server answers").json();
    assert_eq!(listed["items"][0]["name"], json!(name), "{listed}");
    assert_eq!(listed["items"][0]["layers"].as_array().map(Vec::len), Some(3), "{listed}");
    let report =
        client.get(&format!("/coracle/v1/sandboxes/{}", sandbox.id)).expect("the server answers").json();
    assert_eq!(report["image"]["used"], json!(name));
    assert_eq!(fs::read_dir(server.state_directory().join("server/downloads")).map_or(0, Iterator::count), 0);
}

#[test]
fn image_entrypoint_runs_if_the_caller_names_none() {
    let server = TestServer::start();
    let layout = tempfile::tempdir().expect("the temporary directory can be written");
    image().write_layout(layout.path());
    let source = layout.path().to_str().expect("a plain path");
    parse_output(&coracle(&server.state_directory(), &["import", "app:1", source], ""));
    let mut sandbox = created(&server, &json!({"uri": "app:1"}), &json!({"coracle.entrypoint": "image"}));
    e2e::eventually("the entrypoint runs", || sandbox.run("cat /tmp/started").stdout.contains("started"));
    let mut named = created(&server, &json!({"uri": "app:1"}), &json!({}));
    assert_ne!(named.run("cat /tmp/started").code, Some(0), "the entrypoint of the request wins");
}

#[test]
fn private_image_needs_credentials_that_are_never_exposed() {
    let Some(registry) = TestRegistry::start(RegistryReaders::One) else { return };
    registry.push_image("private/app", "1", &image());
    let server = server(&[registry.address()]);
    server.add_secret(PASSWORD);
    let name = registry.image_name("private/app:1");
    for auth in [Value::Null, json!({"username": USERNAME, "password": "wrong-password"})] {
        let answer = create(&server, &json!({"uri": name, "auth": auth}), &json!({}));
        assert_eq!(answer.status, 500, "{}", answer.text());
        assert_eq!(answer.json()["code"], "DOCKER::SANDBOX_IMAGE_PULL_FAILED");
    }
    let auth = json!({"username": USERNAME, "password": PASSWORD});
    let mut sandbox = created(&server, &json!({"uri": name, "auth": auth}), &json!({}));
    assert_eq!(sandbox.run("echo $COLOR").stdout.trim(), "blue");

    let state = tempfile::tempdir().expect("the temporary directory can be written");
    assert!(refused(&coracle(state.path(), &["pull", &name], "")).contains("--username"));
    let pull = ["pull", &name, "--username", USERNAME, "--password-stdin"];
    assert_eq!(parse_output(&coracle(state.path(), &pull, PASSWORD))["name"], json!(name));
}

#[test]
fn only_registries_the_operator_lists_are_contacted() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/app", "1", &image());
    for server in [TestServer::start(), server(&["elsewhere.example:5000"])] {
        let answer = create(&server, &json!({"uri": registry.image_name("test/app:1")}), &json!({}));
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert_eq!(count(&server.state_directory(), "names"), 0);
    }
}

#[test]
fn pinned_digest_gets_that_image_and_a_mismatch_is_refused() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    let state = tempfile::tempdir().expect("the temporary directory can be written");
    let first = registry.push_image("test/app", "1", &image());
    registry.push_image("test/app", "1", &image().with_layer(&[("later", b"x", 0o644, (0, 0))]));
    let pinned = registry.image_name(&format!("test/app@{first}"));
    assert_eq!(parse_output(&coracle(state.path(), &["pull", &pinned], ""))["digest"], json!(first));
    let other = format!("sha256:{}", "0".repeat(64));
    refused(&coracle(state.path(), &["pull", &registry.image_name(&format!("test/app@{other}"))], ""));

    let (_, manifest) = image().blobs();
    let (address, answering) = serve_same_document(manifest, 6);
    let error = refused(&coracle(state.path(), &["pull", &format!("{address}/a@{other}")], ""));
    assert!(error.contains("does not match digest") || error.contains("igest"), "{error}");
    // Until every pending response has arrived.
    while !answering.is_finished() {
        drop(std::net::TcpStream::connect(&address));
    }
    assert_eq!(count(state.path(), "names"), 1);
}

#[test]
fn shared_layer_is_stored_once_and_removed_with_its_last_image() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/one", "1", &image());
    registry.push_image("test/two", "1", &image().with_layer(&[("more", b"x", 0o644, (0, 0))]));
    let server = server(&[registry.address()]);
    let state = server.state_directory();
    let mut client = server.client();
    for (name, layers) in [("test/one:1", 3), ("test/two:1", 4)] {
        let request = json!({"name": registry.image_name(name)});
        let pulled = client.post("/coracle/v1/images", &request).expect("the server answers").text();
        assert!(pulled.contains("event: progress") && pulled.contains("event: done"), "{pulled}");
        assert_eq!(count(&state, "layers"), layers);
    }
    let (one, two) = (registry.image_name("test/one:1"), registry.image_name("test/two:1"));
    let mut sandbox = created(&server, &json!({"uri": two}), &json!({}));
    for name in [&one, &two] {
        let path = format!("/coracle/v1/images?name={name}");
        assert_eq!(client.delete(&path).expect("the server answers").status, 200);
        assert_eq!(client.delete(&path).expect("the server answers").status, 404);
    }
    assert_eq!((count(&state, "names"), count(&state, "layers")), (0, 4), "a sandbox uses them");
    assert_eq!(sandbox.run("echo $COLOR").stdout.trim(), "blue");
    server.remove_all().expect("the server removes its sandboxes");
    let freed = client.post("/coracle/v1/images/gc", &json!({})).expect("the server answers").json();
    assert_eq!(freed["layers"], 4, "{freed}");
    assert_eq!(count(&state, "layers"), 0);
}

#[test]
fn least_recently_used_image_is_evicted_over_the_size_limit() {
    let state = tempfile::tempdir().expect("the temporary directory can be written");
    let config = state.path().join("coracle.toml");
    fs::write(&config, "images.max_bytes = \"50k\"\n").expect("our own directory");
    let config = config.to_str().expect("a plain path");
    for name in ["one", "two", "three"] {
        let layout = state.path().join(name);
        let content = name.repeat(8000);
        let only = build_layer(&[("usr/file", content.as_bytes(), 0o644, (0, 0))], &[]);
        TestImage::empty().with_raw_layer(only).write_layout(&layout);
        let source = layout.to_str().expect("a plain path");
        parse_output(&coracle(state.path(), &["import", name, source, "--config", config], ""));
    }
    let listed = parse_output(&coracle(state.path(), &["ls"], ""));
    let names: Vec<&str> =
        listed.as_array().into_iter().flatten().filter_map(|image| image["name"].as_str()).collect();
    assert_eq!(names, ["host", "three"]);
}

#[test]
fn imported_archives_are_images_for_every_owner() {
    for user in all_users() {
        let home = user.make_home();
        let (layout, saved) = (home.path().join("layout"), home.path().join("saved.tar"));
        let many = (0..150).fold(image(), |image, number| {
            let (path, content) = (format!("many/{number}"), number.to_string());
            image.with_layer(&[(&path, content.as_bytes(), 0o644, (0, 0))])
        });
        many.write_layout(&layout);
        image().save_docker_archive(&saved);
        let state = home.path().join("state");
        for (name, source) in [("many:1", &layout), ("saved:1", &saved)] {
            let mut command = ProgramCopies::shared().command();
            command.args(["image", "import", name]).arg(source).arg("--state-dir").arg(&state);
            command.env("HOME", home.path());
            user.apply_to(&mut command);
            let output = command.output().expect("the binary can be run");
            assert!(output.status.success(), "{user:?} {output:?}");
        }
        let text =
            "set -- /many/*; echo $#; echo $COLOR; pwd; test -e /gone || echo gone; echo /opt/old/*; id -u";
        let ran = RunCommand::new(user).state(&state).flag("--image", "many:1").run_argv(&["sh", "-c", text]);
        let uid = if user == TestUser::Same && testkit::is_root() { "1234" } else { "0" };
        assert_eq!(
            ran.stdout,
            format!("150\nblue\n/srv/app\ngone\n/opt/old/new\n{uid}\n"),
            "{user:?} {ran:?}"
        );
        let ran = RunCommand::new(user).state(&state).flag("--image", "saved:1").run_argv(&[
            "sh",
            "-c",
            "echo $COLOR",
        ]);
        assert_eq!(ran.stdout, "blue\n", "{user:?} {ran:?}");
    }
}

#[test]
fn a_hostile_archive_is_refused_whole_and_without_a_trace() {
    let state = tempfile::tempdir().expect("the temporary directory can be written");
    let layout = state.path().join("layout");
    let mut evil = build_layer(&[], &[("out", "../../../../../../../..")]);
    // Without its end marker, so that the following entry belongs to it: a file through the link.
    evil.truncate(512);
    evil.extend(build_layer(&[("out/tmp/coracle-evil", b"evil", 0o644, (0, 0))], &[]));
    TestImage::empty().with_raw_layer(evil).write_layout(&layout);
    let error =
        refused(&coracle(state.path(), &["import", "evil", layout.to_str().expect("a plain path")], ""));
    assert!(error.contains("symbolic link"), "{error}");
    assert!(!Path::new("/tmp/coracle-evil").exists());
    assert_eq!(
        (count(state.path(), "names"), count(state.path(), "layers"), count(state.path(), "draft")),
        (0, 0, 0)
    );
}

#[test]
fn killed_pull_leaves_nothing() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/app", "1", &image());
    let stalling = StallingProxy::in_front_of(&registry, 200_000);
    let start = ServerBuilder::new();
    let mut server = ServerBuilder::new().start();
    let state = server.state_directory();
    let downloads = state.join("server/downloads");
    let request = json!({"name": stalling.image_name("test/app:1")}).to_string();
    let mut client = server.client();
    let pulling = client.start_request("POST", "/coracle/v1/images", "application/json", request.as_bytes());
    let pulling = pulling.expect("the server answers");
    e2e::eventually("something was fetched", || {
        let pulls = fs::read_dir(&downloads).into_iter().flatten().flatten();
        pulls.flat_map(|pull| fs::read_dir(pull.path().join("blobs/sha256")).into_iter().flatten()).count()
            > 0
    });
    server.kill();
    drop(pulling);
    server.restart(&start);
    assert_eq!(fs::read_dir(&downloads).map_or(0, Iterator::count), 0);
    assert_eq!((count(&state, "names"), count(&state, "layers"), count(&state, "draft")), (0, 0, 0));
}

/// An image that takes a while to unpack.
fn slow_image() -> TestImage {
    let names: Vec<String> = (0..8_000).map(|number| format!("usr/{}/{number}", number % 100)).collect();
    let entries: Vec<_> = names.iter().map(|name| (name.as_str(), &b"x"[..], 0o644, (0, 0))).collect();
    TestImage::empty().with_layer(&entries)
}

#[test]
fn a_launcher_killed_while_it_unpacks_leaves_the_old_state_or_the_new_one() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/slow", "1", &slow_image());
    let server = TestServer::start();
    let state = server.state_directory();
    let request = json!({"name": registry.image_name("test/slow:1")}).to_string();
    let mut client = server.client();
    let pulling = client.start_request("POST", "/coracle/v1/images", "application/json", request.as_bytes());
    let mut pulling = pulling.expect("the server answers");
    e2e::eventually("it is being unpacked", || state.join("images/draft/0/usr").exists());
    let launcher = rustix::process::Pid::from_raw(server.part_pid("__launcher").cast_signed());
    let launcher = launcher.expect("a pid is not zero");
    rustix::process::kill_process(launcher, rustix::process::Signal::KILL).expect("it runs");
    let mut reported = String::new();
    pulling.body.read_to_string(&mut reported).expect("the stream ends");
    let done = usize::from(reported.contains("event: done"));
    assert!(done == 1 || reported.contains("event: failed"), "{reported}");
    e2e::eventually("nothing is half made", || {
        (count(&state, "names"), count(&state, "layers"), count(&state, "draft")) == (done, done, 0)
    });
    assert_eq!(fs::read_dir(state.join("server/downloads")).map_or(0, Iterator::count), 0);
}

#[test]
fn killed_import_is_cleaned_up_by_gc() {
    let home = tempfile::tempdir().expect("the temporary directory can be written");
    let (state, layout) = (home.path().join("state"), home.path().join("layout"));
    slow_image().write_layout(&layout);
    let mut command = ProgramCopies::shared().command();
    command.args(["image", "import", "slow"]).arg(&layout).arg("--state-dir").arg(&state);
    let mut importing = command.stderr(Stdio::null()).spawn().expect("the binary can be run");
    e2e::eventually("it is being unpacked", || state.join("images/draft/0/usr").exists());
    importing.kill().expect("it is our child");
    importing.wait().expect("it is our child");
    assert_eq!(count(&state, "names"), 0);
    parse_output(&coracle(&state, &["gc"], ""));
    assert_eq!((count(&state, "layers"), count(&state, "draft")), (0, 0));
}

#[test]
fn only_operators_manage_images() {
    let key = "an-operators-key-0123456789";
    let server = ServerBuilder::new().env("CORACLE_API_KEY", key).start();
    let mut operator = server.client();
    operator.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
    let issued =
        operator.post("/coracle/v1/keys", &json!({"owner": "tenant"})).expect("the server answers").json();
    let tenant_key = issued["key"].as_str().expect("a key is a text").to_owned();
    server.add_secret(&tenant_key);
    let mut tenant = server.client();
    tenant.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), tenant_key)]);
    assert_eq!(operator.get("/coracle/v1/images").expect("the server answers").status, 200);
    for (method, path) in [
        ("GET", "/coracle/v1/images"),
        ("POST", "/coracle/v1/images"),
        ("DELETE", "/coracle/v1/images?name=a"),
        ("POST", "/coracle/v1/images/gc"),
        ("POST", "/coracle/v1/images/import?name=a"),
        ("POST", "/coracle/v1/images/commit"),
    ] {
        let answer =
            tenant.request(method, path, "application/json", b"{\"name\":\"a\"}").expect("it answers");
        assert_eq!(answer.status, 403, "{method} {path}: {}", answer.text());
    }
}

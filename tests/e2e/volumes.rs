//! Volumes: host directories from the operator's list, and disks that outlive sandboxes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use e2e::binary::ProgramCopies;
use e2e::http::HttpResponse;
use e2e::oci::TestImage;
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A server that may mount directories below `allowed`, and files beside them that must stay unreachable.
struct SharedDirectories {
    server: TestServer,
    place: TempDir,
}

impl SharedDirectories {
    /// The allowed directory belongs to user 1000.
    fn start() -> Self {
        let place = TestUser::Same.make_home();
        for name in ["allowed", "secret"] {
            fs::create_dir(place.path().join(name)).expect("our own directory");
        }
        fs::write(place.path().join("secret/token"), "not for you").expect("our own directory");
        chown(place.path().join("allowed"), Some(1000), Some(1000)).expect("root has the permission");
        let server = ServerBuilder::new()
            .env("CORACLE_VOLUMES_HOST_PATHS", &text(&place.path().join("allowed")))
            .start();
        Self { server, place }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn host(&self, name: &str) -> Value {
        json!({"name": "v", "mountPath": "/data", "host": {"path": text(&self.path(name))}})
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("a test's own path").to_owned()
}

fn pvc(name: &str, fields: &Value) -> Value {
    let mut claim = json!({"claimName": name});
    for (field, value) in fields.as_object().into_iter().flatten() {
        claim[field] = value.clone();
    }
    json!({"name": "v", "mountPath": "/data", "pvc": claim})
}

fn with(volume: &Value) -> Value {
    json!({"resourceLimits": {}, "volumes": [volume]})
}

/// A volume entry with other fields replaced.
fn changed(volume: &Value, fields: &Value) -> Value {
    let mut volume = volume.clone();
    for (field, value) in fields.as_object().into_iter().flatten() {
        volume[field] = value.clone();
    }
    volume
}

/// Requests a sandbox that must be refused.
fn refused(server: &TestServer, volume: &Value) -> HttpResponse {
    let mut request = with(volume);
    request["image"] = json!({"uri": "host"});
    request["entrypoint"] = json!(["tail", "-f", "/dev/null"]);
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

fn volumes(server: &TestServer) -> Vec<String> {
    let page = server.client().get("/coracle/v1/volumes").expect("the server answers").json();
    let items = page["items"].as_array().expect("a page has items").iter();
    items.map(|item| item["name"].as_str().expect("a name is a text").to_owned()).collect()
}

fn read(sandbox: &mut RemoteSandbox, command: &str) -> String {
    let ran = sandbox.run(command);
    assert_eq!(ran.code, Some(0), "{command}: {ran:?}");
    ran.stdout
}

#[test]
fn host_directory_is_shared_within_the_allowed_list() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedDirectories::start();
    fs::write(shared.path("allowed/greeting"), "hello").expect("root has the permission");
    let mut sandbox = shared.server.create_sandbox_with(&with(&shared.host("allowed")));
    assert_eq!(read(&mut sandbox, "cat /data/greeting; echo back > /data/reply"), "hello");
    let reply = fs::metadata(shared.path("allowed/reply")).expect("it was written");
    assert_eq!((reply.uid(), reply.gid()), (1000, 1000), "it belongs to another user outside");
    let flags = read(&mut sandbox, "grep ' /data ' /proc/self/mounts");
    assert!(flags.contains("nosuid") && flags.contains("nodev"), "{flags}");
    let ran = sandbox.run("cp /usr/bin/id /data/id && chmod 4755 /data/id");
    assert_ne!(ran.code, Some(0), "a set-id file was left on the host: {ran:?}");

    let read_only = changed(&shared.host("allowed"), &json!({"readOnly": true}));
    let mut reader = shared.server.create_sandbox_with(&with(&read_only));
    let ran = reader.run("cat /data/reply; echo no > /data/greeting");
    assert!(ran.stdout.contains("back") && ran.code != Some(0), "{ran:?}");

    // A missing directory is created, and belongs to the owner of its parent.
    let below = changed(&shared.host("allowed/made/here"), &json!({"subPath": "and/there"}));
    let mut maker = shared.server.create_sandbox_with(&with(&below));
    read(&mut maker, "echo deep > /data/file");
    assert_eq!(
        fs::read_to_string(shared.path("allowed/made/here/and/there/file")).expect("it is there"),
        "deep\n"
    );
    assert_eq!(fs::metadata(shared.path("allowed/made")).expect("it is there").uid(), 1000);

    // The operator's report shows mounts, but not their sources.
    let report = shared.server.client().get(&format!("/coracle/v1/sandboxes/{}", maker.id)).expect("answers");
    assert!(report.text().contains("mount /data"), "{}", report.text());
    let shown = shared.server.client().get(&format!("/v1/sandboxes/{}", maker.id)).expect("answers").text();
    assert!(!shown.contains("allowed"), "{shown}");
}

#[test]
fn a_listed_directory_behind_a_link_is_found_by_either_name() {
    if !testkit::needs_root() {
        return;
    }
    let place = TestUser::Same.make_home();
    let path = |name: &str| place.path().join(name);
    fs::create_dir(path("real")).expect("our own directory");
    fs::create_dir(path("later")).expect("our own directory");
    symlink(path("real"), path("link")).expect("our own directory");
    let server = ServerBuilder::new().env("CORACLE_VOLUMES_HOST_PATHS", &text(&path("link"))).start();
    // The link is resolved once, at the start.
    fs::remove_file(path("link")).expect("our own link");
    symlink(path("later"), path("link")).expect("our own directory");
    for name in ["link", "real", "link/below"] {
        let volume = json!({"name": "v", "mountPath": "/data", "host": {"path": text(&path(name))}});
        let mut sandbox = server.create_sandbox_with(&with(&volume));
        read(&mut sandbox, &format!("echo {name} > /data/from"));
        let written = path(&name.replace("link", "real")).join("from");
        assert_eq!(fs::read_to_string(written).expect("it was written"), format!("{name}\n"));
    }
    assert!(!path("later/from").exists(), "the link was followed again");
}

/// Stores an image whose commands start as `user`.
fn add_image(server: &TestServer, name: &str, user: &str) {
    let layout = tempfile::tempdir().expect("a directory");
    TestImage::with_shell()
        .with_settings(json!({"User": user, "Env": ["PATH=/usr/bin"]}))
        .write_layout(layout.path());
    let mut command = ProgramCopies::shared().command();
    command.args(["image", "import", name]).arg(layout.path());
    let output = command.arg("--state-dir").arg(server.state_directory()).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_owner_of_a_directory_is_the_user_of_the_image() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedDirectories::start();
    for (name, owner) in [("theirs", 4242), ("roots", 0)] {
        fs::create_dir(shared.path("allowed").join(name)).expect("root has the permission");
        chown(shared.path("allowed").join(name), Some(owner), Some(owner)).expect("root has the permission");
    }
    for (image, user, ids) in [("named:1", "app", "1234:1235"), ("numbered:1", "77:78", "77:78")] {
        add_image(&shared.server, image, user);
        let create = |directory: &str| {
            let mut request = with(&shared.host(directory));
            request["image"] = json!({"uri": image});
            request["entrypoint"] = json!(["sleep", "1000"]);
            shared.server.create_sandbox_with(&request)
        };
        let mut sandbox = create("allowed/theirs");
        let command = format!("stat -c %u:%g /data; echo mine > /data/{user}; stat -c %u:%g /data/{user}");
        assert_eq!(read(&mut sandbox, &command), format!("{ids}\n{ids}\n"));
        let written = fs::metadata(shared.path("allowed/theirs").join(user)).expect("it was written");
        assert_eq!((written.uid(), written.gid()), (4242, 4242));
        let mut sandbox = create("allowed/roots");
        assert_eq!(read(&mut sandbox, "stat -c %u:%g /data"), "0:0\n", "root's stays root's");
        let ran = sandbox.run("echo no > /data/file");
        assert_ne!(ran.code, Some(0), "a user wrote as root of the host: {ran:?}");
    }
}

#[test]
fn only_allowed_paths_are_mounted() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedDirectories::start();
    symlink(shared.path("secret"), shared.path("allowed/link")).expect("root has the permission");
    symlink("..", shared.path("allowed/up")).expect("root has the permission");
    symlink("/proc/self/root", shared.path("allowed/magic")).expect("root has the permission");
    fs::create_dir(shared.path("allowed-not")).expect("our own directory");
    let sub = |path: &str| changed(&shared.host("allowed"), &json!({"subPath": path}));
    for (volume, code) in [
        (shared.host("secret"), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (shared.host("allowed-not"), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (shared.host(""), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (changed(&shared.host(""), &json!({"host": {"path": "/"}})), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (changed(&shared.host(""), &json!({"host": {"path": "/etc"}})), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (shared.host("allowed/link"), "VOLUME::HOST_PATH_NOT_FOUND"),
        (shared.host("allowed/up/secret"), "VOLUME::HOST_PATH_NOT_FOUND"),
        (shared.host("allowed/magic/etc"), "VOLUME::HOST_PATH_NOT_FOUND"),
        (sub("link"), "VOLUME::INVALID_SUB_PATH"),
        (sub("up/secret"), "VOLUME::INVALID_SUB_PATH"),
        (sub("magic/etc"), "VOLUME::INVALID_SUB_PATH"),
        (sub("link/made"), "VOLUME::INVALID_SUB_PATH"),
        (sub("../secret"), "VOLUME::INVALID_SUB_PATH"),
        (changed(&shared.host("allowed"), &json!({"mountPath": "/proc"})), "VOLUME::INVALID_MOUNT_PATH"),
        (json!({"name": "v", "mountPath": "/data", "ossfs": {}}), "VOLUME::UNSUPPORTED_BACKEND"),
    ] {
        let answer = refused(&shared.server, &volume);
        assert_eq!(answer.status, 400, "{volume}: {}", answer.text());
        assert_eq!(answer.json()["code"], code, "{volume}: {}", answer.text());
    }
    assert!(!shared.path("secret/made").exists(), "a file was created outside");
    // Without a list no host directory is mounted at all, and both routes of the API say so.
    let plain = TestServer::start();
    let mut request = with(&shared.host("allowed"));
    request["image"] = json!({"uri": "host"});
    request["entrypoint"] = json!(["true"]);
    for path in ["/v1/sandboxes", "/sandboxes"] {
        let answer = plain.client().post(path, &request).expect("the server answers");
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("VOLUME::HOST_PATH_NOT_ALLOWED")));
        assert!(answer.text().contains("host_paths"), "{}", answer.text());
    }
}

/// Alternates between a directory and a link to the secret, as a neighbour with the same directory could.
fn swap_until(stop: &AtomicBool, directory: &Path, link: &Path) {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    while !stop.load(Ordering::Relaxed) {
        renameat_with(CWD, directory, CWD, link, RenameFlags::EXCHANGE).expect("both are there");
    }
}

/// Ends a background activity when the test ends.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn swapping_a_directory_for_a_link_exposes_nothing() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedDirectories::start();
    let (directory, link) = (shared.path("allowed/x"), shared.path("allowed/y"));
    fs::create_dir(&directory).expect("root has the permission");
    fs::create_dir(directory.join("deep")).expect("root has the permission");
    fs::create_dir(shared.path("secret/deep")).expect("root has the permission");
    fs::write(shared.path("secret/deep/token"), "not for you").expect("root has the permission");
    symlink(shared.path("secret"), &link).expect("root has the permission");
    let stop = AtomicBool::new(false);
    let (mut mounted, mut refusals) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| swap_until(&stop, &directory, &link));
        let _stopping = StopOnDrop(&stop);
        let sub = |path: &str| changed(&shared.host("allowed"), &json!({"subPath": path}));
        let ways = [shared.host("allowed/x"), shared.host("allowed/x/deep"), sub("x"), sub("x/deep/made")];
        for round in 0..60 {
            let answer = refused(&shared.server, &ways[round % ways.len()]);
            if answer.status != 202 {
                assert_eq!(answer.status, 400, "{}", answer.text());
                refusals += 1;
                continue;
            }
            mounted += 1;
            let id = answer.json()["id"].as_str().expect("an id is a text").to_owned();
            let mut sandbox = RemoteSandbox::existing(shared.server.client(), &id);
            let seen = read(&mut sandbox, "cat /data/token /data/deep/token 2>/dev/null; echo end");
            assert_eq!(seen, "end\n", "round {round} exposes the target of the link");
            sandbox.delete();
        }
    });
    assert!(mounted > 0 && refusals > 0, "the race was never close: {mounted} and {refusals}");
    assert!(!shared.path("secret/deep/made").exists(), "a file was created outside");
}

#[test]
fn a_volume_outlives_its_sandboxes_and_its_server() {
    if !testkit::needs_root() {
        return;
    }
    let start = || ServerBuilder::new().env("CORACLE_INSTANCE", &format!("volumes-{}", std::process::id()));
    let mut server = start().start();
    let claim = pvc("data", &json!({"storage": "64Mi"}));
    let mut one = server.create_sandbox_with(&with(&claim));
    let mut other = server.create_sandbox_with(&with(&changed(&claim, &json!({"readOnly": true}))));
    read(&mut one, "echo kept > /data/file && chown 1234:1234 /data/file");
    assert_eq!(read(&mut other, "stat -c %u:%g /data/file; cat /data/file"), "1234:1234\nkept\n");
    assert_ne!(other.run("touch /data/no").code, Some(0), "a read-only volume was written");
    let mut part = server.create_sandbox_with(&with(&changed(&claim, &json!({"subPath": "a/b"}))));
    read(&mut part, "echo part > /data/part");
    assert_eq!(read(&mut other, "cat /data/a/b/part"), "part\n");

    let shown = server.client().get("/coracle/v1/volumes/data").expect("the server answers").json();
    assert_eq!(
        (&shown["sizeBytes"], shown["sandboxes"].as_array().map(Vec::len)),
        (&json!(64 << 20), Some(3))
    );
    let remove = |server: &TestServer| server.client().delete("/coracle/v1/volumes/data").expect("answers");
    let busy = remove(&server);
    assert_eq!(busy.status, 409, "{}", busy.text());
    assert!(busy.text().contains("hint"), "{}", busy.text());
    for sandbox in [&mut one, &mut part] {
        sandbox.delete();
    }

    server.kill();
    server.restart(&start().listen(server.address()));
    assert_eq!(remove(&server).status, 409, "a restart must not lose the use of a volume");
    let mut still = RemoteSandbox::existing(server.client(), &other.id);
    assert_eq!(read(&mut still, "cat /data/file"), "kept\n");
    still.delete();
    let mut later = server.create_sandbox_with(&with(&pvc("data", &json!({"createIfNotExists": false}))));
    assert_eq!(read(&mut later, "cat /data/file /data/a/b/part"), "kept\npart\n");
    later.delete();
    assert_eq!(remove(&server).status, 204);
    assert_eq!(remove(&server).status, 404);
    let absent = refused(&server, &pvc("data", &json!({"createIfNotExists": false})));
    assert_eq!((absent.status, &absent.json()["code"]), (400, &json!("VOLUME::PVC_NOT_FOUND")));
    let mut fresh = server.create_sandbox_with(&with(&claim));
    assert_eq!(read(&mut fresh, "ls -A /data"), "", "a volume of that name is new");
    fresh.delete();
    assert_eq!(remove(&server).status, 204);
}

#[test]
fn auto_removed_volume_is_removed_with_its_last_sandbox() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let going = pvc("brief", &json!({"deleteOnSandboxTermination": true, "storage": "32Mi"}));
    let mut one = server.create_sandbox_with(&with(&going));
    let mut other = server.create_sandbox_with(&with(&going));
    read(&mut one, "echo x > /data/x");
    one.delete();
    assert_eq!(read(&mut other, "cat /data/x"), "x\n");
    assert_eq!(volumes(&server), ["brief"]);
    other.delete();
    e2e::eventually("the volume is gone", || volumes(&server).is_empty());
    // A volume that existed before is never removed with a sandbox.
    let made = server.client().post("/coracle/v1/volumes", &json!({"name": "brief", "size": "32Mi"}));
    assert_eq!(made.expect("the server answers").status, 201);
    server.create_sandbox_with(&with(&going)).delete();
    assert_eq!(volumes(&server), ["brief"]);
    assert_eq!(server.client().delete("/coracle/v1/volumes/brief").expect("answers").status, 204);
}

#[test]
fn volume_size_limits_bytes_and_empty_files() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&with(&pvc("small", &json!({"storage": "16Mi"}))));
    let ran = sandbox.run("head -c 64m /dev/zero > /data/big");
    let full = |text: &str| text.contains("No space left") || text.contains("quota exceeded");
    assert!(ran.code != Some(0) && full(&ran.stderr), "{ran:?}");
    let written = read(&mut sandbox, "stat -c %s /data/big; rm /data/big; sync -f /data");
    assert!(written.trim().parse::<u64>().expect("a number") <= 16 << 20, "{written}");
    // Each file is empty, but all of them together would hold gigabytes of names.
    let ran = sandbox
        .run("i=0; while [ $i -lt 400000 ]; do : > /data/$i-$(printf %0200d 0) || exit 3; i=$((i+1)); done");
    assert!(ran.code == Some(3) || full(&ran.stderr), "empty files are not bounded: {:?}", ran.code);
    let usage = server.client().get("/coracle/v1/volumes/small").expect("the server answers").json();
    assert!(usage["usedBytes"].as_u64().is_some_and(|used| used <= 17 << 20), "{usage}");
    sandbox.delete();
    assert_eq!(server.client().delete("/coracle/v1/volumes/small").expect("answers").status, 204);
}

/// Makes a subvolume in the given directory, which on btrfs has no limit.
const NEST: &str = "import fcntl, os, sys\n\
    d = os.open(sys.argv[1], os.O_RDONLY)\n\
    fcntl.ioctl(d, 0x5000940e, bytearray(bytes(8) + b'nested' + bytes(4082)))\n";

#[test]
fn unlimited_subvolume_cannot_be_made_on_a_volume() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&with(&pvc("flat", &json!({"storage": "32Mi"}))));
    let inside = sandbox.run_argv(&["python3", "-c", NEST, "/data"]);
    assert!(inside.code != Some(0) && inside.stderr.contains("Operation not supported"), "{inside:?}");
    // Outside, in the launcher's own view of the same directory, the attack works.
    let shown = server.client().get("/coracle/v1/volumes/flat").expect("the server answers").json();
    let id = shown["id"].as_str().expect("an id is a text");
    let state = server.state_directory();
    let below = state.strip_prefix("/").expect("a state directory is absolute");
    let root = Path::new("/proc").join(server.part_pid("__launcher").to_string()).join("root").join(below);
    let data = root.join("disk/pool/named-volumes").join(id).join("data");
    if data.is_dir() {
        let outside = std::process::Command::new("python3").args(["-c", NEST]).arg(&data).output();
        assert!(outside.expect("there is a python").status.success(), "the attack does not work outside");
        fs::remove_dir(data.join("nested")).expect("an empty subvolume can be removed like a directory");
    } else {
        testkit::skip_test("volumes are not subvolumes here");
    }
    sandbox.delete();
    assert_eq!(server.client().delete("/coracle/v1/volumes/flat").expect("answers").status, 204);
}

#[test]
fn volumes_belong_to_their_owners_and_count_into_their_quotas() {
    if !testkit::needs_root() {
        return;
    }
    const OPERATOR: &str = "the-operators-own-key";
    let config = tempfile::NamedTempFile::new().expect("the temporary directory can be written");
    fs::write(config.path(), "[owners.small]\ndisk = \"200m\"\n[limits]\ndisk = \"64m\"\n")
        .expect("our own file");
    let path = text(config.path());
    let server =
        ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).argument("--config").argument(&path).start();
    let keyed = |key: &str| {
        let mut client = server.client();
        client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
        client
    };
    let tenant = |owner: &str| {
        let made =
            keyed(OPERATOR).post("/coracle/v1/keys", &json!({"owner": owner})).expect("answers").json();
        let key = made["key"].as_str().expect("it is shown once").to_owned();
        server.add_secret(&key);
        keyed(&key)
    };
    let (mut small, mut other) = (tenant("small"), tenant("other"));
    let make = |size: &str| json!({"name": "data", "size": size});
    assert_eq!(small.post("/coracle/v1/volumes", &make("300Mi")).expect("answers").status, 400);
    assert_eq!(small.post("/coracle/v1/volumes", &make("150Mi")).expect("answers").status, 201);
    assert_eq!(small.post("/coracle/v1/volumes", &make("150Mi")).expect("answers").status, 200);
    assert_eq!(small.post("/coracle/v1/volumes", &make("100Mi")).expect("answers").status, 409);
    let request =
        json!({"image": {"uri": "host"}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]});
    let answer = small.post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(answer.status, 429, "volume and sandbox exceed the quota together: {}", answer.text());
    // The same name is another volume for another owner, and a foreign one is not found.
    assert_eq!(other.get("/coracle/v1/volumes").expect("answers").json()["items"], json!([]));
    assert_eq!(other.get("/coracle/v1/volumes/data").expect("answers").status, 404);
    assert_eq!(other.delete("/coracle/v1/volumes/data").expect("answers").status, 404);
    assert_eq!(other.post("/coracle/v1/volumes", &make("300Mi")).expect("answers").status, 201);
    for client in [&mut small, &mut other] {
        assert_eq!(client.delete("/coracle/v1/volumes/data").expect("answers").status, 204);
    }
}

#[test]
fn the_command_line_manages_volumes() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let url = format!("http://{}", server.address());
    let coracle = |words: &[&str]| {
        let mut command = ProgramCopies::shared().command();
        command.args(["--json", "--url", &url]).args(words).output().expect("the binary runs")
    };
    let run_json = |words: &[&str]| -> Value {
        let output = coracle(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("it is JSON")
    };
    assert_eq!(run_json(&["volume", "create", "data", "--size", "32m"])["sizeBytes"], json!(32 << 20));
    let made = run_json(&["create", "--volume", "data:/data"]);
    let id = made["id"].as_str().expect("an id is a text").to_owned();
    assert_eq!(run_json(&["volume", "inspect", "data"])["sandboxes"], json!([id]));
    let refused = coracle(&["volume", "rm", "data"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("in use") && words.contains("hint"), "{words}");
    run_json(&["rm", &id]);
    assert_eq!(run_json(&["volume", "rm", "data"])["removed"], json!(["data"]));
    assert_eq!(run_json(&["volume", "ls"]), json!([]));
    assert!(!coracle(&["volume", "inspect", "data"]).status.success());
}

#[test]
fn an_ordinary_users_server_shares_directories_and_refuses_volumes_by_name() {
    let user = if testkit::is_root() { e2e::run::ORDINARY_USER } else { TestUser::Same };
    let place = user.make_home();
    let allowed = place.path().join("allowed");
    fs::create_dir(&allowed).expect("our own directory");
    fs::set_permissions(&allowed, fs::Permissions::from_mode(0o755)).expect("our own directory");
    if let TestUser::Ordinary(uid) = user {
        chown(&allowed, Some(uid), Some(uid)).expect("root has the permission");
    }
    symlink("/etc", allowed.join("link")).expect("our own directory");
    let start = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false");
    let server = start.env("CORACLE_VOLUMES_HOST_PATHS", &text(&allowed)).start();
    let host = |path: &Path| json!({"name": "v", "mountPath": "/data", "host": {"path": text(path)}});
    let mut sandbox = server.create_sandbox_with(&with(&host(&allowed.join("made"))));
    read(&mut sandbox, "echo mine > /data/file");
    assert_eq!(fs::read_to_string(allowed.join("made/file")).expect("it is there"), "mine\n");
    for (volume, code) in [
        (host(Path::new("/etc")), "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (host(&allowed.join("link")), "VOLUME::HOST_PATH_NOT_FOUND"),
        (pvc("data", &json!({})), "VOLUME::UNSUPPORTED_BACKEND"),
    ] {
        let answer = refused(&server, &volume);
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!(code)), "{}", answer.text());
    }
}

//! `coracle backup` and `coracle restore`, beside a running server.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use e2e::binary::ProgramCopies;
use e2e::run::{ORDINARY_USER, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

fn coracle(words: &[&str], state: &Path) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.args(words).arg("--state-dir").arg(state).output().expect("the binary can be run")
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), output.stderr.as_slice()].concat()).into_owned()
}

fn post(server: &TestServer, path: &str, body: &Value) -> Value {
    let answer = server.client().post(path, body).expect("the server answers");
    assert!(answer.status < 300, "{path}: {}", answer.text());
    answer.json()
}

/// A directory tree that becomes an image: with a link, a second name and a hole.
fn make_image(state: &Path, home: &Path) {
    let tree = home.join("tree");
    fs::create_dir_all(tree.join("data")).expect("our own directory");
    fs::create_dir_all(tree.join("usr/bin")).expect("our own directory");
    fs::write(tree.join("data/of-image"), "image\n").expect("our own file");
    fs::hard_link(tree.join("data/of-image"), tree.join("data/again")).expect("our own file");
    std::os::unix::fs::symlink("of-image", tree.join("data/link")).expect("our own link");
    let path = tree.to_str().expect("it is text");
    let imported = coracle(&["image", "import", "mine", path], state);
    assert!(imported.status.success(), "{}", text(&imported));
}

#[test]
fn restored_directory_has_files_volumes_images_and_snapshots() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's disks are in memory");
    }
    let server = TestServer::start();
    let home = TestUser::Same.make_home();
    make_image(&server.state_directory(), home.path());
    let volume = json!([{"name": "cache", "pvc": {"claimName": "cache"}, "mountPath": "/cache"}]);
    let mut named = server.create_sandbox_with(&json!({
        "extensions": {"coracle.key": "work"},
        "volumes": volume,
    }));
    assert_eq!(
        named.run("echo of-sandbox > /root/file && echo of-volume > /cache/file && sync").code,
        Some(0)
    );
    let snapshot =
        post(&server, &format!("/v1/sandboxes/{}/snapshots", named.id), &json!({"name": "before"}));
    let snapshot = snapshot["id"].as_str().expect("an id is a text").to_owned();
    e2e::eventually("the snapshot is ready", || {
        let answer = server.client().get(&format!("/v1/snapshots/{snapshot}")).expect("the server answers");
        answer.json()["status"]["state"] == "Ready"
    });
    let file = home.path().join("all.backup");
    let name = file.to_str().expect("it is text");
    let small = coracle(&["backup", name, "--max-size", "4k"], &server.state_directory());
    assert!(!small.status.success() && !file.exists(), "{}", text(&small));
    assert!(text(&small).contains("larger than 4.0 KiB"), "{}", text(&small));
    let nowhere = coracle(&["backup", "/no/such/directory/file"], &server.state_directory());
    assert!(
        text(&nowhere).contains("the directory `/no/such/directory` does not exist"),
        "{}",
        text(&nowhere)
    );
    let dash = coracle(&["backup", "-"], &server.state_directory());
    assert!(text(&dash).contains("not written to standard output"), "{}", text(&dash));
    let mut ordinary = ProgramCopies::shared().command();
    ORDINARY_USER.apply_to(&mut ordinary);
    ordinary.args(["backup", "/tmp/not-saved", "--state-dir"]).arg(server.state_directory());
    let denied = ordinary.output().expect("the binary can be run");
    assert!(text(&denied).contains("hint: run it as root"), "{}", text(&denied));
    let saved = coracle(&["--json", "backup", name], &server.state_directory());
    assert!(saved.status.success(), "{}", text(&saved));
    assert_eq!(fs::metadata(&file).expect("it is there").permissions().mode() & 0o777, 0o600);
    assert!(!server.state_directory().join("backup.draft").exists());
    // The original continues to work.
    assert_eq!(named.run("echo more >> /root/file && cat /root/file").stdout, "of-sandbox\nmore\n");
    let again = coracle(&["backup", name], &server.state_directory());
    assert!(text(&again).contains("exists already"), "{}", text(&again));

    let other = TestUser::Same.make_home();
    let state = other.path().join("state");
    let refused = coracle(&["restore", name], &server.state_directory());
    assert!(text(&refused).contains("is not empty"), "{}", text(&refused));
    check_damage(&file, home.path(), &state);
    let restored = coracle(&["restore", name], &state);
    assert!(restored.status.success(), "{}", text(&restored));
    assert!(!state.join("server/secret").exists(), "the secret stays where it is");
    let pool = fs::metadata(state.join("disk/pool.btrfs"));
    if let Ok(pool) = pool {
        assert!(pool.blocks() * 512 < pool.len() / 2, "holes are holes again");
    }

    let after = ServerBuilder::new().start_in(other);
    let answer = after.client().get(&format!("/v1/sandboxes/{}", named.id)).expect("the server answers");
    assert_eq!(answer.json()["status"]["state"], "Failed", "{}", answer.text());
    let mut forked =
        after.create_sandbox_with(&json!({"image": null, "entrypoint": null, "snapshotId": snapshot}));
    assert_eq!(forked.run("cat /root/file").stdout, "of-sandbox\n");
    after.create_sandbox_with(&json!({"image": {"uri": "mine"}}));
    let images = |state: &Path| state.join("images/layers");
    let mut compare = Command::new("diff");
    compare.args(["-r", "--no-dereference"]).arg(images(&server.state_directory()));
    let same = compare.arg(images(&after.state_directory())).output().expect("there is diff");
    assert!(same.status.success(), "{}", text(&same));
    let mut reader = after.create_sandbox_with(&json!({"volumes": volume}));
    assert_eq!(reader.run("cat /cache/file").stdout, "of-volume\n");
    check_restart(&after, &named.id);
    // The restored server does not affect the original's sandbox.
    assert_eq!(named.run("cat /root/file").stdout, "of-sandbox\nmore\n");
}

/// The name refers to the sandbox again, which restarts with its files.
fn check_restart(after: &TestServer, id: &str) {
    let mut again = after.create_sandbox_with(&json!({"extensions": {"coracle.key": "work"}}));
    assert_eq!(again.id, id);
    assert_eq!(again.run("cat /root/file").stdout, "of-sandbox\n");
}

/// A backup with a wrong byte, or without its end, is refused and leaves nothing.
fn check_damage(file: &Path, home: &Path, state: &Path) {
    let whole = fs::read(file).expect("our own file");
    let mut wrong = whole.clone();
    let middle = wrong.len() / 2;
    wrong[middle] ^= 0x55;
    for bytes in [wrong.as_slice(), &whole[..whole.len() - 100]] {
        let damaged = home.join("damaged");
        fs::write(&damaged, bytes).expect("our own file");
        let refused = coracle(&["restore", damaged.to_str().expect("it is text")], state);
        assert!(!refused.status.success(), "{}", text(&refused));
        assert!(text(&refused).contains("damaged"), "{}", text(&refused));
        let left: Vec<_> =
            fs::read_dir(state.parent().expect("it has one")).expect("ours").flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn disks_in_memory_are_named_as_not_saved() {
    let user = if testkit::is_root() { ORDINARY_USER } else { TestUser::Same };
    let server = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let file = server.directory().join("all.backup");
    let mut command = ProgramCopies::shared().command();
    command.args(["--json", "backup"]).arg(&file).arg("--state-dir").arg(server.state_directory());
    command.env("HOME", server.directory());
    user.apply_to(&mut command);
    let saved = command.output().expect("the binary can be run");
    assert!(saved.status.success(), "{}", text(&saved));
    let reported: Value = serde_json::from_slice(&saved.stdout).expect("it is JSON");
    assert_eq!(reported["notSaved"], json!([sandbox.id]));
    assert!(text(&saved).contains("in memory and is not saved"), "{}", text(&saved));
}

#[test]
fn backup_that_is_killed_freezes_nothing() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's disks are in memory");
    }
    let mut server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("head -c 50000000 /dev/urandom > /root/much && sync").code, Some(0));
    for round in 0..5 {
        let file = server.directory().join(format!("{round}.backup"));
        let mut command: Command = ProgramCopies::shared().command();
        command.arg("backup").arg(&file).arg("--state-dir").arg(server.state_directory());
        let mut backup = command.spawn().expect("the binary can be run");
        let draft = server.state_directory().join("backup.draft/disk-0");
        e2e::eventually("it copies, or is done", || {
            draft.exists() || backup.try_wait().is_ok_and(|ended| ended.is_some())
        });
        backup.kill().ok();
        backup.wait().expect("it is our child");
        assert_eq!(
            sandbox.run(&format!("echo {round} > /root/on && sync && cat /root/on")).stdout,
            format!("{round}\n")
        );
    }
    let whole = server.directory().join("whole.backup");
    let saved = coracle(&["backup", whole.to_str().expect("it is text")], &server.state_directory());
    assert!(saved.status.success(), "{}", text(&saved));
    // The next start removes the draft of a killed backup.
    let draft = server.state_directory().join("backup.draft");
    fs::create_dir(&draft).expect("it was removed");
    fs::write(draft.join("disk-0"), "a copy of a disk").expect("our own directory");
    assert!(server.terminate().success());
    server.restart(&ServerBuilder::new());
    assert!(!draft.exists());
}

#[test]
fn restored_server_with_secrets_honours_old_tokens() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's disks are in memory");
    }
    let server = TestServer::start();
    let named = server.create_sandbox_with(&json!({"extensions": {"coracle.key": "work"}}));
    let file = server.directory().join("all.backup");
    let name = file.to_str().expect("it is text");
    let secret = server.state_directory().join("server/secret");
    // A subverted server could put a symbolic or hard link here to a file that only root may read.
    let aside = secret.with_extension("aside");
    fs::rename(&secret, &aside).expect("we are root");
    for make in [
        |target: &Path, link: &Path| std::os::unix::fs::symlink(target, link),
        |target: &Path, link: &Path| fs::hard_link(target, link),
    ] {
        make(&aside, &secret).expect("we are root");
        let refused = coracle(&["backup", name, "--with-secrets"], &server.state_directory());
        assert!(!refused.status.success() && !file.exists(), "{}", text(&refused));
        fs::remove_file(&secret).expect("we are root");
    }
    fs::rename(&aside, &secret).expect("we are root");
    let saved = coracle(&["backup", name, "--with-secrets"], &server.state_directory());
    assert!(saved.status.success(), "{}", text(&saved));
    let other = TestUser::Same.make_home();
    let state = other.path().join("state");
    let restored = coracle(&["restore", name], &state);
    assert!(restored.status.success(), "{}", text(&restored));
    let facts = fs::metadata(state.join("server/secret")).expect("it was saved");
    assert_eq!((facts.uid(), facts.mode() & 0o7777), (0, 0o600));
    let after = ServerBuilder::new().start_in(other);
    let again = after.create_sandbox_with(&json!({"extensions": {"coracle.key": "work"}}));
    assert_eq!(again.id, named.id);
    let mut with_old_token = named.with_client(after.client());
    assert_eq!(with_old_token.run("echo yes").stdout, "yes\n");
}

#[test]
fn failed_backup_leaves_disks_as_they_were() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's disks are in memory");
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("echo kept > /root/file && sync").code, Some(0));
    // The database is copied while the disk is frozen, and a link is refused.
    let database = server.state_directory().join("server/coracle.db");
    let aside = database.with_extension("aside");
    fs::rename(&database, &aside).expect("we are root");
    std::os::unix::fs::symlink(&aside, &database).expect("we are root");
    let file = server.directory().join("all.backup");
    let name = file.to_str().expect("it is text");
    let failed = coracle(&["backup", name], &server.state_directory());
    assert!(!failed.status.success() && !file.exists(), "{}", text(&failed));
    assert!(text(&failed).contains("is not a file that the server"), "{}", text(&failed));
    assert!(!server.state_directory().join("backup.draft").exists());
    fs::rename(&aside, &database).expect("we are root");
    // Nothing is lost and nothing is frozen.
    assert_eq!(sandbox.run("cat /root/file && echo new > /root/new && sync").stdout, "kept\n");
    assert_eq!(server.create_sandbox().run("echo other > /root/file && sync").code, Some(0));
    let saved = coracle(&["backup", name], &server.state_directory());
    assert!(saved.status.success(), "{}", text(&saved));
}

/// Runs a command in a mount namespace of its own, in which `directory` is a file system of 8 MiB.
fn on_a_small_disk(directory: &Path, words: &[&str], state: &Path) -> Output {
    const MOUNT: &str = "mount -t tmpfs -o size=8m small \"$0\" && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", MOUNT]).arg(directory).arg(ProgramCopies::shared().coracle_path());
    command.args(words).arg("--state-dir").arg(state).output().expect("there is unshare")
}

#[test]
fn backup_and_restore_are_refused_for_lack_of_space() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let home = TestUser::Same.make_home();
    let small = home.path().join("small");
    fs::create_dir(&small).expect("our own directory");
    let inside = small.join("all.backup");
    let refused =
        on_a_small_disk(&small, &["backup", inside.to_str().expect("it is text")], &server.state_directory());
    let said = text(&refused);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(" free") && said.contains("needed"), "{said}");
    assert!(said.contains("hint: free some space"), "{said}");
    assert!(!server.state_directory().join("backup.draft").exists());

    let file = home.path().join("all.backup");
    let name = file.to_str().expect("it is text");
    let saved = coracle(&["backup", name], &server.state_directory());
    assert!(saved.status.success(), "{}", text(&saved));
    let refused = on_a_small_disk(&small, &["restore", name], &small.join("state"));
    let said = text(&refused);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(" free") && said.contains("needed"), "{said}");
    assert!(said.contains("hint: free some space"), "{said}");
}

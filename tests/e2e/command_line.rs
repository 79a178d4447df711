//! The messages that `coracle create` prints beside the id, and the treatment of links by `coracle cp`.

use std::path::{Path, PathBuf};
use std::process::Output;

use e2e::binary::ProgramCopies;
use e2e::server::{ServerBuilder, TestServer};

const OPERATOR: &str = "the-operators-own-key";

fn coracle(server: &TestServer, key: Option<&str>, words: &[&str]) -> Output {
    let mut command = ProgramCopies::shared().command();
    command.args(["--url", &format!("http://{}", server.address())]).args(words);
    command.envs(key.map(|key| ("CORACLE_API_KEY", key)));
    command.output().expect("the binary runs")
}

/// The standard output and standard error of a command that must succeed.
fn successful_output(server: &TestServer, words: &[&str]) -> (String, String) {
    let output = coracle(server, None, words);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text").trim_end().to_owned();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{words:?}: {stderr}");
    (stdout, stderr)
}

#[test]
fn links_are_copied_as_links_both_ways() {
    let server = TestServer::start();
    let (id, _) = successful_output(&server, &["create"]);
    let tree = server.directory().join("node_modules");
    std::fs::create_dir_all(tree.join(".bin")).expect("our own directory");
    std::fs::create_dir_all(tree.join("tool")).expect("our own directory");
    std::fs::write(tree.join("tool/main.sh"), "echo it runs\n").expect("our own file");
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, tree.join(name));
    link("../tool/main.sh", ".bin/tool").expect("it is new");
    link("/no/such", "dangling").expect("it is new");
    link("tool", "alias").expect("it is new");
    let local = tree.to_str().expect("it is UTF-8");
    for _ in 0..2 {
        assert_eq!(successful_output(&server, &["cp", local, &format!("{id}:/srv/")]).1, "");
    }
    let inside = "cd /srv/node_modules; sh .bin/tool; readlink .bin/tool dangling alias";
    let (shown, _) = successful_output(&server, &["exec", &id, "-c", inside]);
    assert_eq!(shown, "it runs\n../tool/main.sh\n/no/such\ntool");
    let back = server.directory().join("back");
    let copy = back.to_str().expect("it is UTF-8");
    assert_eq!(successful_output(&server, &["cp", &format!("{id}:/srv/node_modules"), copy]).1, "");
    let led = |name: &str| std::fs::read_link(back.join(name)).expect("it is a link");
    assert_eq!(led(".bin/tool"), Path::new("../tool/main.sh"));
    assert_eq!((led("dangling"), led("alias")), (PathBuf::from("/no/such"), PathBuf::from("tool")));
    assert_eq!(std::fs::read_to_string(back.join("tool/main.sh")).expect("it was copied"), "echo it runs\n");
}

#[test]
fn create_says_which_options_an_existing_sandbox_ignores() {
    let server = TestServer::start();
    let (id, first) = successful_output(&server, &["create", "--key", "work", "--memory", "64m"]);
    assert!(!first.contains("no effect"), "{first}");
    let (same, told) =
        successful_output(&server, &["create", "--key", "work", "--memory", "96m", "--image", "host"]);
    assert_eq!(same, id);
    let expected = "warning: the sandbox of key `work` exists; --image, --memory have no effect on it";
    assert!(told.contains(expected), "{told}");
    assert_eq!(successful_output(&server, &["create", "--key", "work"]), (id, String::new()));
}

#[test]
fn create_says_which_volumes_it_made() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    successful_output(&server, &["volume", "create", "data", "--size", "16m"]);
    let (_, told) = successful_output(&server, &["create", "--volume", "data:/data"]);
    assert!(!told.contains("was created"), "{told}");
    let (_, told) =
        successful_output(&server, &["create", "--volume", "nodata:/data", "--volume", "data:/d"]);
    assert!(told.contains("volume `nodata` (1.0 GiB) was created") && !told.contains("`data`"), "{told}");
}

#[test]
fn an_owner_without_the_image_is_sent_to_the_operator() {
    let server =
        ServerBuilder::new().env("CORACLE_API_KEY", OPERATOR).env("CORACLE_IMAGES_STRICT", "true").start();
    let made = coracle(&server, Some(OPERATOR), &["--json", "key", "create", "team"]);
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).expect("it is JSON");
    let key = made["key"].as_str().expect("it is shown once");
    let refusal = |key: &str| {
        let output = coracle(&server, Some(key), &["create", "--image", "nothing-like-this"]);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("it is text")
    };
    let (owners, operators) = (refusal(key), refusal(OPERATOR));
    assert!(owners.contains("the operator of this server can provide others"), "{owners}");
    assert!(!owners.contains("image ls") && operators.contains("coracle image ls"), "{owners}{operators}");
}

#[test]
fn copy_to_a_relative_path_says_that_it_must_be_absolute() {
    let server = TestServer::start();
    let output = coracle(&server, None, &["cp", "script.py", "work:x"]);
    let said = String::from_utf8(output.stderr).expect("it is text");
    assert!(said.contains("the path in the sandbox must be absolute, and `x` is not"), "{said}");
    assert!(said.contains("hint: write `work:/x`"), "{said}");
}

#[test]
fn unknown_commands_of_other_tools_name_ours() {
    for (word, ours) in [("delete", "coracle rm"), ("stop", "coracle pause")] {
        let output = ProgramCopies::shared().command().args([word, "x"]).output().expect("the binary runs");
        let said = String::from_utf8(output.stderr).expect("it is text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(ours), "{said}");
    }
}

#[test]
fn removing_all_without_keys_does_not_speak_of_owners() {
    let server = TestServer::start();
    successful_output(&server, &["create"]);
    assert_eq!(successful_output(&server, &["rm", "--all"]).1, "1 sandbox removed");
}

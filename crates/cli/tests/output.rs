//! Tests the complete output of the binary when something is wrong.

use std::net::TcpListener;
use std::process::{Command, Output};

fn coracle(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("CORACLE_")) {
        command.env_remove(name);
    }
    command.args(words).output().expect("the binary starts")
}

fn check(words: &[&str], code: i32, stderr: &str) {
    let output = coracle(words);
    assert_eq!(String::from_utf8_lossy(&output.stderr), stderr, "{words:?}");
    assert_eq!(output.status.code(), Some(code), "{words:?}");
    assert!(output.stdout.is_empty(), "{words:?}");
}

/// An address at which nothing listens: it was free a moment ago.
fn unused_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", listener.local_addr().expect("an address"))
}

#[test]
fn a_missing_server_is_an_error_with_a_hint() {
    let url = unused_address();
    let complaint = format!(
        "error: could not talk to the server at `{url}`\n\
         caused by: client error (Connect)\n\
         caused by: tcp connect error\n\
         caused by: Connection refused (os error 111)\n\
         hint: start one with `coracle serve`, or name another with --url\n"
    );
    check(&["ls", "--url", &url], 1, &complaint);
    check(&["exec", "--url", &url, "abcdefghijklmnopqrst", "--", "true"], 125, &complaint);
}

#[test]
fn tls_is_refused_with_a_hint() {
    check(
        &["ls", "--url", "https://localhost"],
        1,
        "error: `https://localhost` speaks TLS, which this client does not\n\
         hint: use http, or a local proxy that adds TLS\n",
    );
}

#[test]
fn a_copy_needs_exactly_one_end_in_a_sandbox() {
    check(&["cp", "a", "b"], 1, "error: one of the two ends must be in a sandbox, as in `SANDBOX:/PATH`\n");
    let inside = "abcdefghijklmnopqrst:/a";
    check(&["cp", inside, inside], 1, "error: one of the two ends must be on this host\n");
}

#[test]
fn an_unknown_key_is_an_error_that_names_the_known_ones() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("coracle.toml");
    std::fs::write(&file, "[prepared]\nvolume = 3\n").expect("it is written");
    let file = file.to_str().expect("text");
    check(
        &["image", "ls", "--config", file],
        1,
        &format!(
            "error: `{file}` is not a configuration\n\
             caused by: line 2: unknown field `volume`, expected `volumes` or `namespaces`\n\
             hint: docs/configuration.md says what each setting means and how it is written\n"
        ),
    );
}

#[test]
fn a_missing_configuration_is_an_error_with_a_hint() {
    check(
        &["image", "ls", "--config", "/no/such/file"],
        1,
        "error: could not read `/no/such/file`\n\
         caused by: No such file or directory (os error 2)\n\
         hint: name a file that can be read with --config or CORACLE_CONFIG, or none\n",
    );
}

#[test]
fn errors_are_json_for_programs() {
    check(
        &["--json", "image", "ls", "--config", "/no/such/file"],
        1,
        "{\"error\":\"could not read `/no/such/file`\",\
         \"caused_by\":[\"No such file or directory (os error 2)\"],\
         \"hint\":\"name a file that can be read with --config or CORACLE_CONFIG, or none\"}\n",
    );
    check(
        &["--json", "cp", "a", "b"],
        1,
        "{\"error\":\"one of the two ends must be in a sandbox, as in `SANDBOX:/PATH`\",\"caused_by\":[]}\n",
    );
}

#[test]
fn an_image_is_imported_listed_and_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("root");
    std::fs::create_dir_all(root.join("usr/bin")).expect("it is made");
    std::fs::write(root.join("usr/bin/tool"), vec![b'x'; 2048]).expect("it is written");
    let state = directory.path().join("state");
    let [root, state] = [&root, &state].map(|path| path.to_str().expect("text"));
    let image = |words: &[&str]| {
        let output = coracle(&[&["image"], words, &["--state-dir", state]].concat());
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    // The size of the file and of three entries.
    assert_eq!(image(&["import", "tools:1", root]), "tools:1 (14.0 KiB)\n");
    let list = image(&["ls"]);
    // The time of the last use follows it.
    let start = "NAME     LAYERS  SIZE      DIGEST  LAST USED\nhost     0       0 B       -       -\ntools:1  1       14.0 KiB  -       2";
    assert!(list.starts_with(start), "{list}");
    check(
        &["image", "import", "tools:1", root, "--state-dir", state],
        1,
        &format!(
            "error: `{root}` is not imported\ncaused by: image `tools:1` already exists\n\
             hint: remove the image first with `coracle image rm`\n"
        ),
    );
    assert_eq!(image(&["rm", "tools:1"]), "tools:1\n");
    check(
        &["image", "rm", "tools:1", "--state-dir", state],
        1,
        "error: image `tools:1` not found\nhint: `coracle image ls` lists the images\n",
    );
}

#[test]
fn completions_are_printed_for_a_shell() {
    let output = coracle(&["completions", "bash"]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("complete -F _coracle"));
}

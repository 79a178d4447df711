//! Registries that attack their client, and the process that meets them.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::oci::{TestImage, build_layer};
use e2e::registry::{HostileRegistry, PASSWORD, RegistryReaders, StallingProxy, TestRegistry, USERNAME};
use e2e::run::CommandOutput;
use e2e::server::ServerBuilder;
use serde_json::json;

/// Text of an internal service that a registry must not be able to make visible.
const INTERNAL_TEXT: &str = "INTERNAL-TEXT-4711";

fn respond(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n{body}")
}

fn pull_command(state: &std::path::Path, name: &str) -> Command {
    let mut command = ProgramCopies::shared().command();
    command.args(["image", "pull", name, "--state-dir"]).arg(state);
    command
}

/// Pulls with the credentials of a user, without a server.
fn pull_as_user(name: &str) -> CommandOutput {
    let state = tempfile::tempdir().expect("the temporary directory can be written");
    let mut command = pull_command(state.path(), name);
    command.args(["--username", USERNAME, "--password-stdin"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    let mut input = child.stdin.take().expect("it is a pipe");
    input.write_all(PASSWORD.as_bytes()).expect("it reads the password");
    drop(input);
    child.wait_with_output().expect("it is our child").into()
}

#[test]
fn registry_cannot_have_a_password_sent_elsewhere() {
    let victim = HostileRegistry::start(|_, _| respond("200 OK", "", INTERNAL_TEXT));
    let realm = format!("http://{}/token", victim.address());
    let registry = HostileRegistry::start(move |_, _| {
        respond("401 Unauthorized", &format!("WWW-Authenticate: Bearer realm=\"{realm}\"\r\n"), "")
    });
    let ended = pull_as_user(&registry.image_name("test/app:1"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("not https"), "{ended:?}");
    assert_eq!(victim.requests(), Vec::<String>::new(), "another service was asked");
    assert!(!registry.requests().concat().to_ascii_lowercase().contains("authorization:"));
}

#[test]
fn token_is_fetched_from_the_registry_itself_and_no_body_is_shown() {
    let registry = HostileRegistry::start(|head, own| {
        if head.starts_with("GET /token") {
            return respond("403 Forbidden", "", INTERNAL_TEXT);
        }
        let challenge = format!("WWW-Authenticate: Bearer realm=\"http://{own}/token\",service=\"test\"\r\n");
        respond("401 Unauthorized", &challenge, INTERNAL_TEXT)
    });
    let ended = pull_as_user(&registry.image_name("test/app:1"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let shown = format!("{}{}", ended.stdout, ended.stderr);
    assert!(!shown.contains(INTERNAL_TEXT) && !shown.contains(PASSWORD), "{shown}");
    let asked = registry.requests().concat();
    // The attack works as far as it may: the registry itself gets the password that was given for it.
    assert!(asked.contains("scope=repository%3Atest%2Fapp%3Apull&service=test"), "{asked}");
    assert!(asked.to_ascii_lowercase().contains("authorization: basic"), "{asked}");
}

#[test]
fn endless_token_is_refused() {
    let registry = HostileRegistry::start(|head, own| {
        if head.starts_with("GET /token") {
            return respond("200 OK", "", &"x".repeat(2 << 20));
        }
        respond("401 Unauthorized", &format!("WWW-Authenticate: Bearer realm=\"http://{own}/token\"\r\n"), "")
    });
    let ended = pull_as_user(&registry.image_name("test/app:1"));
    assert!(ended.code == Some(1) && ended.stderr.contains("1 MiB of token"), "{ended:?}");
}

/// One field of `/proc/PID/status`.
fn status_field(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.expect("the kernel shows the field").trim().to_owned()
}

fn process_uid(pid: u32) -> u32 {
    let uids = status_field(pid, "Uid");
    uids.split_whitespace().next().expect("there are four").parse().expect("it is a number")
}

/// Checks that a puller is confined and knows nothing of us.
fn check_confined(pid: u32, secret: &str) {
    assert_eq!(status_field(pid, "Seccomp"), "2");
    assert_eq!(status_field(pid, "NoNewPrivs"), "1");
    for field in ["CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status_field(pid, field), "0000000000000000", "{field}");
    }
    let read = |name: &str| {
        let bytes = fs::read(format!("/proc/{pid}/{name}")).expect("root may read this");
        String::from_utf8_lossy(&bytes).into_owned()
    };
    if testkit::is_root() {
        assert_ne!(process_uid(pid), 0);
        assert!(!read("environ").contains("CORACLE_") && !read("environ").contains(secret));
        assert!(!read("cmdline").contains(secret));
        let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("root may read this").flatten();
        let open: Vec<_> = open.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
        for path in open {
            let path = path.to_string_lossy().into_owned();
            let plain =
                ["socket:", "pipe:", "anon_inode:", "/dev/null"].iter().any(|kind| path.starts_with(kind));
            assert!(plain, "the puller has `{path}` open");
        }
    }
}

/// An image whose layer is too large for what the proxy lets pass.
fn large_image() -> TestImage {
    let content: Vec<u8> =
        (0..1_000_000_u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    TestImage::empty().with_raw_layer(build_layer(&[("usr/file", &content, 0o644, (0, 0))], &[]))
}

#[test]
fn server_fetches_images_in_a_process_without_rights() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/large", "1", &large_image());
    let stalling = StallingProxy::in_front_of(&registry, 200_000);
    let key = "the-operators-secret-key-0815";
    let mut server = ServerBuilder::new().env("CORACLE_API_KEY", key).start();
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
    let request = json!({"name": stalling.image_name("test/large:1")}).to_string();
    let pulling = client.start_request("POST", "/coracle/v1/images", "application/json", request.as_bytes());
    let pulling = pulling.expect("the server answers");
    let puller = server.part_pid("__pull");
    e2e::eventually("the puller is confined", || status_field(puller, "Seccomp_filters") != "2");
    check_confined(puller, key);
    if testkit::is_root() {
        assert_ne!(process_uid(puller), process_uid(server.part_pid("__server")));
    }
    // It ends with the server that wants the image.
    server.kill();
    drop(pulling);
    e2e::eventually("the puller ended", || !fs::exists(format!("/proc/{puller}/fd")).unwrap_or(true));
}

#[test]
fn command_line_fetches_images_in_a_process_without_rights() {
    let Some(registry) = TestRegistry::start(RegistryReaders::All) else { return };
    registry.push_image("test/large", "1", &large_image());
    let stalling = StallingProxy::in_front_of(&registry, 200_000);
    let state = tempfile::tempdir().expect("the temporary directory can be written");
    let mut command = pull_command(state.path(), &stalling.image_name("test/large:1"));
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut pulling = command.spawn().expect("the binary runs");
    let parent = pulling.id();
    let mut puller = 0;
    e2e::eventually("there is a confined puller", || {
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
        puller =
            children.unwrap_or_default().split_whitespace().find_map(|pid| pid.parse().ok()).unwrap_or(0);
        puller != 0
            && fs::exists(format!("/proc/{puller}")).unwrap_or(false)
            && status_field(puller, "Seccomp") == "2"
    });
    check_confined(puller, "no secret was given");
    pulling.kill().expect("it is our child");
    pulling.wait().expect("it is our child");
    e2e::eventually("the puller ended", || !fs::exists(format!("/proc/{puller}/fd")).unwrap_or(true));
}

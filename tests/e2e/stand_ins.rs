//! Images that are not stored here: which ones `host` replaces, how that is reported, and what is refused.

use std::path::Path;

use e2e::binary::ProgramCopies;
use e2e::http::HttpResponse;
use e2e::run::{CommandOutput, RunCommand, TestUser};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

const HEADER: &str = "coracle-image-stand-in";
/// A name that `host` replaces on every machine.
const ALWAYS: &str = "opensandbox/code-interpreter:v1.0.2";

fn create(server: &TestServer, image: &str) -> HttpResponse {
    let request = json!({
        "image": {"uri": image},
        "timeout": 600,
        "resourceLimits": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
    });
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

/// The versions on this machine, as the server's probe reports them.
fn versions(server: &TestServer) -> Value {
    let offered = server.client().get("/coracle/v1/capabilities").expect("the server answers").json();
    offered["hostVersions"].clone()
}

fn major(version: &str) -> u32 {
    let first = version.split('.').next().expect("there is always a first part");
    first.parse().expect("versions begin with a number")
}

fn coracle(server: &TestServer, arguments: &[&str]) -> CommandOutput {
    let mut command = ProgramCopies::shared().command();
    command.args(arguments).args(["--url", &format!("http://{}", server.address())]);
    command.output().expect("the binary runs").into()
}

/// A server with these lines in its configuration.
fn configured(directory: &Path, lines: &str) -> TestServer {
    let config = directory.join("coracle.toml");
    std::fs::write(&config, lines).expect("our own directory");
    ServerBuilder::new().argument("--config").argument(config.to_str().expect("a plain path")).start()
}

fn check_refused(answer: &HttpResponse, image: &str) {
    assert_eq!(answer.status, 400, "{image}: {}", answer.text());
    let reported = answer.json();
    assert_eq!(reported["code"], "DOCKER::SANDBOX_IMAGE_PULL_FAILED", "{image}: {reported}");
    let message = reported["message"].as_str().expect("a message");
    for part in [image, "image pull", "image import", "images.aliases"] {
        assert!(message.contains(part), "{image}: {message}");
    }
}

#[test]
fn host_stands_in_by_its_versions_and_for_nothing_else() {
    let server = ServerBuilder::new().start();
    let versions = versions(&server);
    for (program, shown) in [("python", "Python"), ("node", "Node")] {
        let Some(version) = versions[program].as_str().filter(|version| *version != "unknown") else {
            check_refused(&create(&server, &format!("{program}:3")), program);
            continue;
        };
        let major = major(version);
        for tag in [format!("{major}"), format!("{major}.99-slim"), "slim".to_owned()] {
            let image = format!("{program}:{tag}");
            let answer = create(&server, &image);
            assert_eq!(answer.status, 202, "{image}: {}", answer.text());
            let reported = answer.header(HEADER).unwrap_or_default();
            assert_eq!(reported, format!("image `host` ({shown} {version}) stands in for `{image}`"));
        }
        for tag in [format!("{}", major + 1), format!("{}.1", major - 1)] {
            let image = format!("{program}:{tag}");
            let answer = create(&server, &image);
            check_refused(&answer, &image);
            assert!(answer.text().contains(&format!("{shown} {version}")), "{}", answer.text());
        }
    }
    let other = if versions["system"].as_str().is_some_and(|name| name.starts_with("Ubuntu")) {
        "fedora:40"
    } else {
        "ubuntu:24.04"
    };
    for image in [other, "busybox", "registry.example/python:3", "no-such-image"] {
        check_refused(&create(&server, image), image);
    }
}

#[test]
fn stand_in_is_reported_in_header_log_table_and_on_standard_error() {
    let server = ServerBuilder::new().start();
    for _ in 0..2 {
        let answer = create(&server, ALWAYS);
        assert_eq!(answer.status, 202, "{}", answer.text());
        let reported = answer.header(HEADER).expect("a header").to_owned();
        assert!(reported.starts_with("image `host` (") && reported.contains(ALWAYS), "{reported}");
        let id = answer.json()["id"].as_str().expect("an id").to_owned();
        let seen = server.client().get(&format!("/v1/sandboxes/{id}")).expect("the server answers").json();
        assert_eq!(seen["image"]["uri"], ALWAYS, "{seen}");
        assert_eq!(seen["extensions"]["coracle.image"], "host", "{seen}");
    }
    let log = server.log();
    let reported = log.lines().filter(|line| line.contains("stands in for") && line.contains(ALWAYS));
    assert_eq!(reported.count(), 1, "{log}");
    let listed = coracle(&server, &["ls"]);
    assert!(listed.stdout.contains(&format!("host (for {ALWAYS})")), "{listed:?}");

    let expected = format!("stands in for `{ALWAYS}`");
    let made = coracle(&server, &["create", "--image", ALWAYS]);
    assert!(made.code == Some(0) && made.stderr.contains(&expected), "{made:?}");
    let pool = coracle(&server, &["pool", "create", "p", "--image", ALWAYS, "--level", "0"]);
    assert!(pool.code == Some(0) && pool.stderr.contains(&expected), "{pool:?}");
    let inspected = coracle(&server, &["inspect", made.stdout.trim()]);
    assert!(inspected.stdout.contains(&expected), "{inspected:?}");
    // The image `host` itself causes no notice.
    let plain = create(&server, "host");
    assert!(plain.status == 202 && plain.header(HEADER).is_none(), "{plain:?}");
}

#[test]
fn run_reports_a_stand_in_and_refuses_missing_versions() {
    let run = RunCommand::new(TestUser::Same).flag("--image", ALWAYS);
    let ended = run.run_shell("echo ran");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "ran\n"), "{ended:?}");
    assert!(ended.stderr.contains("warning: image `host` ("), "{ended:?}");
    assert!(ended.stderr.contains(&format!("stands in for `{ALWAYS}`")), "{ended:?}");
    let strict = run.command(&["true"]).env("CORACLE_IMAGES_STRICT", "true").output();
    let strict: CommandOutput = strict.expect("the binary runs").into();
    assert_eq!(strict.code, Some(125), "{strict:?}");
    assert!(strict.stderr.contains("images.strict") && strict.stderr.contains("hint:"), "{strict:?}");
    let refused = RunCommand::new(TestUser::Same).flag("--image", "python:2.7").run_argv(&["true"]);
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(
        refused.stderr.contains("image pull") && refused.stderr.contains("images.aliases"),
        "{refused:?}"
    );
    let ended = RunCommand::new(TestUser::Same).run_argv(&["true"]);
    assert!(!ended.stderr.contains("stands in"), "{ended:?}");
}

#[test]
fn alias_of_the_operator_wins_and_strict_refuses_every_alias() {
    let directory = TestUser::Same.make_home();
    let aliases =
        "images.aliases = { \"python:2.7\" = \"host\", \"ubuntu*\" = \"host\", \"base\" = \"gone\" }\n";
    let server = configured(directory.path(), aliases);
    for image in ["python:2.7", "ubuntu:24.04"] {
        let answer = create(&server, image);
        assert_eq!(answer.status, 202, "{image}: {}", answer.text());
        assert!(
            answer.header(HEADER).is_some_and(|reported| reported.contains(image)),
            "{:?}",
            answer.headers
        );
    }
    let gone = create(&server, "base");
    assert!(gone.status == 400 && gone.text().contains("`gone`"), "{}", gone.text());

    let server = configured(directory.path(), &format!("{aliases}images.strict = true\n"));
    for image in ["python:2.7", ALWAYS, "no-such-image"] {
        let answer = create(&server, image);
        assert!(answer.status == 400 && answer.text().contains(image), "{image}: {}", answer.text());
    }
    assert_eq!(create(&server, "host").status, 202);
}

//! The server under a service manager: units, notifications, signals to the main process alone, and
//! reloading of the configuration.

use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::http::HttpClient;
use e2e::server::{ServerBuilder, TestServer};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;

const FIRST_KEY: &str = "the-first-key-of-the-operator";
const SECOND_KEY: &str = "the-second-key-of-the-operator";

/// A configuration file that a test writes again and again.
struct ConfigFile(TempDir);

impl ConfigFile {
    fn new(text: &str) -> Self {
        let file = Self(tempfile::tempdir().expect("the temporary directory can be written"));
        file.write(text);
        file
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("coracle.toml")
    }

    fn write(&self, text: &str) {
        fs::write(self.path(), text).expect("our own file");
    }

    fn start(&self) -> ServerBuilder {
        ServerBuilder::new().argument("--config").argument(self.path().to_str().expect("it is UTF-8"))
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process has an id");
    rustix::process::kill_process(pid, signal).expect("it is our child");
}

/// Sends SIGHUP to the main process alone and waits until the log has `line` once more.
fn reload(server: &TestServer, line: &str) {
    let before = server.log().matches(line).count();
    signal(server.pid(), Signal::HUP);
    e2e::eventually(line, || server.log().matches(line).count() > before);
}

fn client(server: &TestServer, key: &str) -> HttpClient {
    let mut client = server.client();
    client.set_headers(&[("OPEN-SANDBOX-API-KEY".to_owned(), key.to_owned())]);
    client
}

fn create(client: &mut HttpClient, image: &str) -> e2e::http::HttpResponse {
    let request =
        json!({"image": {"uri": image}, "resourceLimits": {}, "entrypoint": ["tail", "-f", "/dev/null"]});
    client.post("/v1/sandboxes", &request).expect("the server answers")
}

fn coracle(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let home = tempfile::tempdir().expect("the temporary directory can be written");
    let mut command = ProgramCopies::shared().command();
    command.args(args).envs(environment.iter().copied()).env("HOME", home.path());
    command.output().expect("the binary can be run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn sighup_reloads_keys_quotas_limits_and_aliases() {
    let file = ConfigFile::new(&format!("api_key = \"{FIRST_KEY}\"\nlimits.pids = 100"));
    let server = file.start().start();
    let mut first = client(&server, FIRST_KEY);
    assert_eq!(create(&mut first, "one-of-our-own").status, 400, "the alias does not exist yet");
    file.write(&format!(
        "api_key = \"{SECOND_KEY}\"\nlisten = \"127.0.0.1:1\"\nlimits = {{ pids = 101, max_memory = \"3g\" }}\n\
         images.aliases = {{ one-of-our-own = \"host\" }}\nowners.default.sandboxes = 1\n"
    ));
    reload(&server, "configuration reloaded");
    let log = server.log();
    for setting in ["api_key", "limits.pids", "limits.max_memory", "images.aliases.one-of-our-own"] {
        let named =
            |line: &&str| line.contains("setting changed") && line.contains(&format!("\"{setting}\""));
        assert_eq!(log.lines().filter(named).count(), 1, "{setting}: {log}");
    }
    assert!(!log.contains(FIRST_KEY) && !log.contains(SECOND_KEY), "a key is in the log");
    assert_eq!(first.get("/v1/sandboxes").expect("the server answers").status, 401);
    let mut second = client(&server, SECOND_KEY);
    let made = create(&mut second, "one-of-our-own");
    assert_eq!(made.status, 202, "{}", made.text());
    let id = made.json()["id"].as_str().expect("it has an id").to_owned();
    let inspected = second.get(&format!("/coracle/v1/sandboxes/{id}")).expect("the server answers").text();
    assert!(inspected.contains("101"), "{inspected}");
    let over_quota = create(&mut second, "host");
    assert_eq!(over_quota.status, 429, "{}", over_quota.text());
    let request = json!({"image": {"uri": "host"}, "resourceLimits": {"memory": "4Gi"}});
    let too_much = second.post("/v1/sandboxes", &request).expect("the server answers");
    assert_eq!(too_much.status, 400, "{}", too_much.text());
    assert_eq!(second.delete(&format!("/v1/sandboxes/{id}")).expect("the server answers").status, 204);
}

#[test]
fn reload_names_settings_that_need_a_restart() {
    let file = ConfigFile::new("");
    let server = file.start().start();
    file.write("lines = \"S\"\n[gateway]\nmode = \"header\"\n");
    reload(&server, "configuration reloaded");
    let log = server.log();
    for setting in ["lines", "gateway.mode"] {
        let named = |line: &&str| {
            line.contains("needs a restart of the server") && line.contains(&format!("\"{setting}\""))
        };
        assert_eq!(log.lines().filter(named).count(), 1, "{setting}: {log}");
    }
    assert_eq!(server.create_sandbox().run("echo fine").stdout, "fine\n");
}

#[test]
fn wrong_configuration_changes_nothing_on_reload() {
    let file = ConfigFile::new("limits.pids = 100");
    let server = file.start().start();
    for wrong in ["limits.pids = 0", "limts.pids = 5", "limits.pids = ["] {
        file.write(wrong);
        reload(&server, "configuration not reloaded");
    }
    let refused = server.log();
    assert!(refused.contains("`limits.pids` is 0") && refused.contains("limts"), "{refused}");
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("echo fine").stdout, "fine\n");
    let inspected = server.client().get(&format!("/coracle/v1/sandboxes/{}", sandbox.id));
    assert!(inspected.expect("the server answers").text().contains("100"));
}

#[test]
fn reload_changes_the_log_level_of_every_process() {
    let file = ConfigFile::new("log.level = \"warn\"");
    // The level must come from the file: a variable would take precedence.
    let server = file.start().without_env("CORACLE_LOG").start();
    server.client().get("/v1/sandboxes").expect("the server answers");
    assert_eq!(server.log().matches("request completed").count(), 0, "{}", server.log());
    file.write("log.level = \"debug\"");
    reload(&server, "configuration reloaded");
    server.client().get("/v1/sandboxes").expect("the server answers");
    e2e::eventually("requests are logged now", || server.log().contains("request completed"));
}

/// The behaviour of systemd with `KillMode=process`, `Type=notify` and `ExecReload=kill -HUP`.
#[test]
fn sandboxes_survive_signals_to_the_main_process() {
    let file = ConfigFile::new("");
    let socket_path = file.0.path().join("notify");
    let manager = UnixDatagram::bind(&socket_path).expect("our own directory");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("it is a socket");
    let heard = || {
        let mut message = [0; 512];
        let mut receive = || manager.recv(&mut message);
        let is_interrupted = |error: &io::Error| error.kind() == io::ErrorKind::Interrupted;
        let length = loop {
            match receive() {
                Err(error) if is_interrupted(&error) => {}
                received => break received.expect("the supervisor notifies"),
            }
        };
        text(&message[..length])
    };
    let notify =
        |start: ServerBuilder| start.env("NOTIFY_SOCKET", socket_path.to_str().expect("it is UTF-8"));
    let mut server = notify(file.start()).start();
    assert!(heard().starts_with("READY=1\n"));
    let mut sandbox = server.create_sandbox();
    let mark = format!("sleep {}", 800_000 + std::process::id());
    sandbox.start_background(&mark);
    signal(server.pid(), Signal::HUP);
    let reloading = heard();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert!(heard().starts_with("READY=1\n"));

    let parts = [server.part_pid("__server"), server.part_pid("__launcher")];
    assert!(server.terminate().success());
    assert!(heard().starts_with("STOPPING=1\n"));
    for part in parts {
        assert!(!Path::new(&format!("/proc/{part}")).exists(), "a part outlived the supervisor");
    }
    assert_eq!(host::pids_with_command_line(&mark).len(), 1, "the sandbox has ended with the server");
    let again = notify(file.start().listen(server.address()));
    server.restart(&again);
    assert!(heard().starts_with("READY=1\n"));
    assert_eq!(sandbox.run("true").code, Some(0));
    assert_eq!(host::pids_with_command_line(&mark).len(), 1, "the command was lost");
}

#[test]
fn units_are_accepted_by_systemd() {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let directory = tempfile::tempdir().expect("the temporary directory can be written");
    for (name, scope) in [("coracle.service", "--system"), ("coracle-user.service", "--user")] {
        let unit = fs::read_to_string(packaging.join(name)).expect("the unit is part of the repository");
        for line in ["Type=notify", "KillMode=process", "Delegate=yes", "ExecReload=/bin/kill -HUP $MAINPID"]
        {
            assert!(unit.lines().any(|found| found == line), "{name} lacks `{line}`");
        }
        // The program in the unit may not be installed here.
        let binary =
            ProgramCopies::shared().command().get_program().to_str().expect("it is UTF-8").to_owned();
        let unit = unit
            .replace("ExecStart=/usr/local/bin/coracle", &format!("ExecStart={binary}"))
            .replace("ExecStart=coracle", &format!("ExecStart={binary}"));
        let path = directory.path().join(name);
        fs::write(&path, unit).expect("our own directory");
        let verified = Command::new("systemd-analyze")
            .args([scope, "verify", "--man=no"])
            .arg(&path)
            .env("XDG_RUNTIME_DIR", directory.path())
            .output();
        let Ok(verified) = verified else {
            return testkit::skip_test("there is no systemd-analyze here; the package `systemd` has it");
        };
        // systemd-analyze returns success for lines that it ignores, and prints them.
        let said = text(&verified.stderr);
        let unexpected: Vec<&str> = said
            .lines()
            .filter(|line| line.contains(name))
            // Older versions do not know this setting, as the unit says.
            .filter(|line| !line.contains("'DelegateSubgroup'"))
            .collect();
        assert!(verified.status.success() && unexpected.is_empty(), "{name}: {said}");
    }
}

#[test]
fn config_check_accepts_valid_files_and_names_errors() {
    let file = ConfigFile::new("limits.memory = \"2g\"");
    let path = file.path();
    let path = path.to_str().expect("it is UTF-8");
    let right = coracle(&["config", "check", path], &[]);
    assert!(right.status.success(), "{right:?}");
    assert!(text(&right.stdout).contains("is valid"), "{right:?}");
    file.write("\nlimits.memry = \"2g\"");
    let wrong = coracle(&["config", "check", path], &[]);
    assert_eq!(wrong.status.code(), Some(1));
    let said = text(&wrong.stderr);
    assert!(said.contains("line 2") && said.contains("memry"), "{said}");
    file.write("listen = \"0.0.0.0:80\"");
    assert!(
        !coracle(&["config", "check", path], &[]).status.success(),
        "others could reach it without a key"
    );
    assert!(coracle(&["config", "check", path], &[("CORACLE_API_KEY", FIRST_KEY)]).status.success());
    file.write(&format!("api_key = \"{FIRST_KEY}\""));
    let readable = coracle(&["config", "check", path], &[]);
    assert!(text(&readable.stderr).contains("chmod 600"), "{readable:?}");
}

#[test]
fn config_show_names_the_source_of_each_setting_and_no_secret() {
    let file = ConfigFile::new(&format!(
        "api_key = \"{FIRST_KEY}\"\nlimits.pids = 7\nlimits.memory = \"2g\"\nowners.a.sandboxes = 2\n\
         gateway = {{ mode = \"header\", keys = [\"a=MDEyMzQ1Njc4OWFiY2RlZg==\"] }}"
    ));
    let path = file.path();
    let args =
        ["--json", "config", "show", "--state-dir", "/somewhere", "--config", path.to_str().expect("UTF-8")];
    let shown = coracle(&args, &[("CORACLE_LIMITS_MEMORY", "3g")]);
    assert!(shown.status.success(), "{shown:?}");
    let all = text(&shown.stdout);
    assert!(!all.contains(FIRST_KEY) && !all.contains("MDEyMzQ1"), "a secret is shown: {all}");
    let value: Value = serde_json::from_str(&all).expect("it is JSON");
    let find = |name: &str| {
        let settings = value["settings"].as_array().expect("a list");
        let found = settings.iter().find(|setting| setting["name"] == name);
        found.map(|setting| (setting["value"].clone(), setting["source"].clone()))
    };
    for (name, expected, source) in [
        ("api_key", json!("***"), "file"),
        ("gateway.keys", json!(["***"]), "file"),
        ("limits.pids", json!(7), "file"),
        ("owners.a.sandboxes", json!(2), "file"),
        ("limits.memory", json!("3Gi"), "env"),
        ("state_dir", json!("/somewhere"), "flag"),
        ("limits.disk", json!("1Gi"), "default"),
        ("public_address", json!(null), "default"),
    ] {
        assert_eq!(find(name), Some((expected, json!(source))), "{name}");
    }
}

#[test]
fn log_files_have_no_colour_codes_and_json_by_setting() {
    let text_server = ServerBuilder::new().env("CORACLE_LOG_FORMAT", "text").start();
    text_server.client().get("/v1/sandboxes").expect("the server answers");
    e2e::eventually("a request is logged", || text_server.log().contains("request completed"));
    let log = text_server.log();
    assert!(!log.contains('\u{1b}') && log.contains(" INFO "), "{log}");
    let json_server = ServerBuilder::new().env("CORACLE_LOG_FORMAT", "json").start();
    json_server.client().get("/v1/sandboxes").expect("the server answers");
    e2e::eventually("a request is logged", || json_server.log().contains("request completed"));
    for line in json_server.log().lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}

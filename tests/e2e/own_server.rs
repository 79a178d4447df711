//! `coracle aio`: a server of one's own. It serves one sandbox at its root and leaves nothing behind.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use e2e::binary::ProgramCopies;
use e2e::host::{self, HostState};
use e2e::http::HttpClient;
use e2e::run::{TestUser, all_users};
use e2e::server::ServerBuilder;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A running `coracle aio`.
struct OwnServer {
    process: Child,
    url: String,
    sandbox: String,
}

/// Describes a `coracle aio` whose state is below `home`.
fn aio_command(user: TestUser, home: &Path, arguments: &[&str]) -> Command {
    let mut command = ProgramCopies::shared().command();
    command
        .args(["aio", "--json", "--network", "off", "--state-dir"])
        .arg(home.join("state"))
        .args(arguments)
        .env("HOME", home)
        .env_remove("XDG_RUNTIME_DIR")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    user.apply_to(&mut command);
    command.process_group(0);
    command
}

fn log_path(home: &Path) -> PathBuf {
    home.join("log")
}

fn read_log(home: &Path) -> String {
    fs::read_to_string(log_path(home)).unwrap_or_default()
}

impl OwnServer {
    fn start(user: TestUser, home: &Path, arguments: &[&str]) -> Self {
        Self::start_command(aio_command(user, home, arguments), home)
    }

    fn start_command(mut command: Command, home: &Path) -> Self {
        let log = File::options().create(true).append(true).open(log_path(home)).expect("our own directory");
        let mut process = command.stderr(log).spawn().expect("the binary can be run");
        let mut line = String::new();
        let output = process.stdout.take().expect("standard output is a pipe");
        BufReader::new(output).read_line(&mut line).expect("the output is text");
        let ready: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("not ready ({error}): {line}\n{}", read_log(home)));
        let text = |name: &str| ready[name].as_str().expect("a text").to_owned();
        Self { process, url: text("url"), sandbox: text("sandbox") }
    }

    fn client(&self) -> HttpClient {
        HttpClient::new(self.url.strip_prefix("http://").expect("it listens on a port"))
    }

    /// Runs a command in the sandbox and returns its output.
    fn exec(&self, command: &str) -> String {
        exec_with(&mut self.client(), command)
    }

    fn signal(&mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.process), signal).expect("it is our child");
        self.process.wait().expect("it is our child")
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
        }
    }
}

fn exec_with(client: &mut HttpClient, command: &str) -> String {
    let answer = client.post("/v1/shell/exec", &json!({ "command": command })).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["data"]["output"].as_str().expect("an output").to_owned()
}

/// Checks that nothing of these sandboxes, and no state of a server, is left.
fn assert_nothing_left(home: &Path, sandboxes: &[&str]) {
    let words: Vec<String> = sandboxes.iter().map(|id| (*id).to_owned()).collect();
    let mut left = HostState::default();
    e2e::eventually("nothing is left", || {
        left = HostState { links: Default::default(), ..HostState::capture(home).mentioning(&words) };
        left == HostState::default()
    });
    let own = home.join("state/own");
    let entries: Vec<_> = fs::read_dir(own)
        .expect("it was made")
        .map(|entry| entry.expect("it can be listed").path())
        .collect();
    assert!(entries.is_empty(), "{entries:?}");
    for process in fs::read_dir("/proc").expect("there is /proc").filter_map(Result::ok) {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        assert!(!line.contains(&*home.to_string_lossy()), "a process is left: {line}");
    }
}

#[test]
fn sandbox_is_served_at_the_root_and_removed_at_a_signal() {
    for user in all_users() {
        for signal in [Signal::TERM, Signal::INT] {
            let home = user.make_home();
            let mut server = OwnServer::start(user, home.path(), &["--port", "0", "--env", "COLOUR=green"]);
            assert_eq!(server.exec("echo $COLOUR; pwd"), "green\n/home/gem");
            let context = server.client().get("/v1/sandbox").expect("the server answers").json();
            assert_eq!(context["home_dir"], "/home/gem", "{user:?}");
            let other = server.client().get("/v1/sandboxes").expect("the server answers");
            assert_eq!((other.status, &other.json()["success"]), (404, &json!(false)), "{user:?}");
            let sandbox = server.sandbox.clone();
            assert!(server.signal(signal).success(), "{}", read_log(home.path()));
            assert_nothing_left(home.path(), &[&sandbox]);
        }
    }
}

#[test]
fn what_a_killed_server_leaves_is_removed_by_the_next_start() {
    for user in all_users() {
        let home = user.make_home();
        let mut killed = OwnServer::start(user, home.path(), &["--port", "0"]);
        killed.signal(Signal::KILL);
        let mut next = OwnServer::start(user, home.path(), &["--port", "0"]);
        let own = fs::read_dir(home.path().join("state/own")).expect("it was made").count();
        assert_eq!(own, 1, "{user:?}");
        let sandboxes = [killed.sandbox.clone(), next.sandbox.clone()];
        assert!(next.signal(Signal::TERM).success());
        assert_nothing_left(home.path(), &[&sandboxes[0], &sandboxes[1]]);
    }
}

#[test]
fn two_servers_of_one_user_do_not_touch_each_other() {
    let user = TestUser::Same;
    let home = user.make_home();
    let mut one = OwnServer::start(user, home.path(), &["--port", "0"]);
    let two = OwnServer::start(user, home.path(), &["--port", "0"]);
    assert_eq!(one.exec("echo one > name; cat name"), "one");
    assert_eq!(two.exec("ls name 2>/dev/null || echo none"), "none");
    let first = one.sandbox.clone();
    one.signal(Signal::TERM);
    assert_eq!(two.exec("echo alive"), "alive");
    let second = two.sandbox.clone();
    drop(two);
    assert_nothing_left(home.path(), &[&first, &second]);
}

#[test]
fn socket_is_for_its_user_only() {
    for user in all_users() {
        let home = user.make_home();
        let server = OwnServer::start(user, home.path(), &[]);
        let socket = PathBuf::from(server.url.strip_prefix("unix:").expect("it listens on a socket"));
        let mode = fs::metadata(&socket).expect("it exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut stream = UnixStream::connect(&socket).expect("root may connect");
        stream.write_all(b"GET /v1/sandbox HTTP/1.0\r\nhost: any\r\n\r\n").expect("it is open");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the answer is text");
        assert!(answer.starts_with("HTTP/1.0 200 ") || answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
}

#[test]
fn chosen_socket_is_removed_at_the_end_and_replaced_after_a_kill() {
    let user = TestUser::Same;
    let home = user.make_home();
    let socket = home.path().join("chosen.sock");
    let arguments = ["--socket", socket.to_str().expect("plain text")];
    OwnServer::start(user, home.path(), &arguments).signal(Signal::KILL);
    assert!(socket.exists());
    let mut server = OwnServer::start(user, home.path(), &arguments);
    assert_eq!(server.url, format!("unix:{}", socket.display()));
    let taken = aio_command(user, home.path(), &arguments).stderr(Stdio::piped()).output().expect("it runs");
    let message = String::from_utf8_lossy(&taken.stderr).into_owned();
    assert!(!taken.status.success() && message.contains("--socket"), "{message}");
    assert!(server.signal(Signal::TERM).success());
    assert!(!socket.exists());
}

#[test]
fn port_of_a_killed_server_can_be_used_at_once() {
    let user = TestUser::Same;
    let home = user.make_home();
    let mut server = OwnServer::start(user, home.path(), &["--port", "0"]);
    for _ in 0..3 {
        let port = server.url.rsplit(':').next().expect("a port").to_owned();
        server.signal(Signal::KILL);
        server = OwnServer::start(user, home.path(), &["--port", &port]);
        assert!(server.url.ends_with(&port), "{}", server.url);
    }
    assert!(server.signal(Signal::TERM).success());
}

#[test]
fn pages_of_other_sites_cannot_use_a_server_without_a_key() {
    let home = TestUser::Same.make_home();
    let server = OwnServer::start(TestUser::Same, home.path(), &["--port", "0"]);
    let port = server.url.rsplit(':').next().expect("a port").to_owned();
    let status = |host: &str, headers: &[(&str, &str)]| {
        let mut client = server.client().with_host(host);
        let headers: Vec<_> = headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        client.set_headers(&headers);
        client.post("/v1/shell/exec", &json!({"command": "true"})).expect("the server answers").status
    };
    let own = format!("localhost:{port}");
    assert_eq!(status(&own, &[]), 200);
    assert_eq!(status(&own, &[("origin", &format!("http://{own}"))]), 200);
    assert_eq!(status(&own, &[("origin", "http://evil.example")]), 403);
    assert_eq!(status(&own, &[("origin", "null")]), 403);
    assert_eq!(status(&own, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")]), 403);
    assert_eq!(status(&format!("evil.example:{port}"), &[]), 403);
}

#[test]
fn key_protects_everything_and_stays_secret() {
    const KEY: &str = "k3y-of-the-own-server";
    let home = TestUser::Same.make_home();
    let mut command = aio_command(TestUser::Same, home.path(), &["--listen", "0.0.0.0:0"]);
    command.env("SANDBOX_API_KEY", KEY).env("CORACLE_LOG", "debug");
    let mut server = OwnServer::start_command(command, home.path());
    let address = server.url.replace("http://0.0.0.0", "127.0.0.1");
    let mut client = HttpClient::new(&address).with_host("any.example");
    for path in ["/v1/sandbox", "/", "/health", "/proxy/80/", "/unknown"] {
        assert_eq!(client.get(path).expect("the server answers").status, 401, "{path}");
    }
    assert_eq!(client.get(&format!("/v1/sandbox?api_key={KEY}")).expect("the server answers").status, 200);
    client.set_headers(&[("x-aio-api-key".to_owned(), KEY.to_owned())]);
    assert_eq!(exec_with(&mut client, "env | grep -c API_KEY"), "0");
    for process in fs::read_dir("/proc").expect("there is /proc").filter_map(Result::ok) {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains(KEY), "the key is an argument");
    }
    server.signal(Signal::TERM);
    assert!(!read_log(home.path()).contains(KEY), "the key is in the log");
}

#[test]
fn variables_of_the_image_are_honoured_or_named() {
    // All variables of AIO's image that have no effect.
    const NAMED: [&str; 23] = [
        "AIO_SKILLS_PATH",
        "AUTH_TOKEN",
        "BROWSER_ALLOW_FILE_SELECTION_DIALOGS",
        "BROWSER_EXTRA_ARGS",
        "BROWSER_LANG",
        "BROWSER_USER_AGENT",
        "CHROME_UI_LANG",
        "CODE_SERVER_PORT",
        "DISABLE_CODE_SERVER",
        "DISABLE_JUPYTER",
        "DISPLAY_HEIGHT",
        "DISPLAY_WIDTH",
        "DNS_OVER_HTTPS_TEMPLATES",
        "GITHUB_TOKEN",
        "HOMEPAGE",
        "PROXY_EXCLUDE",
        "PROXY_INCLUDE",
        "PROXY_MAP",
        "PROXY_SERVER",
        "PUBLIC_PORT",
        "SANDBOX_SRV_PORT",
        "SHELL_POOL_SIZE",
        "WAIT_PORTS",
    ];
    let home = TestUser::Same.make_home();
    let mut command = aio_command(TestUser::Same, home.path(), &["--port", "0", "--env", "USER=ann"]);
    command
        .envs(NAMED.map(|name| (name, "x")))
        .envs([("WORKSPACE", "/srv/work"), ("TZ", "Asia/Tokyo"), ("MAX_SHELL_SESSIONS", "3")])
        .envs([("USER_UID", "1234"), ("USER_GID", "1235"), ("SHELL_SESSION_TIMEOUT", "77")])
        .envs([("RUN_HOOK_INIT", "echo init > order"), ("RUN_HOOK_POST_READY", "echo ready >> order")])
        .env("GITHUB_TOKEN", "s3cret-token");
    let server = OwnServer::start_command(command, home.path());
    let output = server.exec("pwd; id -u; id -g; date +%Z; cat order; echo \"[$GITHUB_TOKEN]\"");
    assert_eq!(output, "/srv/work\n1234\n1235\nJST\ninit\nready\n[]");
    let stats = server.client().get("/v1/shell/sessions/stats").expect("the server answers").json();
    assert_eq!((&stats["data"]["max_sessions"], &stats["data"]["session_timeout"]), (&json!(3), &json!(77)));
    let log = read_log(home.path());
    let named = log.lines().find(|line| line.contains("have no effect")).expect("a line").to_owned();
    for name in NAMED.into_iter().chain(["USER"]) {
        assert!(named.contains(&format!("{name} (")), "{name}: {named}");
    }
    assert!(!log.contains("s3cret-token"));
}

#[test]
fn crashed_sandbox_is_replaced_at_the_next_request() {
    if !testkit::needs_root() {
        return;
    }
    let home = TestUser::Same.make_home();
    let server = OwnServer::start(TestUser::Same, home.path(), &["--port", "0"]);
    server.exec("echo old > file");
    let agent = host::agent_pid(&server.sandbox).expect("it runs");
    kill_process(Pid::from_raw(agent.cast_signed()).expect("a pid"), Signal::KILL).expect("it runs");
    e2e::eventually("a successor answers", || {
        let mut client = server.client();
        client.post("/v1/shell/exec", &json!({"command": "ls"})).is_ok_and(|answer| answer.status == 200)
    });
    assert_eq!(server.exec("ls file 2>/dev/null || echo none"), "none");
    let log = read_log(home.path());
    assert!(log.contains("its successor answers"), "{log}");
}

#[test]
fn mistakes_are_refused_with_a_hint_and_leave_nothing() {
    let home = TestUser::Same.make_home();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it listens").port().to_string();
    for (arguments, expected) in [
        (vec!["--port", port.as_str()], "--port"),
        (vec!["--listen", "0.0.0.0:0"], "SANDBOX_API_KEY"),
        (vec!["--port", "0", "--image", "no/such/image"], "no/such/image"),
        (vec!["--port", "0", "--env", "AUTH_TOKEN=x"], "SANDBOX_API_KEY"),
        (vec!["--port", "0", "--env", "WORKSPACE=relative"], "WORKSPACE"),
        (vec!["--port", "0", "--env", "RUN_HOOK_INIT=exit 3"], "RUN_HOOK_INIT failed with code 3"),
    ] {
        let output = aio_command(TestUser::Same, home.path(), &arguments)
            .env("CORACLE_IMAGES_STRICT", "true")
            .stderr(Stdio::piped())
            .output()
            .expect("the binary can be run");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{arguments:?}: {message}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
    }
    assert_nothing_left(home.path(), &[]);
}

#[test]
fn create_for_a_guest_prints_an_id_and_url_its_address() {
    let server = ServerBuilder::new().start();
    let run = |arguments: &[&str]| {
        let output = ProgramCopies::shared()
            .command()
            .args(arguments)
            .env("CORACLE_URL", format!("http://{}", server.address()))
            .output()
            .expect("the binary can be run");
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (output.status.success(), text, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (made, id, why) = run(&["create", "--guest", "aio", "--key", "mine", "--env", "WORKSPACE=/w"]);
    assert!(made, "{why}");
    let (found, url, why) = run(&["url", "mine"]);
    assert!(found, "{why}");
    let path = url.strip_prefix(&format!("http://{}/aio/", server.address())).expect(&url).to_owned();
    server.add_secret(path.split_once('.').expect("a code").1);
    let mut client = server.client();
    let body = json!({"command": "pwd"});
    let answer = client.post(&format!("/aio/{path}/v1/shell/exec"), &body).expect("the server answers");
    assert_eq!(answer.json()["data"]["output"], "/w", "{}", answer.text());
    let (_, again, note) = run(&["create", "--guest", "aio", "--key", "mine", "--memory", "64m"]);
    assert_eq!(again, id);
    assert!(note.contains("--memory"), "{note}");
    let (_, unnamed, _) = run(&["create", "--guest", "aio"]);
    assert_ne!(unnamed, id);
    assert!(run(&["url", &unnamed]).0);
    // Sandboxes of other kinds have ports, but no such address.
    let plain = server.create_sandbox();
    let (found, _, why) = run(&["url", &plain.id]);
    assert!(!found && why.contains("--guest aio"), "{why}");
    let (made, _, why) = run(&["create", "--guest", "aio", "--env", "SANDBOX_API_KEY=s3cret"]);
    assert!(!made && !why.contains("s3cret"), "{why}");
}

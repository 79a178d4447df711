//! Tests the client commands against a real server. Making sandboxes with all their limits requires
//! root; otherwise these tests print that they were skipped.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::tcgetattr;
use tempfile::TempDir;

const KEY: &str = "a-key-that-only-this-test-knows";

/// A server on a free port, with a key, in its own directory.
struct Server {
    process: Child,
    url: String,
    directory: TempDir,
}

impl Server {
    /// Returns `None` and prints a message where sandboxes cannot be made with all their limits.
    fn start() -> Option<Self> {
        if !testkit::needs_root() {
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let mut process = Command::new(env!("CARGO_BIN_EXE_coracle"))
            .args(["serve", "--listen", "127.0.0.1:0", "--state-dir"])
            .arg(directory.path().join("state"))
            .env("CORACLE_API_KEY", KEY)
            .stdout(Stdio::piped())
            .stderr(File::create(directory.path().join("log")).expect("a log"))
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        let mut stdout = BufReader::new(process.stdout.take().expect("a pipe"));
        stdout.read_line(&mut line).expect("it says that it is ready");
        let url = line.trim().strip_prefix("coracle listening on ").expect("the ready line").to_owned();
        Some(Self { process, url, directory })
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_coracle"));
        command.args(words).env("CORACLE_URL", &self.url).env("CORACLE_API_KEY", KEY);
        command
    }

    fn output(&self, words: &[&str]) -> Output {
        self.command(words).stdin(Stdio::null()).output().expect("the binary starts")
    }

    /// The output of a command that must succeed.
    fn text(&self, words: &[&str]) -> String {
        let output = self.output(words);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {complaint}");
        String::from_utf8(output.stdout).expect("text")
    }

    fn create(&self) -> String {
        self.text(&["create"]).trim().to_owned()
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().expect("text").to_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.output(&["rm", "--all"]);
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process(pid, Signal::TERM).expect("our own child");
        let status = self.process.wait().expect("our own child");
        assert!(status.success() || std::thread::panicking(), "the server ended with {status}");
    }
}

#[test]
fn a_sandbox_is_created_listed_and_removed() {
    let Some(server) = Server::start() else { return };
    let id = server.text(&["create", "--label", "team=search", "--timeout", "1h", "--memory", "64m"]);
    let id = id.trim();
    assert_eq!(server.text(&["ls", "-q", "--label", "team=search"]), format!("{id}\n"));
    assert_eq!(server.text(&["ls", "-q", "--label", "team=other"]), "");
    let listed: serde_json::Value = serde_json::from_str(&server.text(&["ls", "--json"])).expect("JSON");
    assert_eq!(listed[0]["status"]["state"], "Running");
    assert_eq!(server.text(&["rm", id]), format!("{id}\n"));
    let again = server.output(&["rm", id]);
    assert_eq!(again.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&again.stderr),
        format!("error: there is no such sandbox as `{id}`\nhint: `coracle ls` lists the sandboxes\n")
    );
}

#[test]
fn a_wrong_key_is_refused_with_a_hint() {
    let Some(server) = Server::start() else { return };
    let output = server.command(&["ls"]).env("CORACLE_API_KEY", "another").output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.starts_with("error: the server refused (401)"), "{complaint}");
    let hint = "set CORACLE_API_KEY to a valid key; the operator makes one with `coracle key create OWNER`";
    assert!(complaint.ends_with(&format!("hint: {hint}\n")), "{complaint}");
}

#[test]
fn exec_passes_output_and_exit_code_through() {
    let Some(server) = Server::start() else { return };
    let id = server.create();
    let output = server.output(&["exec", "-e", "A=b", &id, "-c", "echo $A; echo wrong >&2; exit 7"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "wrong\n");
    assert_eq!(output.status.code(), Some(7));
    let code = |words: &[&str]| server.output(&[&["exec"], words].concat()).status.code();
    assert_eq!(code(&[&id, "--", "echo", "two  words"]), Some(0));
    assert_eq!(code(&[&id, "-c", "kill -9 $$"]), Some(137));
    assert_eq!(code(&["--timeout", "100ms", &id, "--", "sleep", "600"]), Some(124));
    assert_eq!(code(&[&id, "--", "no-such-program"]), Some(127));
    assert_eq!(code(&[&id, "--", "/etc/passwd"]), Some(126));
    assert_eq!(code(&["-w", "/no/such/directory", &id, "--", "true"]), Some(125));
}

#[test]
fn logs_begin_at_any_byte_and_can_be_followed_to_the_end() {
    let Some(server) = Server::start() else { return };
    let id = server.create();
    let process = server.text(&["exec", "--detach", &id, "-c", "echo one; read -t 0.2 x <> <(:); echo two"]);
    let process = process.trim();
    assert_eq!(server.text(&["logs", "--follow", &id, process]), "one\ntwo\n");
    assert_eq!(server.text(&["logs", "--from", "4", &id, process]), "two\n");
}

#[test]
fn files_and_directories_are_copied_in_and_out() {
    let Some(server) = Server::start() else { return };
    let id = server.create();
    let source = server.path("source");
    std::fs::create_dir_all(Path::new(&source).join("a b")).expect("a directory");
    let content: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(Path::new(&source).join("a b/ü"), &content).expect("a file");
    std::os::unix::fs::symlink("/etc/passwd", Path::new(&source).join("link")).expect("a link");

    server.text(&["cp", &source, &format!("{id}:/root/tree")]);
    assert_eq!(server.text(&["exec", &id, "--", "readlink", "/root/tree/link"]), "/etc/passwd\n");
    server.text(&["exec", &id, "--", "ln", "-s", "/etc", "/root/tree/evil"]);
    let target = server.path("target");
    server.text(&["cp", &format!("{id}:/root/tree"), &target]);
    assert_eq!(std::fs::read(Path::new(&target).join("a b/ü")).expect("it is there"), content);
    let evil = std::fs::read_link(Path::new(&target).join("evil")).expect("a link stays a link");
    assert_eq!(evil, Path::new("/etc"));
    server.text(&["exec", &id, "-c", "printf short > /root/file"]);
    assert_eq!(server.text(&["cp", &format!("{id}:/root/file"), "-"]), "short");
}

#[test]
fn a_shell_passes_keys_and_size_and_leaves_the_terminal_as_it_was() {
    let Some(server) = Server::start() else { return };
    let id = server.create();
    let (mut outside, inside) = terminal();
    let before = tcgetattr(&inside).expect("a terminal");
    let end = || Stdio::from(inside.try_clone().expect("a descriptor"));
    let mut shell =
        server.command(&["shell", &id]).stdin(end()).stdout(end()).stderr(end()).spawn().expect("it starts");
    read_until(&mut outside, "# ");
    outside.write_all(b"stty size; exit 3\r").expect("it takes keys");
    read_until(&mut outside, "24 80");
    assert_eq!(shell.wait().expect("our own child").code(), Some(3));
    let after = tcgetattr(&inside).expect("a terminal");
    assert_eq!(format!("{after:?}"), format!("{before:?}"));
}

/// A new terminal: the end of the user, and the end of the program.
fn terminal() -> (File, File) {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let outside = openpt(flags).expect("a terminal");
    grantpt(&outside).expect("our own terminal");
    unlockpt(&outside).expect("our own terminal");
    let inside = ioctl_tiocgptpeer(&outside, flags).expect("its other end");
    (File::from(outside), File::from(inside))
}

fn read_until(terminal: &mut File, wanted: &str) {
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.contains(wanted) {
        let count = terminal.read(&mut buffer).expect("the terminal is open");
        seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
}

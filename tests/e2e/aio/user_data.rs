//! Directories below DeerFlow's state root: the gateway and the sandbox work on the same files, whichever user the
//! gateway is, and nested mounts have the access that the client asked for.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::aio::{self, AioSandbox, StateRoot};
use e2e::run::{CommandOutput, TestUser};
use e2e::server::TestServer;
use serde_json::{Value, json};

const THREAD: &str = "users/ann/threads/t";

/// A state root, and a server that mounts directories below it.
struct SharedState {
    root: StateRoot,
    server: TestServer,
}

impl SharedState {
    fn start() -> Self {
        let root = StateRoot::make();
        let server = root.server().start();
        Self { root, server }
    }

    fn root(&self) -> PathBuf {
        self.root.path()
    }

    /// Removes everything below the root, and gives it to another owner.
    fn reset(&self, owner: u32, mode: u32) {
        let mut provisioner = aio::keyed_client(self.server.address());
        assert_eq!(provisioner.delete("/api/sandboxes/shared").expect("the server answers").status, 200);
        for entry in fs::read_dir(self.root()).expect("our own directory") {
            fs::remove_dir_all(entry.expect("our own directory").path()).expect("our own directory");
        }
        fs::set_permissions(self.root(), Permissions::from_mode(mode)).expect("our own directory");
        chown(self.root(), Some(owner), Some(owner)).expect("root may do this");
    }

    /// Makes the directories of a conversation as DeerFlow does: every user may write to them.
    fn make_thread_directories(&self, owner: u32) {
        let text = format!("umask 0; mkdir -p {THREAD}/user-data/workspace");
        let made = run_as(owner, &self.root(), &text);
        assert_eq!(made.code, Some(0), "{made:?}");
    }

    fn workspace(&self) -> PathBuf {
        self.root().join(THREAD).join("user-data/workspace")
    }

    fn create_sandbox(&self, fields: &Value) -> AioSandbox {
        let mut request = json!({"user_id": "ann", "thread_id": "t"});
        for (name, value) in fields.as_object().into_iter().flatten() {
            request[name] = value.clone();
        }
        AioSandbox::create_with(&self.server, "shared", &request)
    }
}

/// Runs shell text on the host, as the gateway would.
fn run_as(uid: u32, directory: &Path, text: &str) -> CommandOutput {
    let mut command = Command::new("sh");
    command.args(["-c", text]).current_dir(directory);
    TestUser::Ordinary(uid).apply_to(&mut command);
    command.output().expect("there is a shell").into()
}

/// Reads, changes and deletes files and directories that the other side made. Both sides run the same text.
const MAKE: &str =
    "echo mine > plain && mkdir -p made/below && echo mine > made/below/file && chmod 600 made/below/file";
const USE: &str = "cat plain made/below/file && echo more >> plain && mv plain made/below/moved && \
                   touch made/below/new && rm -r made && ls";
const USED: &str = "mine\nmine";

/// Checks that each side can use what the other made.
fn check_both_directions(shared: &SharedState, sandbox: &mut AioSandbox, gateway: u32) {
    let made = run_as(gateway, &shared.workspace(), MAKE);
    assert_eq!(made.code, Some(0), "the gateway {gateway} writes: {made:?}");
    let used = sandbox.run(&format!("cd /mnt/user-data/workspace && {USE}"));
    assert_eq!(used, USED, "the sandbox uses files of the gateway {gateway}");

    sandbox.run(&format!("cd /mnt/user-data/workspace && {MAKE}"));
    let used = run_as(gateway, &shared.workspace(), USE);
    assert_eq!(
        (used.code, used.stdout.trim_end()),
        (Some(0), USED),
        "the gateway {gateway} uses files of the sandbox: {used:?}"
    );
}

#[test]
fn gateway_and_sandbox_read_write_and_delete_each_others_files() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedState::start();
    // Root, the user of most images, and a user that exists nowhere. The server makes missing directories, as the owner
    // of those above them. The root is private, as the documents advise.
    for gateway in [0, 1000, 61_234] {
        shared.reset(gateway, 0o700);
        let mut sandbox = shared.create_sandbox(&json!({}));
        check_both_directions(&shared, &mut sandbox, gateway);
    }
    // DeerFlow makes the directories of a conversation before it asks for a sandbox, so they are its own even below the
    // directory of another user.
    for (owner, gateway) in [(0, 1000), (0, 61_234), (1000, 0)] {
        shared.reset(owner, 0o777);
        shared.make_thread_directories(gateway);
        let mut sandbox = shared.create_sandbox(&json!({}));
        check_both_directions(&shared, &mut sandbox, gateway);
    }
}

/// The kernel maps one owner to the user of the sandbox. Files of others have no owner there, and can only be read.
#[test]
fn files_of_another_user_in_the_gateways_directory_can_only_be_read() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedState::start();
    shared.reset(1000, 0o700);
    let mut sandbox = shared.create_sandbox(&json!({}));
    let made =
        run_as(0, &shared.workspace(), "umask 0; echo theirs > plain; mkdir below; echo theirs > below/file");
    assert_eq!(made.code, Some(0), "{made:?}");
    let tried = sandbox.run(
        "cd /mnt/user-data/workspace; cat plain below/file; stat -c %U plain; \
         { echo more >> plain; rm -f plain; touch below/new; rm -f below/file; } 2>/dev/null; ls -1 . below",
    );
    assert_eq!(tried, "theirs\ntheirs\nnobody\n.:\nbelow\nplain\n\nbelow:\nfile");
    // It does not keep the sandbox from work beside them.
    assert_eq!(
        sandbox.run(&format!("cd /mnt/user-data/workspace && mkdir own && cd own && {MAKE} && {USE}")),
        USED
    );
}

#[test]
fn nested_mounts_are_read_only_or_writable_as_requested() {
    if !testkit::needs_root() {
        return;
    }
    let shared = SharedState::start();
    let lark = shared.root().join("users/ann/integrations/lark-cli");
    for (directory, file) in [("config", "settings"), ("config/locks", "held"), ("runtime", "program")] {
        fs::create_dir_all(lark.join(directory)).expect("our own directory");
        fs::write(lark.join(directory).join(file), file).expect("our own directory");
    }
    let mount = |name: &str, read_only: bool| {
        json!({
            "host_path": lark.join(name), "container_path": format!("/mnt/integrations/lark-cli/{name}"),
            "read_only": read_only,
        })
    };
    // DeerFlow's order, and the reverse: the inner mount is inside of the outer one in both.
    let in_order =
        [mount("config", true), mount("config/locks", false), mount("data", false), mount("runtime", true)];
    let reversed: Vec<Value> = in_order.iter().rev().cloned().collect();
    for mounts in [in_order.to_vec(), reversed] {
        let mut sandbox = shared.create_sandbox(&json!({"extra_mounts": mounts}));
        let seen = sandbox
            .run("cd /mnt/integrations/lark-cli && cat config/settings config/locks/held runtime/program");
        assert_eq!(seen, "settingsheldprogram");
        let writable = sandbox.run(
            "cd /mnt/integrations/lark-cli && for at in . config config/locks data runtime; do \
             touch $at/new 2>/dev/null && echo $at; rm -f $at/settings $at/program 2>/dev/null; done",
        );
        assert_eq!(writable, "config/locks\ndata");
        assert_eq!(fs::read_to_string(lark.join("config/settings")).expect("it stays"), "settings");
        assert_eq!(fs::read_to_string(lark.join("runtime/program")).expect("it stays"), "program");
        for place in ["config/locks/new", "data/new"] {
            fs::remove_file(lark.join(place)).expect("the sandbox wrote to the directory of the host");
        }
        assert!(!lark.join("config/new").exists() && !lark.join("runtime/new").exists());
        let mut provisioner = aio::keyed_client(shared.server.address());
        assert_eq!(provisioner.delete("/api/sandboxes/shared").expect("the server answers").status, 200);
    }
}

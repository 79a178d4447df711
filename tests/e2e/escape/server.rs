//! Attacks from a subverted server.
//!
//! The process that faces the network is made to execute the attacker's program, so the attacks run with
//! its uid, its Landlock domain and all its descriptors, including the launcher's socket. Its legitimate
//! operations (asking for sandboxes, ending them, talking to their agents) are not among them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use e2e::binary::ProgramCopies;
use e2e::run::{TestUser, attack_outside};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

use super::Secret;

/// The ids of plans that the attacker sends.
const PLANNED_SANDBOX_ID: &str = "attackersplan0000000";

/// Subverts the server and returns the verdict of each attack.
fn attack_from_server(server: &TestServer, attacks: &[String]) -> BTreeMap<String, String> {
    attack_from_part(server, "__server", attacks)
}

/// Subverts the process of that role and returns the verdict of each attack.
pub(super) fn attack_from_part(
    server: &TestServer,
    role: &str,
    attacks: &[String],
) -> BTreeMap<String, String> {
    let own = server.state_directory().join("server");
    let (program, report) = (own.join("attacks"), own.join("report"));
    fs::copy(ProgramCopies::shared().attacks_path(), &program).expect("root can write there");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("our own copy");
    let (program, report_path) = (program.to_string_lossy(), report.to_string_lossy());
    let subverted = server.part_pid(role);
    let pid = subverted.to_string();
    let mut words = vec!["subvert", &pid, &program, "each", &report_path];
    words.extend(attacks.iter().map(String::as_str));
    let ended = attack_outside(&words);
    assert_eq!(ended.code, Some(0), "{role} could not be subverted: {ended:?}");
    let read = || fs::read_to_string(&report).unwrap_or_default();
    e2e::eventually("all attacks were tried", || read().ends_with("done\n"));
    // The attacker has ended, so the supervisor starts the part again, which must find everything intact.
    e2e::eventually("the part runs again", || {
        server.part_pid(role) != subverted && server.client().get("/health").is_ok()
    });
    read()
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, verdict)| (name.into(), verdict.into()))
        .collect()
}

/// Checks that all of `attacks` fail from the server, each with one of the expected errors.
fn check_refused(server: &TestServer, attacks: &[String], refusals: &[&str]) {
    let verdicts = attack_from_server(server, attacks);
    for attack in attacks {
        let verdict = verdicts.get(attack).map_or("was not tried", String::as_str);
        let refused = verdict.starts_with("stopped: ") && refusals.iter().any(|name| verdict.contains(name));
        assert!(refused, "{attack} from the server: {verdict}");
    }
}

/// Shows as root, outside, that the attacks work.
fn check_outside(attacks: &[String]) {
    for attack in attacks {
        let words: Vec<&str> = attack.split(':').collect();
        let ended = attack_outside(&words);
        assert_eq!(ended.code, Some(0), "{attack} does not work outside: {ended:?}");
    }
}

#[test]
fn a_subverted_server_reads_no_file_of_the_host() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let secret = Secret::new();
    let ways =
        ["read", "read-through-proc", "read-through-descriptors", "read-through-dots", "read-by-handle"];
    let mut attacks: Vec<String> = ways.map(|way| format!("{way}:{}:{}", secret.path(), secret.token)).into();
    attacks.push("open:r:/etc/shadow".to_owned());
    check_outside(&attacks);
    // Landlock blocks files that every user may read, and the missing capability blocks handles.
    check_refused(&server, &attacks, &["EACCES", "EPERM"]);
}

#[test]
fn a_subverted_server_cannot_reach_the_launchers_state() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let sandbox = server.create_sandbox();
    let state = server.state_directory().to_string_lossy().into_owned();
    let record = format!("{state}/boxes/{}", sandbox.id);
    let mut attacks: Vec<String> = ["", "/boxes", "/images", "/run", "/bin", "/disk", "/host", "/ranges"]
        .map(|directory| format!("{state}{directory}"))
        .into_iter()
        .filter(|directory| PathBuf::from(directory).is_dir())
        .map(|directory| format!("write-file:{directory}"))
        .collect();
    attacks.extend([format!("open:r:{record}"), format!("open:w:{record}"), format!("open:w:{state}/lock")]);
    assert!(attacks.len() >= 8, "the state directory looks different: {attacks:?}");
    check_outside(&attacks);
    check_refused(&server, &attacks, &["EACCES"]);
}

#[test]
fn a_subverted_server_gains_no_rights() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let attacks = [
        "become-root",
        "mount-tmpfs",
        "mount-proc",
        "mount-by-descriptor",
        "pivot-root",
        "make-device:block",
        "unshare:mount",
        "socket:raw",
        "socket:packet",
        "raise-priority",
    ];
    let attacks: Vec<String> = attacks.map(str::to_owned).into();
    check_outside(&attacks);
    let mut attacks = attacks;
    // The filter refuses a user namespace; Landlock would still forbid mounts in it.
    attacks.push("user-namespace-then-mount".to_owned());
    check_refused(&server, &attacks, &["EPERM", "EACCES", "EAFNOSUPPORT"]);
}

/// A process of root that serves as the target of an attack.
struct RootVictim(Child);

impl Drop for RootVictim {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn a_subverted_server_cannot_touch_other_processes() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let victim = RootVictim(Command::new("sleep").arg("600").spawn().expect("there is a `sleep`"));
    let ways = ["trace", "read-memory", "steal-descriptor", "overwrite-binary", "signal"];
    let on = |pid: u32| ways.map(|way| format!("{way}:{pid}"));
    let others = [victim.0.id(), server.part_pid("__launcher"), server.pid()];
    let attacks: Vec<String> = others.into_iter().flat_map(on).collect();
    check_refused(&server, &attacks, &["EPERM", "EACCES"]);
    check_outside(&on(victim.0.id()));
}

/// A request to the launcher for a sandbox; `fields` replace those of a plain plan.
fn plan(fields: &Value) -> Value {
    let mut plan = json!({
        "id": PLANNED_SANDBOX_ID,
        "image": "host",
        "limits": {"memory": 64 << 20, "cpus": 500, "pids": 32, "disk": 64 << 20},
        "named": [],
        "require_limits": true,
        "network": "off",
        "mounts": [],
        "env": {},
        "guest": {"users": [], "default_user": "root", "default_directory": "/root", "directories": []},
        "max_processes": 4,
        "keep": false,
    });
    for (name, value) in fields.as_object().into_iter().flatten() {
        plan[name] = value.clone();
    }
    json!({"version": 1, "number": 1, "question": {"create": plan}})
}

/// An attack in which the server sends this request to the launcher.
fn launcher_request_attack(server: &TestServer, name: &str, question: &Value) -> String {
    let state = server.state_directory();
    let file = state.join("server").join(name);
    fs::write(&file, question.to_string()).expect("root can write there");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("our own file");
    format!("ask-launcher:{}:{}", state.join("run/launcher").display(), file.display())
}

#[test]
fn subverted_server_mounts_only_paths_the_operator_lists() {
    if !testkit::needs_root() {
        return;
    }
    let place = TestUser::Same.make_home();
    let allowed = place.path().join("allowed");
    fs::create_dir(&allowed).expect("our own directory");
    std::os::unix::fs::symlink("/etc", allowed.join("link")).expect("our own directory");
    let text = allowed.to_str().expect("a test's own path").to_owned();
    let server = ServerBuilder::new().env("CORACLE_VOLUMES_HOST_PATHS", &text).start();
    let living = server.create_sandbox();
    let host = |path: &str| json!({"source": {"host": path}, "target": "/stolen", "read_only": true});
    let sub =
        |path: &str| json!({"source": {"host": text}, "target": "/s", "read_only": true, "sub_path": path});
    let volume = |id: &str| json!({"source": {"volume": id}, "target": "/stolen", "read_only": false});
    let target = json!({"source": {"host": text}, "target": "/proc/1", "read_only": true});
    let mounts = [
        ("the-host", host("/etc"), "not below a directory"),
        ("its-root", host("/"), "not below a directory"),
        ("a-relative-path", host("etc"), "not below a directory"),
        ("a-way-up", host(&format!("{text}/../../etc")), "not below a directory"),
        ("a-link", host(&format!("{text}/link")), "not_found"),
        ("behind-a-link", host(&format!("{text}/link/ssh")), "not_found"),
        ("a-sub-path-up", sub("../.."), "sub_path"),
        ("an-absolute-sub-path", sub("/etc"), "sub_path"),
        ("a-sub-path-behind-a-link", sub("link/ssh"), "sub_path"),
        ("a-volume-by-path", volume("../../../../etc"), "hung up"),
        ("another-sandboxes-disk", volume(&living.id), "no_volume"),
        ("a-place-of-the-kernel", target, "target"),
    ];
    let volume =
        json!({"id": PLANNED_SANDBOX_ID, "owner": "../x", "name": "a", "size": 1 << 24, "kept": true});
    let path = json!({"id": "../../x", "owner": "a", "name": "a", "size": 1 << 24, "kept": true});
    let huge = json!({"id": PLANNED_SANDBOX_ID, "owner": "a", "name": "a", "size": u64::MAX, "kept": true});
    let mut attacks = vec![
        (
            launcher_request_attack(&server, "a-label", &launcher_request("make_volume", volume)),
            "not a volume",
        ),
        (launcher_request_attack(&server, "a-path", &launcher_request("make_volume", path)), "hung up"),
        (launcher_request_attack(&server, "all-space", &launcher_request("make_volume", huge)), "too_much"),
        (
            launcher_request_attack(
                &server,
                "another-path",
                &launcher_request("remove_volume", json!({"id": "../boxes"})),
            ),
            "hung up",
        ),
    ];
    for (name, mount, words) in mounts {
        let create = plan(&json!({"mounts": [mount]}));
        let attach = launcher_request("attach", json!({"id": living.id, "mounts": [mount]}));
        attacks.push((launcher_request_attack(&server, &format!("create-{name}"), &create), words));
        attacks.push((launcher_request_attack(&server, &format!("attach-{name}"), &attach), words));
    }
    // The attack works: a listed path is mounted.
    let listed = launcher_request_attack(&server, "listed", &plan(&json!({"mounts": [host(&text)]})));
    let all: Vec<String> = attacks.iter().map(|(attack, _)| attack.clone()).chain([listed.clone()]).collect();
    let verdicts = attack_from_server(&server, &all);
    for (attack, words) in &attacks {
        let verdict = &verdicts[attack];
        assert!(verdict.starts_with("stopped: ") && verdict.contains(words), "{attack}: {verdict}");
    }
    assert!(verdicts[&listed].starts_with("succeeded: "), "a listed path: {}", verdicts[&listed]);
    e2e::eventually("the attacker's sandbox is gone", || {
        !server.state_directory().join("boxes").join(PLANNED_SANDBOX_ID).exists()
    });
}

fn launcher_request(kind: &str, content: Value) -> Value {
    json!({"version": 1, "number": 1, "question": {kind: content}})
}

#[test]
fn subverted_server_cannot_make_the_launcher_exceed_its_job() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let own = server.state_directory().join("server");
    let socket = server.state_directory().join("run/launcher");
    let image = own.join("image");
    fs::create_dir_all(image.join("rootfs/bin")).expect("root can write there");
    let mount = json!([{"source": {"host": "/etc"}, "target": "/stolen", "read_only": true}]);
    let refused = [
        ("a-mount-of-the-host", json!({"mounts": mount}), "mounts no host directories"),
        ("files-that-stay-behind", json!({"keep": true}), "cannot keep the files"),
        ("an-image-by-path", json!({"image": "../server/image"}), "no_image"),
        ("an-image-by-absolute-path", json!({"image": image}), "no_image"),
        ("an-id-that-is-a-path", json!({"id": "../../../../tmp/x"}), "hung up"),
        ("a-plan-that-is-none", json!({"limits": "none"}), "hung up"),
    ];
    let question = |name: &str, fields: &Value| launcher_request_attack(&server, name, &plan(fields));
    // The attack works: a plan without any of these fields is carried out.
    let plain = question("a-plain-plan", &json!({}));
    let mut attacks = vec![plain.clone()];
    attacks.extend(refused.iter().map(|(name, fields, _)| question(name, fields)));
    let plug = format!("plug-launcher:{}", socket.display());
    attacks.push(plug.clone());
    let verdicts = attack_from_server(&server, &attacks);
    assert!(verdicts[&plain].starts_with("succeeded: "), "a plain plan: {}", verdicts[&plain]);
    for ((name, _, words), attack) in refused.iter().zip(&attacks[1..]) {
        let verdict = &verdicts[attack];
        assert!(verdict.starts_with("stopped: ") && verdict.contains(words), "{name}: {verdict}");
    }
    assert!(verdicts[&plug].starts_with("stopped: "), "the launcher can be blocked: {}", verdicts[&plug]);
    // The attacker's sandbox has no row in the database, so the next server removed it.
    e2e::eventually("the attacker's sandbox is gone", || {
        !server.state_directory().join("boxes").join(PLANNED_SANDBOX_ID).exists()
    });
}

/// The launcher finds the record and the disk of a snapshot by its id, and mounts the disk as root.
#[test]
fn a_subverted_server_makes_no_image_of_a_file_that_is_not_a_snapshot() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let own = server.state_directory().join("server");
    let made_of = json!({"image": "host", "trees": [], "env": []});
    let record = json!({"sandbox": PLANNED_SANDBOX_ID, "made_of": made_of, "size": 1, "disk": 1});
    fs::write(own.join("planted.json"), record.to_string()).expect("root may write there");
    fs::set_permissions(own.join("planted.json"), fs::Permissions::from_mode(0o644)).expect("our own file");
    std::os::unix::fs::symlink("/etc/shadow", own.join("planted.img")).expect("root may write there");
    let absolute = own.join("planted").to_string_lossy().into_owned();
    let unknown = "ffffffff-ffff-4fff-bfff-ffffffffffff";
    let commit = |name: &str, snapshot: &str| {
        let content = json!({"commit": {"snapshot": snapshot, "name": "stolen"}});
        launcher_request_attack(&server, name, &launcher_request("image", content))
    };
    let attacks = [
        (commit("an-absolute-path", &absolute), "hung up"),
        (commit("a-relative-path", "../server/planted"), "hung up"),
        // Such a question is heard if the id is one.
        (commit("an-unknown-id", unknown), "does not exist"),
    ];
    let all: Vec<String> = attacks.iter().map(|(attack, _)| attack.clone()).collect();
    let verdicts = attack_from_server(&server, &all);
    for (attack, words) in &attacks {
        let verdict = &verdicts[attack];
        assert!(verdict.starts_with("stopped: ") && verdict.contains(words), "{attack}: {verdict}");
    }
}

/// The server owns the directory of its database, and a backup copies the database as root while disks
/// are frozen.
#[test]
fn a_subverted_server_does_not_keep_disks_frozen_during_a_backup() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let journal = server.state_directory().join("server/coracle.db-journal");
    let made = Command::new("mkfifo").arg(&journal).status().expect("there is mkfifo");
    assert!(made.success());
    let file = server.directory().join("all.backup");
    let backup = || {
        let mut command = Command::new("timeout");
        command.args(["--signal", "KILL", "30"]).arg(ProgramCopies::shared().coracle_path()).arg("backup");
        command
            .arg(&file)
            .arg("--state-dir")
            .arg(server.state_directory())
            .output()
            .expect("there is timeout")
    };
    let ended = backup();
    fs::remove_file(&journal).expect("root may remove it");
    assert_eq!(ended.status.code(), Some(1), "the backup hangs with a frozen disk: {ended:?}");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("coracle.db-journal") && !file.exists(), "{said}");
    assert_eq!(sandbox.run("echo more > /root/file && sync").code, Some(0));
    // It bites: without the pipe there is a backup.
    let saved = backup();
    assert!(saved.status.success(), "{}", String::from_utf8_lossy(&saved.stderr));
}

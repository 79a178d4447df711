//! Skills from archives and directories.

use std::io::{Cursor, Write};
use std::path::Path;

use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

const SKILL: &[u8] = b"---\nname: report-writer\ndescription: Writes reports.\n---\n\n# Report\n";

fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in entries {
        let mode = if name.ends_with(".sh") { 0o755 } else { 0o644 };
        writer.start_file(*name, SimpleFileOptions::default().unix_permissions(mode)).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

async fn register(sandbox: &AioSandbox<'_>, file: Option<&[u8]>, fields: &[(&str, &str)]) -> TestResponse {
    let mut body = Vec::new();
    let mut add_part = |head: &str, content: &[u8]| {
        body.extend_from_slice(format!("--B\r\nContent-Disposition: form-data; {head}\r\n\r\n").as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    };
    for (name, value) in fields {
        add_part(&format!("name=\"{name}\""), value.as_bytes());
    }
    if let Some(file) = file {
        add_part("name=\"file\"; filename=\"packed.zip\"", file);
    }
    body.extend_from_slice(b"--B--\r\n");
    let request = sandbox.request("POST", "/v1/skills/register");
    request.header("content-type", "multipart/form-data; boundary=B").body(body).send().await
}

fn home(server: &TestServer) -> String {
    let ids = server.backend.ids();
    server.backend.home(ids.first().unwrap()).to_str().unwrap().to_owned()
}

async fn names(sandbox: &AioSandbox<'_>) -> Vec<String> {
    let listed = sandbox.get("/v1/skills/metadatas").await.expect(200);
    let skills = listed["data"]["skills"].as_array().unwrap().clone();
    skills.iter().map(|skill| skill["name"].as_str().unwrap().to_owned()).collect()
}

/// The names of all files and directories below a path.
fn tree(path: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.map(Result::unwrap) {
        found.push(entry.path().to_str().unwrap().to_owned());
        if entry.file_type().unwrap().is_dir() {
            found.extend(tree(&entry.path()));
        }
    }
    found
}

#[tokio::test]
async fn archive_becomes_a_skill_until_it_is_deleted() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let content = archive(&[("SKILL.md", SKILL), ("scripts/run.sh", b"echo hi\n"), ("a/b/c", b"")]);
    let added = register(&sandbox, Some(&content), &[]).await.expect(200)["data"].clone();
    let path = format!("{home}/skills/report-writer");
    let expected = json!({"name": "report-writer", "path": path, "dependency_commands": [],
        "metadata": {"name": "report-writer", "description": "Writes reports."}});
    assert_eq!(added, json!({"count": 1, "registered": [expected]}));
    assert_eq!(std::fs::read(format!("{path}/SKILL.md")).unwrap(), SKILL);
    let script = std::fs::metadata(format!("{path}/scripts/run.sh")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&script.permissions()) & 0o777, 0o755);
    assert!(Path::new(&format!("{path}/a/b/c")).exists());
    let listed = sandbox.get("/v1/skills/metadatas?names=other,report-writer").await.expect(200);
    assert_eq!(listed["data"]["skills"], json!([expected]));
    let none = sandbox.get("/v1/skills/metadatas?names=other").await.expect(200);
    assert_eq!(none["data"]["skills"], json!([]));
    let read = sandbox.get("/v1/skills/report-writer/content").await.expect(200);
    assert_eq!(read["data"], json!({"name": "report-writer", "path": path, "content": "\n# Report\n"}));
    // What exists is not overwritten.
    register(&sandbox, Some(&content), &[]).await.expect(409);
    let deleted = sandbox.request("DELETE", "/v1/skills/report-writer").send().await.expect(200);
    assert_eq!(deleted["data"], expected);
    assert!(!Path::new(&path).exists());
    sandbox.request("DELETE", "/v1/skills/report-writer").send().await.expect(404);
    sandbox.get("/v1/skills/report-writer/content").await.expect(404);
    assert!(names(&sandbox).await.is_empty());
}

#[tokio::test]
async fn archive_may_hold_several_skills() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let root = format!("{}/mine", home(&server));
    let content = archive(&[("one/SKILL.md", b"text"), ("two/SKILL.md", b"text"), ("README", b"")]);
    register(&sandbox, Some(&content), &[("path", &root), ("name", "x")]).await.expect(422);
    let added = register(&sandbox, Some(&content), &[("path", &root)]).await.expect(200);
    assert_eq!(added["data"]["count"], 2);
    assert_eq!(names(&sandbox).await, ["one", "two"]);
    let deleted = sandbox.request("DELETE", "/v1/skills").send().await.expect(200);
    assert_eq!(deleted["data"], json!({"count": 2, "deleted": ["one", "two"]}));
    assert_eq!(tree(Path::new(&root)), Vec::<String>::new());
}

#[tokio::test]
async fn directory_is_registered_where_it_is_and_stays() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    for name in ["a", "b", "no-skill"] {
        std::fs::create_dir_all(format!("{home}/own/{name}")).unwrap();
    }
    std::fs::write(format!("{home}/own/a/SKILL.md"), SKILL).unwrap();
    std::fs::write(format!("{home}/own/b/SKILL.md"), "plain").unwrap();
    let one = [("path", format!("{home}/own/b/")), ("name", "given".to_owned())];
    let one: Vec<(&str, &str)> = one.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let added = register(&sandbox, None, &one).await.expect(200);
    assert_eq!(added["data"]["registered"][0]["path"], format!("{home}/own/b"));
    let all = register(&sandbox, None, &[("path", &format!("{home}/own"))]).await.expect(200);
    assert_eq!(all["data"]["count"], 2);
    assert_eq!(names(&sandbox).await, ["b", "given", "report-writer"]);
    sandbox.request("DELETE", "/v1/skills").send().await.expect(200);
    assert!(names(&sandbox).await.is_empty());
    assert!(Path::new(&format!("{home}/own/b/SKILL.md")).exists());
    register(&sandbox, None, &[("path", &format!("{home}/own/no-skill"))]).await.expect(404);
    register(&sandbox, None, &[("path", "/nonexistent")]).await.expect(404);
    register(&sandbox, None, &[("path", "relative")]).await.expect(422);
    register(&sandbox, None, &[]).await.expect(422);
}

#[tokio::test]
async fn refused_archive_leaves_nothing_behind() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let before = tree(Path::new(&home));
    let zeros = vec![0; 15 << 20];
    let numbers: Vec<String> = (0..5).map(|number| format!("{number}")).collect();
    let mut bomb: Vec<(&str, &[u8])> = vec![("SKILL.md", SKILL)];
    bomb.extend(numbers.iter().map(|name| (name.as_str(), zeros.as_slice())));
    let mut link = ZipWriter::new(Cursor::new(Vec::new()));
    link.start_file("SKILL.md", SimpleFileOptions::default()).unwrap();
    link.add_symlink("x", "/etc", SimpleFileOptions::default()).unwrap();
    let link = link.finish().unwrap().into_inner();
    for (content, words) in [
        (archive(&bomb), "exceed 67108864 bytes"),
        (link, "`x` of the archive is a link"),
        (archive(&[("SKILL.md", SKILL), ("../../evil", b"x")]), "leads out of its directory"),
        (archive(&[("SKILL.md", SKILL), ("/tmp/evil", b"x")]), "has an absolute path"),
        (archive(&[("README", b"")]), "no SKILL.md"),
        (archive(&[("SKILL.md", b"---\na: *b\n---\n")]), "front matter"),
        (b"not a zip".to_vec(), "not a zip archive"),
    ] {
        let refused: Value = register(&sandbox, Some(&content), &[]).await.expect(400);
        assert!(refused["message"].as_str().unwrap().contains(words), "{words}: {refused}");
        assert_eq!((&refused["success"], &refused["data"]), (&json!(false), &Value::Null));
        assert_eq!(tree(Path::new(&home)), before, "{words}");
    }
    let long = vec![0; (16 << 20) + 1];
    register(&sandbox, Some(&long), &[]).await.expect(413);
    register(&sandbox, Some(&archive(&[("SKILL.md", b"")])), &[("name", "../x")]).await.expect(422);
    assert_eq!(tree(Path::new(&home)), before);
    assert!(names(&sandbox).await.is_empty());
}

/// Makes directories with this `SKILL.md`, and returns the directory above them.
fn make_skills(home: &str, count: usize, text: &str) -> String {
    let root = format!("{home}/own");
    for number in 0..count {
        std::fs::create_dir_all(format!("{root}/{number}")).unwrap();
        std::fs::write(format!("{root}/{number}/SKILL.md"), text).unwrap();
    }
    root
}

#[tokio::test]
async fn front_matters_of_one_request_are_bounded() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let root = make_skills(&home, 250, &format!("---\na: {}\n---\n", "x".repeat(20 << 10)));
    let refused = register(&sandbox, None, &[("path", &root)]).await.expect(413);
    assert!(refused["message"].as_str().unwrap().contains("fewer skills"), "{refused}");
    assert!(names(&sandbox).await.is_empty());
    // Skills that were registered in several requests cannot be listed in one.
    std::fs::create_dir_all(format!("{home}/.aio/skills")).unwrap();
    for number in 0..250 {
        let record = json!({"path": format!("{root}/{number}"), "extracted": false});
        std::fs::write(format!("{home}/.aio/skills/{number}.json"), record.to_string()).unwrap();
    }
    sandbox.get("/v1/skills/metadatas").await.expect(413);
    let listed = sandbox.get("/v1/skills/metadatas?names=7,8").await.expect(200);
    assert_eq!(listed["data"]["skills"].as_array().unwrap().len(), 2);
    let deleted = sandbox.request("DELETE", "/v1/skills").send().await.expect(200);
    assert_eq!(deleted["data"]["count"], 250);
}

#[tokio::test]
async fn second_registration_of_an_owner_is_refused_at_once() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let root = make_skills(&home(&server), 100, "text");
    let other = AioSandbox::create(&server, "two").await;
    let fields = [("path", root.as_str())];
    let (first, second) = tokio::join!(register(&sandbox, None, &fields), register(&other, None, &fields));
    let (added, refused) = if first.status == 200 { (first, second) } else { (second, first) };
    assert_eq!(added.expect(200)["data"]["count"], 100);
    assert!(refused.expect(429)["message"].as_str().unwrap().contains("of one owner"));
    assert_eq!(refused.header("retry-after"), Some("1"));
    register(&other, None, &fields).await.expect(200);
}

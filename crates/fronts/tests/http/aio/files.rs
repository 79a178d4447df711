//! The file API, over the real agent without a jail. Searches for text need the whole program, so they are tested
//! elsewhere.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use domain::SandboxId;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

/// More than is held in memory, so it goes through a draft.
const LONG: usize = 3 << 20;

/// A directory of the sandbox's own.
fn home(server: &TestServer) -> String {
    let ids = server.backend.ids();
    let id: &SandboxId = ids.first().expect("there is one sandbox");
    server.backend.home(id).to_str().unwrap().to_owned()
}

async fn start() -> TestServer {
    start_with_keys_and_agents(|_| {}).await
}

impl AioSandbox<'_> {
    async fn file(&self, operation: &str, body: Value) -> TestResponse {
        self.post(&format!("/v1/file/{operation}"), body).await
    }

    async fn data(&self, operation: &str, body: Value) -> Value {
        let answer = self.file(operation, body).await.expect(200);
        assert_eq!(answer["success"], true, "{answer}");
        answer["data"].clone()
    }

    async fn write_text(&self, path: &str, text: &str) {
        self.data("write", json!({"file": path, "content": text})).await;
    }

    async fn read_text(&self, path: &str) -> String {
        self.data("read", json!({"file": path})).await["content"].as_str().unwrap().to_owned()
    }

    /// Sends a body as it is.
    async fn send_raw(&self, operation: &str, body: impl Into<Vec<u8>>) -> TestResponse {
        let path = format!("{}/v1/file/{operation}", self.path);
        let request = self.server.request("POST", &path).header("content-type", "application/json");
        request.body(body.into()).send().await
    }
}

#[tokio::test]
async fn j13_written_files_are_read_whole_and_in_ranges() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let path = format!("{home}/new/dir/a.txt");
    let text = "eins\nzwei €\ndrei 😀\n";
    let written = sandbox.data("write", json!({"file": path, "content": text, "encoding": null})).await;
    assert_eq!((&written["file"], &written["bytes_written"]), (&json!(path), &json!(text.len())));
    assert_eq!(sandbox.read_text(&path).await, text);
    // n21: DeerFlow sends lines 1 to 2 as 0 and 2.
    for (start, end, expected) in [
        (json!(0), json!(2), "eins\nzwei €"),
        (json!(1), json!(null), "zwei €\ndrei 😀"),
        (json!(null), json!(1), "eins"),
        (json!(2), json!(99), "drei 😀"),
        (json!(7), json!(9), ""),
        (json!(2), json!(1), ""),
        (json!(0), json!(0), ""),
    ] {
        let body = json!({"file": path, "start_line": start, "end_line": end});
        assert_eq!(sandbox.data("read", body).await["content"], expected, "{start} {end}");
    }
    sandbox.data("write", json!({"file": path, "content": "vier", "append": true})).await;
    let newlines = json!({"file": path, "content": "x", "append": true, "leading_newline": true,
        "trailing_newline": true});
    assert_eq!(sandbox.data("write", newlines).await["bytes_written"], 3);
    assert_eq!(sandbox.read_text(&path).await, format!("{text}vier\nx\n"));
    let empty = format!("{home}/empty");
    sandbox.write_text(&empty, "").await;
    assert_eq!(sandbox.read_text(&empty).await, "");
    for body in [json!({"file": path, "start_line": -1}), json!({"file": path, "end_line": -1}), json!({})] {
        assert!(sandbox.file("read", body).await.expect(422)["detail"].is_array());
    }
}

#[tokio::test]
async fn j13_base64_and_raw_texts_are_bytes() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/b.bin", home(&server));
    let bytes: Vec<u8> = (0..=255).collect();
    let content = STANDARD.encode(&bytes);
    let body = json!({"file": path, "content": content, "encoding": "base64", "trailing_newline": true});
    assert_eq!(sandbox.data("write", body).await["bytes_written"], 256);
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    let raw: String = bytes.iter().map(|byte| char::from(*byte)).collect();
    sandbox.data("write", json!({"file": path, "content": raw, "encoding": "raw", "append": true})).await;
    assert_eq!(std::fs::read(&path).unwrap(), [bytes.clone(), bytes.clone()].concat());
    for (content, encoding) in [("aGk", "base64"), ("a-b_", "base64"), ("aGk=x", "base64"), ("€", "raw")] {
        for append in [true, false] {
            let body = json!({"file": path, "content": content, "encoding": encoding, "append": append});
            let refused = sandbox.file("write", body).await.expect(400);
            assert_eq!((&refused["success"], &refused["data"]), (&json!(false), &Value::Null));
        }
    }
    let unknown = json!({"file": path, "content": "", "encoding": "utf-7"});
    sandbox.file("write", unknown).await.expect(422);
    assert_eq!(std::fs::read(&path).unwrap().len(), 512);
    let not_text = sandbox.file("read", json!({"file": path})).await.expect(400);
    assert_eq!(not_text["data"]["error_type"], "decode_error");
}

#[tokio::test]
async fn j14_bytes_of_text_files_are_not_changed() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/crlf.txt", home(&server));
    for bytes in ["a\r\nb\r\n", "\u{feff}a\r\nb", "a\rb\n\n", "\0\u{1}\u{7f}\"\\", "\n", "a\nb"] {
        std::fs::write(&path, bytes).unwrap();
        let read = sandbox.read_text(&path).await;
        sandbox.write_text(&path, &read).await;
        assert_eq!(std::fs::read(&path).unwrap(), bytes.as_bytes(), "{bytes:?}");
    }
    std::fs::write(&path, "a\r\nb\r\nc\r\n").unwrap();
    let lines = sandbox.data("read", json!({"file": path, "start_line": 0, "end_line": 2})).await;
    assert_eq!(lines["content"], "a\r\nb\r");
}

#[tokio::test]
async fn j13_missing_files_are_errors_with_their_errno() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let missing = format!("{home}/missing");
    let refused = sandbox.file("read", json!({"file": missing})).await.expect(404);
    let message = format!("Failed to read file: [Errno 2] No such file or directory: '{missing}'");
    assert_eq!((&refused["success"], &refused["message"]), (&json!(false), &json!(message)));
    assert_eq!(
        refused["data"],
        json!({"path": missing, "operation": "read", "message": message, "error_type": "not_found",
            "retryable": false, "errno": 2, "errno_name": "ENOENT", "exception_type": "FileNotFoundError"})
    );
    let directory = sandbox.file("read", json!({"file": home})).await.expect(400);
    assert_eq!(directory["data"]["errno_name"], "EISDIR");
    let directory = sandbox.file("write", json!({"file": home, "content": "x"})).await.expect(400);
    assert_eq!(directory["data"]["error_type"], "invalid_target");
    let relative = sandbox.file("read", json!({"file": "a.txt"})).await.expect(400);
    assert_eq!(relative["data"]["error_type"], "invalid_path");
    let long = format!("/{}", "x".repeat(300));
    let long = sandbox.file("read", json!({"file": long})).await.expect(400);
    assert_eq!(long["data"]["errno_name"], "ENAMETOOLONG");
    let long = sandbox.file("read", json!({"file": "/".repeat(9000)})).await.expect(400);
    assert_eq!(long["data"]["error_type"], "invalid_path");
    assert!(sandbox.file("read", json!({"file": "/a\0"})).await.expect(422)["detail"].is_array());
    for operation in ["find", "list", "glob"] {
        let body = json!({"path": missing, "glob": "*", "pattern": "*"});
        assert_eq!(sandbox.file(operation, body).await.expect(404)["data"]["operation"], operation);
        sandbox.write_text(&format!("{home}/file"), "").await;
        let body = json!({"path": format!("{home}/file"), "glob": "*", "pattern": "*"});
        assert_eq!(sandbox.file(operation, body).await.expect(400)["data"]["errno_name"], "ENOTDIR");
    }
}

#[tokio::test]
async fn fields_may_have_any_order_around_a_long_content() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/long.bin", home(&server));
    let drafts = || {
        let names = std::fs::read_dir("/tmp").unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(".coracle-draft-")).collect::<BTreeSet<_>>()
    };
    let before = drafts();
    let bytes: Vec<u8> = (0..LONG).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
    let content = STANDARD.encode(&bytes);
    for body in [
        format!(r#"{{"file":"{path}","content":"{content}","encoding":"base64","append":false}}"#),
        format!(r#"{{"content":"{content}","encoding":"base64","other":{{"content":"x"}},"file":"{path}"}}"#),
        format!(r#"{{"encoding":"base64","file":"{path}","sudo":true,"content":"{content}"}}"#),
    ] {
        std::fs::remove_file(&path).ok();
        let written = sandbox.send_raw("write", body).await.expect(200);
        assert_eq!(written["data"]["bytes_written"], LONG);
        assert!(std::fs::read(&path).unwrap() == bytes);
    }
    let body = format!(r#"{{"content":"{content}","append":true,"leading_newline":true,"file":"{path}"}}"#);
    assert_eq!(sandbox.send_raw("write", body).await.expect(200)["data"]["bytes_written"], content.len() + 1);
    assert!(std::fs::read(&path).unwrap() == [&bytes[..], b"\n", content.as_bytes()].concat());
    // Nothing of an invalid request is written, wherever it is wrong.
    let old = std::fs::read(&path).unwrap();
    for (body, status) in [
        (format!(r#"{{"file":"{path}","content":"{content}=","encoding":"base64"}}"#), 400),
        (format!(r#"{{"file":"{path}","content":"{content}","encoding":"base64","append":"no"}}"#), 422),
        (format!(r#"{{"file":"{path}","content":"{content}"#), 422),
        (format!(r#"{{"file":"{path}","content":"{content}","#), 422),
        (format!(r#"{{"file":"{path}","content":"{content}\ud800","append":true}}"#), 422),
        (format!(r#"{{"file":7,"content":"{content}"}}"#), 422),
        (format!(r#"{{"content":"{content}"}}"#), 422),
        (format!(r#"{{"file":"{path}","content":["{}"]}}"#, "x".repeat(2 << 20)), 413),
        (format!(r#"{{"file":"{path}","content":null}}"#), 422),
        (format!(r#"{{"file":"{path}"}}"#), 422),
        ("[]".to_owned(), 422),
        (String::new(), 422),
    ] {
        let refused = sandbox.send_raw("write", body.as_bytes()).await;
        assert_eq!(refused.status, status, "{} {}", &body[..body.len().min(80)], refused.text());
    }
    assert!(std::fs::read(&path).unwrap() == old);
    // Other tests have drafts in the same directory, which go away too.
    let mut left: BTreeSet<_> = drafts().difference(&before).cloned().collect();
    let begun = Instant::now();
    while !left.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{left:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
        left.retain(|name| Path::new("/tmp").join(name).exists());
    }
}

#[tokio::test]
async fn disconnected_write_leaves_the_old_file() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let path = format!("{home}/kept.txt");
    sandbox.write_text(&path, "old").await;
    for append in [false, true] {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
        let head = format!(
            "POST {}/v1/file/write HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n\
             {{\"file\":\"{path}\",\"append\":{append},\"content\":\"",
            sandbox.path
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&vec![b'x'; 4 << 20]).await.unwrap();
        stream.shutdown().await.unwrap();
        // The server closes its side when it has given the request up.
        stream.read_to_end(&mut Vec::new()).await.ok();
        assert_eq!(sandbox.read_text(&path).await, "old");
    }
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), 1);
}

#[tokio::test]
async fn n22_parallel_appends_all_survive() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/log", home(&server));
    let long = "y".repeat(LONG);
    let append = |text: String| sandbox.data("write", json!({"file": path, "content": text, "append": true}));
    let appends = (0..20).map(|number| append(format!("line {number}\n")));
    let appends = appends.chain([append(format!("{long}\n"))]);
    futures_util::stream::iter(appends).buffer_unordered(21).collect::<Vec<_>>().await;
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 21);
    for number in 0..20 {
        assert!(text.lines().any(|line| line == format!("line {number}")), "{number}");
    }
    assert!(text.lines().any(|line| line == long));
}

#[tokio::test]
async fn j10_names_and_long_texts_in_any_script_survive() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let path = format!("{home}/文件 😀 \"quoted\".txt");
    let text = "文件 😀 \"\\ \t\r\n".repeat(200_000);
    sandbox.write_text(&path, &text).await;
    assert!(std::fs::read_to_string(&path).unwrap() == text);
    assert!(sandbox.read_text(&path).await == text);
    let found = sandbox.data("find", json!({"path": home, "glob": "文*"})).await;
    assert_eq!(found["files"], json!([path]));
    let name = percent_encoding::utf8_percent_encode(&path, percent_encoding::NON_ALPHANUMERIC);
    let downloaded = sandbox.get(&format!("/v1/file/download?path={name}")).await;
    assert!(downloaded.body == text.as_bytes());
}

async fn make_tree(sandbox: &AioSandbox<'_>, home: &str) {
    for (name, text) in [
        ("a.py", "1"),
        ("b.md", "22"),
        ("src/c.py", "333"),
        ("src/deep/d.ts", "4444"),
        (".hidden/e.py", "5"),
        (".f.py", "6"),
    ] {
        sandbox.write_text(&format!("{home}/{name}"), text).await;
    }
}

fn relative(list: &Value, home: &str) -> Vec<String> {
    let path = |entry: &Value| entry.as_str().or(entry["path"].as_str()).unwrap().to_owned();
    list.as_array().unwrap().iter().map(|entry| path(entry).replacen(&format!("{home}/"), "", 1)).collect()
}

#[tokio::test]
async fn j15_find_list_and_glob_follow_their_options() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    make_tree(&sandbox, &home).await;
    for (glob, expected) in [
        ("**/*.py", &["a.py", "src/c.py"][..]),
        ("*.md", &["b.md"]),
        ("src/**/*.ts", &["src/deep/d.ts"]),
        ("*", &["a.py", "b.md", "src"]),
        ("nothing*", &[]),
        (".*.py", &[".f.py"]),
    ] {
        let found = sandbox.data("find", json!({"path": home, "glob": glob})).await;
        assert_eq!(relative(&found["files"], &home), expected, "{glob}");
    }
    // n31: DeerFlow needs directories, and no hidden entries.
    let all = sandbox.data("list", json!({"path": home, "recursive": true, "show_hidden": false})).await;
    let expected = ["a.py", "b.md", "src", "src/c.py", "src/deep", "src/deep/d.ts"];
    assert_eq!(relative(&all["files"], &home), expected);
    assert_eq!((&all["total_count"], &all["directory_count"]), (&json!(6), &json!(2)));
    let (file, directory) = (&all["files"][0], &all["files"][2]);
    assert_eq!(
        (&file["name"], &file["size"], &file["extension"]),
        (&json!("a.py"), &json!(1), &json!(".py"))
    );
    assert_eq!((&directory["is_directory"], &directory["size"]), (&json!(true), &Value::Null));
    let shallow = sandbox.data("list", json!({"path": home, "include_permissions": true})).await;
    assert_eq!(relative(&shallow["files"], &home), [".f.py", ".hidden", "a.py", "b.md", "src"]);
    assert_eq!(shallow["files"][2]["permissions"], "-rw-r--r--");
    assert_eq!(shallow["files"][4]["permissions"].as_str().unwrap().chars().next(), Some('d'));
    let two = json!({"path": home, "recursive": true, "max_depth": 2, "show_hidden": false,
        "file_types": [".py", "md"], "sort_by": "name", "sort_desc": true});
    let two = sandbox.data("list", two).await;
    assert_eq!(relative(&two["files"], &home), ["src/deep", "src/c.py", "src", "b.md", "a.py"]);
    let by_size =
        json!({"path": home, "pattern": "**/*", "sort_by": "size", "sort_desc": true, "max_results": 2});
    let by_size = sandbox.data("glob", by_size).await;
    assert_eq!(relative(&by_size["files"], &home), ["src/deep/d.ts", "src/c.py"]);
    assert_eq!((&by_size["total_count"], &by_size["truncated"]), (&json!(4), &json!(true)));
    let hidden = json!({"path": home, "pattern": "**/*.py", "include_hidden": true, "exclude": ["src"],
        "include_metadata": false});
    let hidden = sandbox.data("glob", hidden).await;
    assert_eq!(relative(&hidden["files"], &home), [".f.py", ".hidden/e.py", "a.py"]);
    assert_eq!(hidden["files"][0]["size"], Value::Null);
    for (operation, body) in [
        ("glob", json!({"path": home, "pattern": "*", "max_results": 0})),
        ("glob", json!({"path": home, "pattern": "*", "sort_by": "colour"})),
        ("list", json!({"path": home, "max_depth": 0})),
        ("grep", json!({"path": home, "pattern": "x", "context_before": 21})),
        ("grep", json!({"path": home, "pattern": "x", "max_file_size": "big"})),
        ("grep", json!({"path": home})),
    ] {
        sandbox.file(operation, body).await.expect(422);
    }
    assert_eq!(
        sandbox.file("find", json!({"path": home, "glob": "["})).await.expect(400)["data"],
        Value::Null
    );
}

#[tokio::test]
async fn listing_is_cut_at_ten_thousand_entries() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    for number in 0..10_050 {
        std::fs::write(format!("{home}/{number:05}"), "").unwrap();
    }
    let listed = sandbox.data("list", json!({"path": home})).await;
    assert_eq!((&listed["total_count"], &listed["truncated"]), (&json!(10_000), &json!(true)));
}

fn multipart(parts: &[(&str, Option<&str>, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, file_name, content) in parts {
        let file_name = file_name.map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
        let head = format!("--B\r\nContent-Disposition: form-data; name=\"{name}\"{file_name}\r\n\r\n");
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"--B--\r\n");
    body
}

#[tokio::test]
async fn j16_uploaded_files_are_downloaded() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let upload = async |body: Vec<u8>| {
        let request = server.request("POST", &format!("{}/v1/file/upload", sandbox.path));
        request.header("content-type", "multipart/form-data; boundary=B").body(body).send().await
    };
    let bytes: Vec<u8> = (0..LONG).map(|at| u8::try_from(at % 253).unwrap()).collect();
    let path = format!("{home}/up/x.bin");
    let (file, field) = (("file", Some("x.bin"), &bytes[..]), ("path", None, path.as_bytes()));
    for parts in [[file, field], [field, file]] {
        std::fs::remove_file(&path).ok();
        let answer = upload(multipart(&parts)).await.expect(200);
        assert_eq!(answer["data"], json!({"file_path": path, "file_size": LONG, "success": true}));
        let downloaded = sandbox.get(&format!("/v1/file/download?path={path}")).await;
        assert!(downloaded.body == bytes);
        assert_eq!(downloaded.header("content-length"), Some(LONG.to_string().as_str()));
        assert_eq!(downloaded.header("content-type"), Some("application/octet-stream"));
        assert_eq!(downloaded.header("content-disposition"), Some("attachment; filename=\"x.bin\""));
    }
    let aborting = sandbox.get(&format!("/v1/file/download?change_policy=abort&path={path}")).await;
    assert!(aborting.body == bytes);
    upload(multipart(&[field])).await.expect(422);
    upload(multipart(&[("path", None, b"relative"), file])).await.expect(400);
    upload(multipart(&[("path", None, home.as_bytes()), file])).await.expect(400);
    let named = upload(multipart(&[("path", None, format!("{home}/dir/").as_bytes()), file])).await;
    assert_eq!(named.expect(200)["data"]["file_path"], format!("{home}/dir/x.bin"));
    let missing = sandbox.get(&format!("/v1/file/download?path={home}/none")).await.expect(404);
    assert_eq!(missing["message"], format!("File does not exist: {home}/none"));
    let directory = sandbox.get(&format!("/v1/file/download?path={home}")).await.expect(400);
    assert_eq!(directory["message"], format!("Path is not a file: {home}"));
    sandbox.get("/v1/file/download").await.expect(422);
    sandbox.get(&format!("/v1/file/download?change_policy=x&path={path}")).await.expect(422);
    // n24
    sandbox.write_text(&format!("{home}/empty"), "").await;
    assert_eq!(sandbox.get(&format!("/v1/file/download?path={home}/empty")).await.body.len(), 0);
}

#[tokio::test]
async fn download_of_a_file_that_changes_is_aborted_if_asked() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/changing", home(&server));
    std::fs::write(&path, vec![b'x'; 32 << 20]).unwrap();
    for (policy, is_whole) in [("abort", false), ("ignore", true)] {
        let url = format!("{}/v1/file/download?change_policy={policy}&path={path}", sandbox.path);
        let response = server.request("GET", &url).send_and_stream().await;
        // The response has begun, and the client has not read it yet.
        std::fs::OpenOptions::new().append(true).open(&path).unwrap().set_len(33 << 20).unwrap();
        assert_eq!(response.into_body().collect().await.is_ok(), is_whole, "{policy}");
        std::fs::write(&path, vec![b'x'; 32 << 20]).unwrap();
    }
}

#[tokio::test]
async fn j17_editor_views_edits_and_takes_back() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let path = format!("{home}/sub/a.txt");
    let edit = async |mut body: Value| {
        body["path"] = body["path"].as_str().unwrap_or(&path).into();
        sandbox.file("str_replace_editor", body).await
    };
    let refused = async |body: Value, phrase: &str| {
        let refused = edit(body).await.expect(400);
        assert!(refused["message"].as_str().unwrap().contains(phrase), "{phrase}: {refused}");
        assert_eq!(refused["success"], false);
    };
    refused(json!({"command": "view"}), "does not exist").await;
    refused(json!({"command": "undo_edit"}), "does not exist").await;
    refused(json!({"command": "create"}), "`file_text` is required").await;
    refused(json!({"command": "view", "path": "relative"}), "Invalid `path`").await;
    let created = edit(json!({"command": "create", "file_text": "one\ntwo\nthree\ntwo\n"})).await.expect(200);
    assert_eq!((&created["data"]["prev_exist"], &created["data"]["path"]), (&json!(false), &json!(path)));
    refused(json!({"command": "create", "file_text": ""}), "already exists").await;
    refused(json!({"command": "str_replace", "new_str": "x"}), "`old_str` is required").await;
    refused(json!({"command": "str_replace", "old_str": "four", "new_str": "x"}), "did not appear").await;
    refused(json!({"command": "str_replace", "old_str": "two", "new_str": "x"}), "Multiple occurrences")
        .await;
    refused(json!({"command": "str_replace", "old_str": "two", "new_str": "x"}), "not unique").await;
    refused(json!({"command": "str_replace", "old_str": "two", "new_str": "two"}), "must be different").await;
    refused(json!({"command": "insert", "new_str": "x"}), "`insert_line` is required").await;
    refused(json!({"command": "insert", "insert_line": 9, "new_str": "x"}), "[0, 4]").await;
    refused(json!({"command": "view", "view_range": [0, 1]}), "view_range").await;
    refused(json!({"command": "view", "view_range": [2, 9]}), "[1, 4]").await;
    refused(json!({"command": "view", "path": home, "view_range": [1, 2]}), "directory").await;
    refused(json!({"command": "insert", "path": home, "insert_line": 0, "new_str": "x"}), "is a directory")
        .await;
    let view = edit(json!({"command": "view", "view_range": [2, -1]})).await.expect(200);
    assert!(view["data"]["output"].as_str().unwrap().ends_with("     2\ttwo\n     3\tthree\n     4\ttwo\n"));
    let last = json!({"command": "str_replace", "old_str": "two", "new_str": "2", "replace_mode": "LAST"});
    let last = edit(last).await.expect(200);
    assert_eq!(last["data"]["new_content"], "one\ntwo\nthree\n2\n");
    assert_eq!(last["data"]["old_content"], "one\ntwo\nthree\ntwo\n");
    assert!(last["data"]["output"].as_str().unwrap().contains("     4\t2\n"));
    edit(json!({"command": "insert", "insert_line": 1, "new_str": "in"})).await.expect(200);
    assert_eq!(sandbox.read_text(&path).await, "one\nin\ntwo\nthree\n2\n");
    for expected in ["one\ntwo\nthree\n2\n", "one\ntwo\nthree\ntwo\n"] {
        edit(json!({"command": "undo_edit"})).await.expect(200);
        assert_eq!(sandbox.read_text(&path).await, expected);
    }
    // The first edit created the file.
    edit(json!({"command": "undo_edit"})).await.expect(200);
    assert!(!std::path::Path::new(&path).exists());
    refused(json!({"command": "undo_edit"}), "o edit history").await;
    make_tree(&sandbox, &home).await;
    let view = edit(json!({"command": "view", "path": home})).await.expect(200);
    let output = view["data"]["output"].as_str().unwrap();
    assert!(output.contains("src/deep/\n") || output.ends_with("src/deep/"), "{output}");
    assert!(!output.contains("d.ts") && !output.contains(".hidden"), "{output}");
    edit(json!({"command": "dance"})).await.expect(422);
}

#[tokio::test]
async fn every_occurrence_is_replaced() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/a", home(&server));
    sandbox.write_text(&path, "aXbX\r\n").await;
    let body = json!({"file": path, "old_str": "X", "new_str": "--", "sudo": true});
    assert_eq!(sandbox.data("replace", body.clone()).await["replaced_count"], 2);
    assert_eq!(sandbox.data("replace", body).await["replaced_count"], 0);
    assert_eq!(sandbox.read_text(&path).await, "a--b--\r\n");
    sandbox.file("replace", json!({"file": path, "old_str": "", "new_str": "x"})).await.expect(422);
    sandbox.file("replace", json!({"file": path, "old_str": "x"})).await.expect(422);
    let missing = json!({"file": "/missing/a", "old_str": "x", "new_str": "y"});
    assert_eq!(sandbox.file("replace", missing).await.expect(404)["data"]["operation"], "replace");
}

#[tokio::test]
async fn watches_report_events_to_polls_and_streams() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let created = sandbox.file("watch", json!({"path": home, "debounce": 50})).await.expect(200);
    let id = created["data"]["watcher_id"].as_str().unwrap().to_owned();
    assert_eq!(sandbox.get("/v1/file/watch").await.expect(200)["watchers"][0]["watcher_id"], id);
    let stream = server.request("GET", &format!("{}/v1/file/watch/{id}/events", sandbox.path));
    let mut stream = stream.send_and_stream().await.into_body();
    sandbox.write_text(&format!("{home}/x.pyc"), "excluded").await;
    sandbox.write_text(&format!("{home}/a.txt"), "text").await;
    let mut cursor = 0;
    let event = loop {
        let body = json!({"since": cursor, "timeout": 30, "limit": 1});
        let page = sandbox.post(&format!("/v1/file/watch/{id}/poll"), body).await.expect(200);
        let event = page["data"]["events"][0].clone();
        assert!(event["seq"].as_u64().unwrap() > cursor && page["overflow"] == false, "{page}");
        if event["relative_path"] == "a.txt" {
            break event;
        }
        cursor = page["cursor"].as_u64().unwrap();
    };
    assert_eq!(event["path"], format!("{home}/a.txt"));
    let mut text = String::new();
    while !text.contains("a.txt") {
        let frame = stream.frame().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    assert!(text.contains("event: watch_started") && !text.contains("x.pyc"), "{text}");
    assert!(text.contains(&format!("id: {id}:")) && text.contains("event: file_change"), "{text}");
    let removed = format!("{}/v1/file/watch/{id}", sandbox.path);
    server.delete(&removed).await.expect(200);
    assert_eq!(server.delete(&removed).await.expect(404)["message"], "Watcher not found");
    // The stream ends with its watch.
    while stream.frame().await.is_some_and(|frame| frame.is_ok()) {}
    sandbox.post(&format!("/v1/file/watch/{id}/poll"), json!({})).await.expect(404);
    sandbox.file("watch", json!({"path": format!("{home}/none")})).await.expect(404);
    sandbox.file("watch", json!({"path": home, "exclude": ["["]})).await.expect(400);
    sandbox.file("watch", json!({"path": home, "debounce": 1})).await.expect(422);
}

#[tokio::test]
async fn wait_returns_with_the_event_of_the_file() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let home = home(&server);
    let path = format!("{home}/w.txt");
    let wait =
        |types: Value| sandbox.file("watch/wait", json!({"path": path, "timeout": 60, "event_types": types}));
    let (waited, ()) = tokio::join!(wait(Value::Null), async {
        // Files are written until one of them was seen; the watch may begin later than the first.
        for number in 0..20 {
            sandbox.write_text(&path, &number.to_string()).await;
        }
    });
    assert_eq!(waited.expect(200)["event"]["path"], path);
    let existing = wait(json!(["create"])).await.expect(200);
    assert_eq!(
        (&existing["data"]["event"]["type"], &existing["timed_out"]),
        (&json!("create"), &json!(false))
    );
    let quiet = json!({"path": format!("{home}/quiet"), "timeout": 1});
    assert_eq!(sandbox.file("watch/wait", quiet).await.expect(200)["event"], Value::Null);
    wait(json!(["dance"])).await.expect(422);
}

#[tokio::test]
async fn j20_unknown_fields_and_nulls_are_accepted() {
    let server = start().await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let path = format!("{}/a", home(&server));
    let body = json!({"file": path, "content": "x", "encoding": null, "append": null, "leading_newline": null,
        "trailing_newline": null, "sudo": null, "future": {"content": [1]}});
    sandbox.data("write", body).await;
    assert_eq!(sandbox.read_text(&path).await, "x");
    for operation in
        ["read", "write", "replace", "search", "find", "grep", "glob", "list", "str_replace_editor"]
    {
        let refused = sandbox.send_raw(operation, "").await.expect(422);
        assert_eq!(refused["detail"][0]["type"], "missing", "{operation}");
        assert_eq!(sandbox.send_raw(operation, "{").await.expect(422)["detail"][0]["type"], "json_invalid");
    }
}

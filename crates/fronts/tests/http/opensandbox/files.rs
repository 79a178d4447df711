//! Files, over the real agent without a jail.

use domain::SandboxId;
use serde_json::{Value, json};
use testkit::test_client::TestResponse;
use testkit::test_server::TestServer;

use super::{create, inside};
use crate::setup::{expect_error, start_with_agents};

const BOUNDARY: &str = "border-of-the-parts";

/// A sandbox and the directory for its files.
struct FileSandbox {
    server: TestServer,
    id: String,
    home: String,
}

impl FileSandbox {
    async fn start() -> Self {
        let server = start_with_agents().await;
        let id = create(&server).await;
        let home = server.backend.home(&SandboxId::parse(&id).unwrap()).to_str().unwrap().to_owned();
        Self { server, id, home }
    }

    async fn request(&self, method: &str, path: &str) -> TestResponse {
        self.server.request(method, &inside(&self.id, path)).send().await
    }

    async fn post(&self, path: &str, body: Value) -> TestResponse {
        self.server.post(&inside(&self.id, path), body).await
    }

    async fn upload(&self, metadata: &Value, content: &[u8]) -> TestResponse {
        let part = |name: &str| {
            let shown = format!("form-data; name=\"{name}\"; filename=\"{name}\"");
            format!("--{BOUNDARY}\r\nContent-Disposition: {shown}\r\n\r\n")
        };
        let before = format!("{}{metadata}\r\n{}", part("metadata"), part("file"));
        let after = format!("\r\n--{BOUNDARY}--\r\n");
        let body = [before.as_bytes(), content, after.as_bytes()].concat();
        let kind = format!("multipart/form-data; boundary={BOUNDARY}");
        let request = self.server.request("POST", &inside(&self.id, "files/upload"));
        request.header("content-type", &kind).body(body).send().await
    }

    async fn download(&self, name: &str, range: Option<&str>) -> TestResponse {
        let path = inside(&self.id, &format!("files/download?path={}/{name}", self.home));
        let request = self.server.request("GET", &path);
        match range {
            Some(range) => request.header("range", range).send().await,
            None => request.send().await,
        }
    }
}

#[tokio::test]
async fn uploaded_bytes_are_downloaded_whole_and_in_ranges() {
    let files = FileSandbox::start().await;
    let content: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let metadata = json!({"path": format!("{}/deep/er/file", files.home), "mode": 640});
    assert_eq!(files.upload(&metadata, &content).await.status, 200);
    let whole = files.download("deep/er/file", None).await;
    assert!(whole.status == 200 && whole.body == content, "{} bytes came back", whole.body.len());
    let part = files.download("deep/er/file", Some("bytes=299990-")).await;
    assert_eq!((part.status.as_u16(), &part.body[..]), (206, &content[299_990..]));
    assert_eq!(part.header("content-range"), Some("bytes 299990-299999/300000"));
    let beyond = files.download("deep/er/file", Some("bytes=300000-")).await;
    expect_error(&beyond, 416, "UNKNOWN");
    let path = format!("{}/deep/er/file", files.home);
    let info = files.request("GET", &format!("files/info?path={path}")).await.expect(200);
    assert_eq!((&info[&path]["size"], &info[&path]["mode"]), (&json!(300_000), &json!(640)), "{info}");
}

#[tokio::test]
async fn lines_of_a_file_are_downloaded_by_number() {
    let files = FileSandbox::start().await;
    let metadata = json!({"path": format!("{}/lines", files.home)});
    assert_eq!(files.upload(&metadata, b"one\ntwo\nthree\n").await.status, 200);
    let lines = files.download("lines&offset=2&limit=1", None).await;
    assert_eq!((lines.status.as_u16(), lines.text()), (200, "two"));
    let both = files.download("lines&offset=2&limit=1", Some("bytes=0-1")).await;
    expect_error(&both, 400, "INVALID_REQUEST_BODY");
    expect_error(&files.download("lines&offset=0", None).await, 400, "INVALID_REQUEST_BODY");
}

#[tokio::test]
async fn malformed_uploads_are_refused() {
    let files = FileSandbox::start().await;
    let plain = files.post("files/upload", json!({"path": "/tmp/x"})).await;
    assert_eq!(plain.status, 400, "{}", plain.text());
    let no_path = files.upload(&json!({"mode": 644}), b"").await;
    expect_error(&no_path, 400, "INVALID_FILE_METADATA");
    let directory = files.upload(&json!({"path": files.home}), b"").await;
    assert!(directory.status.is_client_error() || directory.status.is_server_error(), "{directory:?}");
}

#[tokio::test]
async fn missing_files_and_parameters_are_reported() {
    let files = FileSandbox::start().await;
    expect_error(&files.download("none", None).await, 404, "FILE_NOT_FOUND");
    for path in ["files/info?path=/no/such", "directories/list?path=/no/such", "files/search?path=/no/such"] {
        expect_error(&files.request("GET", path).await, 404, "FILE_NOT_FOUND");
    }
    for path in ["files/download", "directories/list"] {
        expect_error(&files.request("GET", path).await, 400, "MISSING_QUERY");
    }
    let directory = files.request("GET", &format!("files/download?path={}", files.home)).await;
    expect_error(&directory, 400, "INVALID_FILE");
}

#[tokio::test]
async fn directories_are_made_listed_searched_and_deleted() {
    let files = FileSandbox::start().await;
    let directory = format!("{}/a/b", files.home);
    assert_eq!(files.post("directories", json!({&directory: {"mode": 755}})).await.status, 200);
    let metadata = json!({"path": format!("{directory}/found.txt")});
    assert_eq!(files.upload(&metadata, b"text").await.status, 200);
    let listed = files.request("GET", &format!("directories/list?path={directory}")).await.expect(200);
    assert_eq!(listed[0]["path"], metadata["path"], "{listed}");
    let query = format!("files/search?path={}&pattern=*.txt", files.home);
    let found = files.request("GET", &query).await.expect(200);
    assert_eq!(found[0]["path"], metadata["path"], "{found}");
    let moved = json!([{"src": metadata["path"], "dest": format!("{directory}/moved")}]);
    assert_eq!(files.post("files/mv", moved).await.status, 200);
    expect_error(&files.download("a/b/found.txt", None).await, 404, "FILE_NOT_FOUND");
    assert_eq!(files.download("a/b/moved", None).await.text(), "text");
    assert_eq!(files.request("DELETE", &format!("directories?path={directory}")).await.status, 200);
    expect_error(&files.download("a/b/moved", None).await, 404, "FILE_NOT_FOUND");
}

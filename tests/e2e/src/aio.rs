//! One sandbox of the provisioner, through the AIO API.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{HttpClient, HttpResponse};
use crate::run::TestUser;
use crate::server::{ServerBuilder, TestServer};

/// The key of servers whose provisioner is used.
pub const KEY: &str = "key-of-the-provisioner";

/// DeerFlow's state directory on this host, for servers that share the files of conversations with its gateway.
pub struct StateRoot {
    home: TempDir,
}

impl StateRoot {
    /// Makes an empty one.
    pub fn make() -> Self {
        let home = TestUser::Same.make_home();
        fs::create_dir(home.path().join("flow")).expect("our own directory");
        Self { home }
    }

    pub fn path(&self) -> PathBuf {
        self.home.path().join("flow")
    }

    /// The directory that contains it, for files beside it.
    pub fn parent(&self) -> &Path {
        self.home.path()
    }

    /// A server whose provisioner mounts directories below it.
    pub fn server(&self) -> ServerBuilder {
        ServerBuilder::new()
            .env("CORACLE_API_KEY", KEY)
            .env("CORACLE_ON_STOP", "remove")
            .env("CORACLE_DEERFLOW_USER_DATA", "host")
            .env("CORACLE_DEERFLOW_STATE_ROOT", &self.path().to_string_lossy())
    }
}

/// A sandbox and a kept connection to its server.
pub struct AioSandbox {
    /// The id that the client chose.
    pub id: String,
    /// The id of this incarnation, by which other APIs know it.
    pub container: String,
    /// The path of its API, which opens it.
    pub path: String,
    client: HttpClient,
}

/// A client that presents the key to the provisioner and to the other APIs.
pub fn keyed_client(address: &str) -> HttpClient {
    let mut client = HttpClient::new(address);
    client.set_headers(&keys());
    client
}

/// The headers that present the key.
pub fn keys() -> [(String, String); 2] {
    ["X-API-Key", "OPEN-SANDBOX-API-KEY"].map(|name| (name.to_owned(), KEY.to_owned()))
}

/// Creates the sandbox of an id, or finds it; `fields` are added to the request. A server that dies meanwhile is an
/// error.
pub fn try_provision(address: &str, id: &str, fields: &Value) -> io::Result<HttpResponse> {
    let mut request = json!({"sandbox_id": id});
    for (name, value) in fields.as_object().into_iter().flatten() {
        request[name] = value.clone();
    }
    keyed_client(address).post("/api/sandboxes", &request)
}

impl AioSandbox {
    pub fn create(server: &TestServer, id: &str) -> Self {
        Self::create_with(server, id, &json!({}))
    }

    pub fn create_with(server: &TestServer, id: &str, fields: &Value) -> Self {
        let made = Self::provision(server.address(), id, fields);
        server.add_secret(made.mac());
        made
    }

    /// As [`AioSandbox::create_with`], by the address of a server.
    pub fn provision(address: &str, id: &str, fields: &Value) -> Self {
        let answer = try_provision(address, id, fields).expect("the server answers");
        assert_eq!(answer.status, 200, "create failed: {}", answer.text());
        Self::from_response(address, &answer.json())
    }

    /// The sandbox that a response of the provisioner describes.
    pub fn from_response(address: &str, body: &Value) -> Self {
        let text = |name: &str| body[name].as_str().unwrap_or_else(|| panic!("{name}: {body}")).to_owned();
        let url = text("sandbox_url");
        // Where hosts name sandboxes, their paths work as well.
        let path = match url.split_once("/aio/") {
            Some((_, path)) => path.to_owned(),
            None => {
                let label = url.split_once("://aio-").and_then(|(_, rest)| rest.split('.').next());
                label.expect("the host names the sandbox").replace('-', ".")
            }
        };
        Self {
            id: text("sandbox_id"),
            container: text("container_id"),
            path: format!("/aio/{path}"),
            client: HttpClient::new(address),
        }
    }

    /// A second connection to the same sandbox, for use from another thread.
    pub fn with_client(&self, client: HttpClient) -> Self {
        let Self { id, container, path, .. } = self;
        Self { id: id.clone(), container: container.clone(), path: path.clone(), client }
    }

    /// The part of the address that is secret.
    pub fn mac(&self) -> &str {
        self.path.rsplit('.').next().expect("an address has a code")
    }

    pub fn try_get(&mut self, path: &str) -> io::Result<HttpResponse> {
        self.client.get(&format!("{}{path}", self.path))
    }

    pub fn try_post(&mut self, path: &str, body: &Value) -> io::Result<HttpResponse> {
        self.client.post(&format!("{}{path}", self.path), body)
    }

    pub fn delete(&mut self, path: &str) -> HttpResponse {
        self.client.delete(&format!("{}{path}", self.path)).expect("the server answers")
    }

    /// The `data` of a request that succeeds.
    #[track_caller]
    pub fn post(&mut self, path: &str, body: &Value) -> Value {
        let answer = self.try_post(path, body).expect("the server answers");
        assert_eq!(answer.status, 200, "{path} {body}: {}", answer.text());
        answer.json()["data"].take()
    }

    #[track_caller]
    pub fn get(&mut self, path: &str) -> Value {
        let answer = self.try_get(path).expect("the server answers");
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()["data"].take()
    }

    /// Runs a command in a session without a name, and returns what it printed.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        let done = self.post("/v1/shell/exec", &json!({"command": command}));
        assert_eq!(done["status"], "completed", "{command}: {done}");
        done["output"].as_str().unwrap_or_default().to_owned()
    }

    /// Runs a command in a named session, which must exist.
    #[track_caller]
    pub fn run_in(&mut self, session: &str, command: &str) -> String {
        let done = self.post("/v1/shell/exec", &json!({"id": session, "command": command}));
        assert_eq!(done["status"], "completed", "{command}: {done}");
        done["output"].as_str().unwrap_or_default().to_owned()
    }

    /// Uploads a file; the server may die meanwhile.
    pub fn try_upload(&mut self, path: &str, content: &[u8]) -> io::Result<HttpResponse> {
        const BOUNDARY: &str = "border-of-the-parts";
        let part = |name: &str, file: &str| {
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n")
        };
        let before = format!("{}{path}\r\n{}", part("path", ""), part("file", "; filename=\"f\""));
        let after = format!("\r\n--{BOUNDARY}--\r\n");
        let body = [before.as_bytes(), content, after.as_bytes()].concat();
        let kind = format!("multipart/form-data; boundary={BOUNDARY}");
        self.client.request("POST", &format!("{}/v1/file/upload", self.path), &kind, &body)
    }

    /// The bytes of a file.
    pub fn download(&mut self, path: &str) -> Vec<u8> {
        let answer = self.try_get(&format!("/v1/file/download?path={path}")).expect("the server answers");
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.body
    }
}

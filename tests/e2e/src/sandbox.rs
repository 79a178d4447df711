//! One sandbox of a server, through the OpenSandbox API.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::{HttpClient, HttpResponse, StreamingResponse};

/// A sandbox and a kept connection to its server.
pub struct RemoteSandbox {
    pub id: String,
    client: HttpClient,
    /// Headers that the server requires for requests to the sandbox.
    headers: Vec<(String, String)>,
}

/// How a command ended.
#[derive(Debug, Default)]
pub struct CommandRun {
    pub id: String,
    pub stdout: String,
    pub stderr: String,
    /// `None` for a command that was killed, or whose end was not seen.
    pub code: Option<i32>,
    /// The text of the error event, if there was one.
    pub error: String,
    pub took: Duration,
}

impl RemoteSandbox {
    /// Creates a sandbox; `fields` replace those of a plain request.
    pub fn create(mut client: HttpClient, fields: &Value) -> Self {
        let mut request = json!({
            "image": {"uri": "host"},
            "timeout": 3600,
            "resourceLimits": {"cpu": "1", "memory": "512Mi"},
            "entrypoint": ["tail", "-f", "/dev/null"],
        });
        for (name, value) in fields.as_object().into_iter().flatten() {
            request[name] = value.clone();
        }
        let answer = client.post("/v1/sandboxes", &request).expect("the server answers");
        assert_eq!(answer.status, 202, "create failed: {}", answer.text());
        let id = answer.json()["id"].as_str().expect("an id is a text").to_owned();
        Self::existing(client, &id)
    }

    /// Refers to an existing sandbox.
    pub fn existing(client: HttpClient, id: &str) -> Self {
        let mut sandbox = Self { id: id.to_owned(), client, headers: Vec::new() };
        sandbox.fetch_headers();
        sandbox
    }

    fn fetch_headers(&mut self) {
        let path = format!("/v1/sandboxes/{}/endpoints/44772?use_server_proxy=true", self.id);
        let answer = self.client.get(&path).expect("the server answers");
        assert_eq!(answer.status, 200, "no endpoint: {}", answer.text());
        for (name, value) in answer.json()["headers"].as_object().into_iter().flatten() {
            self.headers.push((name.clone(), value.as_str().unwrap_or_default().to_owned()));
        }
    }

    /// A second connection to the same sandbox, for use from another thread.
    pub fn with_client(&self, client: HttpClient) -> Self {
        Self { id: self.id.clone(), client, headers: self.headers.clone() }
    }

    /// The tokens among the headers.
    pub fn secrets(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(_, value)| value.as_str()).filter(|value| value.len() > 8)
    }

    /// Runs shell text and waits for its end.
    pub fn run(&mut self, command: &str) -> CommandRun {
        self.run_with(&json!({"command": command}))
    }

    /// Runs a command by argument list and waits for its end.
    pub fn run_argv(&mut self, argv: &[&str]) -> CommandRun {
        self.run_with(&json!({"argv": argv}))
    }

    /// Sends any request to `/command` and waits for the end of its events.
    pub fn run_with(&mut self, request: &Value) -> CommandRun {
        let began = Instant::now();
        let answer = self.request_inside("POST", "command", request);
        assert_eq!(answer.status, 200, "command failed: {}", answer.text());
        let mut ran = CommandRun::from_events(&answer.text());
        ran.took = began.elapsed();
        ran
    }

    /// Starts shell text that continues after the response, and returns its id.
    pub fn start_background(&mut self, command: &str) -> String {
        let ran = self.run_with(&json!({"command": command, "background": true}));
        assert!(ran.error.is_empty(), "the command did not start: {}", ran.error);
        ran.id
    }

    /// All output of a background command so far.
    pub fn logs(&mut self, command: &str) -> String {
        let answer = self.request_inside("GET", &format!("command/{command}/logs?cursor=0"), &Value::Null);
        assert_eq!(answer.status, 200, "no logs: {}", answer.text());
        answer.text()
    }

    /// The status object of a command.
    pub fn status(&mut self, command: &str) -> Value {
        let answer = self.request_inside("GET", &format!("command/status/{command}"), &Value::Null);
        assert_eq!(answer.status, 200, "no status: {}", answer.text());
        answer.json()
    }

    /// Writes a file that anyone inside may execute.
    pub fn upload(&mut self, path: &str, content: &[u8]) {
        let answer = self.try_upload(path, content).expect("the server answers");
        assert_eq!(answer.status, 200, "upload failed: {}", answer.text());
    }

    /// As [`RemoteSandbox::upload`], for a server that may die meanwhile.
    pub fn try_upload(&mut self, path: &str, content: &[u8]) -> io::Result<HttpResponse> {
        let (before, after) = upload_form(path);
        let body = [before.as_slice(), content, &after].concat();
        let (client, path, _) = self.prepare_request("files/upload", &Value::Null);
        client.request("POST", &path, &form_content_type(), &body)
    }

    /// As [`RemoteSandbox::upload`], from a reader, calling back for each piece that was sent.
    pub fn upload_from(
        &mut self,
        path: &str,
        length: u64,
        content: &mut impl Read,
        sent: impl FnMut(),
    ) -> HttpResponse {
        let (before, after) = upload_form(path);
        let length = length + (before.len() + after.len()) as u64;
        let mut body = before.as_slice().chain(content).chain(after.as_slice());
        let (client, path, _) = self.prepare_request("files/upload", &Value::Null);
        client
            .send_streamed(&path, &form_content_type(), length, &mut body, sent)
            .expect("the server answers")
    }

    /// Puts the attacker's program at `/opt/attacks`.
    pub fn upload_attacks(&mut self) {
        let program =
            std::fs::read(crate::binary::ProgramCopies::shared().attacks_path()).expect("our own copy");
        self.upload("/opt/attacks", &program);
    }

    /// Sends a request to the execution API.
    pub fn request_inside(&mut self, method: &str, path: &str, body: &Value) -> HttpResponse {
        self.try_request_inside(method, path, body).expect("the server answers")
    }

    /// As [`RemoteSandbox::request_inside`], for a server that may die meanwhile.
    pub fn try_request_inside(&mut self, method: &str, path: &str, body: &Value) -> io::Result<HttpResponse> {
        let (client, path, body) = self.prepare_request(path, body);
        client.request(method, &path, "application/json", &body)
    }

    /// As [`RemoteSandbox::request_inside`] without a body, with headers beside the usual ones.
    pub fn request_inside_with_headers(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(String, String)],
    ) -> HttpResponse {
        let all = [self.headers.as_slice(), headers].concat();
        let (client, path, _) = self.prepare_request(path, &Value::Null);
        client.set_headers(&all);
        client.request(method, &path, "", &[]).expect("the server answers")
    }

    /// As [`RemoteSandbox::request_inside`], returning when the response begins.
    pub fn request_streaming(&mut self, method: &str, path: &str, body: &Value) -> StreamingResponse {
        self.try_request_streaming(method, path, body).expect("the server answers")
    }

    /// As [`RemoteSandbox::request_streaming`], for a server that may die meanwhile.
    pub fn try_request_streaming(
        &mut self,
        method: &str,
        path: &str,
        body: &Value,
    ) -> io::Result<StreamingResponse> {
        let (client, path, body) = self.prepare_request(path, body);
        client.start_request(method, &path, "application/json", &body)
    }

    fn prepare_request(&mut self, path: &str, body: &Value) -> (&mut HttpClient, String, Vec<u8>) {
        let path = format!("/v1/sandboxes/{}/proxy/44772/{path}", self.id);
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        self.client.set_headers(&self.headers);
        (&mut self.client, path, body)
    }

    /// Pauses or resumes, and returns the status code.
    pub fn change_lifecycle(&mut self, action: &str) -> u16 {
        let path = format!("/v1/sandboxes/{}/{action}", self.id);
        self.client.request("POST", &path, "", &[]).expect("the server answers").status
    }

    /// The state as the server names it; `None` if it does not know the sandbox.
    pub fn state(&mut self) -> Option<String> {
        let answer = self.client.get(&format!("/v1/sandboxes/{}", self.id)).expect("the server answers");
        (answer.status == 200)
            .then(|| answer.json()["status"]["state"].as_str().unwrap_or_default().to_owned())
    }

    pub fn delete(&mut self) {
        let answer = self.client.delete(&format!("/v1/sandboxes/{}", self.id)).expect("the server answers");
        assert_eq!(answer.status, 204, "delete failed: {}", answer.text());
    }
}

const FORM_BOUNDARY: &str = "border-of-the-parts";

fn form_content_type() -> String {
    format!("multipart/form-data; boundary={FORM_BOUNDARY}")
}

/// The bytes before and after the file content in an upload form.
fn upload_form(path: &str) -> (Vec<u8>, Vec<u8>) {
    let part = |name: &str| {
        format!(
            "--{FORM_BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{name}\"\r\n\r\n"
        )
    };
    let metadata = json!({"path": path, "mode": 755});
    let before = format!("{}{metadata}\r\n{}", part("metadata"), part("file"));
    (before.into_bytes(), format!("\r\n--{FORM_BOUNDARY}--\r\n").into_bytes())
}

impl CommandRun {
    /// Collects the events of one command: one JSON object per line.
    pub fn from_events(text: &str) -> Self {
        let mut ran = Self::default();
        for line in text.lines().filter(|line| !line.is_empty()) {
            let line = line.strip_prefix("data: ").unwrap_or(line);
            let event: Value =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in `{line}`"));
            let words = event["text"].as_str().unwrap_or_default();
            match event["type"].as_str().unwrap_or_default() {
                "init" => ran.id = words.to_owned(),
                "stdout" => ran.stdout.push_str(words),
                "stderr" => ran.stderr.push_str(words),
                "execution_complete" => ran.code = Some(0),
                "error" => {
                    let value = event["error"]["evalue"].as_str().unwrap_or_default();
                    ran.code = value.parse().ok();
                    ran.error = event["error"].to_string();
                }
                _ => {}
            }
        }
        ran
    }
}

//! A small HTTP/1.1 client on one kept connection, so that the server dominates the measured time.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// How long a server may stay silent.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) struct BenchClient {
    address: SocketAddr,
    /// Header lines of every request.
    headers: String,
    connection: BufReader<TcpStream>,
    /// The body of the last response; the buffer is reused, so that no run pays for its memory.
    body: Vec<u8>,
}

/// A sandbox and the header lines that its server asks for.
#[derive(Clone, Debug)]
pub(crate) struct BenchSandbox {
    pub(crate) id: String,
    headers: String,
}

impl BenchClient {
    pub(crate) fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).context("could not connect to the server")?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let connection = BufReader::with_capacity(1 << 16, stream);
        Ok(Self { address, headers: String::new(), connection, body: Vec::new() })
    }

    /// Adds header lines to every request.
    pub(crate) fn with_headers(self, headers: String) -> Self {
        Self { headers, ..self }
    }

    /// Creates a sandbox; `extensions` are Coracle's own keys, such as its disk.
    pub(crate) fn create_sandbox(&mut self, extensions: &Value) -> Result<BenchSandbox> {
        self.create_with_memory("512Mi", extensions)
    }

    /// As [`BenchClient::create_sandbox`], with this much memory.
    pub(crate) fn create_with_memory(&mut self, memory: &str, extensions: &Value) -> Result<BenchSandbox> {
        self.create_with_size("1", memory, extensions)
    }

    /// As [`BenchClient::create_with_memory`], with this many cores.
    pub(crate) fn create_with_size(
        &mut self,
        cpu: &str,
        memory: &str,
        extensions: &Value,
    ) -> Result<BenchSandbox> {
        self.create_from_request(json!({
            "resourceLimits": {"cpu": cpu, "memory": memory},
            "extensions": extensions,
        }))
    }

    /// As [`BenchClient::create_sandbox`], with these additional fields.
    pub(crate) fn create_from_request(&mut self, request: Value) -> Result<BenchSandbox> {
        self.create_from_image("host", request)
    }

    /// As [`BenchClient::create_from_request`], from this image.
    pub(crate) fn create_from_image(&mut self, image: &str, mut request: Value) -> Result<BenchSandbox> {
        request["image"] = json!({"uri": image});
        request["timeout"] = json!(3600);
        request["entrypoint"] = json!(["tail", "-f", "/dev/null"]);
        let status = self.send("POST", "/v1/sandboxes", "", request.to_string().as_bytes())?;
        let answer = self.parse_body(status, 202)?;
        let id = answer["id"].as_str().context("the server names no id")?.to_owned();
        Ok(BenchSandbox { id, headers: String::new() })
    }

    /// Asks how the sandbox is reached. The answer never changes, so one request is enough.
    pub(crate) fn resolve_endpoint(&mut self, sandbox: &mut BenchSandbox) -> Result<()> {
        let status = self.send("GET", &format!("/v1/sandboxes/{}/endpoints/44772", sandbox.id), "", b"")?;
        let answer = self.parse_body(status, 200)?;
        sandbox.headers.clear();
        for (name, value) in answer["headers"].as_object().into_iter().flatten() {
            sandbox.headers.push_str(&format!("{name}: {}\r\n", value.as_str().unwrap_or_default()));
        }
        Ok(())
    }

    /// The state of a sandbox, such as `Running`.
    pub(crate) fn sandbox_state(&mut self, sandbox: &BenchSandbox) -> Result<String> {
        let status = self.send("GET", &format!("/v1/sandboxes/{}", sandbox.id), "", b"")?;
        let answer = self.parse_body(status, 200)?;
        Ok(answer["status"]["state"].as_str().context("the sandbox has no state")?.to_owned())
    }

    /// Asks how the sandbox is reached; returns the address and the path of its execution API.
    pub(crate) fn resolve_direct_endpoint(&mut self, sandbox: &mut BenchSandbox) -> Result<(String, String)> {
        self.resolve_endpoint(sandbox)?;
        let answer: Value = serde_json::from_slice(&self.body)?;
        let endpoint = answer["endpoint"].as_str().context("the server names no endpoint")?;
        let endpoint = endpoint.trim_start_matches("http://");
        let (address, path) = endpoint.split_once('/').unwrap_or((endpoint, ""));
        Ok((address.to_owned(), path.trim_end_matches('/').to_owned()))
    }

    /// Runs a line of a shell inside through the execution API at `path`; returns the size of the response.
    pub(crate) fn run_line_at(&mut self, sandbox: &BenchSandbox, path: &str, line: &str) -> Result<usize> {
        let path = if path.is_empty() { "/command".to_owned() } else { format!("/{path}/command") };
        self.run_body(&path, sandbox, &json!({"command": line}))?;
        Ok(self.body.len())
    }

    /// Runs a line of a shell inside, as clients of this API do, and waits for the end of its events.
    pub(crate) fn run_line(&mut self, sandbox: &BenchSandbox, line: &str) -> Result<()> {
        self.run_body(&sandbox.proxy_path("command"), sandbox, &json!({"command": line}))
    }

    /// Runs `true` inside and waits for the end of its events.
    pub(crate) fn run_true(&mut self, sandbox: &BenchSandbox) -> Result<()> {
        self.run_command(sandbox, &["true"])
    }

    /// Runs a command inside, which must succeed, and waits for the end of its events.
    pub(crate) fn run_command(&mut self, sandbox: &BenchSandbox, words: &[impl AsRef<str>]) -> Result<()> {
        let path = sandbox.proxy_path("command");
        let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
        self.run_body(&path, sandbox, &json!({"argv": words}))
    }

    /// Runs the command that a body describes, which must succeed, and waits for the end of its events.
    fn run_body(&mut self, path: &str, sandbox: &BenchSandbox, body: &Value) -> Result<()> {
        let status = self.send("POST", path, &sandbox.headers, body.to_string().as_bytes())?;
        // The event is the last one, and there may be much output before it.
        let ended = self.body.windows(18).rev().any(|window| window == b"execution_complete");
        if status != 200 || !ended {
            bail!("a command failed with status {status}: {}", String::from_utf8_lossy(&self.body));
        }
        Ok(())
    }

    /// Sends one request to the execution API; returns the status and the body of the response.
    pub(crate) fn send_inside(
        &mut self,
        sandbox: &BenchSandbox,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<(u16, &[u8])> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let status = self.send(method, &sandbox.proxy_path(path), &sandbox.headers, body.as_bytes())?;
        Ok((status, &self.body))
    }

    /// Takes a snapshot and waits until it is ready.
    pub(crate) fn take_snapshot(&mut self, sandbox: &BenchSandbox) -> Result<String> {
        let path = format!("/v1/sandboxes/{}/snapshots", sandbox.id);
        let status = self.send("POST", &path, "", b"{}")?;
        let mut answer = self.parse_body(status, 202)?;
        let id = answer["id"].as_str().context("the server names no id")?.to_owned();
        while answer["status"]["state"] == "Creating" {
            let status = self.send("GET", &format!("/v1/snapshots/{id}"), "", b"")?;
            answer = self.parse_body(status, 200)?;
        }
        if answer["status"]["state"] != "Ready" {
            bail!("a snapshot failed: {answer}");
        }
        Ok(id)
    }

    /// Deletes a snapshot.
    pub(crate) fn delete_snapshot(&mut self, snapshot: &str) -> Result<()> {
        self.delete_path(&format!("/v1/snapshots/{snapshot}"), "")
    }

    /// Creates a sandbox with the files of a snapshot.
    pub(crate) fn restore_snapshot(&mut self, snapshot: &str) -> Result<BenchSandbox> {
        let request = json!({
            "snapshotId": snapshot,
            "timeout": 3600,
            "resourceLimits": {"cpu": "1", "memory": "512Mi"},
        });
        let status = self.send("POST", "/v1/sandboxes", "", request.to_string().as_bytes())?;
        let answer = self.parse_body(status, 202)?;
        let id = answer["id"].as_str().context("the server names no id")?.to_owned();
        Ok(BenchSandbox { id, headers: String::new() })
    }

    pub(crate) fn delete_sandbox(&mut self, sandbox: &BenchSandbox) -> Result<()> {
        let status = self.send("DELETE", &format!("/v1/sandboxes/{}", sandbox.id), "", b"")?;
        if status != 204 {
            bail!("delete failed with status {status}: {}", String::from_utf8_lossy(&self.body));
        }
        Ok(())
    }

    /// The first page of the list, as ids.
    pub(crate) fn list_first_page(&mut self) -> Result<Vec<String>> {
        self.list_page(1, 10)
    }

    /// One page of the list, as ids.
    pub(crate) fn list_page(&mut self, page: usize, size: usize) -> Result<Vec<String>> {
        let status = self.send("GET", &format!("/v1/sandboxes?page={page}&pageSize={size}"), "", b"")?;
        let page = self.parse_body(status, 200)?;
        let items = page["items"].as_array().context("the list has no items")?;
        Ok(items.iter().filter_map(|item| item["id"].as_str()).map(str::to_owned).collect())
    }

    /// Makes a pool of the default image.
    pub(crate) fn create_pool(&mut self, name: &str, level: usize) -> Result<()> {
        let container = json!({"image": "host", "resources": {"limits": {"cpu": "1", "memory": "512Mi"}}});
        let request = json!({
            "name": name,
            "template": {"spec": {"containers": [container]}},
            "capacitySpec": {"bufferMax": level, "bufferMin": 0, "poolMax": 1000, "poolMin": 0},
        });
        let status = self.send("POST", "/v1/pools", "", request.to_string().as_bytes())?;
        self.parse_body(status, 201).map(drop)
    }

    /// How many sandboxes of a pool are warm.
    pub(crate) fn count_warm(&mut self, pool: &str) -> Result<u64> {
        let status = self.send("GET", &format!("/v1/pools/{pool}"), "", b"")?;
        self.parse_body(status, 200)?["status"]["available"].as_u64().context("the pool has no status")
    }

    pub(crate) fn delete_all(&mut self) -> Result<()> {
        loop {
            let ids = self.list_first_page()?;
            if ids.is_empty() {
                return Ok(());
            }
            for id in ids {
                self.delete_sandbox(&BenchSandbox { id, headers: String::new() })?;
            }
        }
    }

    /// Writes a file of `size` bytes inside, without holding all of it in memory.
    pub(crate) fn upload(&mut self, sandbox: &BenchSandbox, path: &str, size: u64) -> Result<()> {
        let (head, tail) = multipart_envelope(path);
        let kind = format!("Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n");
        let headers = format!("{}{kind}", sandbox.headers);
        self.send_large("POST", &sandbox.proxy_path("files/upload"), &headers, [&head, &tail], size)
    }

    /// Writes a file of `size` bytes as a bare body.
    pub(crate) fn put(&mut self, path: &str, size: u64) -> Result<()> {
        self.send_large("PUT", path, "", ["", ""], size)
    }

    /// Sends one request with `size` bytes between a head and a tail.
    pub(crate) fn send_large(
        &mut self,
        method: &str,
        path: &str,
        headers: &str,
        [head, tail]: [&str; 2],
        size: u64,
    ) -> Result<()> {
        let length = head.len() as u64 + size + tail.len() as u64;
        let (address, own) = (self.address, &self.headers);
        let stream = self.connection.get_mut();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\n{own}{headers}Content-Length: {length}\r\n\r\n{head}"
        )?;
        let block = vec![0x5a_u8; 1 << 20];
        let mut left = size;
        while left > 0 {
            let now = left.min(block.len() as u64);
            stream.write_all(&block[..usize::try_from(now)?])?;
            left -= now;
        }
        stream.write_all(tail.as_bytes())?;
        let status = self.read_response(&mut io::sink())?.0;
        if !(200..300).contains(&status) {
            bail!("{method} {path} failed with status {status}");
        }
        Ok(())
    }

    /// Sends one request with a JSON body, or none; returns the JSON of the response, which must be a success.
    pub(crate) fn call(&mut self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let status = self.send(method, path, "", body.as_bytes())?;
        self.parse_body(status, 200)
    }

    /// Removes a file inside.
    pub(crate) fn remove_file(&mut self, sandbox: &BenchSandbox, path: &str) -> Result<()> {
        self.delete_path(&sandbox.proxy_path(&format!("files?path={path}")), &sandbox.headers)
    }

    /// Removes whatever is at `path`.
    pub(crate) fn delete_path(&mut self, path: &str, headers: &str) -> Result<()> {
        let status = self.send("DELETE", path, headers, b"")?;
        if !(200..300).contains(&status) {
            bail!("DELETE {path} failed with status {status}");
        }
        Ok(())
    }

    /// Reads a file from inside and returns how many bytes it had.
    pub(crate) fn download(&mut self, sandbox: &BenchSandbox, path: &str) -> Result<u64> {
        let path = sandbox.proxy_path(&format!("files/download?path={path}"));
        self.fetch_and_discard(&path, &sandbox.headers)
    }

    /// Reads whatever is at `path`, throws it away and returns how many bytes it had.
    pub(crate) fn fetch_and_discard(&mut self, path: &str, headers: &str) -> Result<u64> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\n{headers}\r\n", self.address);
        self.connection.get_mut().write_all(request.as_bytes())?;
        let (status, size) = self.read_response(&mut io::sink())?;
        if status != 200 {
            bail!("GET {path} failed with status {status}");
        }
        Ok(size)
    }

    /// Sends one request with a small response, which is left in `body`.
    fn send(&mut self, method: &str, path: &str, headers: &str, body: &[u8]) -> Result<u16> {
        let mut message = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\n{}{headers}Content-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            self.address,
            self.headers,
            body.len(),
        )
        .into_bytes();
        message.extend_from_slice(body);
        self.connection.get_mut().write_all(&message).context("could not send a request")?;
        let mut answer = std::mem::take(&mut self.body);
        answer.clear();
        let received = self.read_response(&mut answer);
        self.body = answer;
        Ok(received.context("could not read an answer")?.0)
    }

    fn parse_body(&self, status: u16, expected: u16) -> Result<Value> {
        if status != expected {
            bail!("status {status} instead of {expected}: {}", String::from_utf8_lossy(&self.body));
        }
        Ok(serde_json::from_slice(&self.body)?)
    }

    /// Reads one response into `to`; returns its status and size.
    fn read_response(&mut self, to: &mut impl Write) -> Result<(u16, u64)> {
        let line = read_line(&mut self.connection)?;
        let status: u16 = line.split(' ').nth(1).context("no status line")?.parse()?;
        let (mut length, mut chunked) = (0, false);
        loop {
            let line = read_line(&mut self.connection)?.to_ascii_lowercase();
            match line.split_once(':') {
                None => break,
                Some(("content-length", value)) => length = value.trim().parse()?,
                Some(("transfer-encoding", value)) => chunked = value.trim() == "chunked",
                Some(_) => {}
            }
        }
        let size = if chunked {
            copy_chunks(&mut self.connection, to)?
        } else {
            copy_exact(&mut self.connection, length, to)?
        };
        Ok((status, size))
    }
}

impl BenchSandbox {
    fn proxy_path(&self, path: &str) -> String {
        format!("/v1/sandboxes/{}/proxy/44772/{path}", self.id)
    }
}

const BOUNDARY: &str = "border-of-the-parts";

/// The parts of a multipart body before and after the bytes of an uploaded file.
fn multipart_envelope(path: &str) -> (String, String) {
    let metadata = json!({"path": path, "mode": 644});
    let part = |name: &str| {
        format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{name}\"\r\n\r\n"
        )
    };
    (format!("{}{metadata}\r\n{}", part("metadata"), part("file")), format!("\r\n--{BOUNDARY}--\r\n"))
}

fn copy_chunks(from: &mut BufReader<TcpStream>, to: &mut impl Write) -> Result<u64> {
    let mut total = 0;
    loop {
        let size = u64::from_str_radix(&read_line(from)?, 16)?;
        if size == 0 {
            while !read_line(from)?.is_empty() {}
            return Ok(total);
        }
        total += copy_exact(from, size, to)?;
        read_line(from)?;
    }
}

fn copy_exact(from: &mut BufReader<TcpStream>, size: u64, to: &mut impl Write) -> Result<u64> {
    let copied = io::copy(&mut from.take(size), to)?;
    if copied < size {
        bail!("the answer ended after {copied} of {size} bytes");
    }
    Ok(copied)
}

fn read_line(from: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        bail!("the server closed the connection");
    }
    Ok(line.trim_end().to_owned())
}

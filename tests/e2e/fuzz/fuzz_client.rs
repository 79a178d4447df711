//! One fuzzing client: it sends requests, reads as much of each response as it needs, and remembers names
//! for later requests.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use e2e::server::TestServer;
use serde_json::{Value, json};

use super::document::DocumentedOperation;
use super::random_source::RandomSource;
use super::request::{self, RequestForm, RequestTargets};
use super::response_check::{self, FuzzResponse};
use super::{KEY, client};

/// How long to wait for the beginning of a response. Searching all files of the host takes long.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to read from a stream.
const STREAM_READ_TIME: Duration = Duration::from_millis(150);
const MAX_RESPONSE_BYTES: usize = 256 << 10;
/// How many names of each kind are remembered.
const MAX_REMEMBERED_NAMES: usize = 6;
/// The ids of the sandboxes that all visitors share at the provisioner.
const PROVISIONED: [&str; 2] = ["hostile-a", "hostile-b"];

pub(super) struct FuzzClient<'a> {
    server: &'a TestServer,
    operations: &'a [DocumentedOperation],
    dice: RandomSource,
    sandboxes: Vec<String>,
    addresses: Vec<AioAddress>,
    names: Vec<String>,
    /// How many requests to the API of an AIO sandbox succeeded.
    pub(super) addressed: usize,
}

/// A sandbox that the provisioner made.
struct AioAddress {
    /// `{handle}.{mac}`
    text: String,
    /// The id of the sandbox in the other APIs.
    container: String,
}

impl<'a> FuzzClient<'a> {
    pub(super) fn new(
        server: &'a TestServer,
        operations: &'a [DocumentedOperation],
        dice: RandomSource,
    ) -> Self {
        Self {
            server,
            operations,
            dice,
            sandboxes: Vec::new(),
            addresses: Vec::new(),
            names: Vec::new(),
            addressed: 0,
        }
    }

    /// Sends one request, and complains about a wrong response. Returns its status, or 0.
    pub(super) fn send_one(&mut self) -> Result<u16, String> {
        self.ensure_sandbox();
        self.ensure_address();
        let operation = self.choose_operation();
        let addresses: Vec<String> = self.addresses.iter().map(|address| address.text.clone()).collect();
        let aim = RequestTargets {
            host: self.server.address(),
            key: KEY,
            sandboxes: &self.sandboxes,
            addresses: &addresses,
            provisioned: &PROVISIONED,
            names: &self.names,
        };
        let request = request::make_request(operation, &aim, &mut self.dice);
        let answer = self.exchange(&request.bytes, request.form);
        let Some(answer) = answer.map_err(|why| format!("{}: {why}", request.title))? else { return Ok(0) };
        self.remember_names(operation, &answer);
        self.addressed += usize::from(operation.path.starts_with("/aio/") && answer.status == 200);
        response_check::check_response(operation, &request, &answer).map(|()| answer.status)
    }

    /// Creating sandboxes takes long, and every other operation needs one.
    fn choose_operation(&mut self) -> &'a DocumentedOperation {
        let operation = &self.operations[self.dice.below(self.operations.len())];
        let costly = matches!(
            (operation.method.as_str(), operation.path.as_str()),
            ("POST", "/v1/sandboxes" | "/v1/pools" | "/api/sandboxes")
                | ("DELETE", "/v1/sandboxes/{id}" | "/api/sandboxes/{id}")
        );
        if costly && self.dice.chance(70) { self.choose_operation() } else { operation }
    }

    fn ensure_sandbox(&mut self) {
        if !self.sandboxes.is_empty() && !self.dice.chance(1) {
            return;
        }
        let request = json!({
            "image": {"uri": "host"}, "timeout": 3600, "resourceLimits": {"memory": "64Mi"},
            "entrypoint": ["tail", "-f", "/dev/null"],
        });
        let made = client(self.server).post("/v1/sandboxes", &request).expect("the server answers");
        match made.json()["id"].as_str() {
            Some(id) => push_bounded(&mut self.sandboxes, id),
            // The sandbox limit is reached: use a sandbox of another visitor.
            None => {
                let all =
                    client(self.server).get("/v1/sandboxes?pageSize=200").expect("the server answers").json();
                let ids =
                    all["items"].as_array().into_iter().flatten().filter_map(|item| item["id"].as_str());
                let ids: Vec<&str> = ids.collect();
                if !ids.is_empty() {
                    push_bounded(&mut self.sandboxes, ids[self.dice.below(ids.len())]);
                }
            }
        }
    }

    /// Creates a sandbox at the provisioner, or finds it: any visitor may have removed it.
    fn ensure_address(&mut self) {
        if !self.addresses.is_empty() && !self.dice.chance(2) {
            return;
        }
        let mut provisioner = self.server.client();
        provisioner.set_headers(&[("X-API-Key".to_owned(), KEY.to_owned())]);
        let request = json!({"sandbox_id": self.dice.pick(&PROVISIONED), "max_shell_sessions": 8});
        let made = provisioner.post("/api/sandboxes", &request).expect("the server answers");
        let made = if made.status == 200 { made.json() } else { Value::Null };
        let url = made["sandbox_url"].as_str().unwrap_or_default();
        let (Some((_, text)), Some(container)) = (url.split_once("/aio/"), made["container_id"].as_str())
        else {
            // The server is full, or another visitor removes the sandbox right now. Make room for later.
            if let Some(id) = self.sandboxes.pop() {
                client(self.server).delete(&format!("/v1/sandboxes/{id}")).expect("the server answers");
            }
            return;
        };
        let (_, mac) = text.split_once('.').expect("an address has a code");
        self.server.add_secret(mac);
        self.addresses.retain(|known| known.container != container);
        if self.addresses.len() >= PROVISIONED.len() {
            self.addresses.remove(0);
        }
        self.addresses.push(AioAddress { text: text.to_owned(), container: container.to_owned() });
    }

    /// Remembers the names in a response.
    fn remember_names(&mut self, operation: &DocumentedOperation, answer: &FuzzResponse) {
        let Some(body) = answer.json() else { return };
        // Other visitors remove sandboxes too.
        let message = body["message"].as_str().unwrap_or_default();
        if answer.status == 404 {
            self.sandboxes.retain(|id| !message.contains(id.as_str()));
        }
        let created = operation.path == "/v1/sandboxes" && operation.method == "POST";
        if let Some(id) = body["id"].as_str().filter(|_| created) {
            push_bounded(&mut self.sandboxes, id);
        }
        let data = &body["data"];
        if operation.path.starts_with("/aio/") && answer.status == 404 && body["message"] == "Not Found" {
            // Its sandbox may be gone, so that another one is created.
            self.addresses.clear();
        }
        let names = [
            &body["session_id"],
            &body["name"],
            &body["text"],
            &data["session_id"],
            &data["command_id"],
            &data["watcher_id"],
        ];
        names.iter().filter_map(|name| name.as_str()).for_each(|name| push_bounded(&mut self.names, name));
    }

    /// Sends bytes and reads a response; `None` if the server closed the connection instead, which is
    /// allowed for malformed requests.
    fn exchange(&mut self, bytes: &[u8], form: RequestForm) -> Result<Option<FuzzResponse>, String> {
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        let mut stream =
            TcpStream::connect(self.server.address()).map_err(|error| failed("no connection", error))?;
        stream.set_read_timeout(Some(STREAM_READ_TIME)).expect("it is a socket");
        // The server may refuse the rest while we still send it.
        let sent = stream.write_all(bytes);
        if form == RequestForm::Broken && sent.is_ok() && self.dice.chance(50) {
            stream.shutdown(Shutdown::Write).ok();
        }
        let (mut seen, mut stood_still, began) = (Vec::new(), false, Instant::now());
        loop {
            let mut piece = [0; 16 << 10];
            match stream.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => seen.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let incomplete = FuzzResponse::parse(&seen).is_none();
                    match form {
                        // The server still waits for the rest of a request that will never come.
                        RequestForm::Broken => break,
                        RequestForm::Good if incomplete => {
                            // Other visitors may pause and resume it meanwhile.
                            stood_still |= self.is_paused(bytes);
                            match began.elapsed() > RESPONSE_TIMEOUT {
                                true if stood_still => return Ok(None),
                                true => return Err("no answer in time".to_owned()),
                                false => continue,
                            }
                        }
                        RequestForm::Good => break,
                    }
                }
                Err(_) => break,
            }
            if seen.len() > MAX_RESPONSE_BYTES
                || FuzzResponse::parse(&seen).is_some_and(|answer| answer.whole)
            {
                break;
            }
        }
        match FuzzResponse::parse(&seen) {
            Some(answer) => Ok(Some(answer)),
            None if form == RequestForm::Broken => Ok(None),
            None => Err(format!(
                "the connection was closed without an answer: {:?}",
                String::from_utf8_lossy(&seen)
            )),
        }
    }
}

impl FuzzClient<'_> {
    /// Whether the sandbox that a request names is paused: other visitors pause sandboxes too.
    fn is_paused(&self, request: &[u8]) -> bool {
        let text = String::from_utf8_lossy(request);
        let addressed = self.addresses.iter().find(|address| text.contains(&address.text));
        let id = match (addressed, text.split_once("/v1/sandboxes/")) {
            (Some(address), _) => address.container.as_str(),
            (None, Some((_, behind))) => behind.split(['/', '?', ' ']).next().unwrap_or_default(),
            (None, None) => return false,
        };
        let mut client = super::client(self.server);
        let answer = client.get(&format!("/v1/sandboxes/{id}"));
        answer.is_ok_and(|answer| answer.json()["status"]["state"] == "Paused")
    }
}

fn push_bounded(list: &mut Vec<String>, item: &str) {
    if list.len() >= MAX_REMEMBERED_NAMES {
        list.remove(0);
    }
    list.push(item.to_owned());
}

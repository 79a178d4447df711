//! A real registry on this host, and fakes of hostile ones.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use tempfile::TempDir;

use crate::http::HttpClient;
use crate::oci::{TestImage, sha256_digest};

/// The one user of a registry that requires credentials.
pub const USERNAME: &str = "reader";
pub const PASSWORD: &str = "opensesame-4711";
/// The password as htpasswd(1) writes it.
const PASSWORD_HASH: &str = "$2b$04$OqI63InVsWWrCPV3qjFCd.C/vvm8KTfAFZ/Hf8KD/EuRBuHyf4Km2";
/// The user name and password as a header.
const BASIC_AUTH_HEADER: &str = "Basic cmVhZGVyOm9wZW5zZXNhbWUtNDcxMQ==";

/// The clients that may read from a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryReaders {
    All,
    /// [`USERNAME`] alone.
    One,
}

/// `docker-registry` as a process of the test's own.
pub struct TestRegistry {
    process: Child,
    address: String,
    readers: RegistryReaders,
    _directory: TempDir,
}

impl TestRegistry {
    /// Starts a registry; returns `None` and reports the skip where the program is missing.
    pub fn start(readers: RegistryReaders) -> Option<Self> {
        let directory = TempDir::new().expect("the temporary directory can be written");
        let path = directory.path();
        let auth = match readers {
            RegistryReaders::All => String::new(),
            RegistryReaders::One => {
                let file = path.join("users");
                fs::write(&file, format!("{USERNAME}:{PASSWORD_HASH}\n")).expect("our own directory");
                format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", file.display())
            }
        };
        let config = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:0\n{auth}",
            path.join("data").display()
        );
        fs::write(path.join("config.yml"), config).expect("our own directory");
        let started = Command::new("docker-registry")
            .arg("serve")
            .arg(path.join("config.yml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let Ok(mut process) = started else {
            testkit::skip_test("there is no docker-registry");
            return None;
        };
        let mut lines = BufReader::new(process.stderr.take().expect("it is a pipe")).lines();
        let address = lines.find_map(|line| {
            let line = line.ok()?;
            let (_, rest) = line.split_once("listening on ")?;
            rest.split(['"', ' ', ',']).next().map(str::to_owned)
        });
        let address = address.expect("a registry says where it listens");
        // The pipe is drained, so that a full one never blocks the registry.
        std::thread::spawn(move || lines.count());
        Some(Self { process, address, readers, _directory: directory })
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The name under which an image of this registry is pulled.
    pub fn image_name(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    /// Uploads an image and returns the digest of its manifest.
    pub fn push_image(&self, path: &str, tag: &str, image: &TestImage) -> String {
        let mut client = HttpClient::new(&self.address);
        if self.readers == RegistryReaders::One {
            client.set_headers(&[("Authorization".to_owned(), BASIC_AUTH_HEADER.to_owned())]);
        }
        let (blobs, manifest) = image.blobs();
        for (digest, content) in blobs {
            let begun = client.request("POST", &format!("/v2/{path}/blobs/uploads/"), "", &[]);
            let begun = begun.expect("the registry answers");
            assert_eq!(begun.status, 202, "{}", begun.text());
            let place = begun.header("location").expect("an upload has a location");
            let place = place.trim_start_matches(&format!("http://{}", self.address));
            let done = client.request(
                "PUT",
                &format!("{place}&digest={digest}"),
                "application/octet-stream",
                &content,
            );
            assert_eq!(done.expect("the registry answers").status, 201);
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let done = client.request("PUT", &format!("/v2/{path}/manifests/{tag}"), kind, &manifest);
        let done = done.expect("the registry answers");
        assert_eq!(done.status, 201, "{}", done.text());
        sha256_digest(&manifest)
    }
}

impl Drop for TestRegistry {
    fn drop(&mut self) {
        self.process.kill().expect("it is our child");
        self.process.wait().expect("it is our child");
    }
}

/// A proxy that forwards bytes of a registry up to a limit, and then stalls.
pub struct StallingProxy {
    address: String,
    over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl StallingProxy {
    /// A proxy for `registry`; each response stops after `bytes`.
    pub fn in_front_of(registry: &TestRegistry, bytes: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (over, behind) = (Arc::new(AtomicBool::new(false)), registry.address().to_owned());
        let stopped = Arc::clone(&over);
        let accepting = std::thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(&behind)) else { continue };
                let (Ok(mut up), Ok(down)) = (client.try_clone(), server.try_clone()) else { continue };
                let (mut server, mut client) = (server, client);
                std::thread::spawn(move || std::io::copy(&mut up, &mut server));
                std::thread::spawn(move || {
                    std::io::copy(&mut down.take(bytes), &mut client).unwrap_or_default();
                    // The connection stays open and silent until the other side closes it.
                    client.read_to_end(&mut Vec::new()).unwrap_or_default()
                });
            }
        });
        Self { address, over, accepting: Some(accepting) }
    }

    pub fn image_name(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }
}

impl Drop for StallingProxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Wakes the thread, so that it sees that it should end.
        drop(TcpStream::connect(&self.address));
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("it does not panic");
        }
    }
}

/// Answers every request with the same document, the given number of times.
pub fn serve_same_document(document: Vec<u8>, times: usize) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
    let address = listener.local_addr().expect("it is bound").to_string();
    let answering = std::thread::spawn(move || {
        for _ in 0..times {
            let Ok((mut client, _)) = listener.accept() else { return };
            let mut lines = BufReader::new(&client).lines();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: application/vnd.oci.image.manifest.v1+json\r\n\
                 Content-Length: {}\r\nConnection: close\r\n\r\n",
                document.len()
            );
            client.write_all(head.as_bytes()).and_then(|()| client.write_all(&document)).unwrap_or_default();
        }
    });
    (address, answering)
}

/// A registry whose every answer the test decides, and which records what it is asked.
pub struct HostileRegistry {
    address: String,
    over: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<String>>>,
    accepting: Option<JoinHandle<()>>,
}

impl HostileRegistry {
    /// Starts it; `answer` gets the head of a request and the registry's own address, and returns a whole response.
    pub fn start(answer: impl Fn(&str, &str) -> String + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there are free ports");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (over, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, recorded, own) = (Arc::clone(&over), Arc::clone(&requests), address.clone());
        let accepting = std::thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(mut client) = client else { continue };
                let mut head = String::new();
                let mut lines = BufReader::new(&client);
                while !head.ends_with("\r\n\r\n") && lines.read_line(&mut head).is_ok_and(|length| length > 0)
                {
                }
                let response = answer(&head, &own);
                recorded.lock().expect("no thread panics while holding the lock").push(head);
                client.write_all(response.as_bytes()).unwrap_or_default();
            }
        });
        Self { address, over, requests, accepting: Some(accepting) }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn image_name(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    /// The heads of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("no thread panics while holding the lock").clone()
    }
}

impl Drop for HostileRegistry {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Wakes the thread, so that it sees that it should end.
        drop(TcpStream::connect(&self.address));
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("it does not panic");
        }
    }
}

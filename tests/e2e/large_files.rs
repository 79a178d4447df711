//! Files larger than any buffer: they stream, and no process's memory grows with them.

use std::io::Read;

use e2e::host;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{TestServer, resident_memory};
use serde_json::{Value, json};

const GIBIBYTE: u64 = 1 << 30;
const BLOCK: u64 = 1 << 20;

/// How much memory buffers may take for a file of any size.
const MAX_MEMORY_GROWTH: u64 = 48 << 20;

/// A gibibyte whose every block begins with its number.
struct NumberedBlocks {
    place: u64,
    size: u64,
}

impl Read for NumberedBlocks {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = usize::try_from(self.size - self.place).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        buffer[..length].fill(0x5a);
        let mut start = self.place.next_multiple_of(8);
        while start + 8 <= self.place + length as u64 {
            if start.is_multiple_of(BLOCK) {
                let at = usize::try_from(start - self.place).expect("it lies in the buffer");
                buffer[at..at + 8].copy_from_slice(&(start / BLOCK).to_le_bytes());
            }
            start += 8;
        }
        self.place += length as u64;
        Ok(length)
    }
}

/// The highest memory use seen, of the server and of the sandbox's own processes.
struct MemoryPeak {
    server: u32,
    sandbox: String,
    before: u64,
    highest: u64,
}

impl MemoryPeak {
    fn begin(server: &TestServer, sandbox: &RemoteSandbox) -> Self {
        let (server, sandbox) = (server.pid(), sandbox.id.clone());
        let before = resident_memory(server) + host::agent_memory(&sandbox);
        Self { server, sandbox, before, highest: before }
    }

    fn sample(&mut self) {
        self.highest = self.highest.max(resident_memory(self.server) + host::agent_memory(&self.sandbox));
    }

    fn check(&self, what: &str) {
        let Self { before, highest, .. } = self;
        assert!(
            *highest < before + MAX_MEMORY_GROWTH,
            "{what}: memory rose from {before} to {highest} bytes"
        );
    }
}

#[test]
fn a_gibibyte_goes_up_and_comes_down_in_flat_memory() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"extensions": {"coracle.disk": "2Gi"}}));
    assert_eq!(sandbox.run("true").code, Some(0));
    let mut watched = MemoryPeak::begin(&server, &sandbox);
    let mut pieces = 0_u64;
    let mut content = NumberedBlocks { place: 0, size: GIBIBYTE };
    let answer = sandbox.upload_from("/root/large", GIBIBYTE, &mut content, || {
        pieces += 1;
        if pieces.is_multiple_of(256) {
            watched.sample();
        }
    });
    assert_eq!(answer.status, 200, "{}", answer.text());
    watched.check("the upload");
    assert_eq!(sandbox.run("stat -c %s /root/large").stdout, format!("{GIBIBYTE}\n"));

    let mut stream = sandbox.request_streaming("GET", "files/download?path=/root/large", &Value::Null);
    assert_eq!(stream.status, 200);
    let mut expected = NumberedBlocks { place: 0, size: GIBIBYTE };
    let (mut got, mut wanted) = (vec![0; 1 << 18], vec![0; 1 << 18]);
    let mut taken = 0_u64;
    loop {
        let count = stream.body.read(&mut got).expect("the stream continues");
        if count == 0 {
            break;
        }
        expected.read_exact(&mut wanted[..count]).expect("no more than the file has");
        assert!(got[..count] == wanted[..count], "other bytes came back, near {taken}");
        taken += count as u64;
        if (taken / BLOCK).is_multiple_of(64) {
            watched.sample();
        }
    }
    assert_eq!(taken, GIBIBYTE);
    watched.check("the download");
}

#[test]
fn sizes_and_offsets_beyond_four_gibibytes_are_exact() {
    const PLACE: u64 = 4 * GIBIBYTE;
    const WORDS: &str = "beyond what 32 bits can count";
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let write = format!("truncate -s {PLACE} /root/sparse && printf %s '{WORDS}' >> /root/sparse");
    assert_eq!(sandbox.run(&write).code, Some(0));
    let size = PLACE + WORDS.len() as u64;
    let info = sandbox.request_inside("GET", "files/info?path=/root/sparse", &Value::Null).json();
    assert_eq!(info["/root/sparse"]["size"], json!(size), "{info}");
    // From before the border to after it, and the last bytes by a suffix range.
    for (range, start) in [(format!("bytes={}-", PLACE - 3), PLACE - 3), ("bytes=-29".to_owned(), PLACE)] {
        let answer = sandbox.request_inside_with_headers(
            "GET",
            "files/download?path=/root/sparse",
            &[("Range".to_owned(), range.clone())],
        );
        assert_eq!(answer.status, 206, "{range}: {}", answer.text());
        let place = format!("bytes {start}-{}/{size}", size - 1);
        assert_eq!(answer.header("content-range"), Some(place.as_str()), "{range}");
        assert_eq!(answer.text().trim_start_matches('\0'), WORDS, "{range}");
        assert_eq!(answer.body.len() as u64, size - start, "{range}");
    }
    // The whole file is announced with its true length.
    let whole = sandbox.request_streaming("GET", "files/download?path=/root/sparse", &Value::Null);
    let length = whole.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    assert_eq!(length.map(|(_, value)| value.clone()), Some(size.to_string()));
}

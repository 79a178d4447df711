//! Files larger than any buffer, by multipart up and by download down.

use std::io::Read;

use e2e::aio::AioSandbox;
use e2e::host;
use e2e::http::HttpClient;
use e2e::server::resident_memory;

const FILE_BYTES: u64 = 200 << 20;
/// How much memory buffers may take for a file of any size.
const MAX_MEMORY_GROWTH: u64 = 32 << 20;
const BOUNDARY: &str = "border-of-the-parts";

/// A multipart body with the file, and its length.
fn multipart_body(path: &str) -> (u64, impl Read) {
    let part = |name: &str, file: &str| {
        format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n")
    };
    let before = format!("{}{path}\r\n{}", part("path", ""), part("file", "; filename=\"f\""));
    let after = format!("\r\n--{BOUNDARY}--\r\n");
    let length = (before.len() + after.len()) as u64 + FILE_BYTES;
    let content = std::io::repeat(b'z').take(FILE_BYTES);
    (length, std::io::Cursor::new(before).chain(content).chain(std::io::Cursor::new(after)))
}

#[test]
fn j16_two_hundred_megabytes_go_up_and_come_down_in_flat_memory() {
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "large");
    sandbox.run("true");
    let memory = || resident_memory(server.pid()) + host::agent_memory(&sandbox.container);
    let before = memory();
    let mut highest = before;
    let mut pieces = 0_u64;
    let mut sample = || {
        pieces += 1;
        if pieces.is_multiple_of(256) {
            highest = highest.max(memory());
        }
    };
    let path = "/home/gem/large";
    let (length, mut body) = multipart_body(path);
    let kind = format!("multipart/form-data; boundary={BOUNDARY}");
    let mut client = HttpClient::new(server.address());
    let upload = format!("{}/v1/file/upload", sandbox.path);
    let uploaded =
        client.send_streamed(&upload, &kind, length, &mut body, &mut sample).expect("the server reads");
    assert_eq!(uploaded.status, 200, "{}", uploaded.text());
    assert_eq!(uploaded.json()["data"]["file_size"], FILE_BYTES);

    let download = format!("{}/v1/file/download?path={path}", sandbox.path);
    let mut response = client.start_request("GET", &download, "", &[]).expect("the server answers");
    assert_eq!(response.status, 200);
    let (mut piece, mut received) = (vec![0; 128 << 10], 0_u64);
    loop {
        let count = response.body.read(&mut piece).expect("the whole file arrives");
        if count == 0 {
            break;
        }
        assert!(piece[..count].iter().all(|byte| *byte == b'z'), "other bytes arrived at {received}");
        received += count as u64;
        sample();
    }
    assert_eq!(received, FILE_BYTES);
    assert!(highest < before + MAX_MEMORY_GROWTH, "memory rose from {before} to {highest} bytes");
    assert_eq!(sandbox.run(&format!("stat -c %s {path}")), FILE_BYTES.to_string());
}

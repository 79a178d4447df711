//! Exchanges of a server and an agent of the first version of the protocol, recorded in `crates/agent/tests/recorded`.
//!
//! Each file contains the bytes from the server (`>`) and the reply of the agent (`<`), in hexadecimal.

use std::fs;
use std::path::Path;

/// The bytes of both sides of one connection.
#[derive(Clone, Debug)]
pub struct RecordedExchange {
    /// The name of its file, without the extension.
    pub name: String,
    /// What the server sent.
    pub sent: Vec<u8>,
    /// What the agent sent, from its greeting on.
    pub answered: Vec<u8>,
}

impl RecordedExchange {
    /// All exchanges, ordered by name.
    pub fn load_all() -> Vec<Self> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/tests/recorded");
        let entries = fs::read_dir(directory).expect("the recordings exist");
        let mut all: Vec<Self> =
            entries.map(|entry| Self::load(&entry.expect("the recordings can be listed").path())).collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        assert!(all.len() >= 30, "recordings are missing");
        all
    }

    fn load(path: &Path) -> Self {
        let text = fs::read_to_string(path).expect("a recording is text");
        let side = |mark: &str| {
            let lines = text.lines().filter_map(|line| line.strip_prefix(mark));
            lines.flat_map(|line| from_hex(line.trim())).collect()
        };
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a plain name").to_owned();
        Self { name, sent: side(">"), answered: side("<") }
    }
}

fn from_hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).expect("digits are ASCII"));
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("two digits are a byte")).collect()
}

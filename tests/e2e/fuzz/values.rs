//! Values that are nearly right, and values that no client should send.

use serde_json::{Map, Value, json};

use super::random_source::RandomSource;

/// Texts that have caused bugs elsewhere.
const NASTY_TEXTS: &[&str] = &[
    "",
    " ",
    "\0",
    "a\0b",
    "\u{feff}",
    "\u{202e}reversed",
    "é́\u{301}\u{301}",
    "../../../../etc/passwd",
    "/proc/self/root/etc/shadow",
    "..%2f..%2f",
    "%00",
    "%",
    "%zz",
    "'; DROP TABLE sandboxes; --",
    "${jndi:ldap://127.0.0.1/x}",
    "$(id)",
    "`id`",
    "\r\nX-Injected: 1",
    "-1",
    "0",
    "1",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "1e309",
    "NaN",
    "true",
    "null",
    "[]",
    "{}",
    "/",
    "//",
    "~",
    "~root/x",
    "/tmp/x",
    "/tmp/../tmp/./x",
    "/dev/full",
    "/dev/zero",
    "/proc/1/mem",
    "/nonexistent/x",
    "*",
    "**/**/**/**",
    "[a-",
    "2026-11-15T10:00:00Z",
    "9999-12-31T23:59:60Z",
    "-0001-01-01T00:00:00Z",
];

pub(super) fn nasty_text(dice: &mut RandomSource) -> String {
    match dice.below(20) {
        0 => "x".repeat(dice.below(70_000)),
        1 => "/a".repeat(dice.below(5_000)),
        2 => String::from_utf8_lossy(&dice.bytes(64)).into_owned(),
        _ => dice.pick(NASTY_TEXTS).to_owned(),
    }
}

/// A plausible value for a known name, so that requests get past the first check.
pub(super) fn plausible_value(name: &str, dice: &mut RandomSource) -> String {
    let choices: &[&str] = match name {
        "path" | "cwd" | "src" | "dest" | "mountPath" => {
            &["/tmp/a", "/tmp/b", "/tmp", "/etc", "/tmp/d/e/f", "relative", "/etc/passwd", "/tmp/a/b"]
        }
        "uri" => &["host", "python:3.12", "none/such:1"],
        "command" | "code" => &["true", "echo hi", "exit 3", "sleep 0.05", "cat", "head -c 100000 /dev/zero"],
        "argv" | "entrypoint" => &["true", "tail", "-f", "/dev/null", "sleep", "1"],
        "memory" | "storage" | "size" => &["64Mi", "1Gi", "x", "0", "999999999Ti"],
        "cpu" => &["1", "500m", "0.1", "1e9"],
        "state" => &["Running", "Paused", "x"],
        "metadata" => &["a=b", "a", "a=b&c=d"],
        "scope" => &["container", "all", "runtime", "lifecycle", "x"],
        "since" => &["10m", "1h", "x"],
        "language" => &["python", "bash", "x"],
        "expires" => &["9999999999", "1"],
        "expiresAt" => &["2099-01-01T00:00:00Z", "2000-01-01T00:00:00Z"],
        "owner" | "group" => &["root", "nobody", "no such user"],
        "name" | "claimName" => &["a", "b", "pool-a", "Not A Name"],
        "pattern" => &["*", "**", "*.txt", "["],
        "poolRef" => &["pool-a", "none"],
        _ => &["1", "2", "text", "true"],
    };
    dice.pick(choices).to_owned()
}

/// A value that matches the schema, most of the time.
pub(super) fn value_of_schema(name: &str, schema: &Value, dice: &mut RandomSource) -> Value {
    if dice.chance(7) {
        return any_json(dice, 3);
    }
    let kind = match &schema["type"] {
        Value::String(kind) => kind.as_str(),
        Value::Array(kinds) => kinds.first().and_then(Value::as_str).unwrap_or_default(),
        _ => "",
    };
    match kind {
        "object" => object(name, schema, dice),
        "array" => (0..dice.below(4)).map(|_| value_of_schema(name, &schema["items"], dice)).collect(),
        "integer" => number(dice),
        "boolean" => json!(dice.chance(50)),
        _ => json!(if dice.chance(75) { plausible_value(name, dice) } else { nasty_text(dice) }),
    }
}

fn object(name: &str, schema: &Value, dice: &mut RandomSource) -> Value {
    let required =
        |field: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| one == field));
    let mut fields = Map::new();
    for (field, inner) in schema["properties"].as_object().into_iter().flatten() {
        if dice.chance(if required(field) { 95 } else { 35 }) {
            fields.insert(field.clone(), value_of_schema(field, inner, dice));
        }
    }
    if schema["additionalProperties"].is_object() {
        for _ in 0..dice.below(4) {
            let key = if dice.chance(70) { key(name, dice) } else { nasty_text(dice) };
            let value = value_of_schema(&key, &schema["additionalProperties"], dice);
            fields.insert(key, value);
        }
    }
    if dice.chance(5) {
        fields.insert(nasty_text(dice), any_json(dice, 2));
    }
    Value::Object(fields)
}

/// Keys for maps whose keys have a meaning.
fn key(name: &str, dice: &mut RandomSource) -> String {
    let choices: &[&str] = match name {
        "resourceLimits" => &["cpu", "memory", "gpu"],
        "extensions" => &[
            "coracle.lines",
            "coracle.disk",
            "coracle.pids",
            "coracle.key",
            "coracle.network",
            "coracle.idle-timeout",
            "access.renew.extend.seconds",
            "poolRef",
            "opensandbox.extensions.x",
        ],
        "body" => &["/tmp/a", "/tmp/b", "/tmp/d", "team"],
        _ => &["A", "PATH", "team", "x"],
    };
    dice.pick(choices).to_owned()
}

fn number(dice: &mut RandomSource) -> Value {
    const NUMBERS: [i64; 12] = [0, 1, -1, 60, 64, 600, 755, 1_000, 65_536, 4_294_967_296, i64::MAX, i64::MIN];
    match dice.below(8) {
        0 => json!(1e308),
        1 => json!(18_446_744_073_709_551_615_u64),
        _ => json!(NUMBERS[dice.below(NUMBERS.len())]),
    }
}

/// Any JSON at all.
pub(super) fn any_json(dice: &mut RandomSource, depth: usize) -> Value {
    match dice.below(if depth == 0 { 5 } else { 7 }) {
        0 => Value::Null,
        1 => json!(dice.chance(50)),
        2 => number(dice),
        3 | 4 => json!(nasty_text(dice)),
        5 => (0..dice.below(4)).map(|_| any_json(dice, depth - 1)).collect(),
        _ => (0..dice.below(4)).map(|_| (nasty_text(dice), any_json(dice, depth - 1))).collect(),
    }
}

/// A body that matches no schema.
pub(super) fn malformed_body(dice: &mut RandomSource) -> Vec<u8> {
    match dice.below(8) {
        0 => b"[".repeat(dice.below(20_000)),
        1 => b"{\"a\":".repeat(dice.below(10_000)),
        2 => br#"{"text":"\ud800"}"#.to_vec(),
        3 => b"\xff\xfe{\"a\":1}".to_vec(),
        4 => br#"{"timeout":1,"timeout":2}"#.to_vec(),
        5 => vec![b'9'; dice.below(5_000)],
        6 => dice.bytes(4_096),
        _ => Vec::new(),
    }
}

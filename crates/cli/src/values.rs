//! Parsers for durations, sizes, mounts and similar values on the command line and in the configuration
//! file.
//!
//! Each parser returns a sentence that says what was wrong and shows a valid value, because the argument
//! parser prints it as it is.

use std::env::VarError;
use std::path::{Path, PathBuf};
use std::time::Duration;

use domain::{Bytes, MilliCpus, MountAccess, MountSpec, PolicyTarget, SandboxId, UserIdentity};

use crate::client::SandboxRef;

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CopyEndpoint {
    /// `-`: standard input or output.
    Standard,
    Local(PathBuf),
    Remote {
        sandbox: SandboxRef,
        path: String,
    },
}

/// How long a sandbox lives, or may stay unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SandboxLifetime {
    Never,
    After(Duration),
}

/// Reads `never` or a duration.
pub(crate) fn parse_lifetime(text: &str) -> Result<SandboxLifetime, String> {
    match text {
        "never" => Ok(SandboxLifetime::Never),
        text => {
            parse_duration(text).map(SandboxLifetime::After).map_err(|error| format!("{error}, or `never`"))
        }
    }
}

/// Reads `90`, `5s`, `500ms`, `2m`, `1h30m`, `7d`; a bare number means seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a duration such as `5s`, `500ms` or `1h30m`");
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().map(Duration::from_secs).ok_or_else(wrong);
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let (part, after) = parse_duration_part(rest).ok_or_else(wrong)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = after;
    }
    if total.is_zero() { Err(wrong()) } else { Ok(total) }
}

/// Takes one number with its unit off the front.
fn parse_duration_part(text: &str) -> Option<(Duration, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    let letters = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
    let (unit, rest) = rest.split_at(letters);
    let number: u64 = number.parse().ok()?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    Some((Duration::from_millis(number.checked_mul(milliseconds)?), rest))
}

/// Reads `256m` as 256 MiB: on a command line a bare letter means powers of 1024.
pub(crate) fn parse_bytes(text: &str) -> Result<Bytes, String> {
    Bytes::parse_binary(text).map_err(|error| error.to_string())
}

pub(crate) fn parse_cpus(text: &str) -> Result<MilliCpus, String> {
    MilliCpus::parse(text).map_err(|error| error.to_string())
}

/// Reads a name, `*.NAME`, an address or a range, each with or without a port.
pub(crate) fn parse_policy_target(text: &str) -> Result<PolicyTarget, String> {
    text.parse().map_err(|error: domain::PolicyError| error.to_string())
}

/// Reads `SRC:DST` or `SRC:DST:ro`. Both are absolute in the result.
pub(crate) fn parse_mount(text: &str) -> Result<MountSpec, String> {
    let wrong = |what: &str| format!("{what} in `{text}`; a mount is SRC:DST or SRC:DST:ro");
    let mut parts = text.split(':');
    let (source, target) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let access = match (parts.next(), parts.next()) {
        (None, None) | (Some("rw"), None) => MountAccess::ReadWrite,
        (Some("ro"), None) => MountAccess::ReadOnly,
        _ => return Err(wrong("there is something other than `ro` or `rw` at the end")),
    };
    if source.is_empty() || target.is_empty() {
        return Err(wrong("the source or the destination is missing"));
    }
    if !target.starts_with('/') {
        return Err(wrong("the destination is not an absolute path"));
    }
    let source = std::path::absolute(source).map_err(|error| format!("`{source}`: {error}"))?;
    Ok(MountSpec::from_host(source, target, access))
}

/// Reads `NAME:DST`, `/PATH:DST`, or either with `:ro`, as an entry of the API's `volumes`.
pub(crate) fn parse_volume(text: &str) -> Result<serde_json::Value, String> {
    let wrong =
        |what: &str| format!("{what} in `{text}`; a volume is NAME:DST or /PATH:DST, and `:ro` if need be");
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, read_only) = match parts[..] {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        _ => return Err(wrong("there are too few or too many parts")),
    };
    if source.is_empty() || !target.starts_with('/') {
        return Err(wrong("the source is missing, or the destination is not an absolute path"));
    }
    if source.starts_with('.') || source.contains('/') && !source.starts_with('/') {
        return Err(format!("host directories are given as absolute paths, and `{source}` is relative"));
    }
    let (kind, backend) = if source.starts_with('/') {
        ("host", serde_json::json!({ "path": source }))
    } else {
        ("pvc", serde_json::json!({ "claimName": source }))
    };
    Ok(serde_json::json!({ "mountPath": target, "readOnly": read_only, kind: backend }))
}

/// Reads `NAME=VALUE`; a bare `NAME` takes the value from the caller's environment.
pub(crate) fn parse_variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, value.to_owned()),
        None => (text, std::env::var(text).map_err(|error| explain_missing(text, &error))?),
    };
    if name.is_empty() { Err(format!("there is no name in `{text}`")) } else { Ok((name.to_owned(), value)) }
}

/// Says why a variable cannot be passed on. Its value may be a secret, and the error of std contains it.
fn explain_missing(name: &str, error: &VarError) -> String {
    match error {
        VarError::NotPresent => format!("`{name}` has no value here"),
        VarError::NotUnicode(_) => format!("the value of `{name}` is not UTF-8"),
    }
}

/// Reads `KEY=VALUE`; the server checks the characters.
pub(crate) fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not a label such as `team=search`")),
    }
}

/// Reads `NAME`, `UID` or `UID:GID`; a lone uid is its own group.
pub(crate) fn parse_identity(text: &str) -> Result<UserIdentity, String> {
    let wrong = || format!("`{text}` is not a user; write a name, UID or UID:GID");
    let number = |part: &str| part.parse::<u32>().ok().filter(|id| *id != u32::MAX);
    if let Some((uid, gid)) = text.split_once(':') {
        return match (number(uid), number(gid)) {
            (Some(uid), Some(gid)) => Ok(UserIdentity::Ids { uid, gid }),
            _ => Err(wrong()),
        };
    }
    match number(text) {
        Some(id) => Ok(UserIdentity::Ids { uid: id, gid: id }),
        None if text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_') => {
            Ok(UserIdentity::User(text.to_owned()))
        }
        None => Err(wrong()),
    }
}

/// As [`parse_identity`], without names: the servers' API knows only numbers.
pub(crate) fn parse_numeric_identity(text: &str) -> Result<(u32, u32), String> {
    match parse_identity(text)? {
        UserIdentity::Ids { uid, gid } => Ok((uid, gid)),
        UserIdentity::Default | UserIdentity::User(_) => Err(format!("`{text}` is not UID or UID:GID")),
    }
}

/// Reads one end of a copy. `SANDBOX:/PATH` is inside a sandbox, unless there is a slash before the
/// colon. Everything else is a path on this host. A local name of that form is written with `./` before
/// it.
pub(crate) fn parse_copy_endpoint(text: &str) -> Result<CopyEndpoint, String> {
    if text.is_empty() {
        return Err("a path cannot be empty".to_owned());
    }
    if text == "-" {
        return Ok(CopyEndpoint::Standard);
    }
    if let Some((id, path)) = text.split_once(':')
        && SandboxId::parse(id).is_ok()
        && !path.starts_with('/')
    {
        return Err(format!("`{path}` is not an absolute path inside the sandbox"));
    }
    match text.find(":/").map(|colon| text.split_at(colon)) {
        Some((sandbox, path)) if !sandbox.is_empty() && !sandbox.contains('/') => {
            Ok(CopyEndpoint::Remote { sandbox: sandbox.parse()?, path: path[1..].to_owned() })
        }
        _ => Ok(CopyEndpoint::Local(Path::new(text).to_owned())),
    }
}

/// A signal that the server knows, by name or number, as it was written.
pub(crate) fn parse_signal(text: &str) -> Result<String, String> {
    if domain::signal::parse_signal(text).is_some() {
        return Ok(text.to_owned());
    }
    let names: Vec<&str> = domain::signal::SIGNAL_NAMES.iter().map(|(name, _)| *name).collect();
    Err(format!("there is no such signal; signals are {} and the numbers 1 to 31", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use domain::MountSource;

    use super::*;

    #[test]
    fn variable_that_is_not_text_is_named_without_its_value() {
        let error = VarError::NotUnicode("s3cret".into());
        assert_eq!(explain_missing("TOKEN", &error), "the value of `TOKEN` is not UTF-8");
    }

    #[test]
    fn signals_are_known_names_and_numbers() {
        for right in ["TERM", "term", "SIGKILL", "9", "31"] {
            assert_eq!(parse_signal(right).as_deref(), Ok(right));
        }
        for wrong in ["FOO", "", "0", "32", "-1", "TERM "] {
            let why = parse_signal(wrong).expect_err(wrong);
            assert!(why.contains("TERM, ") && why.contains("1 to 31"), "{why}");
        }
    }

    #[test]
    fn durations_have_units_and_a_bare_number_is_seconds() {
        for (text, milliseconds) in [
            ("5s", 5000),
            ("500ms", 500),
            ("2m", 120_000),
            ("1h30m", 5_400_000),
            ("7d", 604_800_000),
            ("90", 90_000),
            ("0", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "s", "5x", "5 s", "-1s", "1.5h", "0s", "99999999999999999999", "5s5"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn mounts_name_source_destination_and_access() {
        let read_only = parse_mount("/data:/mnt/data:ro").expect("a right mount");
        assert_eq!(read_only.source, MountSource::Host("/data".into()));
        assert_eq!(read_only.target, "/mnt/data");
        assert_eq!(read_only.access, MountAccess::ReadOnly);
        assert_eq!(parse_mount("/data:/mnt").expect("a right mount").access, MountAccess::ReadWrite);
        for text in ["", "/data", ":/mnt", "/data:", "/data:mnt", "/data:/mnt:rx", "/a:/b:ro:ro"] {
            assert!(parse_mount(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_volume_is_a_name_or_a_path_and_where_it_goes() {
        let named = parse_volume("data:/data").expect("a right volume");
        assert_eq!(named["pvc"]["claimName"], "data");
        let host = parse_volume("/srv:/data:ro").expect("a right volume");
        assert_eq!((&host["host"]["path"], &host["readOnly"]), (&"/srv".into(), &true.into()));
        for text in ["", "data", "data:rel", ":/data", "data:/data:rx", "a:/b:ro:ro"] {
            assert!(parse_volume(text).is_err(), "{text}");
        }
        for text in ["./project:/w", "project/src:/w", "..:/w"] {
            let refused = parse_volume(text).expect_err("it is relative");
            assert!(refused.contains("host directories are given as absolute paths"), "{refused}");
        }
    }

    #[test]
    fn a_relative_mount_source_becomes_absolute() {
        let mount = parse_mount("some/where:/mnt").expect("a right mount");
        let expected = std::env::current_dir().expect("a directory").join("some/where");
        assert_eq!(mount.source, MountSource::Host(expected));
    }

    #[test]
    fn a_variable_keeps_everything_behind_the_first_equals_sign() {
        assert_eq!(parse_variable("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert_eq!(parse_variable("A="), Ok(("A".to_owned(), String::new())));
        assert!(parse_variable("=b").is_err());
        assert!(parse_variable("A_VARIABLE_THAT_NOBODY_SETS").is_err());
    }

    #[test]
    fn sizes_are_binary_and_bounded_below() {
        assert_eq!(parse_bytes("256m"), Ok(Bytes::from_mib(256)));
        assert!(parse_bytes("0").is_err());
        assert_eq!(parse_cpus("0.5"), Ok(MilliCpus(500)));
    }

    #[test]
    fn users_are_names_or_numbers() {
        assert_eq!(parse_identity("nobody"), Ok(UserIdentity::User("nobody".to_owned())));
        assert_eq!(parse_identity("1000"), Ok(UserIdentity::Ids { uid: 1000, gid: 1000 }));
        assert_eq!(parse_identity("0:5"), Ok(UserIdentity::Ids { uid: 0, gid: 5 }));
        for text in ["", ":", "1:", "a:b", "-1", "4294967295"] {
            assert!(parse_identity(text).is_err(), "{text}");
        }
        assert!(parse_numeric_identity("nobody").is_err());
    }

    #[test]
    fn only_a_whole_id_before_the_colon_is_remote() {
        let id = "abcdefghijklmnopqrst";
        assert_eq!(
            parse_copy_endpoint(&format!("{id}:/etc/passwd")),
            Ok(CopyEndpoint::Remote { sandbox: id.parse().expect("an id"), path: "/etc/passwd".to_owned() })
        );
        assert_eq!(
            parse_copy_endpoint("user:7:/tmp"),
            Ok(CopyEndpoint::Remote { sandbox: "user:7".parse().expect("a name"), path: "/tmp".to_owned() })
        );
        for local in ["a:b", "./a:/b", "/tmp/a:/b", "dir/a:/b", ":/x"] {
            assert_eq!(parse_copy_endpoint(local), Ok(CopyEndpoint::Local(local.into())), "{local}");
        }
        assert_eq!(parse_copy_endpoint("-"), Ok(CopyEndpoint::Standard));
        assert!(parse_copy_endpoint(&format!("{id}:etc")).is_err());
        assert!(parse_copy_endpoint("").is_err());
    }
}

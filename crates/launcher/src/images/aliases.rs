//! Aliases: names of missing images, and the image that stands in for each.
//!
//! The operator's own table decides first. Then fixed rules apply, by which the image `host` stands
//! in for a name only if it has what that name promises. All other names are rejected.

use super::HOST_IMAGE;
use super::host_programs::{HostProgram, HostPrograms, OsRelease, leading_version, major_version};

/// Which aliases are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AliasRule {
    /// The operator's aliases, then the rules for the image `host`.
    OperatorThenHost,
    OperatorOnly,
    /// None: only existing images are used.
    Refuse,
}

/// Patterns of the operator and the image for each; the first match wins. A `*` in a pattern
/// matches any text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageAliases {
    pub table: Vec<(String, String)>,
    pub rule: AliasRule,
    pub host: HostPrograms,
}

/// The image that stands in for a name, and a description of its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AliasTarget {
    pub image: String,
    pub has: Option<String>,
}

/// The decision of the fixed rules about a name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AliasVerdict {
    /// The image `host` stands in for it; the text describes its contents.
    Host(String),
    /// The image `host` does not fit, for this reason.
    Refused(String),
    /// No rule applies to the name.
    Unknown,
}

/// Repositories that the compatible APIs use by default, for which `host` always stands in: they
/// promise an environment to run code, without a version of anything.
const DEFAULT_REPOSITORIES: [&str; 4] =
    ["base", "agent-infra/sandbox", "all-in-one-sandbox", "rockchin/langbot-sandbox"];

/// The repository of the reference's image for code; several suffixes of it are in use.
const CODE_INTERPRETER: &str = "opensandbox/code-interpreter";

/// Repositories of distributions, and the `ID` of each in `os-release`.
const DISTRIBUTIONS: [(&str, &str); 20] = [
    ("almalinux", "almalinux"),
    ("alpine", "alpine"),
    ("alt", "altlinux"),
    ("amazonlinux", "amzn"),
    ("archlinux", "arch"),
    ("archlinux/archlinux", "arch"),
    ("centos", "centos"),
    ("clearlinux", "clear-linux-os"),
    ("debian", "debian"),
    ("fedora", "fedora"),
    ("gentoo/stage3", "gentoo"),
    ("kalilinux/kali-rolling", "kali"),
    ("mageia", "mageia"),
    ("opensuse/leap", "opensuse-leap"),
    ("opensuse/tumbleweed", "opensuse-tumbleweed"),
    ("oraclelinux", "ol"),
    ("photon", "photon"),
    ("rockylinux", "rocky"),
    ("ubuntu", "ubuntu"),
    ("voidlinux/voidlinux", "void"),
];

impl ImageAliases {
    /// Returns the image that stands in for `name`, or the reason why there is none, if known.
    pub(super) fn find_stand_in(&self, name: &str) -> Result<AliasTarget, Option<String>> {
        let found = self.table.iter().find(|(pattern, _)| matches_pattern(pattern, name));
        if let Some((_, target)) = found {
            let has = (target == HOST_IMAGE).then(|| self.host.summary());
            return Ok(AliasTarget { image: target.clone(), has });
        }
        if self.rule == AliasRule::OperatorOnly {
            return Err(None);
        }
        match judge_name(name, &self.host) {
            AliasVerdict::Host(has) => Ok(AliasTarget { image: HOST_IMAGE.to_owned(), has: Some(has) }),
            AliasVerdict::Refused(reason) => Err(Some(reason)),
            AliasVerdict::Unknown => Err(None),
        }
    }
}

/// Decides by the fixed rules whether the image `host` may stand in for `name`.
fn judge_name(name: &str, host: &HostPrograms) -> AliasVerdict {
    // A digest identifies exact content, which the host never matches.
    if name.contains('@') {
        return AliasVerdict::Unknown;
    }
    let (repository, tag) = super::name::split_tag(name);
    let repository = short_repository(repository);
    let ends_with = |known: &str| {
        repository.strip_suffix(known).is_some_and(|before| before.is_empty() || before.ends_with('/'))
    };
    let is_code_interpreter = repository
        .find(CODE_INTERPRETER)
        .is_some_and(|start| start == 0 || repository[..start].ends_with('/'));
    if is_code_interpreter
        || DEFAULT_REPOSITORIES.into_iter().any(|known| known != "base" && ends_with(known))
    {
        return AliasVerdict::Host(host.summary());
    }
    let distribution = DISTRIBUTIONS.iter().find(|(known, _)| *known == repository);
    match (repository, distribution) {
        ("base", _) => AliasVerdict::Host(host.summary()),
        ("python", _) => judge_program("Python", tag, host.python()),
        ("node", _) => judge_program("Node", tag, host.node()),
        (_, Some((_, id))) => judge_distribution(id, tag, host.os_release()),
        _ => AliasVerdict::Unknown,
    }
}

/// Returns the short form of a Docker Hub repository.
fn short_repository(repository: &str) -> &str {
    let hub = ["docker.io/", "index.docker.io/"];
    let path = hub.iter().find_map(|hub| repository.strip_prefix(hub)).unwrap_or(repository);
    path.strip_prefix("library/").unwrap_or(path)
}

/// A program matches a tag without a number and a tag with the same major version.
fn judge_program(name: &str, tag: Option<&str>, found: Option<HostProgram>) -> AliasVerdict {
    let Some(found) = found else {
        return AliasVerdict::Refused(format!("image `host` has no {name} below /usr"));
    };
    let has = found.describe(name);
    match (tag.and_then(leading_version), &found.version) {
        (None, _) => AliasVerdict::Host(has),
        (Some(asked), Some(version)) if major_version(&asked) == major_version(version) => {
            AliasVerdict::Host(has)
        }
        _ => AliasVerdict::Refused(format!("image `host` has {has}")),
    }
}

/// A distribution matches itself: a tag without a version, its own version or its own code name,
/// with or without a variant (`12-slim`, `bookworm-slim`).
fn judge_distribution(id: &str, tag: Option<&str>, release: Option<OsRelease>) -> AliasVerdict {
    let Some(release) = release else {
        return AliasVerdict::Refused("this host has no os-release file".to_owned());
    };
    let refused = AliasVerdict::Refused(format!("image `host` is {release}"));
    if release.id != id {
        return refused;
    }
    let version = tag.map(|tag| tag.split('-').next().unwrap_or(tag));
    let matches = match version {
        None | Some("latest") => true,
        Some(version) => {
            release.version_id.as_deref().is_some_and(|own| same_release(version, own))
                || release.codename.as_deref() == Some(version)
        }
    };
    if matches { AliasVerdict::Host(release.to_string()) } else { refused }
}

/// Whether the versions are equal as far as both are given: `12.5` belongs to release `12`.
fn same_release(one: &str, other: &str) -> bool {
    one.split('.').zip(other.split('.')).all(|(one, other)| one == other)
}

/// Whether `text` matches `pattern`. Taking the first match for every part between two stars is
/// sufficient, so the time is bounded.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in middle.split('*') {
        match text.find(part) {
            Some(index) => text = &text[index + part.len()..],
            None => return false,
        }
    }
    text.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_matches_any_text() {
        for (pattern, text, expected) in [
            ("base", "base", true),
            ("base", "base2", false),
            ("python:*", "python:3.12", true),
            ("python:*", "python", false),
            ("*/code-interpreter*", "a/b/code-interpreter:v1", true),
            ("*/code-interpreter*", "code-interpreter", false),
            ("a*b*a", "aba", true),
            ("a*b*a", "ab", false),
            ("ab*ba", "aba", false),
            ("*", "", true),
            ("**", "x", true),
        ] {
            assert_eq!(matches_pattern(pattern, text), expected, "{pattern} {text}");
        }
    }

    /// Creates a Debian 12 root with Python 3.11 and Node 20.1.7.
    fn debian() -> (tempfile::TempDir, HostPrograms) {
        let root = tempfile::tempdir().expect("a temporary directory can be created");
        let header =
            "#define NODE_MAJOR_VERSION 20\n#define NODE_MINOR_VERSION 1\n#define NODE_PATCH_VERSION 7\n";
        let release = "NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        for (path, content) in [
            ("usr/bin/python3.11", "\x7fELF"),
            ("usr/bin/node", "\x7fELF"),
            ("usr/include/node/node_version.h", header),
            ("usr/lib/os-release", release),
        ] {
            use std::os::unix::fs::PermissionsExt;
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the root")).expect("our own directory");
            std::fs::write(&path, content).expect("our own file");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("our own file");
        }
        std::os::unix::fs::symlink("python3.11", root.path().join("usr/bin/python3"))
            .expect("the link is new");
        let host = HostPrograms::below(root.path());
        (root, host)
    }

    #[test]
    fn host_stands_in_only_for_matching_names() {
        let (_root, host) = debian();
        for (name, expected) in [
            ("opensandbox/code-interpreter", "all"),
            ("opensandbox/code-interpreter:v1.0.2", "all"),
            ("opensandbox/code-interpreter-base:latest", "all"),
            ("registry.example/opensandbox/code-interpreter:v1", "all"),
            ("registry.example:5000/vefaas-public/all-in-one-sandbox:latest", "all"),
            ("ghcr.io/agent-infra/sandbox:1.11.0", "all"),
            ("rockchin/langbot-sandbox:latest", "all"),
            ("base", "all"),
            ("base:latest", "all"),
            ("python", "Python 3.11"),
            ("python:3", "Python 3.11"),
            ("python:3.12", "Python 3.11"),
            ("python:3.99", "Python 3.11"),
            ("python:3.12-slim-bookworm", "Python 3.11"),
            ("python:slim", "Python 3.11"),
            ("docker.io/library/python:3.12", "Python 3.11"),
            ("library/python:latest", "Python 3.11"),
            ("python:2.7", "refused"),
            ("python:2", "refused"),
            ("python:30", "refused"),
            ("node", "Node 20.1.7"),
            ("node:lts-slim", "Node 20.1.7"),
            ("node:20", "Node 20.1.7"),
            ("node:20.19-alpine", "Node 20.1.7"),
            ("node:22", "refused"),
            ("node:2", "refused"),
            ("debian", "Debian GNU/Linux 12"),
            ("debian:latest", "Debian GNU/Linux 12"),
            ("debian:12", "Debian GNU/Linux 12"),
            ("debian:12.5", "Debian GNU/Linux 12"),
            ("debian:12-slim", "Debian GNU/Linux 12"),
            ("debian:bookworm-slim", "Debian GNU/Linux 12"),
            ("debian:11", "refused"),
            ("debian:trixie", "refused"),
            ("debian:stable", "refused"),
            ("ubuntu", "refused"),
            ("ubuntu:24.04", "refused"),
            ("alpine:3.20", "refused"),
            ("fedora", "refused"),
            ("busybox", "unknown"),
            ("pypy:3", "unknown"),
            ("ghcr.io/x/node:20", "unknown"),
            ("registry.example/python:3.12", "unknown"),
            ("code-interpreter-v1", "unknown"),
            ("opensandbox/desktop", "unknown"),
            ("my-own", "unknown"),
            ("someone/base", "unknown"),
            ("xopensandbox/code-interpreter", "unknown"),
            ("python@sha256:00", "unknown"),
            ("Python:3", "unknown"),
            ("", "unknown"),
        ] {
            let verdict = match judge_name(name, &host) {
                AliasVerdict::Host(has) if has == host.summary() => "all".to_owned(),
                AliasVerdict::Host(has) => has,
                AliasVerdict::Refused(_) => "refused".to_owned(),
                AliasVerdict::Unknown => "unknown".to_owned(),
            };
            assert_eq!(verdict, expected, "{name}");
        }
    }

    #[test]
    fn host_without_a_program_does_not_stand_in_for_it() {
        let empty = tempfile::tempdir().expect("a temporary directory can be created");
        let host = HostPrograms::below(empty.path());
        for name in ["python", "node:20", "debian"] {
            assert!(matches!(judge_name(name, &host), AliasVerdict::Refused(_)), "{name}");
        }
        assert!(matches!(judge_name("base", &host), AliasVerdict::Host(_)));
        // A program of unknown version matches only requests without a version.
        let unknown = || Some(HostProgram { version: None });
        assert!(matches!(judge_program("Node", Some("20"), unknown()), AliasVerdict::Refused(_)));
        assert!(matches!(judge_program("Node", Some("lts"), unknown()), AliasVerdict::Host(_)));
    }

    #[test]
    fn operator_aliases_come_first() {
        let (_root, host) = debian();
        let table =
            vec![("ubuntu*".to_owned(), "jammy".to_owned()), ("my".to_owned(), HOST_IMAGE.to_owned())];
        let mut aliases = ImageAliases { table, rule: AliasRule::OperatorThenHost, host };
        let alias = aliases.find_stand_in("ubuntu:22.04");
        assert_eq!(alias, Ok(AliasTarget { image: "jammy".to_owned(), has: None }));
        assert_eq!(aliases.find_stand_in("my").map(|alias| alias.image).as_deref(), Ok(HOST_IMAGE));
        assert!(aliases.find_stand_in("python:3.12").is_ok());
        assert_eq!(aliases.find_stand_in("no-such"), Err(None));
        aliases.rule = AliasRule::OperatorOnly;
        assert!(aliases.find_stand_in("ubuntu").is_ok());
        assert_eq!(aliases.find_stand_in("python:3.12"), Err(None));
    }
}

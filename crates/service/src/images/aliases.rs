//! Aliases: names of missing images, and the image that stands in for each.
//!
//! The operator's own table decides first. Then fixed rules apply, by which the image `host` stands
//! in for a name only if it has what that name promises. All other names are rejected.

use backend::host_software::{HostProgram, HostSoftware, OsRelease, leading_version, major_version};
use backend::{BackendError, MISSING_IMAGE_HINT};
use domain::{HOST_IMAGE, split_image_tag};

/// Which names of missing images stand for another image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageAliases {
    /// Patterns of the operator and the image for each; the first match wins. A `*` in a pattern
    /// matches any text.
    pub table: Vec<(String, String)>,
    pub rule: AliasRule,
}

/// Whether another image may be used instead of one that is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AliasRule {
    /// The operator's aliases are used, then the rules for the image `host`.
    #[default]
    OperatorThenHost,
    /// Only existing images are used.
    Refuse,
}

/// The image that a sandbox gets for a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedImage {
    pub name: String,
    /// Set if the requested image is missing and another one is used.
    pub stand_in: Option<StandIn>,
}

/// An image that is used instead of a requested one that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandIn {
    /// The requested name.
    pub asked: String,
    pub used: String,
    /// The contents of the used image, such as `Python 3.11`, if known.
    pub has: Option<String>,
}

/// The reason why a name stands for no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoImageError {
    #[error("image `{0}` not found")]
    Unknown(String),
    #[error("image `{name}` not found, and no other stands in for it: {reason}")]
    NoStandIn { name: String, reason: String },
    #[error("image `{0}` not found, and `images.strict` allows no other to stand in for it")]
    Strict(String),
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

/// The hint where no image may stand in for another.
const STRICT_IMAGE_HINT: &str = "`coracle image pull NAME` or `coracle image import NAME FILE` adds it; `coracle image ls` lists the available images";

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
    /// Returns the image that the operator uses instead of a missing one.
    pub fn operator_target(&self, name: &str) -> Option<&str> {
        if self.rule == AliasRule::Refuse {
            return None;
        }
        let found = self.table.iter().find(|(pattern, _)| matches_pattern(pattern, name));
        found.map(|(_, target)| target.as_str())
    }

    /// Returns the image that stands in for `name`, which is missing. That image may be missing as well.
    pub fn find_stand_in(&self, name: &str, host: &HostSoftware) -> Result<StandIn, NoImageError> {
        if self.rule == AliasRule::Refuse {
            return Err(NoImageError::Strict(name.to_owned()));
        }
        let stand_in = |used: &str, has| StandIn { asked: name.to_owned(), used: used.to_owned(), has };
        if let Some(target) = self.operator_target(name) {
            return Ok(stand_in(target, (target == HOST_IMAGE).then(|| host.summary())));
        }
        match judge_name(name, host) {
            AliasVerdict::Host(has) => Ok(stand_in(HOST_IMAGE, Some(has))),
            AliasVerdict::Refused(reason) => Err(NoImageError::NoStandIn { name: name.to_owned(), reason }),
            AliasVerdict::Unknown => Err(NoImageError::Unknown(name.to_owned())),
        }
    }
}

impl StandIn {
    /// Returns the image, or the error if it is missing too. `found` is the name that it was found by.
    pub fn resolve_found(self, found: Option<String>) -> Result<ResolvedImage, NoImageError> {
        let Some(name) = found else {
            let reason = format!("`images.aliases` names `{}`, which does not exist either", self.used);
            return Err(NoImageError::NoStandIn { name: self.asked, reason });
        };
        Ok(ResolvedImage { name: name.clone(), stand_in: Some(Self { used: name, ..self }) })
    }
}

impl std::fmt::Display for StandIn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "image `{}`", self.used)?;
        self.has.iter().try_for_each(|has| write!(f, " ({has})"))?;
        write!(f, " stands in for `{}`", self.asked)
    }
}

impl From<NoImageError> for BackendError {
    fn from(error: NoImageError) -> Self {
        let hint = match error {
            NoImageError::Unknown(_) | NoImageError::NoStandIn { .. } => MISSING_IMAGE_HINT,
            NoImageError::Strict(_) => STRICT_IMAGE_HINT,
        };
        Self::NoImage { message: error.to_string(), hint: Some(hint.to_owned()) }
    }
}

/// Decides by the fixed rules whether the image `host` may stand in for `name`.
fn judge_name(name: &str, host: &HostSoftware) -> AliasVerdict {
    // A digest identifies exact content, which the host never matches.
    if name.contains('@') {
        return AliasVerdict::Unknown;
    }
    let (repository, tag) = split_image_tag(name);
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
        ("python", _) => judge_program("Python", tag, host.python.as_ref()),
        ("node", _) => judge_program("Node", tag, host.node.as_ref()),
        (_, Some((_, id))) => judge_distribution(id, tag, host.os_release.as_ref()),
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
fn judge_program(name: &str, tag: Option<&str>, found: Option<&HostProgram>) -> AliasVerdict {
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
fn judge_distribution(id: &str, tag: Option<&str>, release: Option<&OsRelease>) -> AliasVerdict {
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

    /// Debian 12 with Python 3.11 and Node 20.1.7.
    fn debian() -> HostSoftware {
        let program = |version: &str| Some(HostProgram { version: Some(version.to_owned()) });
        let release = OsRelease {
            id: "debian".to_owned(),
            version_id: Some("12".to_owned()),
            codename: Some("bookworm".to_owned()),
            name: Some("Debian GNU/Linux".to_owned()),
        };
        HostSoftware { os_release: Some(release), python: program("3.11"), node: program("20.1.7") }
    }

    #[test]
    fn host_stands_in_only_for_matching_names() {
        let host = debian();
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
        let host = HostSoftware::default();
        for name in ["python", "node:20", "debian"] {
            assert!(matches!(judge_name(name, &host), AliasVerdict::Refused(_)), "{name}");
        }
        assert!(matches!(judge_name("base", &host), AliasVerdict::Host(_)));
        // A program of unknown version matches only requests without a version.
        let unknown = HostProgram { version: None };
        assert!(matches!(judge_program("Node", Some("20"), Some(&unknown)), AliasVerdict::Refused(_)));
        assert!(matches!(judge_program("Node", Some("lts"), Some(&unknown)), AliasVerdict::Host(_)));
    }

    #[test]
    fn operator_aliases_come_first() {
        let host = debian();
        let table =
            vec![("ubuntu*".to_owned(), "jammy".to_owned()), ("my".to_owned(), HOST_IMAGE.to_owned())];
        let mut aliases = ImageAliases { table, rule: AliasRule::OperatorThenHost };
        let find = |aliases: &ImageAliases, name: &str| aliases.find_stand_in(name, &host);
        let stand_in = find(&aliases, "ubuntu:22.04").expect("the operator has an alias for it");
        assert_eq!((stand_in.used.as_str(), &stand_in.has), ("jammy", &None));
        assert_eq!(find(&aliases, "my").map(|alias| alias.used).as_deref(), Ok(HOST_IMAGE));
        assert!(find(&aliases, "python:3.12").is_ok());
        assert_eq!(find(&aliases, "no-such"), Err(NoImageError::Unknown("no-such".to_owned())));
        assert_eq!(aliases.operator_target("ubuntu"), Some("jammy"));
        assert_eq!(aliases.operator_target("python:3.12"), None);
        aliases.rule = AliasRule::Refuse;
        assert_eq!(find(&aliases, "my"), Err(NoImageError::Strict("my".to_owned())));
        assert_eq!(aliases.operator_target("my"), None);
    }

    #[test]
    fn stand_in_names_the_image_that_was_found() {
        let aliases =
            ImageAliases { table: vec![("x".to_owned(), "y".to_owned())], ..ImageAliases::default() };
        let stand_in = aliases.find_stand_in("x", &debian()).expect("the operator has an alias for it");
        let found = stand_in.clone().resolve_found(Some("y:latest".to_owned())).expect("it exists");
        assert_eq!(found.name, "y:latest");
        let sentence = found.stand_in.map(|stand_in| stand_in.to_string());
        assert_eq!(sentence.as_deref(), Some("image `y:latest` stands in for `x`"));
        let missing = stand_in.resolve_found(None);
        assert!(matches!(missing, Err(NoImageError::NoStandIn { .. })), "{missing:?}");
    }
}

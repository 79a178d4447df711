//! Which requests a binding is for.

use std::fmt;
use std::str::FromStr;

use crate::network_policy::{DomainName, NetworkPolicy, PolicyAction, PolicyTarget, TargetHost};
use crate::vault::binding::{BindingError, check_count, is_token_byte};

const DEFAULT_METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];
const MAX_PATH_BYTES: usize = 2048;

/// Conditions that a request must meet, one of each list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestMatch {
    hosts: Vec<HostPattern>,
    schemes: Vec<UrlScheme>,
    methods: Vec<String>,
    paths: Vec<PathPattern>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UrlScheme {
    Https,
    Http,
}

/// A name, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    Name(DomainName),
    NamesBelow(DomainName),
}

/// A path, or with `*` at its end all paths that begin like it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathPattern {
    Path(String),
    Prefix(String),
}

/// What a binding is compared with.
#[derive(Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    pub scheme: UrlScheme,
    pub host: &'a DomainName,
    pub method: &'a str,
    /// Without the query, as the client sent it.
    pub path: &'a str,
}

/// How exactly a binding names a host; the greater precedes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HostPrecedence {
    Wildcard,
    Exact,
}

impl RequestMatch {
    /// Parses the lists. Empty ones but `hosts` get their defaults. A port follows from the scheme, so `ports` is only
    /// checked.
    pub fn new(
        hosts: &[String],
        schemes: &[String],
        methods: &[String],
        paths: &[String],
        ports: &[u32],
    ) -> Result<Self, BindingError> {
        if hosts.is_empty() {
            return Err(BindingError::NoHost);
        }
        if let Some(port) = ports.iter().find(|port| ![80, 443].contains(*port)) {
            return Err(BindingError::Port(*port));
        }
        check_count(hosts, "hosts")?;
        check_count(methods, "methods")?;
        check_count(paths, "paths")?;
        let schemes = parse_unique(schemes, str::parse)?;
        let methods = parse_unique(methods, parse_method)?;
        let paths = parse_unique(paths, str::parse)?;
        Ok(Self {
            hosts: parse_unique(hosts, str::parse)?,
            schemes: if schemes.is_empty() { vec![UrlScheme::Https] } else { schemes },
            methods: if methods.is_empty() { DEFAULT_METHODS.map(str::to_owned).to_vec() } else { methods },
            paths: if paths.is_empty() { vec![PathPattern::Prefix("/".to_owned())] } else { paths },
        })
    }

    pub fn hosts(&self) -> &[HostPattern] {
        &self.hosts
    }

    pub fn schemes(&self) -> &[UrlScheme] {
        &self.schemes
    }

    pub fn methods(&self) -> &[String] {
        &self.methods
    }

    pub fn paths(&self) -> &[PathPattern] {
        &self.paths
    }

    /// Whether some request to this host may match.
    pub fn concerns(&self, scheme: UrlScheme, host: &DomainName) -> bool {
        self.schemes.contains(&scheme) && self.hosts.iter().any(|pattern| pattern.matches(host))
    }

    pub(super) fn matches(&self, request: &RequestFacts<'_>) -> Option<HostPrecedence> {
        let rest = self.schemes.contains(&request.scheme)
            && self.methods.iter().any(|method| method == request.method)
            && self.paths.iter().any(|pattern| pattern.matches(request.path));
        let hosts = self.hosts.iter().filter(|pattern| rest && pattern.matches(request.host));
        hosts.map(HostPattern::precedence).max()
    }

    /// Whether some request matches both, with the same precedence.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let share =
            |equal: &dyn Fn(&HostPattern, &HostPattern) -> bool| any_pair(&self.hosts, &other.hosts, equal);
        any_pair(&self.schemes, &other.schemes, &PartialEq::eq)
            && any_pair(&self.methods, &other.methods, &PartialEq::eq)
            && any_pair(&self.paths, &other.paths, &PathPattern::overlaps)
            && share(&HostPattern::overlaps)
    }

    /// The first host for which the policy has no allow rule, or a rule before it that denies it.
    pub(super) fn host_not_allowed(&self, policy: &NetworkPolicy) -> Option<&HostPattern> {
        let allowed = |host: &HostPattern| {
            self.schemes.iter().all(|scheme| host.is_allowed(policy, scheme.default_port()))
        };
        self.hosts.iter().find(|host| !allowed(host))
    }
}

fn any_pair<T>(first: &[T], second: &[T], holds: &dyn Fn(&T, &T) -> bool) -> bool {
    first.iter().any(|one| second.iter().any(|other| holds(one, other)))
}

fn parse_unique<T: PartialEq>(
    texts: &[String],
    parse: impl Fn(&str) -> Result<T, BindingError>,
) -> Result<Vec<T>, BindingError> {
    let mut parsed = Vec::with_capacity(texts.len());
    for text in texts {
        let one = parse(text.trim())?;
        if !parsed.contains(&one) {
            parsed.push(one);
        }
    }
    Ok(parsed)
}

fn parse_method(text: &str) -> Result<String, BindingError> {
    let valid = !text.is_empty() && text.len() <= 32 && text.bytes().all(is_token_byte);
    if valid { Ok(text.to_ascii_uppercase()) } else { Err(BindingError::Method(text.to_owned())) }
}

impl UrlScheme {
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }
}

impl HostPattern {
    pub fn matches(&self, host: &DomainName) -> bool {
        match self {
            Self::Name(name) => name == host,
            Self::NamesBelow(parent) => host.is_below(parent),
        }
    }

    fn precedence(&self) -> HostPrecedence {
        match self {
            Self::Name(_) => HostPrecedence::Exact,
            Self::NamesBelow(_) => HostPrecedence::Wildcard,
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(one), Self::Name(two)) => one == two,
            (Self::NamesBelow(one), Self::NamesBelow(two)) => {
                one == two || one.is_below(two) || two.is_below(one)
            }
            // The exact name precedes.
            (Self::Name(_), Self::NamesBelow(_)) | (Self::NamesBelow(_), Self::Name(_)) => false,
        }
    }

    /// Whether the first rule that stands for all of these hosts allows them. The default does not count: a secret
    /// is only sent where somebody has named the host.
    fn is_allowed(&self, policy: &NetworkPolicy, port: u16) -> bool {
        let covers = |target: &PolicyTarget| {
            target.port.is_none_or(|own| own == port)
                && match (self, &target.host) {
                    (Self::Name(name), host) => host.matches_name(name),
                    (Self::NamesBelow(name), TargetHost::NamesBelow(parent)) => {
                        name == parent || name.is_below(parent)
                    }
                    (Self::NamesBelow(_), TargetHost::Name(_) | TargetHost::Addresses(_)) => false,
                }
        };
        let first = policy.rules().iter().find(|rule| covers(&rule.target));
        first.is_some_and(|rule| rule.action == PolicyAction::Allow)
    }
}

impl PathPattern {
    fn matches(&self, path: &str) -> bool {
        match self {
            Self::Prefix(prefix) if prefix == "/" => true,
            // A server may resolve `/public/../admin` to a path that this pattern is not for.
            _ if has_ambiguous_segments(path) => false,
            Self::Path(own) => own == path,
            Self::Prefix(prefix) => path.starts_with(prefix.as_str()),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Path(one), Self::Path(two)) => one == two,
            (Self::Path(path), Self::Prefix(prefix)) | (Self::Prefix(prefix), Self::Path(path)) => {
                path.starts_with(prefix.as_str())
            }
            (Self::Prefix(one), Self::Prefix(two)) => {
                one.starts_with(two.as_str()) || two.starts_with(one.as_str())
            }
        }
    }
}

/// Whether a server may take this path for another one: segments `.` and `..`, also if encoded or if separated by an
/// encoded slash or a backslash.
fn has_ambiguous_segments(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let decoded = lower.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").replace('\\', "/");
    // What follows `;` are parameters of the segment, which some servers remove first.
    decoded.split('/').any(|segment| matches!(segment.split(';').next(), Some("." | "..")))
}

impl FromStr for UrlScheme {
    type Err = BindingError;

    fn from_str(text: &str) -> Result<Self, BindingError> {
        match text.to_ascii_lowercase().as_str() {
            "https" => Ok(Self::Https),
            "http" => Ok(Self::Http),
            _ => Err(BindingError::Scheme(text.to_owned())),
        }
    }
}

impl FromStr for HostPattern {
    type Err = BindingError;

    fn from_str(text: &str) -> Result<Self, BindingError> {
        let name = |name: &str| {
            let parsed: DomainName =
                name.parse().map_err(|reason| BindingError::Host { host: text.to_owned(), reason })?;
            if !parsed.as_str().contains('.') {
                return Err(BindingError::SingleLabel(text.to_owned()));
            }
            Ok(parsed)
        };
        match text.strip_prefix("*.") {
            Some(parent) => Ok(Self::NamesBelow(name(parent)?)),
            None => Ok(Self::Name(name(text)?)),
        }
    }
}

impl FromStr for PathPattern {
    type Err = BindingError;

    fn from_str(text: &str) -> Result<Self, BindingError> {
        let (path, is_prefix) = match text.strip_suffix('*') {
            Some(prefix) => (prefix, true),
            None => (text, false),
        };
        let valid = path.starts_with('/')
            && path.len() <= MAX_PATH_BYTES
            && path.bytes().all(|byte| byte.is_ascii_graphic() && !b"*?#".contains(&byte))
            && !has_ambiguous_segments(path);
        match (valid, is_prefix) {
            (false, _) => Err(BindingError::Path(text.to_owned())),
            (true, true) => Ok(Self::Prefix(path.to_owned())),
            (true, false) => Ok(Self::Path(path.to_owned())),
        }
    }
}

impl fmt::Display for UrlScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::NamesBelow(parent) => write!(f, "*.{parent}"),
        }
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => f.write_str(path),
            Self::Prefix(prefix) => write!(f, "{prefix}*"),
        }
    }
}

use super::*;
use crate::network_policy::{PolicyAction, PolicyRule};

type TestVault = Vault<&'static str>;

const CANARY: &str = "canary-3f1c";

fn policy(allowed: &[&str]) -> NetworkPolicy {
    let rule = |text: &&str| PolicyRule {
        action: if text.starts_with('!') { PolicyAction::Deny } else { PolicyAction::Allow },
        target: text.trim_start_matches('!').parse().expect("a target"),
    };
    NetworkPolicy::new(allowed.iter().map(rule).collect(), PolicyAction::Allow).expect("few rules")
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn request(hosts: &[&str], methods: &[&str], paths: &[&str]) -> RequestMatch {
    RequestMatch::new(&strings(hosts), &[], &strings(methods), &strings(paths), &[]).expect("a valid match")
}

fn bearer(name: &str, request: RequestMatch) -> Binding {
    let auth = BindingAuth::Bearer { credential: "token".to_owned() };
    Binding::new(name.to_owned(), request, auth, Vec::new()).expect("a valid binding")
}

fn token(name: &str) -> NewCredential<&'static str> {
    NewCredential { name: name.to_owned(), fits_header: true, value: CANARY }
}

fn vault(bindings: Vec<Binding>) -> Result<TestVault, VaultError> {
    Vault::create(vec![token("token")], bindings, &policy(&["*.example.org", "example.org"]))
}

fn matched(vault: &TestVault, method: &str, url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://").expect("a scheme");
    let (host, path) = rest.split_at(rest.find('/').expect("a path"));
    let host: DomainName = host.parse().expect("a name");
    let facts = RequestFacts { scheme: scheme.parse().expect("a scheme"), host: &host, method, path };
    vault.match_request(&facts).map(|binding| binding.name.clone())
}

#[test]
fn request_matches_by_host_scheme_method_and_path() {
    let vault = vault(vec![
        bearer("exact", request(&["api.example.org"], &["get", "HEAD"], &["/v1/*", "/status"])),
        bearer("below", request(&["*.example.org"], &[], &[])),
    ])
    .expect("a valid vault");
    for (method, url, expected) in [
        ("GET", "https://api.example.org/v1/users", Some("exact")),
        ("GET", "https://api.example.org/v1/", Some("exact")),
        ("HEAD", "https://api.example.org/status", Some("exact")),
        ("GET", "https://api.example.org/status/", Some("below")),
        ("GET", "https://api.example.org/v1", Some("below")),
        ("POST", "https://api.example.org/v1/users", Some("below")),
        ("OPTIONS", "https://api.example.org/v1/users", None),
        ("get", "https://api.example.org/other", None),
        ("DELETE", "https://a.b.example.org/", Some("below")),
        ("GET", "https://example.org/", None),
        ("GET", "http://api.example.org/v1/users", None),
        ("GET", "https://example.net/", None),
    ] {
        assert_eq!(matched(&vault, method, url).as_deref(), expected, "{method} {url}");
    }
}

#[test]
fn path_that_a_server_may_resolve_otherwise_matches_only_all_paths() {
    let vault =
        vault(vec![bearer("public", request(&["api.example.org"], &[], &["/public/*"]))]).expect("valid");
    for path in [
        "/public/../admin",
        "/public/./x",
        "/public/%2e%2E/admin",
        "/public/..%2fadmin",
        "/public/..\\admin",
        "/public/..;a=b/admin",
        "/public/..",
    ] {
        assert_eq!(matched(&vault, "GET", &format!("https://api.example.org{path}")), None, "{path}");
    }
    assert!(matched(&vault, "GET", "https://api.example.org/public/a..b/...").is_some());
    let all = vault_of_all_paths();
    assert!(matched(&all, "GET", "https://api.example.org/public/../admin").is_some());
}

fn vault_of_all_paths() -> TestVault {
    vault(vec![bearer("all", request(&["api.example.org"], &[], &[]))]).expect("valid")
}

#[test]
fn bindings_that_can_match_one_request_are_refused() {
    let pair = |first: RequestMatch, second: RequestMatch| {
        vault(vec![bearer("a", first), bearer("b", second)]).map(|_| ())
    };
    let ambiguous = Err(VaultError::Ambiguous { first: "a".to_owned(), second: "b".to_owned() });
    let api = |methods: &[&str], paths: &[&str]| request(&["api.example.org"], methods, paths);
    assert_eq!(pair(api(&[], &[]), api(&["GET"], &["/x"])), ambiguous);
    assert_eq!(pair(api(&[], &["/v1/*"]), api(&[], &["/v1/users/*"])), ambiguous);
    assert_eq!(pair(api(&[], &["/v1/*"]), api(&[], &["/v2/*"])), Ok(()));
    assert_eq!(pair(api(&["GET"], &[]), api(&["POST"], &[])), Ok(()));
    assert_eq!(pair(api(&[], &[]), request(&["*.example.org"], &[], &[])), Ok(()));
    let below = |host: &str| request(&[host], &[], &[]);
    assert_eq!(pair(below("*.example.org"), below("*.a.example.org")), ambiguous);
    assert_eq!(pair(below("*.b.example.org"), below("*.a.example.org")), Ok(()));
}

#[test]
fn each_host_needs_an_explicit_allow_rule() {
    let check = |allowed: &[&str], host: &str| {
        let vault = Vault::create(
            vec![token("token")],
            vec![bearer("b", request(&[host], &[], &[]))],
            &policy(allowed),
        );
        vault.is_ok()
    };
    assert!(check(&["api.example.org"], "api.example.org"));
    assert!(check(&["API.example.org:443"], "api.example.org"));
    assert!(check(&["*.example.org"], "api.example.org"));
    assert!(check(&["*.example.org"], "*.example.org"));
    assert!(check(&["*.example.org"], "*.a.example.org"));
    assert!(check(&["!other.example.org", "*.example.org"], "*.example.org"));
    assert!(!check(&[], "api.example.org"));
    assert!(!check(&["api.example.org:80"], "api.example.org"));
    assert!(!check(&["*.example.org"], "example.org"));
    assert!(!check(&["api.example.org"], "*.example.org"));
    assert!(!check(&["*.a.example.org"], "*.example.org"));
    assert!(!check(&["!api.example.org", "*.example.org"], "api.example.org"));
    assert!(!check(&["!*.example.org", "*.a.example.org"], "*.a.example.org"));
    assert!(!check(&["192.0.2.0/24"], "api.example.org"));
}

#[test]
fn wrong_matches_are_refused() {
    let wrong = |hosts: &[&str], schemes: &[&str], methods: &[&str], paths: &[&str], ports: &[u32]| {
        RequestMatch::new(&strings(hosts), &strings(schemes), &strings(methods), &strings(paths), ports)
            .expect_err("this match is not valid")
    };
    let host = &["a.example.org"][..];
    assert_eq!(wrong(&[], &[], &[], &[], &[]), BindingError::NoHost);
    for bad in
        ["", "*", "*.", "a.*.org", "192.0.2.1", "https://a.org", "a.org/x", "a.org:443", "localhost", "*.org"]
    {
        assert!(
            matches!(
                wrong(&[bad], &[], &[], &[], &[]),
                BindingError::Host { .. } | BindingError::SingleLabel(_)
            ),
            "{bad}"
        );
    }
    assert_eq!(wrong(host, &["ftp"], &[], &[], &[]), BindingError::Scheme("ftp".to_owned()));
    assert_eq!(wrong(host, &[], &["GE T"], &[], &[]), BindingError::Method("GE T".to_owned()));
    assert_eq!(wrong(host, &[], &[], &[], &[443, 8443]), BindingError::Port(8443));
    for bad in ["", "x", "*", "/a*b", "/a?b", "/a b", "/a/../b", "/**"] {
        assert_eq!(wrong(host, &[], &[], &[bad], &[]), BindingError::Path(bad.to_owned()), "{bad}");
    }
    let many = vec!["/x"; 65];
    assert_eq!(wrong(host, &[], &[], &many, &[]), BindingError::TooMany("paths"));
}

#[test]
fn wrong_headers_and_placeholders_are_refused() {
    let header = |name: &str| HeaderCredential { header: name.to_owned(), credential: "token".to_owned() };
    let build = |auth, substitutions| {
        Binding::new("b".to_owned(), request(&["a.example.org"], &[], &[]), auth, substitutions).map(|_| ())
    };
    let api_key = |name: &str| build(BindingAuth::ApiKey(header(name)), Vec::new());
    assert_eq!(api_key("X-Api-Key"), Ok(()));
    assert_eq!(api_key("Authorization"), Ok(()));
    assert_eq!(api_key("X Key"), Err(BindingError::HeaderName("X Key".to_owned())));
    assert_eq!(api_key(""), Err(BindingError::HeaderName(String::new())));
    assert_eq!(api_key("Content-Length"), Err(BindingError::ReservedHeader("Content-Length".to_owned())));
    let custom = |headers| build(BindingAuth::CustomHeaders(headers), Vec::new());
    assert_eq!(custom(Vec::new()), Err(BindingError::NoHeader));
    assert_eq!(custom(vec![header("a"), header("A")]), Err(BindingError::DuplicateHeader("A".to_owned())));
    let substitution = |placeholder: &str, surfaces: &[SubstitutionSurface]| Substitution {
        credential: "token".to_owned(),
        placeholder: placeholder.to_owned(),
        surfaces: surfaces.to_vec(),
    };
    let substitute = |texts: &[&str]| {
        let all = texts.iter().map(|text| substitution(text, &[SubstitutionSurface::Body])).collect();
        build(BindingAuth::Passthrough, all)
    };
    assert_eq!(substitute(&["__TOKEN__", "__OTHER__"]), Ok(()));
    assert_eq!(substitute(&["abc"]), Err(BindingError::Placeholder("abc".to_owned())));
    assert_eq!(substitute(&["to ken"]), Err(BindingError::Placeholder("to ken".to_owned())));
    assert_eq!(
        substitute(&["TOKEN_1", "TOKEN_12"]),
        Err(BindingError::OverlappingPlaceholders("TOKEN_12".to_owned()))
    );
    let no_surface = build(BindingAuth::Passthrough, vec![substitution("__T__", &[])]);
    assert_eq!(no_surface, Err(BindingError::NoSurface("__T__".to_owned())));
}

#[test]
fn changes_make_revisions() {
    let policy = policy(&["*.example.org"]);
    let vault = Vault::create(Vec::new(), Vec::new(), &policy).expect("an empty vault");
    assert_eq!(vault.revision(), 1);
    let added = changes(Some(1), vec![token("token")], Vec::new(), &[]);
    let vault = vault.apply(added, &policy).expect("the right revision");
    assert_eq!((vault.revision(), vault.credential("token").map(|one| one.revision)), (2, Some(2)));
    let conflict = vault.clone().apply(changes(Some(1), Vec::new(), Vec::new(), &[]), &policy);
    assert_eq!(conflict.err(), Some(VaultError::Revision { expected: 1, current: 2 }));
    let other =
        vault.clone().apply(changes(None, vec![token("other")], Vec::new(), &[]), &policy).expect("valid");
    assert_eq!((other.revision(), other.credential("token").map(|one| one.revision)), (3, Some(2)));
    let replaced =
        other.apply(changes(Some(3), Vec::new(), vec![token("token")], &["other"]), &policy).expect("valid");
    assert_eq!(replaced.credential("token").map(|one| one.revision), Some(4));
    assert!(replaced.credential("other").is_none());
}

fn changes(
    expected_revision: Option<u64>,
    add: Vec<NewCredential<&'static str>>,
    replace: Vec<NewCredential<&'static str>>,
    delete: &[&str],
) -> VaultChanges<&'static str> {
    let credentials = ChangeSet { add, replace, delete: strings(delete) };
    VaultChanges { expected_revision, credentials, bindings: ChangeSet::default() }
}

#[test]
fn wrong_changes_are_refused_whole() {
    let policy = policy(&["*.example.org"]);
    let entry = VaultEntry::Credential;
    let name = |name: &str| name.to_owned();
    let bound = vault(vec![bearer("b", request(&["a.example.org"], &[], &[]))]).expect("valid");
    let refused = |changes| bound.clone().apply(changes, &policy).expect_err("this change is not valid");
    let add = |credentials| refused(changes(None, credentials, Vec::new(), &[]));
    assert_eq!(add(vec![token("token")]), VaultError::Exists { entry, name: name("token") });
    assert_eq!(add(vec![token("x"), token("x")]), VaultError::Duplicate { entry, name: name("x") });
    assert_eq!(add(vec![token(" ")]), VaultError::Name(entry));
    let missing = VaultError::Missing { entry, name: name("x") };
    assert_eq!(refused(changes(None, Vec::new(), vec![token("x")], &[])), missing);
    assert_eq!(refused(changes(None, Vec::new(), Vec::new(), &["x"])), missing);
    let twice = changes(None, Vec::new(), vec![token("token")], &["token"]);
    assert_eq!(refused(twice), VaultError::Duplicate { entry, name: name("token") });
    // A credential that a binding uses cannot go.
    let unknown = VaultError::UnknownCredential { binding: name("b"), credential: name("token") };
    assert_eq!(refused(changes(None, Vec::new(), Vec::new(), &["token"])), unknown);
    let many = (0..=MAX_VAULT_ENTRIES).map(|number| token(&number.to_string())).collect();
    assert_eq!(add(many), VaultError::TooMany(entry));
    let long = NewCredential { fits_header: false, ..token("token") };
    let not_for_headers = VaultError::NotForHeaders { binding: name("b"), credential: name("token") };
    assert_eq!(refused(changes(None, Vec::new(), vec![long], &[])), not_for_headers);
}

#[test]
fn debug_form_has_no_value() {
    let vault = vault_of_all_paths();
    assert!(!format!("{vault:?} {:?}", token("token")).contains(CANARY));
}

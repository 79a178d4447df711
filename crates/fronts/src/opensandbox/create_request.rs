//! Converts the body of a create request into the core's request, or reports what is invalid.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::{
    Bytes, Entrypoint, IsolatedSessions, MilliCpus, NetworkAccess, NetworkPolicy, OnDeath, PolicyMode,
    ResourceLimits, SandboxSettings, SandboxSpec, SnapshotId,
};
use http::StatusCode;
use service::{CreateSandboxRequest, DefaultedPart, ImageSource, LimitName, RegistryCredentials};

use super::guest_settings;
use super::hooks;
use super::labels;
use super::policy::NetworkPolicyBody;
use super::problem::Problem;
use super::types::{CreateSandboxBody, PlatformBody, SandboxNotes};
use super::volumes;
use crate::kit::lines::LineDialect;

/// The origin stored with this front's sandboxes.
pub(super) const ORIGIN: &str = "opensandbox";

const MIN_TIMEOUT_SECONDS: i64 = 60;
/// Extensions with this prefix are stored and echoed in responses.
const ECHOED_PREFIX: &str = "opensandbox.extensions.";
/// The variable that names the env file, and its default path.
const ENV_FILE_VARIABLE: &str = "EXECD_ENVS";
const DEFAULT_ENV_FILE: &str = "/opt/opensandbox/.env";
/// The variable that contains the sandbox's own id.
const ID_VARIABLE: &str = "OPENSANDBOX_ID";
/// The variables with the egress prefix that a client may set.
const EGRESS_VARIABLES: [&str; 11] = [
    "LOG_LEVEL",
    "DNS_UPSTREAM_TIMEOUT",
    "MITMPROXY_SSL_INSECURE",
    "MITMPROXY_TRANSPARENT",
    "MITMPROXY_EXTRA_PORTS",
    "DENY_WEBHOOK",
    "METRICS_EXTRA_ATTRS",
    "CREDENTIAL_VAULT_REQUIRE_TLS",
    "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
    "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
    "POLICY_FILE",
];

/// The image that clients send when their user names none, since the protocol wants one.
const DEFAULT_IMAGE: &str = "host";
/// The limits that the official SDKs send when their user names none.
const SDK_CPUS: MilliCpus = MilliCpus(1000);
const SDK_MEMORY: Bytes = Bytes(2 << 30);

/// A parsed create request; with a name, an existing sandbox may be found instead.
#[derive(Debug)]
pub(super) struct CreateRequest {
    pub(super) create: CreateSandboxRequest,
    pub(super) name: Option<String>,
}

/// What decides the network of a request besides the request itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct NetworkDefaults {
    /// The network of a request that names none.
    pub(super) access: NetworkAccess,
    /// Whether a request may have a filtered network here.
    pub(super) offers_filter: bool,
}

pub(super) fn parse_create_body(
    body: CreateSandboxBody,
    defaults: NetworkDefaults,
) -> Result<CreateRequest, Problem> {
    refuse_unsupported(&body)?;
    let extensions = CreateExtensions::parse(body.extensions.clone().unwrap_or_default())?;
    let source = parse_source(&body, extensions.pool)?;
    let is_named = matches!(source, ImageSource::Named { .. });
    let timeout = parse_timeout(body.timeout, extensions.never_expires)?;
    let mut resources = parse_resources(body.resource_limits, matches!(source, ImageSource::Pool(_)))?;
    let labels = body.metadata.unwrap_or_default();
    labels::check_labels(&labels)?;
    resources.disk = extensions.disk;
    resources.pids = extensions.pids;
    let notes = SandboxNotes {
        extensions: extensions.echoed,
        platform: check_platform(body.platform)?,
        lines: extensions.lines.map(|lines| lines.letter().to_owned()),
        renew_on_access: extensions.renew_on_access,
        secure_access: body.secure_access.unwrap_or(false),
    };
    let mut env = parse_environment(body.env.unwrap_or_default())?;
    let NetworkRequest { network, policy, source: network_source } =
        parse_network_policy(body.network_policy, extensions.network, defaults)?;
    let mut defaulted = vec![DefaultedPart::Guest];
    let is_default = matches!(&source, ImageSource::Named { name, .. } if name == DEFAULT_IMAGE);
    defaulted.extend(is_default.then_some(DefaultedPart::Image));
    defaulted.extend((network_source == ValueSource::Default).then_some(DefaultedPart::Network));
    defaulted.extend(
        (!env.contains_key(ENV_FILE_VARIABLE)).then_some(DefaultedPart::EnvironmentFile(ENV_FILE_VARIABLE)),
    );
    let env_file =
        env.entry(ENV_FILE_VARIABLE.to_owned()).or_insert_with(|| DEFAULT_ENV_FILE.to_owned()).clone();
    let spec = SandboxSpec {
        entrypoint: match extensions.entrypoint {
            EntrypointSource::Named => parse_entrypoint(body.entrypoint, !is_named)?,
            EntrypointSource::Image => Entrypoint::FromImage,
        },
        resources,
        network,
        policy: policy.map(Arc::new),
        mounts: volumes::parse_volumes(body.volumes.unwrap_or_default())?,
        env,
        env_file: Some(env_file).filter(|path| !path.is_empty()),
        id_variable: Some(ID_VARIABLE.to_owned()),
        isolated_sessions: extensions.isolated_sessions,
        hooks: hooks::parse_hooks(body.lifecycle)?,
        guest: guest_settings(),
        on_death: extensions.on_death,
        ..SandboxSpec::with_defaults()
    };
    let notes = serde_json::to_vec(&notes).expect("notes are maps of strings and numbers");
    let idle_timeout = extensions.idle_timeout;
    let create = CreateSandboxRequest {
        origin: ORIGIN,
        source,
        spec,
        labels,
        notes,
        timeout,
        idle_timeout,
        defaulted,
        merge_notes,
    };
    Ok(CreateRequest { create, name: extensions.name })
}

/// Treats limits that are exactly the defaults of the official SDKs as absent, if the sandbox may run
/// without them. The SDKs always send limits, so on a host that cannot enforce any they could
/// otherwise create no sandbox at all. What is not enforced is still reported with the sandbox.
pub(super) fn drop_sdk_limits(resources: &mut ResourceLimits, may_lack: impl Fn(LimitName) -> bool) {
    if resources.cpus == Some(SDK_CPUS) && resources.memory == Some(SDK_MEMORY) {
        resources.cpus = resources.cpus.filter(|_| !may_lack(LimitName::Cpus));
        resources.memory = resources.memory.filter(|_| !may_lack(LimitName::Memory));
    }
}

/// Inherits the notes of a snapshot, or of the dead sandbox that is replaced, where the request does not override
/// them. Clients always send `secureAccess`, so a `false` does not open the ports of a fork or a replacement.
fn merge_notes(own: &[u8], settings: &SandboxSettings) -> Vec<u8> {
    let own: SandboxNotes = serde_json::from_slice(own).unwrap_or_default();
    let recorded = SandboxNotes::from_settings(settings);
    let notes = SandboxNotes {
        extensions: own.extensions,
        platform: own.platform.or(recorded.platform),
        lines: own.lines.or(recorded.lines),
        renew_on_access: own.renew_on_access.or(recorded.renew_on_access),
        secure_access: own.secure_access || recorded.secure_access,
    };
    serde_json::to_vec(&notes).expect("notes are maps of strings and numbers")
}

/// Whether a value comes from the request or is the server's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueSource {
    Named,
    Default,
}

/// The network that a request asks for.
struct NetworkRequest {
    network: NetworkAccess,
    policy: Option<NetworkPolicy>,
    source: ValueSource,
}

/// Combines the policy of a request with the network that it names. A policy that allows everything selects no network,
/// since it restricts none; every other needs a filter. One that denies everything can be changed later, so it gets a
/// filter too where there is one, and is `off` elsewhere.
fn parse_network_policy(
    body: Option<NetworkPolicyBody>,
    named: Option<NetworkAccess>,
    defaults: NetworkDefaults,
) -> Result<NetworkRequest, Problem> {
    let source = if named.is_some() { ValueSource::Named } else { ValueSource::Default };
    let network = named.unwrap_or(defaults.access);
    let Some(body) = body else { return Ok(NetworkRequest { network, policy: None, source }) };
    let policy = body.parse().map_err(|error| Problem::invalid(format!("`networkPolicy`: {error}")))?;
    let with_policy =
        |network| NetworkRequest { network, policy: Some(policy.clone()), source: ValueSource::Named };
    match (policy.mode(), named) {
        (PolicyMode::AllowAll, _) if network == NetworkAccess::Filtered => Ok(with_policy(network)),
        (PolicyMode::AllowAll, _) => Ok(NetworkRequest { network, policy: None, source }),
        (_, Some(NetworkAccess::On)) | (PolicyMode::Enforcing, Some(NetworkAccess::Off)) => {
            Err(Problem::invalid("`networkPolicy` contradicts the extension `coracle.network`"))
        }
        (PolicyMode::DenyAll, Some(NetworkAccess::Off)) => Ok(with_policy(NetworkAccess::Off)),
        (PolicyMode::DenyAll, None | Some(NetworkAccess::Auto)) if !defaults.offers_filter => {
            Ok(with_policy(NetworkAccess::Off))
        }
        (PolicyMode::DenyAll | PolicyMode::Enforcing, _) => Ok(with_policy(NetworkAccess::Filtered)),
    }
}

/// Refuses unsupported features by name rather than ignoring them.
fn refuse_unsupported(body: &CreateSandboxBody) -> Result<(), Problem> {
    if body.template_id.is_some() {
        let message = "templates are not offered by this server";
        return Err(Problem::new(StatusCode::BAD_REQUEST, "FSB::API_NOT_SUPPORTED", message));
    }
    if body.credential_proxy.as_ref().is_some_and(|proxy| proxy.enabled == Some(true)) {
        return Err(Problem::unsupported("the credential proxy is not available yet"));
    }
    Ok(())
}

/// Parses where the files come from. A pool decides the image, even if the request names one.
fn parse_source(body: &CreateSandboxBody, pool: Option<String>) -> Result<ImageSource, Problem> {
    match (&body.image, body.snapshot_id.as_deref(), pool) {
        (Some(_), Some(_), _) | (None, Some(_), Some(_)) => {
            Err(Problem::invalid("`image` and `snapshotId` are mutually exclusive"))
        }
        (_, None, Some(pool)) => Ok(ImageSource::Pool(pool)),
        (_, None, None) => parse_image(body),
        (None, Some(id), None) => {
            let snapshot = SnapshotId::parse(id).ok().ok_or_else(|| Problem::no_snapshot(id))?;
            Ok(ImageSource::Snapshot(snapshot))
        }
    }
}

fn parse_image(body: &CreateSandboxBody) -> Result<ImageSource, Problem> {
    let image = body.image.as_ref().ok_or_else(|| Problem::invalid("`image` is missing"))?;
    if image.uri.trim().is_empty() || image.uri.len() > 512 {
        return Err(Problem::invalid("`image.uri` is empty or longer than 512 bytes"));
    }
    let credentials = image
        .auth
        .as_ref()
        .map(|auth| RegistryCredentials { username: auth.username.clone(), password: auth.password.clone() });
    Ok(ImageSource::Named { name: image.uri.clone(), credentials })
}

/// Parses the timeout. Zero means never, as in the core.
fn parse_timeout(seconds: Option<i64>, never: bool) -> Result<Option<Duration>, Problem> {
    match seconds {
        Some(_) if never => {
            Err(Problem::invalid("`timeout` and the extension `coracle.timeout` are mutually exclusive"))
        }
        None => Ok(never.then_some(Duration::ZERO)),
        Some(seconds) if seconds >= MIN_TIMEOUT_SECONDS => {
            Ok(Some(Duration::from_secs(seconds.unsigned_abs())))
        }
        Some(_) => Err(Problem::invalid(format!("`timeout` must be at least {MIN_TIMEOUT_SECONDS} seconds"))),
    }
}

/// Parses the limits, which only a request with a pool may leave out.
fn parse_resources(
    limits: Option<BTreeMap<String, Option<String>>>,
    optional: bool,
) -> Result<ResourceLimits, Problem> {
    let limits = match limits {
        Some(limits) => limits,
        None if optional => BTreeMap::new(),
        None => return Err(Problem::invalid("`resourceLimits` is missing")),
    };
    let limit = |name: &str| limits.get(name).and_then(Option::as_deref);
    let wrong = |name: &str, error: domain::quantity::QuantityError| {
        Problem::invalid(format!("`resourceLimits.{name}`: {error}"))
    };
    if limit("gpu").is_some() {
        return Err(Problem::unsupported("`resourceLimits.gpu`: this server does not support GPUs"));
    }
    Ok(ResourceLimits {
        memory: limit("memory").map(Bytes::parse).transpose().map_err(|e| wrong("memory", e))?,
        cpus: limit("cpu").map(MilliCpus::parse).transpose().map_err(|e| wrong("cpu", e))?,
        ..ResourceLimits::default()
    })
}

/// Parses the entrypoint, which only a sandbox with a snapshot or a pool may leave out.
fn parse_entrypoint(words: Option<Vec<String>>, optional: bool) -> Result<Entrypoint, Problem> {
    match words {
        None if optional => Ok(Entrypoint::None),
        Some(words) if words.iter().any(|word| word.contains('\0')) => {
            Err(Problem::invalid("`entrypoint` contains a NUL byte"))
        }
        Some(words) if words.first().is_some_and(|word| !word.is_empty()) => {
            Ok(Entrypoint::from_words(words))
        }
        _ => Err(Problem::invalid("`entrypoint` must have at least one element")),
    }
}

fn parse_environment(given: BTreeMap<String, Option<String>>) -> Result<BTreeMap<String, String>, Problem> {
    let given = given.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let mut env: BTreeMap<String, String> = given.collect();
    check_environment(&env).map_err(Problem::invalid)?;
    for name in env.keys() {
        let egress = name.strip_prefix("OPENSANDBOX_EGRESS_");
        if egress.is_some_and(|rest| !EGRESS_VARIABLES.contains(&rest)) || name == "OPENSANDBOX_LIFECYCLE" {
            return Err(Problem::invalid(format!("`env`: the name `{name}` is reserved")));
        }
    }
    // Variables for the egress filter are not passed to the sandbox.
    env.retain(|name, _| !name.starts_with("OPENSANDBOX_EGRESS_"));
    Ok(env)
}

/// Checks that names and values can be passed to the kernel.
pub(super) fn check_environment(env: &BTreeMap<String, String>) -> Result<(), String> {
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(format!("`{}` is not a valid variable name", name.escape_debug()));
        }
        if value.contains('\0') {
            return Err(format!("the value of `{name}` contains a NUL byte"));
        }
    }
    Ok(())
}

fn check_platform(wanted: Option<PlatformBody>) -> Result<Option<PlatformBody>, Problem> {
    let Some(platform) = wanted else { return Ok(None) };
    let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let other_os = platform.os.as_deref().is_some_and(|os| os != "linux");
    let other_arch = platform.arch.as_deref().is_some_and(|arch| arch != here);
    if other_os || other_arch {
        return Err(Problem::unsupported(format!("this server runs sandboxes on linux/{here} only")));
    }
    Ok(Some(platform))
}

/// The extensions that this server knows.
#[derive(Debug, Default, PartialEq, Eq)]
struct CreateExtensions {
    echoed: BTreeMap<String, String>,
    lines: Option<LineDialect>,
    never_expires: bool,
    idle_timeout: Option<Duration>,
    disk: Option<Bytes>,
    pids: Option<u32>,
    renew_on_access: Option<u64>,
    name: Option<String>,
    pool: Option<String>,
    network: Option<NetworkAccess>,
    entrypoint: EntrypointSource,
    isolated_sessions: IsolatedSessions,
    on_death: Option<OnDeath>,
}

/// Which main process is started. The reference requires one in every request, so a client that wants
/// the image's own says so in an extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EntrypointSource {
    #[default]
    Named,
    Image,
}

impl CreateExtensions {
    /// Parses the known extensions; unknown ones are accepted and ignored, as in the reference.
    fn parse(given: BTreeMap<String, Option<String>>) -> Result<Self, Problem> {
        let mut known = Self::default();
        for (name, value) in given.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            known
                .set_extension(&name, &value)
                .map_err(|ExtensionError(why)| Problem::invalid(format!("extension `{name}`: {why}")))?;
            if name.starts_with(ECHOED_PREFIX) {
                known.echoed.insert(name, value);
            }
        }
        Ok(known)
    }

    fn set_extension(&mut self, name: &str, value: &str) -> Result<(), ExtensionError> {
        match name {
            "coracle.lines" => {
                self.lines = Some(LineDialect::parse(value).map_err(|e| ExtensionError(e.to_string()))?)
            }
            "coracle.disk" => {
                self.disk = Some(Bytes::parse(value).map_err(|e| ExtensionError(e.to_string()))?)
            }
            "coracle.pids" => {
                let count = parse_number(value, 1..=u64::from(u32::MAX))?;
                self.pids = Some(u32::try_from(count).expect("the range ends at u32::MAX"));
            }
            "coracle.timeout" if value == "never" => self.never_expires = true,
            "coracle.timeout" => {
                return Err(ExtensionError(format!(
                    "`{value}` is not `never`; use `timeout` for a duration"
                )));
            }
            "coracle.idle-timeout" if value == "never" => self.idle_timeout = Some(Duration::ZERO),
            "coracle.idle-timeout" => {
                self.idle_timeout = Some(Duration::from_secs(parse_number(value, 1..=u64::MAX)?))
            }
            "coracle.entrypoint" if value == "image" => self.entrypoint = EntrypointSource::Image,
            "coracle.entrypoint" => return Err(ExtensionError(format!("`{value}` is not `image`"))),
            "coracle.on-death" => {
                let wrong = || ExtensionError(format!("`{value}` is neither `restart` nor `replace`"));
                self.on_death = Some(OnDeath::parse(value).ok_or_else(wrong)?);
            }
            "coracle.key" => self.name = Some(value.to_owned()),
            "coracle.network" => self.network = Some(parse_network(value)?),
            "access.renew.extend.seconds" => self.renew_on_access = Some(parse_number(value, 300..=86_400)?),
            "poolRef" => self.pool = Some(value.trim().to_owned()).filter(|name| !name.is_empty()),
            "bootstrap.execd.isolation" if value == "enable" => self.isolated_sessions = IsolatedSessions::On,
            _ => {}
        }
        Ok(())
    }
}

/// Why the value of an extension is invalid.
struct ExtensionError(String);

fn parse_number(text: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, ExtensionError> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| {
        let most = if *range.end() == u64::MAX { " up".to_owned() } else { format!(" to {}", range.end()) };
        ExtensionError(format!("`{text}` is not a number from {}{most}", range.start()))
    })
}

fn parse_network(value: &str) -> Result<NetworkAccess, ExtensionError> {
    match value {
        "off" => Ok(NetworkAccess::Off),
        "on" => Ok(NetworkAccess::On),
        "auto" => Ok(NetworkAccess::Auto),
        "filtered" => Ok(NetworkAccess::Filtered),
        _ => Err(ExtensionError(format!("`{value}` is not one of `auto`, `off`, `on`, `filtered`"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn create(change: Value) -> Result<CreateSandboxRequest, Problem> {
        create_by_default(change, NetworkAccess::Off)
    }

    fn create_by_default(change: Value, network: NetworkAccess) -> Result<CreateSandboxRequest, Problem> {
        create_with(change, NetworkDefaults { access: network, offers_filter: true })
    }

    fn create_with(change: Value, defaults: NetworkDefaults) -> Result<CreateSandboxRequest, Problem> {
        let mut body = json!({
            "image": {"uri": "python:3.12"}, "timeout": 600, "secureAccess": false,
            "resourceLimits": {"cpu": "1", "memory": "2Gi"}, "entrypoint": ["tail", "-f", "/dev/null"],
        });
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        parse_create_body(serde_json::from_value(body).unwrap(), defaults).map(|request| request.create)
    }

    /// Builds a request with one periodic hook, with some fields replaced.
    fn hooked(change: Value) -> Value {
        let mut hook = json!({"name": "n", "schedule": "@hourly", "command": ["true"]});
        for (name, value) in change.as_object().unwrap() {
            hook[name] = value.clone();
        }
        json!({"lifecycle": {"periodic": [hook]}})
    }

    #[test]
    fn hooks_are_parsed_and_unknown_fields_refused() {
        let spec = create(hooked(json!({"timeoutSeconds": 5}))).unwrap().spec;
        assert_eq!(spec.hooks.periodic[0].hook.timeout, Duration::from_secs(5));
        let before = json!({"lifecycle": {"preStart": {"command": ["a"], "timeoutSeconds": 10800}}});
        let before = create(before).unwrap().spec.hooks.before.unwrap();
        assert_eq!(before.timeout, Duration::from_secs(10_800));
        for wrong in [json!({"postStop": {}}), json!({"preStart": {"command": ["a"], "env": {}}})] {
            assert!(
                serde_json::from_value::<super::super::types::LifecycleBody>(wrong.clone()).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn requests_of_official_clients_are_accepted() {
        let request = create(json!({"env": {}, "metadata": {}, "extensions": {}, "unknown": 1})).unwrap();
        assert_eq!(request.timeout, Some(Duration::from_secs(600)));
        assert_eq!(request.spec.resources.memory, Some(Bytes(2 << 30)));
        let nulls =
            ["snapshotId", "platform", "timeout", "env", "metadata", "lifecycle", "networkPolicy", "volumes"];
        let nulls = nulls.into_iter().map(|name| (name.to_owned(), Value::Null));
        assert_eq!(create(Value::Object(nulls.collect())).unwrap().timeout, None);
    }

    #[test]
    fn sdk_default_limits_are_dropped_only_where_a_sandbox_may_lack_them() {
        let sent = |limits: Value| create(json!({"resourceLimits": limits})).unwrap().spec.resources;
        let defaults = || sent(json!({"cpu": "1", "memory": "2Gi"}));
        let dropped = |mut resources: ResourceLimits, lacking: &[LimitName]| {
            drop_sdk_limits(&mut resources, |limit| lacking.contains(&limit));
            resources
        };
        assert_eq!(dropped(defaults(), &[]), defaults());
        assert_eq!(dropped(defaults(), &[LimitName::Cpus, LimitName::Memory]), ResourceLimits::default());
        let memory = ResourceLimits { memory: Some(Bytes(2 << 30)), ..ResourceLimits::default() };
        assert_eq!(dropped(defaults(), &[LimitName::Cpus, LimitName::Disk]), memory);
        for named in [
            json!({"cpu": "1", "memory": "1Gi"}),
            json!({"cpu": "2", "memory": "2Gi"}),
            json!({"memory": "2Gi"}),
        ] {
            assert_eq!(dropped(sent(named.clone()), &[LimitName::Cpus, LimitName::Memory]), sent(named));
        }
    }

    #[test]
    fn invalid_or_unsupported_fields_are_refused() {
        for (change, code) in [
            (json!({"timeout": 59}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"entrypoint": []}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"entrypoint": null}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"image": null}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"resourceLimits": null}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"resourceLimits": {"memory": "lots"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"resourceLimits": {"gpu": "1"}}), "SANDBOX::API_NOT_SUPPORTED"),
            (json!({"metadata": {"opensandbox.io/x": "y"}}), "SANDBOX::INVALID_METADATA_LABEL"),
            (json!({"env": {"A=B": "c"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"env": {"OPENSANDBOX_EGRESS_X": "c"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"volumes": [{"name": "v", "mountPath": "/v"}]}), "VOLUME::INVALID_BACKEND"),
            (
                json!({"networkPolicy": {"egress": [{"action": "allow", "target": "a/b"}]}}),
                "SANDBOX::INVALID_PARAMETER",
            ),
            (json!({"networkPolicy": {"defaultAction": "ask"}}), "SANDBOX::INVALID_PARAMETER"),
            (
                json!({"networkPolicy": {}, "extensions": {"coracle.network": "on"}}),
                "SANDBOX::INVALID_PARAMETER",
            ),
            (json!({"platform": {"os": "windows"}}), "SANDBOX::API_NOT_SUPPORTED"),
            (json!({"snapshotId": "s"}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"lifecycle": {"preStart": {"command": []}}}), "SANDBOX::INVALID_PARAMETER"),
            (hooked(json!({"schedule": "often"})), "SANDBOX::INVALID_PARAMETER"),
            (hooked(json!({"timeoutSeconds": 301})), "SANDBOX::INVALID_PARAMETER"),
            (json!({"snapshotId": "s", "image": null}), "SNAPSHOT::NOT_FOUND"),
            (json!({"templateId": "t"}), "FSB::API_NOT_SUPPORTED"),
            (json!({"extensions": {"coracle.lines": "X"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"extensions": {"coracle.pids": "0"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"extensions": {"coracle.timeout": "never"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"timeout": null, "extensions": {"coracle.timeout": "9"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"extensions": {"coracle.network": "open"}}), "SANDBOX::INVALID_PARAMETER"),
            (json!({"extensions": {"access.renew.extend.seconds": "299"}}), "SANDBOX::INVALID_PARAMETER"),
        ] {
            assert_eq!(create(change.clone()).unwrap_err().code, code, "{change}");
        }
    }

    #[test]
    fn request_with_a_pool_may_omit_the_rest() {
        let pooled = |pool: &str, limits: Value| {
            create(
                json!({"image": null, "entrypoint": null, "resourceLimits": limits, "extensions": {"poolRef": pool}}),
            )
        };
        let request = pooled("warm", Value::Null).unwrap();
        assert_eq!(request.source, ImageSource::Pool("warm".to_owned()));
        assert_eq!(request.spec.entrypoint, Entrypoint::None);
        assert_eq!(request.spec.resources, ResourceLimits::default());
        let limited = pooled("warm", json!({"memory": "64Mi"})).unwrap();
        assert_eq!(limited.spec.resources.memory, Some(Bytes::from_mib(64)));
        assert_eq!(pooled(" ", json!({})).unwrap_err().code, "SANDBOX::INVALID_PARAMETER");
    }

    #[test]
    fn request_with_a_snapshot_needs_no_entrypoint() {
        let id = "ffffffff-ffff-4fff-bfff-ffffffffffff";
        let request = create(json!({"image": null, "entrypoint": null, "snapshotId": id})).unwrap();
        assert_eq!(request.source, ImageSource::Snapshot(SnapshotId::parse(id).unwrap()));
        assert_eq!(request.spec.entrypoint, Entrypoint::None);
    }

    #[test]
    fn defaulted_fields_are_marked_for_the_snapshot() {
        use DefaultedPart::{EnvironmentFile, Guest, Image, Network as Reach};
        let open = |change: Value| create(change).unwrap().defaulted;
        assert_eq!(open(json!({})), [Guest, Reach, EnvironmentFile(ENV_FILE_VARIABLE)]);
        assert_eq!(open(json!({"networkPolicy": {"defaultAction": "allow"}})).len(), 3);
        assert_eq!(open(json!({"networkPolicy": {}})), [Guest, EnvironmentFile(ENV_FILE_VARIABLE)]);
        let named = json!({"env": {"EXECD_ENVS": "/a"}, "extensions": {"coracle.network": "on"}});
        assert_eq!(open(named), [Guest]);
        let host = open(json!({"image": {"uri": "host"}}));
        assert_eq!(host, [Guest, Image, Reach, EnvironmentFile(ENV_FILE_VARIABLE)]);
        let never = json!({"timeout": null, "extensions": {"coracle.timeout": "never", "coracle.idle-timeout": "never"}});
        let never = create(never).unwrap();
        assert_eq!((never.timeout, never.idle_timeout), (Some(Duration::ZERO), Some(Duration::ZERO)));
    }

    #[test]
    fn secure_access_and_renewal_are_inherited_from_this_fronts_notes() {
        let parent = json!({"secureAccess": true, "extensions": {
            "access.renew.extend.seconds": "300", "opensandbox.extensions.team": "x",
        }});
        let parent = create(parent).unwrap();
        let mut settings = SandboxSettings {
            network: NetworkAccess::Off,
            policy: None,
            resources: ResourceLimits::default(),
            timeout: None,
            idle_timeout: None,
            on_death: None,
            env: BTreeMap::new(),
            env_file: None,
            guest: guest_settings(),
            labels: BTreeMap::new(),
            origin: ORIGIN.to_owned(),
            notes: parent.notes,
        };
        let inherited = |settings: &SandboxSettings| {
            let fork = create(json!({"secureAccess": false})).unwrap();
            let notes = (fork.merge_notes)(&fork.notes, settings);
            let notes: SandboxNotes = serde_json::from_slice(&notes).unwrap();
            (notes.secure_access, notes.renew_on_access, notes.extensions.len())
        };
        assert_eq!(inherited(&settings), (true, Some(300), 0));
        settings.origin = "another".to_owned();
        assert_eq!(inherited(&settings), (false, None, 0));
    }

    /// Returns the network and the mode of its policy; `None` if the request is refused.
    fn network_of(
        policy: Value,
        named: Option<&str>,
        default: NetworkAccess,
        offers_filter: bool,
    ) -> Option<(NetworkAccess, Option<&'static str>)> {
        let extensions = named.map(|name| json!({ "coracle.network": name }));
        let change = json!({"networkPolicy": policy, "extensions": extensions});
        let request = create_with(change, NetworkDefaults { access: default, offers_filter }).ok()?;
        let spec = request.spec;
        let has_meaning = spec.network == Filtered;
        Some((spec.network, spec.policy.filter(|_| has_meaning).map(|policy| policy.mode().name())))
    }

    use NetworkAccess::{Auto, Filtered, Off, On};

    #[test]
    fn policy_that_restricts_needs_a_filter() {
        let deny = || json!({"defaultAction": "deny", "egress": []});
        let rules = || json!({"egress": [{"action": "allow", "target": "a.org"}]});
        let denied = Some((Filtered, Some("deny_all")));
        let enforced = Some((Filtered, Some("enforcing")));
        for (policy, named, expected) in [
            (deny(), None, denied),
            (json!({}), None, denied),
            (deny(), Some("auto"), denied),
            (deny(), Some("filtered"), denied),
            (deny(), Some("off"), Some((Off, None))),
            (deny(), Some("on"), None),
            (rules(), None, enforced),
            (rules(), Some("auto"), enforced),
            (rules(), Some("filtered"), enforced),
            (rules(), Some("off"), None),
            (rules(), Some("on"), None),
            (Value::Null, Some("filtered"), Some((Filtered, None))),
        ] {
            assert_eq!(network_of(policy.clone(), named, Auto, true), expected, "{policy} and {named:?}");
        }
        // A filter that does not exist is refused later, with the reason.
        assert_eq!(network_of(rules(), None, Auto, false), enforced);
        assert_eq!(network_of(deny(), None, Auto, false), Some((Off, None)));
    }

    #[test]
    fn policy_that_allows_everything_selects_no_network() {
        let allow = || json!({"defaultAction": "allow", "egress": null});
        assert_eq!(network_of(allow(), None, Auto, true), Some((Auto, None)));
        assert_eq!(network_of(allow(), Some("on"), Auto, true), Some((On, None)));
        assert_eq!(network_of(allow(), Some("filtered"), Auto, true), Some((Filtered, Some("allow_all"))));
        assert_eq!(network_of(allow(), None, Filtered, true), Some((Filtered, Some("allow_all"))));
        assert_eq!(network_of(Value::Null, None, Filtered, true), Some((Filtered, None)));
        assert_eq!(network_of(Value::Null, None, Auto, true), Some((Auto, None)));
    }

    #[test]
    fn known_extensions_reach_the_core_and_prefixed_ones_are_echoed() {
        let request = create(json!({"extensions": {
            "coracle.lines": "S", "coracle.disk": "100Mi", "coracle.pids": "64", "coracle.idle-timeout": "90",
            "coracle.network": "off", "opensandbox.extensions.team": "x", "unknown": "y",
            "access.renew.extend.seconds": "300",
        }}));
        let request = request.unwrap();
        assert_eq!(request.spec.resources.disk, Some(Bytes::from_mib(100)));
        assert_eq!(request.spec.resources.pids, Some(64));
        assert_eq!(request.idle_timeout, Some(Duration::from_secs(90)));
        let notes: SandboxNotes = serde_json::from_slice(&request.notes).unwrap();
        assert_eq!(notes.lines.as_deref(), Some("S"));
        assert_eq!(notes.renew_on_access, Some(300));
        assert_eq!(notes.extensions.into_keys().collect::<Vec<_>>(), ["opensandbox.extensions.team"]);
    }
}

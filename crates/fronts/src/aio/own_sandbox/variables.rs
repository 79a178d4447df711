//! The variables that configure AIO's image, and what they mean here.
//!
//! Variables of the sandbox keep their names and are visible inside, as in a container. Credentials of the server become
//! settings and are not.

use std::collections::BTreeMap;

use serde_json::json;

use crate::aio::commands::session::{MAX_BASH_SESSIONS, MAX_BASH_SESSIONS_VARIABLE};
use crate::aio::guest::USER_NAME;
use crate::front_sandboxes::{FrontSandboxError, RootAccess, RootVariables};
use crate::front_settings::SettingValues;

pub(super) const WORKSPACE: &str = "WORKSPACE";
pub(super) const USER_UID: &str = "USER_UID";
pub(super) const USER_GID: &str = "USER_GID";
pub(super) const MAX_SHELL_SESSIONS: &str = "MAX_SHELL_SESSIONS";
/// In the order in which they run.
pub(super) const HOOKS: [&str; 3] = ["RUN_HOOK_INIT", "RUN_HOOK_PRE_SERVICES", "RUN_HOOK_POST_READY"];

const API_KEY: &str = "SANDBOX_API_KEY";
const JWT_PUBLIC_KEY: &str = "JWT_PUBLIC_KEY";
const TICKET_TTL: &str = "TICKET_TTL_SECONDS";
const AUTH_TOKEN: &str = "AUTH_TOKEN";
const GITHUB_TOKEN: &str = "GITHUB_TOKEN";

/// Variables that describe the sandbox. Some are read here, others by programs inside.
const SANDBOX_NAMES: [&str; 14] = [
    WORKSPACE,
    USER_UID,
    USER_GID,
    "TZ",
    MAX_SHELL_SESSIONS,
    "SHELL_SESSION_TIMEOUT",
    MAX_BASH_SESSIONS_VARIABLE,
    "BASH_SESSION_TIMEOUT",
    HOOKS[0],
    HOOKS[1],
    HOOKS[2],
    "PIP_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "NPM_CONFIG_REGISTRY",
];

/// Variables that hold a positive number.
const NUMBERS: [&str; 6] = [
    USER_UID,
    USER_GID,
    MAX_SHELL_SESSIONS,
    "SHELL_SESSION_TIMEOUT",
    MAX_BASH_SESSIONS_VARIABLE,
    "BASH_SESSION_TIMEOUT",
];

/// Settings of the server, which no sandbox gets.
const SERVER_NAMES: [&str; 4] = [API_KEY, JWT_PUBLIC_KEY, TICKET_TTL, AUTH_TOKEN];

/// Variables of AIO's image without an effect here, and why.
const WITHOUT_EFFECT: [(&str, &str); 21] = [
    (AUTH_TOKEN, "use SANDBOX_API_KEY"),
    ("AIO_SKILLS_PATH", "register skills through the API"),
    ("PUBLIC_PORT", "use --port"),
    ("SANDBOX_SRV_PORT", "there is no second server"),
    ("SHELL_POOL_SIZE", "sessions need no pool"),
    ("WAIT_PORTS", "no services start with the sandbox"),
    ("PROXY_SERVER", "no egress proxy"),
    ("PROXY_EXCLUDE", "no egress proxy"),
    ("PROXY_INCLUDE", "no egress proxy"),
    ("PROXY_MAP", "no egress proxy"),
    ("DNS_OVER_HTTPS_TEMPLATES", "no browser"),
    ("HOMEPAGE", "no browser"),
    ("BROWSER_LANG", "no browser"),
    ("CHROME_UI_LANG", "no browser"),
    ("BROWSER_USER_AGENT", "no browser"),
    ("BROWSER_EXTRA_ARGS", "no browser"),
    ("BROWSER_ALLOW_FILE_SELECTION_DIALOGS", "no browser"),
    ("DISPLAY_WIDTH", "no display"),
    ("DISPLAY_HEIGHT", "no display"),
    ("CODE_SERVER_PORT", "no code-server"),
    ("DISABLE_JUPYTER", "no JupyterLab"),
];

/// The variable with the name of the user whom commands run as in AIO's image. It is accepted only where it is given by
/// name: in the environment of every caller it is set already, to the caller's own user, which says nothing about the
/// sandbox.
const USER: &str = "USER";

/// The only names that are read from the environment of the caller: all that AIO's image knows, except [`USER`]. The
/// rest of the environment belongs to the user's shell and must not become visible inside.
pub(super) static ENVIRONMENT_NAMES: &[&str] = &all_names();

const NAME_COUNT: usize = SANDBOX_NAMES.len() + 3 + WITHOUT_EFFECT.len() + 2;

const fn all_names() -> [&'static str; NAME_COUNT] {
    let mut all = [""; NAME_COUNT];
    let (mut count, mut index) = (0, 0);
    while index < SANDBOX_NAMES.len() {
        all[count] = SANDBOX_NAMES[index];
        (count, index) = (count + 1, index + 1);
    }
    index = 0;
    while index < WITHOUT_EFFECT.len() {
        all[count] = WITHOUT_EFFECT[index].0;
        (count, index) = (count + 1, index + 1);
    }
    let others = [API_KEY, JWT_PUBLIC_KEY, TICKET_TTL, GITHUB_TOKEN, "DISABLE_CODE_SERVER"];
    index = 0;
    while index < others.len() {
        all[count] = others[index];
        (count, index) = (count + 1, index + 1);
    }
    all
}

/// Decides about the variables of a server of one sandbox. Those that were given by name override the environment.
pub(super) fn read_variables(
    mut environment: BTreeMap<String, String>,
    given: BTreeMap<String, String>,
) -> Result<RootVariables, FrontSandboxError> {
    if given.contains_key(AUTH_TOKEN) {
        return Err(FrontSandboxError {
            message: format!("`{AUTH_TOKEN}` is not supported, so it would protect nothing"),
            hint: Some("set SANDBOX_API_KEY instead"),
        });
    }
    environment.retain(|name, _| !given.contains_key(name));
    // A lookup of a secret that failed often yields an empty value, and without the credential everything would be open.
    let is_empty =
        |name: &&str| [&environment, &given].iter().any(|all| all.get(*name).is_some_and(String::is_empty));
    if let Some(name) = [API_KEY, JWT_PUBLIC_KEY].iter().find(|name| is_empty(name)) {
        return Err(FrontSandboxError {
            message: format!("`{name}` is empty, so it would protect nothing"),
            hint: Some("unset the variable, or give it a value"),
        });
    }
    // Other variables that are empty in the environment count as unset.
    environment.retain(|_, value| !value.is_empty());
    let mut ignored = Vec::new();
    // The environment is that of the user. Its secrets are for the sandbox only if the user says so.
    environment.retain(|name, value| {
        let is_secret = name == GITHUB_TOKEN || (is_index(name) && has_credentials(value));
        if is_secret {
            ignored.push((name.clone(), "a secret, which only --env passes on"));
        }
        !is_secret
    });
    let mut env: BTreeMap<_, _> = environment.into_iter().chain(given).collect();
    for (name, reason) in WITHOUT_EFFECT.into_iter().chain([("DISABLE_CODE_SERVER", "no code-server")]) {
        if env.remove(name).is_some() {
            ignored.push((name.to_owned(), reason));
        }
    }
    if env.get(USER).is_some_and(|user| user != USER_NAME) {
        env.remove(USER);
        ignored.push((USER.to_owned(), "the user is gem; USER_UID and USER_GID set its ids"));
    }
    let settings = take_settings(&mut env)?;
    ignored.sort_unstable();
    let protected = settings.contains_key("api_key") || settings.contains_key("jwt_public_key");
    let access = Some(if protected { RootAccess::Credential } else { RootAccess::Open });
    Ok(RootVariables { settings, env, ignored, access })
}

/// Takes the settings of the server out of the variables.
fn take_settings(env: &mut BTreeMap<String, String>) -> Result<SettingValues, FrontSandboxError> {
    let mut settings = SettingValues::new();
    for (variable, setting) in [(API_KEY, "api_key"), (JWT_PUBLIC_KEY, "jwt_public_key")] {
        if let Some(text) = env.remove(variable) {
            settings.insert(setting.to_owned(), json!(text));
        }
    }
    if let Some(text) = env.remove(TICKET_TTL) {
        let seconds = parse_number(TICKET_TTL, &text)?;
        settings.insert("ticket_ttl".to_owned(), json!(u64::from(seconds) * 1000));
    }
    Ok(settings)
}

/// Checks the variables of a sandbox. Settings of the server have no place among them.
pub(super) fn check_variables(env: &BTreeMap<String, String>) -> Result<(), FrontSandboxError> {
    if let Some(name) = SERVER_NAMES.iter().find(|name| env.contains_key(**name)) {
        return Err(FrontSandboxError {
            message: format!("`{name}` configures a server, not a sandbox"),
            hint: Some("the address of a sandbox contains its key"),
        });
    }
    for name in NUMBERS {
        let number = env.get(name).map(|text| parse_number(name, text)).transpose()?;
        if let Some(count) =
            number.filter(|count| name == MAX_BASH_SESSIONS_VARIABLE && *count > MAX_BASH_SESSIONS)
        {
            let message = format!("`{name}` is {count}, more than {MAX_BASH_SESSIONS}");
            return Err(FrontSandboxError { message, hint: None });
        }
    }
    Ok(())
}

/// A variable that holds a number; `None` if it is not set. Its form was checked.
pub(super) fn number_of(env: &BTreeMap<String, String>, name: &str) -> Option<u32> {
    env.get(name).and_then(|text| text.trim().parse().ok())
}

fn parse_number(name: &str, text: &str) -> Result<u32, FrontSandboxError> {
    let number = text.trim().parse().ok().filter(|number: &u32| *number > 0);
    number.ok_or_else(|| FrontSandboxError {
        message: format!("`{name}` is `{text}`, not a number from 1 to {}", u32::MAX),
        hint: None,
    })
}

fn is_index(name: &str) -> bool {
    matches!(name, "PIP_INDEX_URL" | "UV_DEFAULT_INDEX" | "NPM_CONFIG_REGISTRY")
}

/// Whether an address contains a user name or a password.
fn has_credentials(url: &str) -> bool {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    authority.split(['/', '?']).next().unwrap_or_default().contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn read(environment: &[(&str, &str)], given: &[(&str, &str)]) -> RootVariables {
        read_variables(pairs(environment), pairs(given)).unwrap()
    }

    #[test]
    fn credentials_become_settings_and_no_variables() {
        let read = read(&[("SANDBOX_API_KEY", "s3cret"), ("TICKET_TTL_SECONDS", "5")], &[("A", "b")]);
        assert_eq!(read.env, pairs(&[("A", "b")]));
        assert_eq!(json!(read.settings), json!({"api_key": "s3cret", "ticket_ttl": 5000}));
        assert_eq!(read.access, Some(RootAccess::Credential));
    }

    #[test]
    fn given_variables_override_the_environment() {
        let read = read(&[("TZ", "UTC"), ("WORKSPACE", "/a")], &[("WORKSPACE", "/b"), ("GITHUB_TOKEN", "t")]);
        assert_eq!(read.env, pairs(&[("TZ", "UTC"), ("WORKSPACE", "/b"), ("GITHUB_TOKEN", "t")]));
        assert_eq!((read.access, read.ignored), (Some(RootAccess::Open), Vec::new()));
    }

    #[test]
    fn secrets_of_the_caller_are_named_and_not_passed_on() {
        let environment =
            [("GITHUB_TOKEN", "t"), ("PIP_INDEX_URL", "https://u:p@pip.example/x"), ("HOMEPAGE", "x")];
        let read = read(&environment, &[]);
        assert_eq!(read.env, BTreeMap::new());
        let names: Vec<_> = read.ignored.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["GITHUB_TOKEN", "HOMEPAGE", "PIP_INDEX_URL"]);
        assert!(!has_credentials("https://pip.example/a@b"));
    }

    #[test]
    fn wrong_numbers_and_misplaced_credentials_are_refused() {
        for (name, value) in [
            ("USER_UID", "x"),
            ("MAX_BASH_SESSIONS", "0"),
            ("MAX_BASH_SESSIONS", "1001"),
            ("SANDBOX_API_KEY", "s3cret"),
            ("AUTH_TOKEN", "t"),
        ] {
            let error = check_variables(&pairs(&[(name, value)])).unwrap_err();
            assert!(error.message.contains(name) && !error.message.contains("s3cret"), "{error}");
        }
        assert!(read_variables(pairs(&[]), pairs(&[("AUTH_TOKEN", "t")])).is_err());
        check_variables(&pairs(&[("USER_UID", " 7 "), ("ANY", "x"), ("MAX_BASH_SESSIONS", "1000")])).unwrap();
    }

    #[test]
    fn every_variable_without_an_effect_is_named() {
        let without: Vec<_> = WITHOUT_EFFECT.map(|(name, _)| (name, "x")).into();
        let read = read(&without, &[("USER", "ann"), ("DISABLE_CODE_SERVER", "true")]);
        assert_eq!(read.env, BTreeMap::new());
        let mut expected: Vec<_> = without.into_iter().map(|(name, _)| name).collect();
        expected.extend(["USER", "DISABLE_CODE_SERVER"]);
        expected.sort_unstable();
        let named: Vec<_> = read.ignored.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(named, expected);
    }

    #[test]
    fn user_that_exists_is_accepted() {
        let read = read(&[], &[("USER", "gem")]);
        assert_eq!((read.env, read.ignored), (pairs(&[("USER", "gem")]), Vec::new()));
    }

    #[test]
    fn every_name_is_read_from_the_environment_once() {
        let mut names = ENVIRONMENT_NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), ENVIRONMENT_NAMES.len());
        assert!(!names.contains(&"") && !names.contains(&USER));
    }
}

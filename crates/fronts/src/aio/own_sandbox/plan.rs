//! The sandbox that a request and its variables describe.

use std::time::Duration;

use domain::{Entrypoint, GuestSettings, HookCommand, OnDeath, SandboxHooks, SandboxSpec};
use service::{CreateSandboxRequest, ImageSource, Service};

use super::variables::{self, HOOKS, MAX_SHELL_SESSIONS, USER_GID, USER_UID, WORKSPACE};
use crate::aio::guest::{self, DEFAULT_SKILLS_ROOT, USER_NAME};
use crate::aio::notes::{AioNotes, FileErrors};
use crate::aio::provisioner::{MAX_ID, ProvisionerSettings, normalize_path};
use crate::aio::{ORIGIN, notes};
use crate::front_sandboxes::{FrontSandboxError, FrontSandboxRequest};
use crate::settings::HttpSettings;

/// How long the hooks of a sandbox may take together.
const HOOKS_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Runs the hooks, each in a shell of its own. They stay in variables, since arguments are visible to others.
const HOOKS_SCRIPT: &str = r#"
for name in RUN_HOOK_INIT RUN_HOOK_PRE_SERVICES RUN_HOOK_POST_READY; do
    ( eval "eval \"\$$name\"" ) || { code=$?; echo "$name failed with code $code" >&2; exit "$code"; }
done
"#;

pub(super) fn plan_sandbox(
    service: &Service,
    settings: &HttpSettings,
    request: &FrontSandboxRequest,
) -> Result<CreateSandboxRequest, FrontSandboxError> {
    variables::check_variables(&request.env)?;
    let defaults = ProvisionerSettings::of_server(settings);
    let notes = AioNotes {
        epoch: notes::draw_epoch(),
        file_errors: FileErrors::Structured,
        max_shell_sessions: count_sessions(service, request, &defaults)?,
        user_id: None,
        thread_id: None,
    };
    let image = request.image.as_deref().unwrap_or("host");
    Ok(CreateSandboxRequest {
        origin: ORIGIN,
        source: ImageSource::from_name(image),
        spec: SandboxSpec {
            entrypoint: Entrypoint::None,
            resources: request.limits(),
            network: request.network.map_or(settings.default_network, Into::into),
            env: request.env.clone(),
            hooks: start_hooks(request),
            guest: choose_guest(request, &defaults)?,
            on_death: Some(OnDeath::Replace),
            ..SandboxSpec::with_defaults()
        },
        labels: request.labels.clone(),
        notes: notes.to_bytes(),
        timeout: request.timeout(),
        idle_timeout: request.idle_timeout(),
        defaulted: Vec::new(),
        merge_notes: AioNotes::inherit_epoch,
    })
}

fn count_sessions(
    service: &Service,
    request: &FrontSandboxRequest,
    defaults: &ProvisionerSettings,
) -> Result<u32, FrontSandboxError> {
    let most = defaults.effective_max_shell_sessions(service);
    match variables::number_of(&request.env, MAX_SHELL_SESSIONS) {
        None => Ok(defaults.default_shell_sessions(service)),
        Some(count) if count <= most => Ok(count),
        Some(count) => Err(refuse(format!("`{MAX_SHELL_SESSIONS}` is {count}, more than {most}"))),
    }
}

/// The user, and the directory in which commands start.
fn choose_guest(
    request: &FrontSandboxRequest,
    defaults: &ProvisionerSettings,
) -> Result<GuestSettings, FrontSandboxError> {
    let id = |name: &str, default: u32| match variables::number_of(&request.env, name) {
        Some(id) if u64::from(id) > MAX_ID => Err(refuse(format!("`{name}` is {id}, more than {MAX_ID}"))),
        id => Ok(id.unwrap_or(default)),
    };
    let (uid, gid) = (id(USER_UID, defaults.uid)?, id(USER_GID, defaults.gid)?);
    let mut guest = guest::guest_with_skills(uid, gid, DEFAULT_SKILLS_ROOT);
    if let Some(workspace) = request.env.get(WORKSPACE) {
        if normalize_path(workspace).as_deref() != Some(workspace) || workspace == "/" {
            return Err(refuse(format!("`{WORKSPACE}` is `{workspace}`, not a plain absolute path")));
        }
        if guest.directories.iter().all(|(path, _)| path != workspace) {
            guest.directories.push((workspace.clone(), USER_NAME.to_owned()));
        }
        guest.default_directory = workspace.clone();
    }
    Ok(guest)
}

fn start_hooks(request: &FrontSandboxRequest) -> SandboxHooks {
    let command = ["/bin/sh", "-c", HOOKS_SCRIPT].map(str::to_owned).to_vec();
    let wanted = HOOKS.iter().any(|name| request.env.contains_key(*name));
    let before = wanted.then_some(HookCommand { command, timeout: HOOKS_TIMEOUT });
    SandboxHooks { before, ..SandboxHooks::default() }
}

fn refuse(message: String) -> FrontSandboxError {
    FrontSandboxError { message, hint: None }
}

//! Images: listing them, deciding which one a name stands for, and fetching a missing one once for all callers that
//! wait for it.

pub(crate) mod aliases;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use backend::{
    ArchiveStream, BackendError, FreedSpace, ImageInfo, ImagePull, Images, PullProgress, RegistryCredentials,
};
use domain::{Entrypoint, HOST_IMAGE, Owner, SandboxSpec};
use tokio::sync::watch;

use self::aliases::{ResolvedImage, StandIn};
use crate::core::Core;
use crate::error::error_chain;
use crate::{Service, ServiceError};

/// The progress of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullState {
    Fetching { bytes: u64, of: u64 },
    Unpacking,
    Done(ImageInfo),
    Failed { message: String, hint: Option<String> },
}

/// The pulls in progress. Requests for the same image with the same credentials share one.
#[derive(Default)]
pub(crate) struct ImagePulls(Mutex<Vec<RunningPull>>);

/// The names for which another image was used, so that each is logged once.
#[derive(Default)]
pub(crate) struct LoggedStandIns(Mutex<BTreeSet<String>>);

/// The entrypoint of the reference's code image, which starts the kernels there. If another image stands in for that
/// one, it does not have this program, and our kernels do not need it.
const CODE_IMAGE_ENTRYPOINT: &str = "/opt/code-interpreter/code-interpreter.sh";

/// How many pulls all tenants together may have at once; the operator may have as many besides.
const MAX_PULLS: usize = 6;
/// How many pulls one tenant may have at once. A pull may take long and much of the disk.
const MAX_PULLS_PER_TENANT: usize = 3;

struct RunningPull {
    owner: Owner,
    name: String,
    credentials: Option<RegistryCredentials>,
    state: watch::Receiver<PullState>,
}

/// Programs that end at once without input: if an image's command is only one of these, it is not started.
const INTERACTIVE_PROGRAMS: [&str; 10] =
    ["sh", "bash", "dash", "ash", "zsh", "python", "python3", "node", "irb", "jshell"];

impl Service {
    pub async fn list_images(&self) -> Result<Vec<ImageInfo>, ServiceError> {
        let listed = self.0.backend_images("list images")?.list().await;
        listed.map_err(|source| self.0.image_error("list images", source))
    }

    pub async fn find_image(&self, name: &str) -> Result<Option<ImageInfo>, ServiceError> {
        self.0.backend_images("find an image")?;
        let found = self.0.find_named_image(name).await;
        found.map_err(|source| self.0.image_error("find an image", source))
    }

    /// The image that a sandbox would get under this name. An image that would be fetched first is returned under its
    /// own name.
    pub async fn resolve_image(&self, name: &str) -> Result<ResolvedImage, ServiceError> {
        if self.0.must_fetch(name).await? {
            return Ok(ResolvedImage { name: name.to_owned(), stand_in: None });
        }
        let resolved = self.0.resolve_image(name).await;
        resolved.map_err(|source| self.0.image_error("find an image", source))
    }

    /// Begins to fetch an image for the operator, or joins a pull in progress. It continues if the client disconnects.
    pub fn pull_image(
        &self,
        name: &str,
        credentials: Option<RegistryCredentials>,
    ) -> Result<watch::Receiver<PullState>, ServiceError> {
        self.0.backend_images("pull an image")?;
        self.0.start_pull(&Owner::operator(), name, credentials)
    }

    /// Imports an image from an archive while it is received.
    pub async fn import_image(
        &self,
        name: &str,
        archive: ArchiveStream<'_>,
    ) -> Result<ImageInfo, ServiceError> {
        let imported = self.0.backend_images("import an image")?.import(name, archive).await;
        let image = imported.map_err(|source| self.0.image_error("import an image", source))?;
        tracing::info!(image = image.name, bytes = image.bytes, "image imported");
        Ok(image)
    }

    /// Removes an image. Sandboxes that use it keep its files.
    pub async fn remove_image(&self, name: &str) -> Result<FreedSpace, ServiceError> {
        let removed = self.0.backend_images("remove an image")?.remove(name).await;
        removed.map_err(|source| self.0.image_error("remove an image", source))
    }

    /// Removes images and layers that are not in use.
    pub async fn collect_images(&self) -> Result<FreedSpace, ServiceError> {
        let collected = self.0.backend_images("collect images")?.collect_unused().await;
        collected.map_err(|source| self.0.image_error("collect images", source))
    }
}

impl Core {
    pub(crate) fn backend_images(&self, action: &'static str) -> Result<&dyn Images, ServiceError> {
        self.host.backend.required_images().map_err(|source| self.image_error(action, source))
    }

    /// The image that a sandbox would get under this name. A backend without images knows no other name for it.
    pub(crate) async fn resolve_image(&self, name: &str) -> Result<ResolvedImage, BackendError> {
        let exact = |name: String| ResolvedImage { name, stand_in: None };
        let Some(images) = self.host.backend.images() else { return Ok(exact(name.to_owned())) };
        if let Some(image) = images.find(name).await? {
            return Ok(exact(image.name));
        }
        let stand_in = self.config().aliases.find_stand_in(name, &images.host_software().await?)?;
        let found = images.find(&stand_in.used).await?;
        Ok(stand_in.resolve_found(found.map(|image| image.name))?)
    }

    /// Finds the image of this name or, if there is none, the one that the operator uses instead. An image for which
    /// `host` could stand in is not found: it is fetched first, if that is allowed.
    async fn find_named_image(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        let Some(images) = self.host.backend.images() else { return Ok(None) };
        if let Some(image) = images.find(name).await? {
            return Ok(Some(image));
        }
        match self.config().aliases.operator_target(name) {
            Some(target) => images.find(target).await,
            None => Ok(None),
        }
    }

    /// Logs, once for each name, that a client did not get the image it asked for.
    pub(crate) fn log_stand_in(&self, stand_in: &StandIn) {
        /// Clients choose the names, so their number is limited.
        const MAX_LOGGED_NAMES: usize = 256;
        let logged = &self.catalog.logged_stand_ins.0;
        let mut logged = logged.lock().expect("no thread panics while holding this lock");
        if logged.len() < MAX_LOGGED_NAMES && logged.insert(stand_in.asked.clone()) {
            tracing::warn!("{stand_in}; this is logged once for each name");
        }
    }

    pub(crate) fn image_error(&self, action: &'static str, source: BackendError) -> ServiceError {
        ServiceError::Image { action, source: Box::new(source) }
    }

    /// Fetches the image that a sandbox needs, if it is not on this host, the operator allows it and the owner could
    /// have the sandbox at all.
    pub(crate) async fn ensure_image(
        self: &Arc<Self>,
        owner: &Owner,
        spec: &SandboxSpec,
        credentials: Option<RegistryCredentials>,
    ) -> Result<(), ServiceError> {
        if !self.must_fetch(&spec.image).await? {
            return Ok(());
        }
        self.check_room_for(owner, &spec.resources)?;
        self.fetch_image(owner, &spec.image, credentials).await
    }

    /// Like [`Core::ensure_image`], for a pool, before room is reserved for its next sandbox.
    pub(crate) async fn ensure_warm_image(self: &Arc<Self>, name: &str) -> Result<(), ServiceError> {
        if !self.must_fetch(name).await? {
            return Ok(());
        }
        self.fetch_image(&Owner::unclaimed(), name, None).await
    }

    /// Whether an image is not on this host and may be fetched.
    async fn must_fetch(&self, name: &str) -> Result<bool, ServiceError> {
        if !self.host.backend.images().is_some_and(|images| images.may_pull(name)) {
            return Ok(false);
        }
        let found = self.find_named_image(name).await;
        found.map(|found| found.is_none()).map_err(|source| self.image_error("find an image", source))
    }

    async fn fetch_image(
        self: &Arc<Self>,
        owner: &Owner,
        name: &str,
        credentials: Option<RegistryCredentials>,
    ) -> Result<(), ServiceError> {
        let mut state = self.start_pull(owner, name, credentials)?;
        let over = |state: &PullState| matches!(state, PullState::Done(_) | PullState::Failed { .. });
        let end = state.wait_for(over).await.map(|state| state.clone());
        match end {
            Ok(PullState::Failed { message, hint }) => {
                let source = BackendError::Pull { image: name.to_owned(), message, hint };
                Err(self.image_error("pull an image", source))
            }
            Ok(_) => Ok(()),
            Err(_closed) => Err(ServiceError::Stopping),
        }
    }

    /// Sets the image's command as entrypoint if the caller named none. Returns whether the caller named a program that
    /// only another image would have, so that there is nothing to start.
    pub(crate) async fn resolve_entrypoint(&self, spec: &mut SandboxSpec) -> bool {
        let from_image = match &spec.entrypoint {
            Entrypoint::FromImage => true,
            Entrypoint::Argv(words) if words.first().is_some_and(|word| word == CODE_IMAGE_ENTRYPOINT) => {
                false
            }
            Entrypoint::None | Entrypoint::Argv(_) => return false,
        };
        if spec.image == HOST_IMAGE {
            return false;
        }
        // Whether the image exists at all is checked when the sandbox is made.
        let found = self.find_named_image(&spec.image).await.ok().flatten();
        if !from_image {
            return found.is_none_or(|image| image.name != spec.image);
        }
        if let Some(image) = found {
            let words: Vec<String> = image.entrypoint.into_iter().chain(image.cmd).collect();
            if !is_interactive(&words) {
                spec.entrypoint = Entrypoint::from_words(words);
            }
        }
        false
    }

    fn start_pull(
        self: &Arc<Self>,
        owner: &Owner,
        name: &str,
        credentials: Option<RegistryCredentials>,
    ) -> Result<watch::Receiver<PullState>, ServiceError> {
        let mut running = self.catalog.pulls.0.lock().expect("no thread panics while holding this lock");
        let same = |pull: &&RunningPull| pull.name == name && pull.credentials == credentials;
        if let Some(pull) = running.iter().find(same) {
            return Ok(pull.state.clone());
        }
        if !may_start_pull(owner, running.iter().map(|pull| &pull.owner)) {
            return Err(ServiceError::TooManyPulls);
        }
        let (progress, state) = watch::channel(PullState::Fetching { bytes: 0, of: 0 });
        running.push(RunningPull {
            owner: owner.clone(),
            name: name.to_owned(),
            credentials: credentials.clone(),
            state: state.clone(),
        });
        drop(running);
        let (core, name) = (Arc::clone(self), name.to_owned());
        self.tasks.spawn(async move {
            let end = tokio::select! {
                end = core.run_pull(&name, credentials.as_ref(), &progress) => end,
                () = core.tasks.cancelled() => stopped_pull(),
            };
            let mut running = core.catalog.pulls.0.lock().expect("no thread panics while holding this lock");
            running.retain(|pull| !(pull.name == name && pull.credentials == credentials));
            drop(running);
            progress.send_replace(end);
        });
        Ok(state)
    }

    async fn run_pull(
        &self,
        name: &str,
        credentials: Option<&RegistryCredentials>,
        state: &watch::Sender<PullState>,
    ) -> PullState {
        let progress = |progress: PullProgress| {
            state.send_replace(match progress {
                PullProgress::Fetching { bytes, of } => PullState::Fetching { bytes, of },
                PullProgress::Unpacking => PullState::Unpacking,
            });
        };
        let Some(images) = self.host.backend.images() else { return stopped_pull() };
        match images.pull(ImagePull { name, credentials, progress: &progress }).await {
            Ok(image) => {
                tracing::info!(image = image.name, digest = image.digest, "image pulled");
                PullState::Done(image)
            }
            Err(error) => {
                tracing::warn!(image = name, error = %error_chain(&error), "failed to pull image");
                let hint = error.hint().map(str::to_owned);
                let message = match error {
                    BackendError::Pull { message, .. } => message,
                    error => error_chain(&error),
                };
                PullState::Failed { message, hint }
            }
        }
    }
}

/// Whether an owner may begin a pull besides those of the owners in `running`. Tenants cannot use up the operator's
/// pulls.
fn may_start_pull<'a>(owner: &Owner, running: impl Iterator<Item = &'a Owner>) -> bool {
    let operator = Owner::operator();
    let (own, others): (Vec<&Owner>, Vec<&Owner>) =
        running.filter(|of| (**of == operator) == (*owner == operator)).partition(|of| *of == owner);
    let most = if *owner == operator { MAX_PULLS } else { MAX_PULLS_PER_TENANT };
    own.len() < most && own.len() + others.len() < MAX_PULLS
}

fn stopped_pull() -> PullState {
    PullState::Failed { message: "the server is stopping".to_owned(), hint: None }
}

/// Whether a command is only a shell or an interpreter.
fn is_interactive(words: &[String]) -> bool {
    let [program] = words else { return false };
    let name = program.rsplit('/').next().unwrap_or(program);
    INTERACTIVE_PROGRAMS.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_tenant_can_use_up_all_pulls() {
        let [one, two, three] = ["one", "two", "three"].map(Owner::from_valid_name);
        let single = Owner::operator();
        let running = vec![&one; MAX_PULLS_PER_TENANT];
        assert!(may_start_pull(&one, running.iter().copied().skip(1)));
        assert!(!may_start_pull(&one, running.iter().copied()));
        assert!(may_start_pull(&two, running.iter().copied()));
        let full = [running, vec![&two; MAX_PULLS - MAX_PULLS_PER_TENANT]].concat();
        assert!(!may_start_pull(&three, full.iter().copied()));
        assert!(may_start_pull(&single, full.iter().copied()));
        assert!(!may_start_pull(&single, std::iter::repeat_n(&single, MAX_PULLS)));
        assert!(may_start_pull(&three, std::iter::repeat_n(&single, MAX_PULLS)));
    }

    #[test]
    fn only_a_bare_shell_counts_as_interactive() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert!(is_interactive(&words(&["bash"])));
        assert!(is_interactive(&words(&["/usr/local/bin/python3"])));
        for program in [&["bash", "-c", "serve"][..], &["nginx"], &[]] {
            assert!(!is_interactive(&words(program)), "{program:?}");
        }
    }
}

//! Images: what there is, and fetching what is missing, once for everybody who waits for it.

use std::sync::{Arc, Mutex};

use backend::{BackendError, Credentials, Freed, ImageInfo, Images, Progress, Pull};
use domain::Spec;
use tokio::sync::watch;

use crate::core::Core;
use crate::error::chain;
use crate::{Service, ServiceError};

/// How far a pull is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullState {
    Fetching { bytes: u64, of: u64 },
    Unpacking,
    Done(ImageInfo),
    Failed { message: String, hint: Option<String> },
}

/// The pulls that are on their way. Whoever wants the same image with the same credentials shares
/// one.
#[derive(Default)]
pub(crate) struct Pulls(Mutex<Vec<Running>>);

struct Running {
    name: String,
    credentials: Option<Credentials>,
    state: watch::Receiver<PullState>,
}

/// Programs that end at once when nobody types: an image that starts only one of these is kept
/// without it.
const INTERACTIVE: [&str; 10] =
    ["sh", "bash", "dash", "ash", "zsh", "python", "python3", "node", "irb", "jshell"];

impl Service {
    pub async fn images(&self) -> Result<Vec<ImageInfo>, ServiceError> {
        let listed = self.0.kept_images("list images")?.list().await;
        listed.map_err(|source| self.0.image_failed("list images", source))
    }

    pub async fn image(&self, name: &str) -> Result<Option<ImageInfo>, ServiceError> {
        let found = self.0.kept_images("find an image")?.find(name).await;
        found.map_err(|source| self.0.image_failed("find an image", source))
    }

    /// Begins to fetch an image, or joins those who already wait for it. It goes on when nobody
    /// waits any more.
    pub fn pull_image(
        &self,
        name: &str,
        credentials: Option<Credentials>,
    ) -> Result<watch::Receiver<PullState>, ServiceError> {
        self.0.kept_images("pull an image")?;
        Ok(self.0.pull(name, credentials))
    }

    /// Fetches an image that a sandbox needs, if it is not here and the operator allows it.
    pub async fn ensure_image(
        &self,
        name: &str,
        credentials: Option<Credentials>,
    ) -> Result<(), ServiceError> {
        self.0.ensure_image(name, credentials).await
    }

    /// Removes an image. Sandboxes that use it keep its files.
    pub async fn remove_image(&self, name: &str) -> Result<Freed, ServiceError> {
        let removed = self.0.kept_images("remove an image")?.remove(name).await;
        removed.map_err(|source| self.0.image_failed("remove an image", source))
    }

    /// Removes what nobody needs.
    pub async fn collect_images(&self) -> Result<Freed, ServiceError> {
        let collected = self.0.kept_images("collect images")?.collect().await;
        collected.map_err(|source| self.0.image_failed("collect images", source))
    }
}

impl Core {
    fn kept_images(&self, action: &'static str) -> Result<&dyn Images, ServiceError> {
        let none = || {
            let message = "this backend keeps no images".to_owned();
            self.image_failed(action, BackendError::Unsupported { message, hint: None })
        };
        self.backend.images().ok_or_else(none)
    }

    fn image_failed(&self, action: &'static str, source: BackendError) -> ServiceError {
        ServiceError::Image { action, source: Box::new(source) }
    }

    pub(crate) async fn ensure_image(
        self: &Arc<Self>,
        name: &str,
        credentials: Option<Credentials>,
    ) -> Result<(), ServiceError> {
        let Some(images) = self.backend.images().filter(|images| images.may_fetch(name)) else {
            return Ok(());
        };
        let found = images.find(name).await;
        if found.map_err(|source| self.image_failed("find an image", source))?.is_some() {
            return Ok(());
        }
        let mut state = self.pull(name, credentials);
        let over = |state: &PullState| matches!(state, PullState::Done(_) | PullState::Failed { .. });
        let end = state.wait_for(over).await.map(|state| state.clone());
        match end {
            Ok(PullState::Failed { message, hint }) => {
                let source = BackendError::Pull { image: name.to_owned(), message, hint };
                Err(self.image_failed("pull an image", source))
            }
            Ok(_) => Ok(()),
            Err(_closed) => Err(ServiceError::Stopping),
        }
    }

    /// What the image starts, where the caller names nothing.
    pub(crate) async fn settle_entrypoint(&self, spec: &mut Spec) {
        let Some(images) =
            self.backend.images().filter(|_| spec.entrypoint.is_empty() && spec.image != "host")
        else {
            return;
        };
        // Whether there is such an image at all is seen when the sandbox is made.
        if let Ok(Some(image)) = images.find(&spec.image).await {
            let words: Vec<String> = image.entrypoint.into_iter().chain(image.cmd).collect();
            if !waits_for_somebody(&words) {
                spec.entrypoint = words;
            }
        }
    }

    fn pull(self: &Arc<Self>, name: &str, credentials: Option<Credentials>) -> watch::Receiver<PullState> {
        let mut running = self.pulls.0.lock().expect("nobody panics while holding it");
        let same = |pull: &&Running| pull.name == name && pull.credentials == credentials;
        if let Some(pull) = running.iter().find(same) {
            return pull.state.clone();
        }
        let (tell, state) = watch::channel(PullState::Fetching { bytes: 0, of: 0 });
        running.push(Running {
            name: name.to_owned(),
            credentials: credentials.clone(),
            state: state.clone(),
        });
        drop(running);
        let (core, name) = (Arc::clone(self), name.to_owned());
        self.tasks.spawn(async move {
            let end = tokio::select! {
                end = core.run_pull(&name, credentials.as_ref(), &tell) => end,
                () = core.stop.cancelled() => stopped(),
            };
            let mut running = core.pulls.0.lock().expect("nobody panics while holding it");
            running.retain(|pull| !(pull.name == name && pull.credentials == credentials));
            drop(running);
            tell.send_replace(end);
        });
        state
    }

    async fn run_pull(
        &self,
        name: &str,
        credentials: Option<&Credentials>,
        tell: &watch::Sender<PullState>,
    ) -> PullState {
        let progress = |progress: Progress| {
            tell.send_replace(match progress {
                Progress::Fetching { bytes, of } => PullState::Fetching { bytes, of },
                Progress::Unpacking => PullState::Unpacking,
            });
        };
        let Some(images) = self.backend.images() else { return stopped() };
        match images.pull(Pull { name, credentials, progress: &progress }).await {
            Ok(image) => {
                tracing::info!(image = image.name, digest = image.digest, "an image was pulled");
                PullState::Done(image)
            }
            Err(error) => {
                tracing::warn!(image = name, error = %chain(&error), "an image could not be pulled");
                let hint = error.hint().map(str::to_owned);
                let message = match error {
                    BackendError::Pull { message, .. } => message,
                    error => chain(&error),
                };
                PullState::Failed { message, hint }
            }
        }
    }
}

fn stopped() -> PullState {
    PullState::Failed { message: "the server is stopping".to_owned(), hint: None }
}

/// Whether a command is nothing but a shell or an interpreter.
fn waits_for_somebody(words: &[String]) -> bool {
    let [program] = words else { return false };
    let name = program.rsplit('/').next().unwrap_or(program);
    INTERACTIVE.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bare_shell_waits_for_somebody() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert!(waits_for_somebody(&words(&["bash"])));
        assert!(waits_for_somebody(&words(&["/usr/local/bin/python3"])));
        for program in [&["bash", "-c", "serve"][..], &["nginx"], &[]] {
            assert!(!waits_for_somebody(&words(program)), "{program:?}");
        }
    }
}

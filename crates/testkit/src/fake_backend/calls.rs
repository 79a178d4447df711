//! The calls of the service to the fake backend.

use std::sync::atomic::Ordering;

use backend::{
    AgentStream, Backend, BackendCapabilities, BackendError, Enforced, FoundCondition, FoundSandbox, Images,
    NetworkFilter, Reconfigure, ResolvedSpec, SandboxDeath, SandboxUsage, SecretVaults, Snapshots,
    StoppedSandbox, Volumes,
};
use domain::{FilesState, SandboxId};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

use super::FakeBackend;
use super::agent::FakeAgent;

#[async_trait::async_trait]
impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        "pretend"
    }

    async fn probe(&self) -> Result<BackendCapabilities, BackendError> {
        self.record_call("probe")?;
        let most = BackendCapabilities {
            pause: true,
            attach: true,
            snapshot: true,
            ..BackendCapabilities::default()
        };
        let restart = self.restarts.load(Ordering::Relaxed);
        Ok(BackendCapabilities {
            volumes: true,
            restart,
            network: self.network.load(Ordering::Relaxed),
            filtered: self.filtered.load(Ordering::Relaxed),
            ..most
        })
    }

    async fn create(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError> {
        self.record_call("create asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("create")?;
        let measures = self.prepare_network(id, &plan.spec)?;
        self.world.lock().unwrap().newest_spec = Some(plan.clone());
        self.start_sandbox(id);
        Ok(Enforced { image: real(&plan.spec.image), measures, ..Enforced::default() })
    }

    async fn stop(&self, id: &SandboxId) -> Result<StoppedSandbox, BackendError> {
        self.record_call("stop")?;
        let files = self.files(id);
        match files {
            FilesState::Kept => {
                self.put_sandbox(id, FoundCondition::Dead);
                self.world.lock().unwrap().policies.remove(id);
            }
            FilesState::Lost => self.remove_sandbox(id),
        }
        Ok(StoppedSandbox { usage: SandboxUsage::default(), files })
    }

    async fn restart(&self, id: &SandboxId, plan: &ResolvedSpec) -> Result<Enforced, BackendError> {
        self.record_call("restart asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("restart")?;
        self.world.lock().unwrap().newest_spec = Some(plan.clone());
        match self.condition(id) {
            Some(FoundCondition::Dead) => self.start_sandbox(id),
            _ => return Err(BackendError::Gone),
        }
        let measures = self.prepare_network(id, &plan.spec)?;
        Ok(Enforced { image: real(&plan.spec.image), measures, ..Enforced::default() })
    }

    async fn pause(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.record_call("pause")?;
        self.check_freezer()?;
        self.put_sandbox(id, FoundCondition::Frozen);
        Ok(())
    }

    async fn resume(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.record_call("resume")?;
        self.check_freezer()?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.put_sandbox(id, FoundCondition::Alive);
        Ok(())
    }

    async fn destroy(&self, id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        self.record_call("destroy")?;
        self.destroy_gate.acquire().await.unwrap().forget();
        self.remove_sandbox(id);
        Ok(SandboxUsage::default())
    }

    async fn list_sandboxes(&self) -> Result<Vec<FoundSandbox>, BackendError> {
        self.record_call("list")?;
        let world = self.world.lock().unwrap();
        let files = if self.restarts.load(Ordering::Relaxed) { FilesState::Kept } else { FilesState::Lost };
        Ok(world
            .sandboxes
            .iter()
            .map(|(id, condition)| FoundSandbox { id: id.clone(), condition: *condition, files })
            .collect())
    }

    async fn open_files(&self) -> Result<Vec<(SandboxId, u64)>, BackendError> {
        self.record_call("open files")?;
        Ok(self.world.lock().unwrap().open_files.clone())
    }

    async fn dial_agent(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        self.record_call("dial")?;
        if self.condition(id).is_none_or(|condition| condition == FoundCondition::Dead) {
            return Err(BackendError::Gone);
        }
        if let Some(socket) = self.agent_socket(id) {
            let stream = UnixStream::connect(socket).await;
            return Ok(Box::new(
                stream.map_err(|source| BackendError::Io { action: "dial an agent", source })?,
            ));
        }
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let world = self.world.lock().unwrap();
        if let Some(serve) = &world.agent {
            serve(theirs);
            return Ok(Box::new(ours));
        }
        let agent = FakeAgent {
            stream: theirs,
            processes: world.processes.clone(),
            script: world.script.clone(),
            entrypoint_end: self.entrypoint_end.subscribe(),
        };
        tokio::spawn(agent.serve());
        Ok(Box::new(ours))
    }

    async fn usage(&self, _id: &SandboxId) -> Result<SandboxUsage, BackendError> {
        Ok(self.world.lock().unwrap().usage)
    }

    fn images(&self) -> Option<&dyn Images> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn volumes(&self) -> Option<&dyn Volumes> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn reconfigure(&self) -> Option<&dyn Reconfigure> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn network_filter(&self) -> Option<&dyn NetworkFilter> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn secret_vaults(&self) -> Option<&dyn SecretVaults> {
        self.optional_traits.load(Ordering::Relaxed).then_some(self as _)
    }

    fn watch_deaths(&self) -> mpsc::UnboundedReceiver<SandboxDeath> {
        // After a restart these tests report no deaths.
        let first = self.deaths.1.lock().unwrap().take();
        first.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }
}

/// The name that an image is found by. That name finds it as well.
pub(super) fn real(image: &str) -> String {
    format!("real {}", image.trim_start_matches("real "))
}

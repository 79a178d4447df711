//! The calls of the service to the fake backend.

use std::sync::atomic::Ordering;

use backend::{
    AgentStream, Backend, BackendCapabilities, BackendError, Enforced, EnforcedMeasures, FoundCondition,
    FoundSandbox, FoundSnapshot, FoundVolume, Images, ResolvedImage, SandboxDeath, SandboxUsage,
    SnapshotContent, SnapshotStage, StoppedSandbox,
};
use domain::{
    Bytes, FilesState, MountSpec, NetworkAccess, ResourceLimits, SandboxId, SandboxSpec, SnapshotId, Volume,
    VolumeId,
};
use tokio::sync::mpsc;

use super::FakeBackend;
use super::agent::FakeAgent;

#[async_trait::async_trait]
impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        "pretend"
    }

    async fn probe(&self) -> Result<BackendCapabilities, BackendError> {
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
            ..most
        })
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Enforced, BackendError> {
        self.record_call("create asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("create")?;
        self.put_sandbox(id, FoundCondition::Alive);
        Ok(Enforced { image: real(&spec.image), stand_in: stand_in(&spec.image), ..Enforced::default() })
    }

    async fn stop(&self, id: &SandboxId) -> Result<StoppedSandbox, BackendError> {
        self.record_call("stop")?;
        let files = self.files(id);
        match files {
            FilesState::Kept => self.put_sandbox(id, FoundCondition::Dead),
            FilesState::Lost => self.remove_sandbox(id),
        }
        Ok(StoppedSandbox { usage: SandboxUsage::default(), files })
    }

    async fn restart(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Enforced, BackendError> {
        self.record_call("restart asked")?;
        self.gate.acquire().await.unwrap().forget();
        self.record_call("restart")?;
        match self.condition(id) {
            Some(FoundCondition::Dead) => self.put_sandbox(id, FoundCondition::Alive),
            _ => return Err(BackendError::Gone),
        }
        Ok(Enforced { image: real(&spec.image), ..Enforced::default() })
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

    async fn dial_agent(&self, id: &SandboxId) -> Result<AgentStream, BackendError> {
        self.record_call("dial")?;
        if self.condition(id).is_none_or(|condition| condition == FoundCondition::Dead) {
            return Err(BackendError::Gone);
        }
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let world = self.world.lock().unwrap();
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

    async fn attach_mounts(
        &self,
        _id: &SandboxId,
        mounts: &[MountSpec],
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("attach")?;
        self.volume_gate.acquire().await.unwrap().forget();
        Ok(mounts.iter().map(|mount| (format!("mount {}", mount.target), "yes".to_owned())).collect())
    }

    async fn create_volume(&self, volume: &Volume) -> Result<(), BackendError> {
        self.record_call("make volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.record_call("make volume")?;
        self.world.lock().unwrap().volumes.insert(volume.id.clone(), volume.clone());
        Ok(())
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError> {
        self.record_call("remove volume asked")?;
        self.volume_gate.acquire().await.unwrap().forget();
        self.record_call("remove volume")?;
        self.world.lock().unwrap().volumes.remove(id);
        Ok(())
    }

    async fn list_volumes(&self) -> Result<Vec<FoundVolume>, BackendError> {
        let world = self.world.lock().unwrap();
        let found = |volume: &Volume| FoundVolume { volume: volume.clone(), used: domain::Bytes(0) };
        Ok(world.volumes.values().map(found).collect())
    }

    async fn volume_sizes(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError> {
        let world = self.world.lock().unwrap();
        let known = ids.iter().filter(|id| world.volumes.contains_key(*id));
        Ok(known.map(|id| (id.clone(), Bytes::from_mib(1))).collect())
    }

    async fn resize(
        &self,
        _id: &SandboxId,
        resources: &ResourceLimits,
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("resize")?;
        self.resizes.acquire().await.unwrap().forget();
        Ok(vec![("memory".to_owned(), format!("{:?}", resources.memory))])
    }

    async fn resolve_image(&self, image: &str) -> Result<ResolvedImage, BackendError> {
        self.record_call("resolve")?;
        Ok(ResolvedImage { name: real(image), stand_in: stand_in(image) })
    }

    async fn connect_network(
        &self,
        _id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("connect")?;
        Ok(vec![("network".to_owned(), format!("{network:?}"))])
    }

    async fn create_snapshot(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<SnapshotContent, BackendError> {
        self.record_call("snapshot asked")?;
        self.snapshot_gate.acquire().await.unwrap().forget();
        self.record_call("snapshot")?;
        self.condition(id).ok_or(BackendError::Gone)?;
        self.put_snapshot(snapshot);
        Ok(kept_files())
    }

    async fn delete_snapshot(&self, snapshot: &SnapshotId) -> Result<(), BackendError> {
        self.record_call("forget")?;
        self.world.lock().unwrap().snapshots.remove(snapshot);
        Ok(())
    }

    async fn list_snapshots(&self) -> Result<Vec<FoundSnapshot>, BackendError> {
        let complete = |id: SnapshotId| FoundSnapshot { id, stage: SnapshotStage::Complete(kept_files()) };
        Ok(self.snapshot_ids().into_iter().map(complete).collect())
    }

    fn images(&self) -> Option<&dyn Images> {
        Some(self)
    }

    fn watch_deaths(&self) -> mpsc::UnboundedReceiver<SandboxDeath> {
        // After a restart these tests report no deaths.
        let first = self.deaths.1.lock().unwrap().take();
        first.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }
}

fn kept_files() -> SnapshotContent {
    SnapshotContent { image: "real host".to_owned(), size: Bytes::from_mib(10), disk: Bytes::from_mib(100) }
}

/// The image that a name resolves to: `alias of host` is another name of `host`.
fn real(image: &str) -> String {
    format!("real {}", image.trim_start_matches("alias of "))
}

/// The stand-in notice for a name that is an alias.
fn stand_in(image: &str) -> Option<String> {
    image.starts_with("alias of ").then(|| format!("it stands in for {image}"))
}

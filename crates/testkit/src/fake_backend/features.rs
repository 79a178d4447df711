//! The optional traits of the fake backend, except its images.

use backend::enforced::{EnforcedAmount, MountKind};
use backend::{
    BackendError, EnforcedMeasures, FoundSnapshot, FoundVolume, LimitName, LimitPlan, Measure, NetworkState,
    Reconfigure, SnapshotContent, SnapshotStage, Snapshots, Volumes,
};
use domain::{Bytes, MountSpec, NetworkAccess, SandboxId, SnapshotId, Volume, VolumeId};

use super::FakeBackend;

#[async_trait::async_trait]
impl Volumes for FakeBackend {
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
}

#[async_trait::async_trait]
impl Snapshots for FakeBackend {
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
}

#[async_trait::async_trait]
impl Reconfigure for FakeBackend {
    async fn attach_mounts(
        &self,
        _id: &SandboxId,
        mounts: &[MountSpec],
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("attach")?;
        self.volume_gate.acquire().await.unwrap().forget();
        let attached = |mount: &MountSpec| Measure::Mount {
            target: mount.target.clone(),
            source: MountKind::HostDirectory,
            access: mount.access,
        };
        Ok(mounts.iter().map(attached).collect())
    }

    async fn resize(&self, _id: &SandboxId, limits: &LimitPlan) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("resize")?;
        self.resizes.acquire().await.unwrap().forget();
        let amount = limits.limits.memory.0;
        let held = Measure::Limit(EnforcedAmount { limit: LimitName::Memory, amount, by: "fake".to_owned() });
        Ok(if limits.named.contains(&LimitName::Memory) { vec![held] } else { Vec::new() })
    }

    async fn connect_network(
        &self,
        _id: &SandboxId,
        network: NetworkAccess,
    ) -> Result<EnforcedMeasures, BackendError> {
        self.record_call("connect")?;
        let state = match network {
            NetworkAccess::Off => NetworkState::Off { since: None },
            NetworkAccess::On | NetworkAccess::Auto => NetworkState::On { by: "fake".to_owned() },
            NetworkAccess::Filtered => {
                self.check_filter()?;
                NetworkState::Filtered
            }
        };
        Ok(vec![Measure::Network(state)])
    }
}

fn kept_files() -> SnapshotContent {
    SnapshotContent { image: "real host".to_owned(), size: Bytes::from_mib(10), disk: Bytes::from_mib(100) }
}

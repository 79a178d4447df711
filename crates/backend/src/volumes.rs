//! Volumes that outlive sandboxes, for backends that offer them.

use domain::{Bytes, Volume, VolumeId};

use crate::BackendError;

/// The volumes of a backend. Whether this host supports them is said by `BackendCapabilities::volumes`.
#[async_trait::async_trait]
pub trait Volumes: Send + Sync {
    /// Creates a volume. An existing volume is left unchanged.
    async fn create_volume(&self, volume: &Volume) -> Result<(), BackendError>;
    /// Removes a volume that no sandbox uses, with its content. A missing volume is not an error.
    async fn remove_volume(&self, id: &VolumeId) -> Result<(), BackendError>;
    /// Lists every complete and readable volume, so that a restarted server knows them again. The backend
    /// itself removes partly created volumes.
    async fn list_volumes(&self) -> Result<Vec<FoundVolume>, BackendError>;
    /// Returns the current size of these volumes. A volume of unknown size is omitted.
    async fn volume_sizes(&self, ids: &[VolumeId]) -> Result<Vec<(VolumeId, Bytes)>, BackendError>;
}

/// A volume that a backend finds at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundVolume {
    pub volume: Volume,
    /// Its current size.
    pub used: Bytes,
}

//! The images of the fake backend.

use backend::{ArchiveStream, BackendError, FreedSpace, HostSoftware, ImageInfo, ImagePull, Images};
use domain::SnapshotId;
use tokio::io::AsyncReadExt;

use super::calls::real;
use super::{ABSENT_IMAGE, FakeBackend};

/// Every image exists, except aliases and one whose pull never ends.
#[async_trait::async_trait]
impl Images for FakeBackend {
    async fn list(&self) -> Result<Vec<ImageInfo>, BackendError> {
        Ok(Vec::new())
    }

    async fn find(&self, name: &str) -> Result<Option<ImageInfo>, BackendError> {
        let exists = name != ABSENT_IMAGE && !name.starts_with("alias of ");
        Ok(exists.then(|| ImageInfo { name: real(name), ..ImageInfo::default() }))
    }

    async fn host_software(&self) -> Result<HostSoftware, BackendError> {
        self.record_call("host software")?;
        Ok(HostSoftware::default())
    }

    fn may_pull(&self, _name: &str) -> bool {
        true
    }

    async fn pull(&self, _pull: ImagePull<'_>) -> Result<ImageInfo, BackendError> {
        self.record_call("pull")?;
        std::future::pending().await
    }

    async fn remove(&self, _name: &str) -> Result<FreedSpace, BackendError> {
        Ok(FreedSpace::default())
    }

    async fn import(&self, name: &str, mut archive: ArchiveStream<'_>) -> Result<ImageInfo, BackendError> {
        self.record_call("import")?;
        let mut content = Vec::new();
        let read = archive.read_to_end(&mut content).await;
        read.map_err(|source| BackendError::Io { action: "read an archive", source })?;
        Ok(ImageInfo { name: name.to_owned(), bytes: content.len() as u64, ..ImageInfo::default() })
    }

    async fn commit_snapshot(&self, snapshot: &SnapshotId, name: &str) -> Result<ImageInfo, BackendError> {
        self.record_call("commit")?;
        let known = self.world.lock().unwrap().snapshots.contains(snapshot);
        assert!(known, "the snapshot to make an image from does not exist");
        Ok(ImageInfo { name: name.to_owned(), ..ImageInfo::default() })
    }

    async fn collect_unused(&self) -> Result<FreedSpace, BackendError> {
        Ok(FreedSpace::default())
    }
}

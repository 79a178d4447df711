//! Giving a warm sandbox to an owner.

use std::time::Duration;

use backend::Measures;

use super::Driver;
use crate::ServiceError;
use crate::pools::Claimed;

/// How long a backend may take to bind one resource.
const BIND: Duration = Duration::from_secs(30);

impl Driver {
    /// Records the owner, and then gives the sandbox everything that the owner asked for. The sandbox either has all of
    /// that in the end, or is removed: nothing of one owner ever reaches another.
    pub(super) async fn bind(&mut self, warm: Claimed) -> Result<(), ServiceError> {
        let bound = self.bind_all(&warm).await;
        if bound.is_err() {
            warm.failed();
        }
        bound
    }

    async fn bind_all(&mut self, warm: &Claimed) -> Result<(), ServiceError> {
        let noted = self.core.store.claim(&self.record).await;
        noted.map_err(|source| ServiceError::Store { action: "record the owner of the sandbox", source })?;
        self.meter(true);
        // The steps are independent of each other, so they run concurrently.
        let hello = self.handle.agent.adopt(&self.record.sandbox.spec);
        let (limits, mounts, network, ()) =
            tokio::try_join!(self.bind_limits(warm), self.bind_mounts(), self.bind_network(warm), hello)?;
        let pool = vec![("pool".to_owned(), warm.pool().to_owned())];
        for measures in [limits, mounts, network, pool] {
            self.record.sandbox.in_force.replace(measures);
        }
        self.begin_life().await
    }

    async fn bind_network(&self, warm: &Claimed) -> Result<Measures, ServiceError> {
        let (core, id, network) = (&self.core, &self.handle.id, self.record.sandbox.spec.network);
        if network == warm.template().network {
            return Ok(Measures::new());
        }
        core.ask_backend("connect", id, BIND, core.backend.connect(id, network)).await
    }

    async fn bind_mounts(&self) -> Result<Measures, ServiceError> {
        let (core, id, mounts) = (&self.core, &self.handle.id, &self.record.sandbox.spec.mounts);
        if mounts.is_empty() {
            return Ok(Measures::new());
        }
        core.ask_backend("attach", id, BIND, core.backend.attach(id, mounts)).await
    }

    async fn bind_limits(&self, warm: &Claimed) -> Result<Measures, ServiceError> {
        let resources = &self.record.sandbox.spec.resources;
        if *resources == warm.template().resources {
            return Ok(Measures::new());
        }
        let (core, id) = (&self.core, &self.handle.id);
        core.ask_backend("resize", id, BIND, core.backend.resize(id, resources)).await
    }
}

//! The filter of networks of the fake backend. Nothing is filtered; policies and records are only kept.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use backend::{
    BackendError, LogWait, Measure, NetworkCounters, NetworkFilter, NetworkLogPage, NetworkRecord,
    NetworkState,
};
use domain::{NetworkAccess, NetworkPolicy, SandboxId, SandboxSpec};

use super::FakeBackend;

/// How long reading a log waits for a record.
const LOG_WAIT_TIMEOUT: Duration = Duration::from_secs(5);

impl FakeBackend {
    /// The policy that the filter has for a sandbox.
    pub fn policy(&self, id: &SandboxId) -> Option<Arc<NetworkPolicy>> {
        self.world.lock().unwrap().policies.get(id).cloned()
    }

    /// Forgets all policies, as a filter does that is restarted without a server.
    pub fn forget_policies(&self) {
        self.world.lock().unwrap().policies.clear();
    }

    /// Adds a record to the log of a sandbox.
    pub fn add_network_record(&self, id: &SandboxId, record: NetworkRecord) {
        self.world.lock().unwrap().network_logs.entry(id.clone()).or_default().push(record);
        self.network_records.send_modify(|count| *count += 1);
    }

    /// Drops the oldest records of a sandbox's log.
    pub fn drop_network_records(&self, id: &SandboxId, count: usize) {
        self.world.lock().unwrap().network_logs.entry(id.clone()).or_default().drain(..count);
    }

    pub fn set_network_counters(&self, counters: NetworkCounters) {
        self.world.lock().unwrap().network_counters = counters;
    }

    /// The measures of a new sandbox. A filtered one has its policy from the beginning.
    pub(super) fn prepare_network(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<Vec<Measure>, BackendError> {
        if spec.network != NetworkAccess::Filtered {
            return Ok(Vec::new());
        }
        self.check_filter()?;
        self.world.lock().unwrap().policies.insert(id.clone(), spec.policy_or_deny_all());
        Ok(vec![Measure::Network(NetworkState::Filtered)])
    }

    pub(super) fn check_filter(&self) -> Result<(), BackendError> {
        if self.filtered.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (message, hint) = ("this host cannot filter networks", "use another host");
        Err(BackendError::Unsupported { message: message.to_owned(), hint: Some(hint.to_owned()) })
    }

    /// The records after `after`, and how many before them are gone.
    fn log_page(&self, id: &SandboxId, after: u64, limit: u32) -> NetworkLogPage {
        let world = self.world.lock().unwrap();
        let log = world.network_logs.get(id).map_or(&[][..], Vec::as_slice);
        let later = log.iter().filter(|record| record.number > after);
        let records: Vec<_> = later.take(usize::try_from(limit).unwrap()).cloned().collect();
        let dropped = records.first().map_or(0, |first| first.number - after - 1);
        NetworkLogPage { records, dropped }
    }
}

#[async_trait::async_trait]
impl NetworkFilter for FakeBackend {
    async fn set_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) -> Result<(), BackendError> {
        self.record_call("set policy asked")?;
        self.policy_gate.acquire().await.unwrap().forget();
        self.record_call("set policy")?;
        self.world.lock().unwrap().policies.insert(id.clone(), Arc::clone(policy));
        Ok(())
    }

    fn restore_policy(&self, id: &SandboxId, policy: &Arc<NetworkPolicy>) {
        self.world.lock().unwrap().policies.insert(id.clone(), Arc::clone(policy));
    }

    async fn read_log(
        &self,
        id: &SandboxId,
        after: u64,
        limit: u32,
        wait: LogWait,
    ) -> Result<NetworkLogPage, BackendError> {
        self.record_call("read log")?;
        let mut added = self.network_records.subscribe();
        let page = self.log_page(id, after, limit);
        if !page.records.is_empty() || wait == LogWait::No {
            return Ok(page);
        }
        // An elapsed time is answered with an empty page.
        tokio::time::timeout(LOG_WAIT_TIMEOUT, added.changed()).await.ok();
        Ok(self.log_page(id, after, limit))
    }

    async fn counters(&self) -> Result<NetworkCounters, BackendError> {
        Ok(self.world.lock().unwrap().network_counters.clone())
    }
}

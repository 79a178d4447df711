//! Changes of what a sandbox may reach.

use std::sync::Arc;

use domain::{LifecycleRequest, NetworkAccess, NetworkPolicy, Phase, PolicyEdit};

use super::Driver;
use crate::error::error_chain;
use crate::{Outcome, PolicyChange, ServiceError};

impl Driver {
    /// Changes the policy of the sandbox, which becomes filtered if it was not.
    pub(super) async fn edit_policy(&mut self, edit: &PolicyEdit) -> Result<PolicyChange, ServiceError> {
        self.check_request(LifecycleRequest::SetPolicy)?;
        let current = self.record.sandbox.network_policy();
        let policy = Arc::new(edit.apply(&current).map_err(ServiceError::Policy)?);
        self.core.check_vault_policy(&self.handle.id, &policy).await?;
        let outcome = if policy == current { Outcome::Unchanged } else { Outcome::Done };
        match (self.record.sandbox.is_filtered(), outcome) {
            // What was stored may not have reached the filter, so it is sent even if nothing changes.
            (true, _) => self.replace_policy(&policy).await?,
            (false, Outcome::Done) => self.begin_filtering(&policy).await?,
            (false, Outcome::Unchanged) => {}
        }
        Ok(PolicyChange { policy, outcome })
    }

    /// Sets the credential vault of a sandbox that a former server made, if it has one.
    pub(crate) fn restore_vault(&self) {
        if !matches!(self.record.sandbox.phase, Phase::Stopping | Phase::Stopped | Phase::Failed(_)) {
            self.core.restore_vault(&self.handle.id);
        }
    }

    async fn replace_policy(&mut self, policy: &Arc<NetworkPolicy>) -> Result<(), ServiceError> {
        self.store_network(NetworkAccess::Filtered, Some(Arc::clone(policy))).await?;
        self.publish_state();
        // If this fails, the backend still applies it as soon as it can.
        self.core.set_network_policy(&self.handle.id, policy).await
    }

    /// Makes the network a filtered one. The policy is set first, so at no moment another one is in force.
    async fn begin_filtering(&mut self, policy: &Arc<NetworkPolicy>) -> Result<(), ServiceError> {
        let spec = &self.record.sandbox.spec;
        let former = (spec.network, spec.policy.clone());
        let mut filtered = spec.clone();
        filtered.network = NetworkAccess::Filtered;
        self.core.check_network(&filtered)?;
        self.store_network(NetworkAccess::Filtered, Some(Arc::clone(policy))).await?;
        match self.connect_filter(policy).await {
            Ok(()) => {
                self.core.store.update_sandbox_later(&self.record).await;
                self.publish_state();
                tracing::info!(sandbox = %self.handle.id, former = former.0.name(), "the network of a sandbox is filtered from now on");
                Ok(())
            }
            Err(error) => {
                (self.record.sandbox.spec.network, self.record.sandbox.spec.policy) = former;
                self.core.store.update_sandbox_later(&self.record).await;
                Err(error)
            }
        }
    }

    async fn connect_filter(&mut self, policy: &Arc<NetworkPolicy>) -> Result<(), ServiceError> {
        let id = &self.handle.id;
        self.core.set_network_policy(id, policy).await?;
        let measures = self.core.connect_network(id, NetworkAccess::Filtered).await?;
        self.record.sandbox.in_force.replace_measures(measures);
        Ok(())
    }

    /// Stores a network before it is in force, so that the next server does not fall back behind it.
    async fn store_network(
        &mut self,
        network: NetworkAccess,
        policy: Option<Arc<NetworkPolicy>>,
    ) -> Result<(), ServiceError> {
        let spec = &mut self.record.sandbox.spec;
        let former = (spec.network, std::mem::replace(&mut spec.policy, policy));
        spec.network = network;
        if let Err(source) = self.core.store.update_sandbox(&self.record).await {
            (self.record.sandbox.spec.network, self.record.sandbox.spec.policy) = former;
            return Err(ServiceError::Store { action: "store the network policy", source });
        }
        Ok(())
    }

    /// Sets the policy of a sandbox that a former server made: the filter may have been restarted since.
    pub(crate) fn restore_policy(&self) {
        let sandbox = &self.record.sandbox;
        if !sandbox.is_filtered()
            || matches!(sandbox.phase, Phase::Stopping | Phase::Stopped | Phase::Failed(_))
        {
            return;
        }
        if let Err(error) = self.core.restore_network_policy(&sandbox.id, &sandbox.network_policy()) {
            tracing::error!(sandbox = %sandbox.id, error = %error_chain(&error), "failed to set the policy of an adopted sandbox; it reaches nothing");
        }
    }
}

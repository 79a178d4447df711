//! The vaults of the fake backend. A value is sealed by writing it backwards, so that tests can tell the forms apart.

use std::sync::Arc;

use backend::{ActiveVault, BackendError, SecretVaults, VaultAuthority};
use domain::{SandboxId, SealedSecret, SecretText};

use super::FakeBackend;

impl FakeBackend {
    /// The vault that the backend has for a sandbox.
    pub fn vault(&self, id: &SandboxId) -> Option<Arc<ActiveVault>> {
        self.world.lock().unwrap().vaults.get(id).cloned()
    }

    /// Forgets all vaults, as a backend does that is restarted without a server.
    pub fn forget_vaults(&self) {
        self.world.lock().unwrap().vaults.clear();
    }
}

#[async_trait::async_trait]
impl SecretVaults for FakeBackend {
    async fn seal_secret(&self, id: &SandboxId, value: &SecretText) -> Result<SealedSecret, BackendError> {
        self.record_call("seal secret")?;
        let backwards: String = value.expose().chars().rev().collect();
        Ok(SealedSecret::new(format!("{id}:{backwards}")))
    }

    async fn create_authority(&self, id: &SandboxId) -> Result<VaultAuthority, BackendError> {
        self.record_call("create authority")?;
        let certificate = format!("-----BEGIN CERTIFICATE-----\n{id}\n-----END CERTIFICATE-----\n");
        Ok(VaultAuthority { certificate, sealed_key: SealedSecret::new(format!("{id}:key")) })
    }

    async fn set_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) -> Result<(), BackendError> {
        self.record_call("set vault")?;
        self.restore_vault(id, vault);
        Ok(())
    }

    fn restore_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) {
        self.world.lock().unwrap().vaults.insert(id.clone(), Arc::clone(vault));
    }

    async fn remove_vault(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.record_call("remove vault")?;
        self.world.lock().unwrap().vaults.remove(id);
        Ok(())
    }
}

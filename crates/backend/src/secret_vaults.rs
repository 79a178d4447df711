//! Vaults of secrets, for backends that can add secrets to requests outside of a sandbox.

use std::sync::Arc;

use domain::{SandboxId, SealedSecret, SecretText, Vault};

use crate::BackendError;

/// Seals secrets and adds them to requests. The service never reads what was sealed.
#[async_trait::async_trait]
pub trait SecretVaults: Send + Sync {
    /// Encrypts a secret for one sandbox.
    async fn seal_secret(&self, id: &SandboxId, value: &SecretText) -> Result<SealedSecret, BackendError>;
    /// Makes the certificate authority of a sandbox, by which its intercepted connections are trusted inside.
    async fn create_authority(&self, id: &SandboxId) -> Result<VaultAuthority, BackendError>;
    /// Sets or replaces the vault of a sandbox. It is in force when this returns. If this fails, the backend still
    /// applies it as soon as it can.
    async fn set_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) -> Result<(), BackendError>;
    /// Does the same for a sandbox that a former server made, without waiting. A later `set_vault` wins.
    fn restore_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>);
    /// Removes the vault of a sandbox; succeeds without one.
    async fn remove_vault(&self, id: &SandboxId) -> Result<(), BackendError>;
}

/// What intercepted connections of a sandbox are signed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VaultAuthority {
    /// The certificate that programs in the sandbox trust, in PEM.
    pub certificate: String,
    pub sealed_key: SealedSecret,
}

/// A vault, with the key that its connections need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveVault {
    pub vault: Vault<SealedSecret>,
    pub authority_key: SealedSecret,
}

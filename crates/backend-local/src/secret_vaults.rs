//! Vaults of secrets, which the egress process opens and applies.

use std::sync::Arc;

use backend::{ActiveVault, BackendError, SecretVaults, VaultAuthority};
use domain::{Credential, SandboxId, SealedSecret, SecretText};
use egress_protocol::{
    BindingMessage, CredentialMessage, EgressReplyBody, EgressRequestBody, SecretScope, SecretValue,
    VaultMessage, VaultReply, VaultRequest,
};

use crate::LocalBackend;
use crate::egress::{REQUEST_TIMEOUT, unexpected_reply};

#[async_trait::async_trait]
impl SecretVaults for LocalBackend {
    async fn seal_secret(&self, id: &SandboxId, value: &SecretText) -> Result<SealedSecret, BackendError> {
        let value = SecretValue::new(value.expose().to_owned());
        match self.ask(VaultRequest::SealSecret { scope: scope_of(id), value }).await? {
            VaultReply::Sealed(sealed) => Ok(SealedSecret::new(sealed.as_str().to_owned())),
            VaultReply::Authority { .. } | VaultReply::Done => Err(unexpected_reply()),
        }
    }

    async fn create_authority(&self, id: &SandboxId) -> Result<VaultAuthority, BackendError> {
        match self.ask(VaultRequest::CreateAuthority { sandbox: id.as_str().to_owned() }).await? {
            VaultReply::Authority { certificate, sealed_key } => {
                let sealed_key = SealedSecret::new(sealed_key.as_str().to_owned());
                Ok(VaultAuthority { certificate, sealed_key })
            }
            VaultReply::Sealed(_) | VaultReply::Done => Err(unexpected_reply()),
        }
    }

    async fn set_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) -> Result<(), BackendError> {
        self.egress.set_vault(id, vault).await
    }

    fn restore_vault(&self, id: &SandboxId, vault: &Arc<ActiveVault>) {
        self.egress.restore_vault(id, vault);
    }

    async fn remove_vault(&self, id: &SandboxId) -> Result<(), BackendError> {
        self.egress.remove_vault(id).await
    }
}

impl LocalBackend {
    async fn ask(&self, request: VaultRequest) -> Result<VaultReply, BackendError> {
        match self.egress.request(REQUEST_TIMEOUT, EgressRequestBody::Vault(request)).await? {
            EgressReplyBody::Vault(reply) => Ok(reply),
            _ => Err(unexpected_reply()),
        }
    }
}

/// Writes a vault as egress reads it.
pub(crate) fn vault_message(id: &SandboxId, active: &ActiveVault) -> VaultMessage {
    let seal = |sealed: &SealedSecret| egress_protocol::SealedSecret::new(sealed.as_str().to_owned());
    let credential = |one: &Credential<SealedSecret>| CredentialMessage {
        name: one.name.clone(),
        revision: one.revision,
        fits_header: one.fits_header,
        scope: scope_of(id),
        sealed: seal(&one.value),
    };
    VaultMessage {
        revision: active.vault.revision(),
        authority: seal(&active.authority_key),
        credentials: active.vault.credentials().map(credential).collect(),
        bindings: active.vault.bindings().map(BindingMessage::from).collect(),
    }
}

fn scope_of(id: &SandboxId) -> SecretScope {
    SecretScope::Sandbox(id.as_str().to_owned())
}

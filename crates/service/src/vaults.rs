//! The credential vaults of sandboxes: who may change them, and where they are kept.
//!
//! A value passes through the server once, on its way to be sealed by the backend. What is kept, stored and sent again to
//! a backend that was restarted is sealed. A sandbox has a vault only if it was created with a credential proxy, because
//! its programs must trust the authority of the proxy from the beginning.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use backend::{ActiveVault, VaultAuthority};
use domain::{
    Binding, ChangeSet, NetworkPolicy, NewCredential, SandboxId, SealedSecret, SecretText, Vault,
    VaultChanges, VaultError,
};

use crate::core::Core;
use crate::{SandboxRef, ServiceError};

/// How long a backend may take to seal a value or to apply a vault.
const VAULT_TIMEOUT: Duration = Duration::from_secs(20);

/// The vault of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxVault<'a>(pub(crate) &'a SandboxRef);

/// What is known of the credential proxy of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredVault {
    pub(crate) authority: VaultAuthority,
    pub(crate) vault: Option<Vault<SealedSecret>>,
}

/// The vaults of all sandboxes. An entry is locked while it changes, so changes of one vault follow each other.
#[derive(Default)]
pub(crate) struct VaultIndex(Mutex<HashMap<SandboxId, VaultEntry>>);

type VaultEntry = Arc<tokio::sync::Mutex<StoredVault>>;

#[derive(Debug, thiserror::Error)]
pub enum VaultAccessError {
    #[error("sandbox `{0}` was created without a credential proxy")]
    NoProxy(SandboxId),
    #[error("sandbox `{0}` has no credential vault")]
    NoVault(SandboxId),
    #[error("sandbox `{0}` has a credential vault already")]
    Exists(SandboxId),
    #[error(transparent)]
    Invalid(#[from] VaultError),
    #[error(transparent)]
    Service(#[from] ServiceError),
}

impl SandboxVault<'_> {
    /// Gives a new sandbox a credential proxy, and returns the certificate that its programs have to trust.
    pub async fn enable_proxy(self) -> Result<String, ServiceError> {
        let SandboxRef { core, handle } = self.0;
        let create = async { core.host.backend.required_secret_vaults()?.create_authority(&handle.id).await };
        let authority =
            core.host.ask_backend("make an authority for", &handle.id, VAULT_TIMEOUT, create).await?;
        let certificate = authority.certificate.clone();
        let stored = StoredVault { authority, vault: None };
        core.store_vault(&handle.id, &stored).await?;
        core.vaults.insert(handle.id.clone(), stored);
        Ok(certificate)
    }

    /// Whether the sandbox has a credential proxy.
    pub fn has_proxy(self) -> bool {
        self.0.core.vaults.get(self.0.id()).is_some()
    }

    /// The vault, without values.
    pub async fn current(self) -> Result<Vault<SealedSecret>, VaultAccessError> {
        // A sandbox without a proxy cannot have one either.
        let no_vault = || VaultAccessError::NoVault(self.0.id().clone());
        let entry = self.0.core.vaults.get(self.0.id()).ok_or_else(no_vault)?;
        entry.lock().await.vault.clone().ok_or_else(no_vault)
    }

    /// Makes the vault. All of it is valid, or nothing happens.
    pub async fn create(
        self,
        credentials: Vec<(String, SecretText)>,
        bindings: Vec<Binding>,
    ) -> Result<Vault<SealedSecret>, VaultAccessError> {
        let entry = self.entry()?;
        let mut stored = entry.lock().await;
        if stored.vault.is_some() {
            return Err(VaultAccessError::Exists(self.0.id().clone()));
        }
        // What is wrong with the rest is found before a value is sealed.
        let unsealed = credentials.iter().map(new_unsealed).collect::<Result<_, _>>()?;
        Vault::create(unsealed, bindings.clone(), &self.0.network().policy())?;
        let credentials = self.seal_all(credentials).await?;
        let vault = Vault::create(credentials, bindings, &self.0.network().policy())?;
        self.replace(&mut stored, vault).await
    }

    /// Changes the vault. All of the changes apply, or none.
    pub async fn change(
        self,
        changes: VaultChanges<SecretText>,
    ) -> Result<Vault<SealedSecret>, VaultAccessError> {
        let entry = self.entry()?;
        let mut stored = entry.lock().await;
        let Some(current) = stored.vault.clone() else {
            return Err(VaultAccessError::NoVault(self.0.id().clone()));
        };
        let policy = self.0.network().policy();
        let VaultChanges { expected_revision, credentials, bindings } = changes;
        current.clone().apply(
            VaultChanges {
                expected_revision,
                credentials: ChangeSet {
                    add: credentials.add.iter().map(placeholder_of).collect::<Result<_, _>>()?,
                    replace: credentials.replace.iter().map(placeholder_of).collect::<Result<_, _>>()?,
                    delete: credentials.delete.clone(),
                },
                bindings: bindings.clone(),
            },
            &policy,
        )?;
        let pairs =
            |new: Vec<NewCredential<SecretText>>| new.into_iter().map(|one| (one.name, one.value)).collect();
        let credentials = ChangeSet {
            add: self.seal_all(pairs(credentials.add)).await?,
            replace: self.seal_all(pairs(credentials.replace)).await?,
            delete: credentials.delete,
        };
        let vault = current.apply(VaultChanges { expected_revision, credentials, bindings }, &policy)?;
        self.replace(&mut stored, vault).await
    }

    /// Removes the vault; the credential proxy remains.
    pub async fn delete(self) -> Result<(), VaultAccessError> {
        let SandboxRef { core, handle } = self.0;
        let entry = self.entry()?;
        let mut stored = entry.lock().await;
        if stored.vault.is_none() {
            return Err(VaultAccessError::NoVault(handle.id.clone()));
        }
        let empty = StoredVault { vault: None, ..stored.clone() };
        core.store_vault(&handle.id, &empty).await?;
        *stored = empty;
        let remove = async { core.host.backend.required_secret_vaults()?.remove_vault(&handle.id).await };
        core.host.ask_backend("remove the vault of", &handle.id, VAULT_TIMEOUT, remove).await?;
        Ok(())
    }

    fn entry(self) -> Result<VaultEntry, VaultAccessError> {
        let SandboxRef { core, handle } = self.0;
        core.vaults.get(&handle.id).ok_or_else(|| VaultAccessError::NoProxy(handle.id.clone()))
    }

    async fn seal_all(
        self,
        credentials: Vec<(String, SecretText)>,
    ) -> Result<Vec<NewCredential<SealedSecret>>, ServiceError> {
        let SandboxRef { core, handle } = self.0;
        let mut sealed = Vec::with_capacity(credentials.len());
        for (name, value) in credentials {
            let seal =
                async { core.host.backend.required_secret_vaults()?.seal_secret(&handle.id, &value).await };
            let fits_header = value.fits_header();
            let value = core.host.ask_backend("seal a secret for", &handle.id, VAULT_TIMEOUT, seal).await?;
            sealed.push(NewCredential { name, fits_header, value });
        }
        Ok(sealed)
    }

    /// Stores a vault before it is in force, so that the next server does not fall back behind it.
    async fn replace(
        self,
        stored: &mut StoredVault,
        vault: Vault<SealedSecret>,
    ) -> Result<Vault<SealedSecret>, VaultAccessError> {
        let SandboxRef { core, handle } = self.0;
        let new = StoredVault { vault: Some(vault.clone()), ..stored.clone() };
        core.store_vault(&handle.id, &new).await?;
        *stored = new;
        let active = Arc::new(ActiveVault {
            vault: vault.clone(),
            authority_key: stored.authority.sealed_key.clone(),
        });
        let set = async { core.host.backend.required_secret_vaults()?.set_vault(&handle.id, &active).await };
        core.host.ask_backend("set the vault of", &handle.id, VAULT_TIMEOUT, set).await?;
        Ok(vault)
    }
}

fn new_unsealed((name, value): &(String, SecretText)) -> Result<NewCredential<()>, VaultError> {
    if !value.has_valid_length() {
        return Err(VaultError::Value(name.clone()));
    }
    Ok(NewCredential { name: name.clone(), fits_header: value.fits_header(), value: () })
}

/// A credential without its value, to find out whether a change is valid.
fn placeholder_of(new: &NewCredential<SecretText>) -> Result<NewCredential<SealedSecret>, VaultError> {
    if !new.value.has_valid_length() {
        return Err(VaultError::Value(new.name.clone()));
    }
    let value = SealedSecret::new(String::new());
    Ok(NewCredential { name: new.name.clone(), fits_header: new.value.fits_header(), value })
}

impl VaultIndex {
    pub(crate) fn new(stored: Vec<(SandboxId, StoredVault)>) -> Self {
        let entries = stored.into_iter().map(|(id, vault)| (id, Arc::new(tokio::sync::Mutex::new(vault))));
        Self(Mutex::new(entries.collect()))
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn insert(&self, id: SandboxId, vault: StoredVault) {
        let entry = Arc::new(tokio::sync::Mutex::new(vault));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, entry);
    }

    fn get(&self, id: &SandboxId) -> Option<VaultEntry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }
}

impl Core {
    async fn store_vault(&self, id: &SandboxId, vault: &StoredVault) -> Result<(), ServiceError> {
        let written = self.store.put_vault(id, vault).await;
        written.map_err(|source| ServiceError::Store { action: "store the vault", source })
    }

    /// Refuses a policy that does not allow the hosts of a sandbox's vault.
    pub(crate) async fn check_vault_policy(
        &self,
        id: &SandboxId,
        policy: &NetworkPolicy,
    ) -> Result<(), ServiceError> {
        let Some(entry) = self.vaults.get(id) else { return Ok(()) };
        let stored = entry.lock().await;
        let checked = stored.vault.as_ref().map_or(Ok(()), |vault| vault.check_policy(policy));
        checked.map_err(ServiceError::VaultPolicy)
    }

    /// Sets the vault of a sandbox that a former server made: the backend may have been restarted since.
    pub(crate) fn restore_vault(&self, id: &SandboxId) {
        let Some(entry) = self.vaults.get(id) else { return };
        // Nothing changes a vault before its sandbox is adopted.
        let Ok(stored) = entry.try_lock() else { return };
        let (Some(vault), Some(vaults)) = (stored.vault.clone(), self.host.backend.secret_vaults()) else {
            return;
        };
        let authority_key = stored.authority.sealed_key.clone();
        vaults.restore_vault(id, &Arc::new(ActiveVault { vault, authority_key }));
    }
}

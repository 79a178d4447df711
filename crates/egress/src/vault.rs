//! Secrets that are added to requests outside of the sandbox.
//!
//! ```text
//! program ══ TLS with a leaf of the sandbox's authority ══► intercept ══ TLS, checked as any client does ══► server
//!                                                              │
//!     each request: host as in the ClientHello? which binding? headers set, placeholders replaced
//!     each response: values of secrets replaced again
//! ```
//!
//! Only hosts that a binding names are intercepted; all other connections pass as they are. The policy has been judged
//! before, and the upstream connection was dialled by name, so neither is this module's concern.
//!
//! This process alone holds open secrets. They are in no log line, error or `Debug` form.

mod authority;
mod body;
mod forward;
mod host_plan;
mod intercept;
mod redact;
mod replace;
mod rewrite;
mod seal;
mod upstream_tls;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{Binding, BindingError, Credential, DomainName, UrlScheme, Vault, VaultError};
use egress_protocol::{CredentialMessage, SecretScope, SecretValue, VaultMessage, VaultReply, VaultRequest};

use authority::SandboxAuthority;
pub(crate) use body::{ProxyBody, pass_body};
pub(crate) use forward::PlainRequest;
use host_plan::HostPlan;
pub use intercept::{InterceptError, InterceptTarget};
pub use seal::SealingKey;
use seal::{SealError, SealPurpose};
pub use upstream_tls::TrustedRoots;
use upstream_tls::UpstreamTls;

/// The vaults of all sandboxes.
pub struct VaultStore {
    key: SealingKey,
    upstream: UpstreamTls,
    sandboxes: Mutex<HashMap<String, Arc<SandboxVault>>>,
}

/// The vault of a sandbox in one revision, with open secrets.
struct SandboxVault {
    vault: Vault<SecretValue>,
    authority: Arc<SandboxAuthority>,
}

#[derive(Debug, thiserror::Error)]
pub enum VaultFailure {
    #[error("could not seal a secret")]
    Seal(#[source] SealError),
    #[error("could not open the sealed value of `{name}`")]
    Open { name: String, source: SealError },
    #[error("could not create the certificate authority of sandbox `{sandbox}`")]
    Authority { sandbox: String, source: rcgen::Error },
    #[error("binding `{name}` is not valid")]
    Binding { name: String, source: BindingError },
    #[error("the vault is not valid")]
    Vault(#[source] VaultError),
}

impl VaultStore {
    pub fn new(key: SealingKey, roots: TrustedRoots) -> Self {
        Self { key, upstream: UpstreamTls::new(roots), sandboxes: Mutex::default() }
    }

    /// A store whose key dies with it, and which trusts no server.
    #[cfg(test)]
    pub(crate) fn ephemeral() -> Result<Self, SealError> {
        Ok(Self::new(SealingKey::ephemeral()?, TrustedRoots::default()))
    }

    pub fn handle(&self, request: VaultRequest) -> Result<VaultReply, VaultFailure> {
        match request {
            VaultRequest::SealSecret { scope, value } => {
                let purpose = SealPurpose::Secret(&scope);
                let sealed = self.key.seal(purpose, value.expose().as_bytes()).map_err(VaultFailure::Seal)?;
                Ok(VaultReply::Sealed(sealed))
            }
            VaultRequest::CreateAuthority { sandbox } => {
                let failed = |source| VaultFailure::Authority { sandbox: sandbox.clone(), source };
                let (authority, certificate) = SandboxAuthority::create(&sandbox).map_err(failed)?;
                let purpose = SealPurpose::Authority(&sandbox);
                let key = authority.private_key();
                let sealed_key = self.key.seal(purpose, &key).map_err(VaultFailure::Seal)?;
                Ok(VaultReply::Authority { certificate, sealed_key })
            }
            VaultRequest::SetVault { sandbox, vault } => self.set(sandbox, vault).map(|()| VaultReply::Done),
            VaultRequest::RemoveVault { sandbox } => {
                self.remove(&sandbox);
                Ok(VaultReply::Done)
            }
        }
    }

    /// Forgets the vault of a sandbox that is no longer served.
    pub fn remove(&self, sandbox: &str) {
        self.lock().remove(sandbox);
    }

    /// Forgets the vaults of all sandboxes but these.
    pub fn keep_only(&self, sandboxes: &[String]) {
        self.lock().retain(|sandbox, _| sandboxes.contains(sandbox));
    }

    /// How a connection of a sandbox to this host is intercepted; `None` if no binding concerns it, so that its bytes
    /// pass as they are.
    pub fn target(
        self: &Arc<Self>,
        sandbox: &str,
        scheme: UrlScheme,
        host: &DomainName,
    ) -> Option<InterceptTarget> {
        let current = self.current(sandbox)?;
        let concerned = current.vault.concerns(scheme, host);
        concerned.then(|| {
            InterceptTarget::new(Arc::clone(self), sandbox.to_owned(), scheme, host.clone(), &current)
        })
    }

    fn current(&self, sandbox: &str) -> Option<Arc<SandboxVault>> {
        self.lock().get(sandbox).cloned()
    }

    fn set(&self, sandbox: String, message: VaultMessage) -> Result<(), VaultFailure> {
        let credentials = message.credentials.into_iter().map(|credential| self.open(&sandbox, credential));
        let credentials = credentials.collect::<Result<_, _>>()?;
        let bindings = message.bindings.into_iter().map(|binding| {
            let name = binding.name.clone();
            Binding::try_from(binding).map_err(|source| VaultFailure::Binding { name, source })
        });
        let bindings = bindings.collect::<Result<_, _>>()?;
        let vault = Vault::restore(message.revision, credentials, bindings).map_err(VaultFailure::Vault)?;
        let known = self.current(&sandbox).map(|current| Arc::clone(&current.authority));
        let authority = match known.filter(|known| known.sealed_key() == Some(&message.authority)) {
            Some(known) => known,
            None => {
                let name = || "certificate authority".to_owned();
                let key = self
                    .key
                    .open(SealPurpose::Authority(&sandbox), &message.authority)
                    .map_err(|source| VaultFailure::Open { name: name(), source })?;
                let failed = |source| VaultFailure::Authority { sandbox: sandbox.clone(), source };
                Arc::new(SandboxAuthority::load(&sandbox, &key, message.authority).map_err(failed)?)
            }
        };
        self.lock().insert(sandbox, Arc::new(SandboxVault { vault, authority }));
        Ok(())
    }

    /// Opens a credential. One that was sealed for another sandbox is refused, whatever the message says.
    fn open(
        &self,
        sandbox: &str,
        message: CredentialMessage,
    ) -> Result<Credential<SecretValue>, VaultFailure> {
        let CredentialMessage { name, revision, fits_header, scope, sealed } = message;
        let failed = |source| VaultFailure::Open { name: name.clone(), source };
        if matches!(&scope, SecretScope::Sandbox(other) if other != sandbox) {
            return Err(failed(SealError::WrongKeyOrScope));
        }
        let value = self.key.open_text(SealPurpose::Secret(&scope), &sealed).map_err(failed)?;
        // The value decides what goes into headers, not what the message says of it.
        let fits_header = fits_header && value.fits_header();
        Ok(Credential { name, revision, fits_header, value })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<SandboxVault>>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SandboxVault {
    fn plan(&self, scheme: UrlScheme, host: &DomainName) -> HostPlan {
        HostPlan::new(&self.vault, scheme, host)
    }
}

impl fmt::Debug for VaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VaultStore").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

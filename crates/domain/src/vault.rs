//! A sandbox's credential vault: secrets that are added to its requests outside of it.
//!
//! A credential is a named secret; a binding says into which requests it goes and how. This module knows the rules: what
//! a valid vault is, how it changes and which binding a request matches. It never looks at a secret: the type of the
//! value is a parameter, so the server keeps sealed values and only egress has open ones.
//!
//! Every change makes a new revision of the vault. A credential carries the revision that last set it.

mod binding;
mod change;
mod request_match;
mod secret;

use std::collections::BTreeMap;
use std::fmt;

pub use binding::{
    Binding, BindingAuth, BindingError, HeaderCredential, Substitution, SubstitutionSurface,
    check_header_name,
};
pub use change::{ChangeSet, NewCredential, VaultChanges};
pub use request_match::{HostPattern, PathPattern, RequestFacts, RequestMatch, UrlScheme};
pub use secret::{SealedSecret, SecretText};

use crate::network_policy::{DomainName, NetworkPolicy};

/// The largest number of credentials and of bindings in one vault.
pub const MAX_VAULT_ENTRIES: usize = 256;
/// The longest secret, in bytes.
pub const MAX_SECRET_BYTES: usize = 16 << 10;
/// The longest name of a credential or binding, in bytes.
const MAX_ENTRY_NAME_BYTES: usize = 253;

/// Credentials and bindings, both by name. `V` is how a secret is represented here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vault<V> {
    revision: u64,
    credentials: BTreeMap<String, Credential<V>>,
    bindings: BTreeMap<String, Binding>,
}

/// A named secret. Its `Debug` form does not contain the value.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential<V> {
    pub name: String,
    /// The revision of the vault that set this value.
    pub revision: u64,
    /// Whether the value can be part of a header.
    pub fits_header: bool,
    pub value: V,
}

/// The two kinds of entries, for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VaultEntry {
    Credential,
    Binding,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VaultError {
    #[error("expectedRevision {expected} does not match the current revision {current}")]
    Revision { expected: u64, current: u64 },
    #[error("a vault has at most {MAX_VAULT_ENTRIES} {0}s")]
    TooMany(VaultEntry),
    #[error("the name of a {0} must have 1 to {MAX_ENTRY_NAME_BYTES} bytes and no control characters")]
    Name(VaultEntry),
    #[error("{entry} `{name}` is named by more than one operation")]
    Duplicate { entry: VaultEntry, name: String },
    #[error("{entry} `{name}` already exists")]
    Exists { entry: VaultEntry, name: String },
    #[error("{entry} `{name}` does not exist")]
    Missing { entry: VaultEntry, name: String },
    #[error("the value of credential `{0}` must have 1 to {MAX_SECRET_BYTES} bytes")]
    Value(String),
    #[error("binding `{name}` is not valid: {reason}")]
    Binding { name: String, reason: BindingError },
    #[error("binding `{binding}` uses unknown credential `{credential}`")]
    UnknownCredential { binding: String, credential: String },
    #[error(
        "binding `{binding}` puts credential `{credential}` into a header, which cannot contain its value"
    )]
    NotForHeaders { binding: String, credential: String },
    #[error(
        "host `{host}` of binding `{binding}` is not covered by an explicit allow rule of the network policy"
    )]
    HostNotAllowed { binding: String, host: String },
    #[error("bindings `{first}` and `{second}` can match the same request")]
    Ambiguous { first: String, second: String },
}

impl<V> Vault<V> {
    /// The first revision of a vault.
    pub fn create(
        credentials: Vec<NewCredential<V>>,
        bindings: Vec<Binding>,
        policy: &NetworkPolicy,
    ) -> Result<Self, VaultError> {
        let credentials = ChangeSet { add: credentials, ..ChangeSet::default() };
        let bindings = ChangeSet { add: bindings, ..ChangeSet::default() };
        let empty = Self { revision: 0, credentials: BTreeMap::new(), bindings: BTreeMap::new() };
        empty.apply(VaultChanges { expected_revision: None, credentials, bindings }, policy)
    }

    /// Puts a vault together again that was taken apart for a message or the store. Policies are not considered: one
    /// may have changed since.
    pub fn restore(
        revision: u64,
        credentials: Vec<Credential<V>>,
        bindings: Vec<Binding>,
    ) -> Result<Self, VaultError> {
        let credentials = credentials.into_iter().map(|one| (one.name.clone(), one)).collect();
        let bindings = bindings.into_iter().map(|one| (one.name.clone(), one)).collect();
        let vault = Self { revision, credentials, bindings };
        vault.check_entries()?;
        Ok(vault)
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// All credentials, by name.
    pub fn credentials(&self) -> impl Iterator<Item = &Credential<V>> {
        self.credentials.values()
    }

    pub fn credential(&self, name: &str) -> Option<&Credential<V>> {
        self.credentials.get(name)
    }

    /// All bindings, by name.
    pub fn bindings(&self) -> impl Iterator<Item = &Binding> {
        self.bindings.values()
    }

    pub fn binding(&self, name: &str) -> Option<&Binding> {
        self.bindings.get(name)
    }

    /// Whether any binding may concern requests to this host.
    pub fn concerns(&self, scheme: UrlScheme, host: &DomainName) -> bool {
        self.bindings.values().any(|binding| binding.request.concerns(scheme, host))
    }

    /// The binding that a request matches. A host given exactly precedes a wildcard; otherwise at most one matches.
    pub fn match_request(&self, request: &RequestFacts<'_>) -> Option<&Binding> {
        let matching = self
            .bindings
            .values()
            .filter_map(|binding| binding.request.matches(request).map(|precedence| (precedence, binding)));
        matching.max_by_key(|(precedence, _)| *precedence).map(|(_, binding)| binding)
    }

    /// Checks what a vault needs of the network policy: an allow rule for each host. Also to be called before the
    /// policy of a sandbox with a vault changes.
    pub fn check_policy(&self, policy: &NetworkPolicy) -> Result<(), VaultError> {
        self.bindings.values().try_for_each(|binding| binding.check_policy(policy))
    }

    /// Checks the entries and how they refer to each other.
    fn check_entries(&self) -> Result<(), VaultError> {
        for (count, entry) in
            [(self.credentials.len(), VaultEntry::Credential), (self.bindings.len(), VaultEntry::Binding)]
        {
            if count > MAX_VAULT_ENTRIES {
                return Err(VaultError::TooMany(entry));
            }
        }
        self.credentials.keys().try_for_each(|name| check_name(name, VaultEntry::Credential))?;
        self.bindings.keys().try_for_each(|name| check_name(name, VaultEntry::Binding))?;
        self.bindings.values().try_for_each(|binding| self.check_references(binding))?;
        let bindings: Vec<&Binding> = self.bindings.values().collect();
        for (index, first) in bindings.iter().enumerate() {
            let overlapping =
                bindings[index + 1..].iter().find(|second| first.request.overlaps(&second.request));
            if let Some(second) = overlapping {
                return Err(VaultError::Ambiguous { first: first.name.clone(), second: second.name.clone() });
            }
        }
        Ok(())
    }

    fn check_references(&self, binding: &Binding) -> Result<(), VaultError> {
        for (name, for_header) in binding.references() {
            let unknown = || VaultError::UnknownCredential {
                binding: binding.name.clone(),
                credential: name.to_owned(),
            };
            let credential = self.credentials.get(name).ok_or_else(unknown)?;
            if for_header && !credential.fits_header {
                return Err(VaultError::NotForHeaders {
                    binding: binding.name.clone(),
                    credential: name.to_owned(),
                });
            }
        }
        Ok(())
    }
}

fn check_name(name: &str, entry: VaultEntry) -> Result<(), VaultError> {
    let valid =
        !name.trim().is_empty() && name.len() <= MAX_ENTRY_NAME_BYTES && !name.chars().any(char::is_control);
    if valid { Ok(()) } else { Err(VaultError::Name(entry)) }
}

impl<V> fmt::Debug for Credential<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("name", &self.name)
            .field("revision", &self.revision)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for VaultEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Credential => "credential",
            Self::Binding => "binding",
        })
    }
}

#[cfg(test)]
mod tests;

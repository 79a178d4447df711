//! Changes of a vault. All of a request apply, or none.

use std::collections::{BTreeMap, BTreeSet};

use crate::network_policy::NetworkPolicy;
use crate::vault::{Binding, Credential, Vault, VaultEntry, VaultError};

/// What a client wants to change.
#[derive(Clone, Debug)]
pub struct VaultChanges<V> {
    /// The change is refused if the vault has another revision.
    pub expected_revision: Option<u64>,
    pub credentials: ChangeSet<NewCredential<V>>,
    pub bindings: ChangeSet<Binding>,
}

/// Entries to add, entries that take the place of those with the same name, and names to delete.
#[derive(Clone, Debug)]
pub struct ChangeSet<T> {
    pub add: Vec<T>,
    pub replace: Vec<T>,
    pub delete: Vec<String>,
}

/// A credential before a vault has it.
#[derive(Clone)]
pub struct NewCredential<V> {
    pub name: String,
    pub fits_header: bool,
    pub value: V,
}

impl<V> Vault<V> {
    /// The next revision of this vault. Every request makes one, even if it changes nothing.
    pub fn apply(mut self, changes: VaultChanges<V>, policy: &NetworkPolicy) -> Result<Self, VaultError> {
        if let Some(expected) = changes.expected_revision.filter(|expected| *expected != self.revision) {
            return Err(VaultError::Revision { expected, current: self.revision });
        }
        self.revision += 1;
        let revision = self.revision;
        let credentials = changes.credentials.map(|new| {
            let NewCredential { name, fits_header, value } = new;
            let name = name.trim().to_owned();
            (name.clone(), Credential { name, revision, fits_header, value })
        });
        apply_changes(&mut self.credentials, credentials, VaultEntry::Credential)?;
        let bindings = changes.bindings.map(|mut binding| {
            binding.name = binding.name.trim().to_owned();
            (binding.name.clone(), binding)
        });
        apply_changes(&mut self.bindings, bindings, VaultEntry::Binding)?;
        self.check_entries()?;
        self.check_policy(policy)?;
        Ok(self)
    }
}

/// Deletes come first, so that a name is free when it is added again by a later request; within one request a name is
/// used once.
fn apply_changes<T>(
    entries: &mut BTreeMap<String, T>,
    changes: ChangeSet<(String, T)>,
    entry: VaultEntry,
) -> Result<(), VaultError> {
    let mut mentioned = BTreeSet::new();
    let mut mention = |name: &String| match mentioned.insert(name.clone()) {
        true => Ok(()),
        false => Err(VaultError::Duplicate { entry, name: name.clone() }),
    };
    for name in changes.delete {
        let name = name.trim().to_owned();
        mention(&name)?;
        if entries.remove(&name).is_none() {
            return Err(VaultError::Missing { entry, name });
        }
    }
    for (name, new) in changes.replace {
        mention(&name)?;
        match entries.get_mut(&name) {
            Some(old) => *old = new,
            None => return Err(VaultError::Missing { entry, name }),
        }
    }
    for (name, new) in changes.add {
        mention(&name)?;
        if entries.contains_key(&name) {
            return Err(VaultError::Exists { entry, name });
        }
        entries.insert(name, new);
    }
    Ok(())
}

impl<T> ChangeSet<T> {
    fn map<U>(self, mut convert: impl FnMut(T) -> U) -> ChangeSet<U> {
        ChangeSet {
            add: self.add.into_iter().map(&mut convert).collect(),
            replace: self.replace.into_iter().map(&mut convert).collect(),
            delete: self.delete,
        }
    }
}

impl<T> Default for ChangeSet<T> {
    fn default() -> Self {
        Self { add: Vec::new(), replace: Vec::new(), delete: Vec::new() }
    }
}

impl<V> std::fmt::Debug for NewCredential<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewCredential").field("name", &self.name).finish_non_exhaustive()
    }
}

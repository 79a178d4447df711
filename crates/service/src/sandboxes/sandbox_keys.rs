//! Which sandbox each key leads to, and the lock (the turn) for changing that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::{KeyHandle, Owner, SandboxId, SandboxKey};

/// Separates the digests of handles from all others.
const HANDLE_CONTEXT: &str = "coracle 2026 handle of a key";

/// All keys in use, in memory; the store has the durable copy.
#[derive(Clone, Default)]
pub(crate) struct KeyIndex(Arc<Mutex<KeyTables>>);

#[derive(Default)]
struct KeyTables {
    slots: HashMap<SandboxKey, Arc<KeySlot>>,
    /// The keys of `slots` by their handles.
    handles: HashMap<KeyHandle, SandboxKey>,
}

/// A key's slot while a caller works with it. A key that leads nowhere is removed when its last guard is dropped.
pub(crate) struct KeyGuard {
    names: KeyIndex,
    key: SandboxKey,
    slot: Option<Arc<KeySlot>>,
}

impl std::ops::Deref for KeyGuard {
    type Target = KeySlot;

    fn deref(&self) -> &KeySlot {
        self.slot.as_ref().expect("the slot is present until the guard is dropped")
    }
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        self.slot = None;
        self.names.remove_unused_slot(&self.key);
    }
}

/// The sandbox that one key leads to.
#[derive(Default)]
pub(crate) struct KeySlot {
    /// Held while the sandbox of this key is made or removed, so that only one caller does so at a time. A caller that
    /// only wants the existing sandbox does not wait for it.
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
    sandbox: Mutex<Option<SandboxId>>,
}

impl KeySlot {
    pub(crate) fn sandbox(&self) -> Option<SandboxId> {
        self.lock().clone()
    }

    pub(crate) fn point_to(&self, id: SandboxId) {
        *self.lock() = Some(id);
    }

    fn lock(&self) -> MutexGuard<'_, Option<SandboxId>> {
        self.sandbox.lock().expect("no thread panics while pointing a key")
    }
}

impl KeyIndex {
    /// Returns a guard for a key, whether it leads anywhere or not.
    pub(crate) fn guard_key(&self, key: &SandboxKey) -> KeyGuard {
        let mut tables = self.lock();
        let slot = match tables.slots.get(key) {
            Some(slot) => Arc::clone(slot),
            None => {
                tables.handles.insert(handle_of_key(key), key.clone());
                Arc::clone(tables.slots.entry(key.clone()).or_default())
            }
        };
        drop(tables);
        KeyGuard { names: self.clone(), key: key.clone(), slot: Some(slot) }
    }

    pub(crate) fn find_sandbox(&self, key: &SandboxKey) -> Option<SandboxId> {
        self.lock().slots.get(key)?.sandbox()
    }

    /// Returns the key with this handle, if it leads to a sandbox or is about to.
    pub(crate) fn find_key(&self, handle: &KeyHandle) -> Option<SandboxKey> {
        self.lock().handles.get(handle).cloned()
    }

    /// Returns the keys of an owner in one space that lead to a sandbox.
    pub(crate) fn keys_in_space(&self, owner: &Owner, space: &str) -> Vec<SandboxKey> {
        let tables = self.lock();
        let found = tables
            .slots
            .iter()
            .filter(|(key, slot)| key.owner() == owner && key.space() == space && slot.sandbox().is_some());
        let mut keys: Vec<_> = found.map(|(key, _)| key.clone()).collect();
        keys.sort_unstable_by(|one, other| one.name().cmp(other.name()));
        keys
    }

    /// Clears the key when its sandbox is gone. A key that leads to a successor by now is left alone.
    pub(crate) fn forget_sandbox(&self, key: &SandboxKey, id: &SandboxId) {
        if let Some(slot) = self.lock().slots.get(key) {
            slot.lock().take_if(|sandbox| sandbox == id);
        }
        self.remove_unused_slot(key);
    }

    /// Slots are handed out only under the lock that is held here, so no other caller can get a slot that is about to
    /// be removed.
    fn remove_unused_slot(&self, key: &SandboxKey) {
        let mut tables = self.lock();
        let is_unused = |slot: &Arc<KeySlot>| Arc::strong_count(slot) == 1 && slot.sandbox().is_none();
        if tables.slots.get(key).is_some_and(is_unused) {
            tables.slots.remove(key);
            tables.handles.remove(&handle_of_key(key));
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeyTables> {
        self.0.lock().expect("no thread panics while looking up a key")
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        let tables = self.lock();
        assert_eq!(tables.slots.len(), tables.handles.len());
        tables.slots.len()
    }
}

/// The handle of a key, whether the key leads anywhere or not.
pub(crate) fn handle_of_key(key: &SandboxKey) -> KeyHandle {
    let mut hasher = blake3::Hasher::new_derive_key(HANDLE_CONTEXT);
    for part in [key.owner().as_str(), key.space(), key.name()] {
        hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes()).update(part.as_bytes());
    }
    let digest = hasher.finalize();
    let (digest, _) = digest.as_bytes().split_first_chunk().expect("a digest has 32 bytes");
    KeyHandle::from_digest(*digest)
}

/// The name in a key, if the owner chose it as a name; keys for other uses, such as requests that may be repeated, are
/// not names.
pub(crate) fn chosen_name(key: &SandboxKey) -> Option<String> {
    (key.space() == crate::NAME_KEY_SPACE).then(|| key.name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_key_is_removed_with_its_last_guard() {
        let names = KeyIndex::default();
        let key = SandboxKey::new(&Owner::operator(), "test", "n").expect("valid name");
        let (one, two) = (names.guard_key(&key), names.guard_key(&key));
        drop(one);
        assert_eq!(names.count(), 1);
        drop(two);
        assert_eq!(names.count(), 0);
    }

    #[test]
    fn key_is_found_by_its_handle_while_it_is_in_use() {
        let names = KeyIndex::default();
        let key = SandboxKey::new(&Owner::operator(), "test", "n").expect("valid name");
        let handle = handle_of_key(&key);
        assert_eq!(names.find_key(&handle), None);
        let guard = names.guard_key(&key);
        assert_eq!(names.find_key(&handle), Some(key));
        drop(guard);
        assert_eq!(names.find_key(&handle), None);
    }

    #[test]
    fn handles_differ_by_owner_space_and_name() {
        let handle = |owner: &str, space: &str, name: &str| {
            handle_of_key(&SandboxKey::new(&Owner::from_valid_name(owner), space, name).expect("valid name"))
        };
        assert_eq!(handle("a", "b", "c"), handle("a", "b", "c"));
        assert_eq!(KeyHandle::from_text(handle("a", "b", "c").as_str()), Some(handle("a", "b", "c")));
        for other in
            [handle("b", "b", "c"), handle("a", "c", "c"), handle("a", "b", "d"), handle("ab", "", "c")]
        {
            assert_ne!(handle("a", "b", "c"), other);
        }
    }

    #[test]
    fn n97_forgetting_an_old_sandbox_does_not_affect_its_successor() {
        let names = KeyIndex::default();
        let key = SandboxKey::new(&Owner::operator(), "test", "n").expect("valid name");
        let (old, new) = (SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20]));
        names.guard_key(&key).point_to(new.clone());
        names.forget_sandbox(&key, &old);
        assert_eq!(names.find_sandbox(&key), Some(new.clone()));
        names.forget_sandbox(&key, &new);
        assert_eq!((names.find_sandbox(&key), names.count()), (None, 0));
    }
}

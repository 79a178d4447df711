//! Which sandbox each key leads to, and the lock (the turn) for changing that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::{SandboxId, SandboxKey};

/// All keys in use, in memory; the store has the durable copy.
#[derive(Clone, Default)]
pub(crate) struct KeyIndex(Arc<Mutex<HashMap<SandboxKey, Arc<KeySlot>>>>);

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
        let slot = Arc::clone(self.lock().entry(key.clone()).or_default());
        KeyGuard { names: self.clone(), key: key.clone(), slot: Some(slot) }
    }

    pub(crate) fn find_sandbox(&self, key: &SandboxKey) -> Option<SandboxId> {
        self.lock().get(key)?.sandbox()
    }

    /// Clears the key when its sandbox is gone. A key that leads to a successor by now is left alone.
    pub(crate) fn forget_sandbox(&self, key: &SandboxKey, id: &SandboxId) {
        if let Some(slot) = self.lock().get(key) {
            slot.lock().take_if(|sandbox| sandbox == id);
        }
        self.remove_unused_slot(key);
    }

    /// Slots are handed out only under the lock that is held here, so no other caller can get a slot that is about to
    /// be removed.
    fn remove_unused_slot(&self, key: &SandboxKey) {
        let mut names = self.lock();
        if names.get(key).is_some_and(|slot| Arc::strong_count(slot) == 1 && slot.sandbox().is_none()) {
            names.remove(key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxKey, Arc<KeySlot>>> {
        self.0.lock().expect("no thread panics while looking up a key")
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }
}

/// The name in a key, if the owner chose it as a name; keys for other uses, such as requests that may be repeated, are
/// not names.
pub(crate) fn chosen_name(key: &SandboxKey) -> Option<String> {
    (key.space() == crate::NAME_KEY_SPACE).then(|| key.name().to_owned())
}

#[cfg(test)]
mod tests {
    use domain::Owner;

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

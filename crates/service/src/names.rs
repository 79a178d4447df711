//! Which sandbox each key leads to, and the lock (the turn) for changing that.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use domain::{Key, SandboxId};

/// All keys in use, in memory; the store has the durable copy.
#[derive(Clone, Default)]
pub(crate) struct Names(Arc<Mutex<HashMap<Key, Arc<Slot>>>>);

/// A key's slot while a caller works with it. A key that leads nowhere is removed when its last guard is dropped.
pub(crate) struct Place {
    names: Names,
    key: Key,
    slot: Option<Arc<Slot>>,
}

impl std::ops::Deref for Place {
    type Target = Slot;

    fn deref(&self) -> &Slot {
        self.slot.as_ref().expect("the slot is present until the guard is dropped")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.slot = None;
        self.names.tidy(&self.key);
    }
}

/// The sandbox that one key leads to.
#[derive(Default)]
pub(crate) struct Slot {
    /// Held while the sandbox of this key is made or removed, so that only one caller does so at a time. A caller that
    /// only wants the existing sandbox does not wait for it.
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
    sandbox: Mutex<Option<SandboxId>>,
}

impl Slot {
    pub(crate) fn sandbox(&self) -> Option<SandboxId> {
        self.lock().clone()
    }

    pub(crate) fn lead_to(&self, id: SandboxId) {
        *self.lock() = Some(id);
    }

    fn lock(&self) -> MutexGuard<'_, Option<SandboxId>> {
        self.sandbox.lock().expect("no thread panics while pointing a key")
    }
}

impl Names {
    /// Returns a guard for a key, whether it leads anywhere or not.
    pub(crate) fn place(&self, key: &Key) -> Place {
        let slot = Arc::clone(self.lock().entry(key.clone()).or_default());
        Place { names: self.clone(), key: key.clone(), slot: Some(slot) }
    }

    pub(crate) fn find(&self, key: &Key) -> Option<SandboxId> {
        self.lock().get(key)?.sandbox()
    }

    /// Clears the key when its sandbox is gone. A key that leads to a successor by now is left alone.
    pub(crate) fn forget(&self, key: &Key, id: &SandboxId) {
        if let Some(slot) = self.lock().get(key) {
            slot.lock().take_if(|sandbox| sandbox == id);
        }
        self.tidy(key);
    }

    /// Slots are handed out only under the lock that is held here, so no other caller can get a slot that is about to
    /// be removed.
    fn tidy(&self, key: &Key) {
        let mut names = self.lock();
        if names.get(key).is_some_and(|slot| Arc::strong_count(slot) == 1 && slot.sandbox().is_none()) {
            names.remove(key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Slot>>> {
        self.0.lock().expect("no thread panics while looking up a key")
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }
}

/// The name in a key, if the owner chose it as a name; keys for other uses, such as requests that may be repeated, are
/// not names.
pub(crate) fn chosen_name(key: &Key) -> Option<String> {
    (key.space() == crate::NAMES).then(|| key.name().to_owned())
}

#[cfg(test)]
mod tests {
    use domain::Owner;

    use super::*;

    #[test]
    fn unused_key_is_removed_with_its_last_guard() {
        let names = Names::default();
        let key = Key::new(&Owner::single(), "test", "n").expect("valid name");
        let (one, two) = (names.place(&key), names.place(&key));
        drop(one);
        assert_eq!(names.count(), 1);
        drop(two);
        assert_eq!(names.count(), 0);
    }

    #[test]
    fn n97_forgetting_an_old_sandbox_does_not_affect_its_successor() {
        let names = Names::default();
        let key = Key::new(&Owner::single(), "test", "n").expect("valid name");
        let (old, new) = (SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20]));
        names.place(&key).lead_to(new.clone());
        names.forget(&key, &old);
        assert_eq!(names.find(&key), Some(new.clone()));
        names.forget(&key, &new);
        assert_eq!((names.find(&key), names.count()), (None, 0));
    }
}

//! API keys and their owners. Only the hash of a key is stored.

use std::io;
use std::time::SystemTime;

use domain::Owner;
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::core::{Core, io_error};
use crate::tenancy::tokens::random_bytes;
use crate::{Secret, ServiceError, clock};

/// The public data of an issued key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    /// Identifies the key and gives no access.
    pub id: String,
    pub owner: Owner,
    pub created: SystemTime,
    pub expires: Option<SystemTime>,
}

/// A key as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredApiKey {
    pub(crate) hash: [u8; 32],
    pub(crate) key: ApiKey,
}

impl StoredApiKey {
    /// Makes a random key, and returns its secret this once.
    pub(crate) fn generate(
        owner: Owner,
        created: SystemTime,
        expires: Option<SystemTime>,
    ) -> io::Result<(Self, Secret)> {
        let secret = format!("cor_{}", encode_base36(&random_bytes::<30>()?));
        let key = ApiKey { id: encode_base36(&random_bytes::<12>()?), owner, created, expires };
        Ok((Self { hash: hash_key(&secret), key }, Secret::new(secret)))
    }
}

/// Letters and digits. The modulo makes 36 choices per byte slightly uneven, but gives more than five bits each.
fn encode_base36(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    bytes.iter().map(|byte| char::from(DIGITS[usize::from(*byte) % DIGITS.len()])).collect()
}

fn hash_key(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}

/// The accepted keys, each as its hash.
#[derive(Default)]
pub(crate) struct ApiKeys {
    kept: Vec<StoredApiKey>,
    /// The key of the configuration.
    single: Option<[u8; 32]>,
}

impl ApiKeys {
    pub(crate) fn new(kept: Vec<StoredApiKey>) -> Self {
        Self { kept, single: None }
    }

    pub(crate) fn set_operator_key(&mut self, key: Option<&str>) {
        self.single = key.map(hash_key);
    }

    pub(crate) fn has_operator_key(&self) -> bool {
        self.single.is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.is_empty() && self.single.is_none()
    }

    pub(crate) fn add(&mut self, key: StoredApiKey) {
        self.kept.push(key);
    }

    /// Returns `false` if there is no such key.
    pub(crate) fn remove(&mut self, id: &str) -> bool {
        let before = self.kept.len();
        self.kept.retain(|kept| kept.key.id != id);
        self.kept.len() < before
    }

    pub(crate) fn list(&self) -> Vec<ApiKey> {
        self.kept.iter().map(|kept| kept.key.clone()).collect()
    }

    /// Compares with every key, so that the time taken does not reveal which one matches.
    pub(crate) fn find_owner(&self, presented: &str, now: SystemTime) -> Option<Owner> {
        let hash = hash_key(presented);
        let mut found = u64::MAX;
        for (index, kept) in (0..).zip(&self.kept) {
            found.conditional_assign(&index, kept.hash.ct_eq(&hash));
        }
        let single = self.single.is_some_and(|key| key.ct_eq(&hash).into());
        let kept = usize::try_from(found).ok().and_then(|index| self.kept.get(index));
        let valid = kept.filter(|kept| kept.key.expires.is_none_or(|expires| expires > now));
        if single { Some(Owner::operator()) } else { valid.map(|kept| kept.key.owner.clone()) }
    }
}

impl Core {
    pub(crate) async fn issue_key(
        &self,
        owner: Owner,
        expires: Option<SystemTime>,
    ) -> Result<(ApiKey, Secret), ServiceError> {
        if !self.tenancy.keys.read().expect("no thread panics while setting a key").has_operator_key() {
            return Err(ServiceError::NoOperatorKey);
        }
        let made =
            StoredApiKey::generate(owner, self.clock.now().wall, expires.map(clock::truncate_to_micros));
        let (kept, secret) = made.map_err(io_error("draw a random key"))?;
        let failed = |source| ServiceError::Store { action: "store the key", source };
        self.store.insert_key(&kept).await.map_err(failed)?;
        let key = kept.key.clone();
        self.tenancy.keys.write().expect("no thread panics while setting a key").add(kept);
        Ok((key, secret))
    }

    pub(crate) async fn revoke_key(&self, id: &str) -> Result<bool, ServiceError> {
        // The key is refused at once, even if deleting its row fails. Such a failure is reported, and the key opens
        // nothing until the next start.
        let known = self.tenancy.keys.write().expect("no thread panics while setting a key").remove(id);
        let failed = |source| ServiceError::Store { action: "delete the key", source };
        self.store.delete_key(id).await.map_err(failed)?;
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn made(owner: &str, expires: Option<SystemTime>) -> (StoredApiKey, Secret) {
        StoredApiKey::generate(Owner::from_valid_name(owner), NOW, expires)
            .expect("the kernel has random bytes")
    }

    #[test]
    fn each_key_leads_to_its_owner() {
        let ((a, alpha), (b, beta)) = (made("a", None), made("b", None));
        let mut keys = ApiKeys::new(vec![a, b]);
        keys.set_operator_key(Some("operator"));
        assert_eq!(keys.find_owner(alpha.expose(), NOW), Some(Owner::from_valid_name("a")));
        assert_eq!(keys.find_owner(beta.expose(), NOW), Some(Owner::from_valid_name("b")));
        assert_eq!(keys.find_owner("operator", NOW), Some(Owner::operator()));
        for wrong in ["", "gamma", &alpha.expose()[1..]] {
            assert_eq!(keys.find_owner(wrong, NOW), None);
        }
        keys.set_operator_key(None);
        assert_eq!(keys.find_owner("operator", NOW), None);
        assert!(ApiKeys::default().is_empty() && !keys.is_empty());
    }

    #[test]
    fn key_ends_when_it_expires_or_is_revoked() {
        let soon = NOW + Duration::from_secs(60);
        let (kept, key) = made("a", Some(soon));
        let id = kept.key.id.clone();
        let mut keys = ApiKeys::new(vec![kept]);
        assert!(keys.find_owner(key.expose(), NOW).is_some());
        assert_eq!(keys.find_owner(key.expose(), soon), None);
        assert!(keys.remove(&id) && !keys.remove(&id));
        assert_eq!(keys.find_owner(key.expose(), NOW), None);
    }

    #[test]
    fn keys_are_distinct_and_do_not_show_their_secret() {
        let ((one, first), (two, second)) = (made("a", None), made("a", None));
        assert!(first.expose() != second.expose() && one.key.id != two.key.id && one.hash != two.hash);
        assert!(!format!("{one:?}").contains(first.expose()));
    }
}

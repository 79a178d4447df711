//! Owners: their keys and their quotas.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use domain::{Bytes, Key, Owner, Resources};

use super::pretend::Pretend;
use super::{Bench, config, plain};
use crate::clock::Clock;
use crate::{Config, Create, ErrorKind, Quota, Quotas, ServiceError};

async fn with_quota(quota: Quota) -> Bench {
    let state = tempfile::tempdir().unwrap();
    let quotas = Quotas { named: BTreeMap::from([(Owner::named("small"), quota)]), others: Quota::default() };
    let usual = Resources { memory: Some(Bytes(100)), ..Resources::default() };
    let config = Config { quotas, usual, ..config(&state) };
    Bench::configured(config, Pretend::new(), state).await
}

fn memory(bytes: u64) -> Create {
    let mut request = plain();
    request.spec.resources.memory = Some(Bytes(bytes));
    request
}

#[tokio::test]
async fn only_the_owner_over_its_quota_is_refused() {
    let bench = with_quota(Quota { memory: Some(Bytes(250)), ..Quota::default() }).await;
    let small = Owner::named("small");
    let first = bench.service.create(&small, plain()).await.unwrap();
    bench.service.create(&small, memory(150)).await.unwrap();
    let error = bench.service.create(&small, memory(1)).await.unwrap_err();
    assert!(
        matches!(error, ServiceError::OverQuota { excess: crate::quota::Excess { what: "memory", .. }, .. }),
        "{error}"
    );
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }));
    bench.create().await;
    bench.service.destroy(&small, &first.id).await.unwrap();
    bench.service.create(&small, memory(1)).await.unwrap();
}

#[tokio::test]
async fn parked_sandboxes_of_an_owner_make_room_in_its_quota() {
    let bench = with_quota(Quota { sandboxes: Some(1), ..Quota::default() }).await;
    let small = Owner::named("small");
    let ours = Key::new(&bench.owner, "test", "parked").unwrap();
    let kept = bench.service.acquire(&ours, plain()).await.unwrap().sandbox;
    bench.service.release(&ours);
    let parked = Key::new(&small, "test", "parked").unwrap();
    let first = bench.service.acquire(&parked, plain()).await.unwrap().sandbox;
    bench.service.create(&small, plain()).await.unwrap_err();
    let check = || bench.service.0.check_room_for(&small, &Resources::default());
    assert!(
        matches!(
            check(),
            Err(ServiceError::OverQuota { excess: crate::quota::Excess { what: "sandboxes", .. }, .. })
        ),
        "the check must refuse before an image is fetched"
    );
    bench.service.release(&parked);
    check().unwrap();
    bench.service.create(&small, plain()).await.unwrap();
    assert!(bench.service.get(&small, &first.id).is_err());
    assert!(bench.service.get(&bench.owner, &kept.id).is_ok(), "the sandbox of another owner stays");
}

#[tokio::test]
async fn keys_are_stored_and_deleted_across_restarts() {
    let bench = Bench::new().await;
    let owner = Owner::named("tenant");
    let refused = bench.service.issue_key(owner.clone(), None).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NoOperatorKey));
    bench.service.set_single_key(Some("operator"));
    let (kept, secret) = bench.service.issue_key(owner.clone(), None).await.unwrap();
    let past = SystemTime::now() - Duration::from_secs(1);
    let (expired, old) = bench.service.issue_key(owner.clone(), Some(past)).await.unwrap();
    let (backend, state) = bench.crash().await;
    let bench = Bench::with(backend, state, Clock::host()).await;
    assert!(!bench.service.keyless());
    assert_eq!(bench.service.keys().len(), 2);
    assert_eq!(bench.service.owner_by_key(secret.expose()), Some(owner));
    assert_eq!(bench.service.owner_by_key(old.expose()), None);
    assert!(bench.service.revoke_key(&kept.id).await.unwrap());
    assert!(!bench.service.revoke_key(&kept.id).await.unwrap());
    assert_eq!(bench.service.owner_by_key(secret.expose()), None);
    let (backend, state) = bench.crash().await;
    let bench = Bench::with(backend, state, Clock::host()).await;
    assert_eq!(bench.service.keys().into_iter().map(|key| key.id).collect::<Vec<_>>(), [expired.id]);
}

#[tokio::test]
async fn secret_of_a_key_is_not_in_the_database() {
    let bench = Bench::new().await;
    bench.service.set_single_key(Some("operator"));
    let (_, secret) = bench.service.issue_key(Owner::named("tenant"), None).await.unwrap();
    let (_, state) = bench.crash().await;
    for entry in std::fs::read_dir(state.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let found = bytes.windows(secret.expose().len()).any(|part| part == secret.expose().as_bytes());
        assert!(!found);
    }
}

#[tokio::test]
async fn dead_sandbox_makes_room_for_its_successor_in_a_full_quota() {
    let bench = with_quota(Quota { sandboxes: Some(1), ..Quota::default() }).await;
    let key = Key::new(&Owner::named("small"), "test", "a").unwrap();
    let dead = bench.service.acquire(&key, plain()).await.unwrap().sandbox;
    bench.backend.take_away(&dead.id);
    let new = bench.service.acquire(&key, plain()).await.unwrap();
    assert!(new.fresh && new.sandbox.id != dead.id);
}

#[tokio::test]
async fn quota_errors_contain_their_numbers() {
    let bench = with_quota(Quota { memory: Some(Bytes::mib(256)), ..Quota::default() }).await;
    let small = Owner::named("small");
    let error = bench.service.create(&small, memory(512 << 20)).await.unwrap_err();
    assert_eq!(error.to_string(), "512Mi memory exceeds the whole quota of owner `small`: 256Mi allowed");
    assert_eq!(error.kind(), ErrorKind::Invalid, "a retry cannot help");
    assert!(!error.hint().unwrap().contains("delete"), "{:?}", error.hint());
    let checked = bench.service.0.check_room_for(&small, &memory(512 << 20).spec.resources);
    assert!(
        matches!(checked, Err(ServiceError::BeyondQuota { .. })),
        "the check must refuse before an image is fetched"
    );
    bench.service.create(&small, memory(200 << 20)).await.unwrap();
    let error = bench.service.create(&small, memory(100 << 20)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "owner `small` would exceed its quota of memory: 300Mi in total, 256Mi allowed"
    );
}

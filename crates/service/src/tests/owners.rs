//! Owners: their keys and their quotas.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use domain::{Bytes, Owner, ResourceLimits, SandboxKey, SandboxLimits};

use super::{TestBench, config, plain};
use crate::clock::Clock;
use crate::{CreateSandboxRequest, ErrorKind, OwnerQuota, OwnerQuotas, ServiceConfig, ServiceError};
use testkit::fake_backend::FakeBackend;

async fn with_quota(quota: OwnerQuota) -> TestBench {
    let state = tempfile::tempdir().unwrap();
    let quotas = OwnerQuotas {
        named: BTreeMap::from([(Owner::from_valid_name("small"), quota)]),
        others: OwnerQuota::default(),
    };
    let usual = SandboxLimits { memory: Bytes(100), ..SandboxLimits::ZERO };
    let config = ServiceConfig { quotas, default_limits: usual, ..config(&state) };
    TestBench::configured(config, FakeBackend::new(), state).await
}

fn memory(bytes: u64) -> CreateSandboxRequest {
    let mut request = plain();
    request.spec.resources.memory = Some(Bytes(bytes));
    request
}

#[tokio::test]
async fn only_the_owner_over_its_quota_is_refused() {
    let bench = with_quota(OwnerQuota { memory: Some(Bytes(250)), ..OwnerQuota::default() }).await;
    let small = Owner::from_valid_name("small");
    let first = bench.service.create_sandbox(&small, plain()).await.unwrap();
    bench.service.create_sandbox(&small, memory(150)).await.unwrap();
    let error = bench.service.create_sandbox(&small, memory(1)).await.unwrap_err();
    assert!(
        matches!(
            error,
            ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Memory, .. },
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }));
    bench.create().await;
    bench.service.sandbox(&small, &first.id).unwrap().destroy().await.unwrap();
    bench.service.create_sandbox(&small, memory(1)).await.unwrap();
}

#[tokio::test]
async fn parked_sandboxes_of_an_owner_make_room_in_its_quota() {
    let bench = with_quota(OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() }).await;
    let small = Owner::from_valid_name("small");
    let ours = SandboxKey::new(&bench.owner, "test", "parked").unwrap();
    let kept = bench.service.acquire(&ours, plain()).await.unwrap().sandbox;
    bench.service.release_key(&ours);
    let parked = SandboxKey::new(&small, "test", "parked").unwrap();
    let first = bench.service.acquire(&parked, plain()).await.unwrap().sandbox;
    bench.service.create_sandbox(&small, plain()).await.unwrap_err();
    let check = || bench.service.0.check_room_for(&small, &ResourceLimits::default());
    assert!(
        matches!(
            check(),
            Err(ServiceError::OverQuota {
                excess: crate::tenancy::quota::QuotaExcess { what: crate::QuotaResource::Sandboxes, .. },
                ..
            })
        ),
        "the check must refuse before an image is fetched"
    );
    bench.service.release_key(&parked);
    check().unwrap();
    bench.service.create_sandbox(&small, plain()).await.unwrap();
    assert!(bench.service.sandbox(&small, &first.id).is_err());
    assert!(bench.service.sandbox(&bench.owner, &kept.id).is_ok(), "the sandbox of another owner stays");
}

#[tokio::test]
async fn keys_are_stored_and_deleted_across_restarts() {
    let bench = TestBench::new().await;
    let owner = Owner::from_valid_name("tenant");
    let refused = bench.service.issue_key(owner.clone(), None).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NoOperatorKey));
    bench.service.set_operator_key(Some("operator"));
    let (kept, secret) = bench.service.issue_key(owner.clone(), None).await.unwrap();
    let past = SystemTime::now() - Duration::from_secs(1);
    let (expired, old) = bench.service.issue_key(owner.clone(), Some(past)).await.unwrap();
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert!(!bench.service.has_no_keys());
    assert_eq!(bench.service.list_keys().len(), 2);
    assert_eq!(bench.service.owner_by_key(secret.expose()), Some(owner));
    assert_eq!(bench.service.owner_by_key(old.expose()), None);
    assert!(bench.service.revoke_key(&kept.id).await.unwrap());
    assert!(!bench.service.revoke_key(&kept.id).await.unwrap());
    assert_eq!(bench.service.owner_by_key(secret.expose()), None);
    let (backend, state) = bench.crash().await;
    let bench = TestBench::with(backend, state, Clock::from_host()).await;
    assert_eq!(bench.service.list_keys().into_iter().map(|key| key.id).collect::<Vec<_>>(), [expired.id]);
}

#[tokio::test]
async fn secret_of_a_key_is_not_in_the_database() {
    let bench = TestBench::new().await;
    bench.service.set_operator_key(Some("operator"));
    let (_, secret) = bench.service.issue_key(Owner::from_valid_name("tenant"), None).await.unwrap();
    let (_, state) = bench.crash().await;
    for entry in std::fs::read_dir(state.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        let found = bytes.windows(secret.expose().len()).any(|part| part == secret.expose().as_bytes());
        assert!(!found);
    }
}

#[tokio::test]
async fn dead_sandbox_makes_room_for_its_successor_in_a_full_quota() {
    let bench = with_quota(OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() }).await;
    let key = SandboxKey::new(&Owner::from_valid_name("small"), "test", "a").unwrap();
    let dead = bench.service.acquire(&key, plain()).await.unwrap().sandbox;
    bench.backend.remove_sandbox(&dead.id);
    let new = bench.service.acquire(&key, plain()).await.unwrap();
    assert!(new.fresh && new.sandbox.id != dead.id);
}

#[tokio::test]
async fn quota_errors_contain_their_numbers() {
    let bench = with_quota(OwnerQuota { memory: Some(Bytes::from_mib(256)), ..OwnerQuota::default() }).await;
    let small = Owner::from_valid_name("small");
    let error = bench.service.create_sandbox(&small, memory(512 << 20)).await.unwrap_err();
    assert_eq!(error.to_string(), "512Mi memory exceeds the whole quota of owner `small`: 256Mi allowed");
    assert_eq!(error.kind(), ErrorKind::Invalid, "a retry cannot help");
    assert!(!error.hint().unwrap().contains("delete"), "{:?}", error.hint());
    let checked = bench.service.0.check_room_for(&small, &memory(512 << 20).spec.resources);
    assert!(
        matches!(checked, Err(ServiceError::BeyondQuota { .. })),
        "the check must refuse before an image is fetched"
    );
    bench.service.create_sandbox(&small, memory(200 << 20)).await.unwrap();
    let error = bench.service.create_sandbox(&small, memory(100 << 20)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "owner `small` would exceed its quota of memory: 300Mi in total, 256Mi allowed"
    );
}

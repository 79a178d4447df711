//! Policies: how they are stored, changed, restored and bound, and what they tried.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use backend::{NetworkCounters, NetworkRecord, NetworkRecordKind, NetworkState, NetworkTotals};
use domain::{
    EndCause, LifecycleRequest, NetworkAccess, NetworkPolicy, Phase, PolicyAction, PolicyEdit, PolicyRule,
    PoolCapacity, PoolSpec, RefillRate, SandboxSpec,
};
use futures_util::future::join_all;
use testkit::fake_backend::FakeBackend;

use super::{TestBench, config, plain};
use crate::clock::Clock;
use crate::{CreateSandboxRequest, ErrorKind, Outcome, Sandbox, Service, ServiceError};

fn rule(name: &str) -> PolicyRule {
    PolicyRule { action: PolicyAction::Allow, target: name.parse().unwrap() }
}

fn allowing(names: &[&str]) -> NetworkPolicy {
    NetworkPolicy::new(names.iter().map(|name| rule(name)).collect(), PolicyAction::Deny).unwrap()
}

fn filtered(names: &[&str]) -> CreateSandboxRequest {
    let policy = Some(Arc::new(allowing(names)));
    let spec = SandboxSpec { network: NetworkAccess::Filtered, policy, ..SandboxSpec::with_defaults() };
    CreateSandboxRequest { spec, ..plain() }
}

fn on() -> CreateSandboxRequest {
    let spec = SandboxSpec { network: NetworkAccess::On, ..SandboxSpec::with_defaults() };
    CreateSandboxRequest { spec, ..plain() }
}

/// The targets of a policy.
fn targets(policy: &NetworkPolicy) -> Vec<String> {
    policy.rules().iter().map(|rule| rule.target.to_string()).collect()
}

impl TestBench {
    async fn filtered(&self, names: &[&str]) -> Sandbox {
        self.service.create_sandbox(&self.owner, filtered(names)).await.unwrap()
    }

    async fn edit(&self, sandbox: &Sandbox, edit: PolicyEdit) -> Result<Outcome, ServiceError> {
        let changed = self.sandbox(&sandbox.id).network().edit_policy(edit).await;
        changed.map(|change| change.outcome)
    }

    /// Checks that the service and the backend have the policy that allows these names.
    fn assert_allowed(&self, sandbox: &Sandbox, names: &[&str]) {
        assert_eq!(targets(&self.sandbox(&sandbox.id).network().policy()), names);
        assert_eq!(
            self.backend.policy(&sandbox.id).as_deref().map(targets),
            Some(names.iter().map(|name| (*name).to_owned()).collect())
        );
    }

    /// The next server, after a crash in which the filter lost its policies.
    async fn restarted_with_the_filter(self) -> Self {
        self.backend.forget_policies();
        self.restarted().await
    }
}

#[tokio::test]
async fn changes_are_in_force_before_they_are_answered_and_survive_restarts() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&["a.org"]).await;
    assert_eq!(made.in_force.network(), Some(&NetworkState::Filtered));
    bench.assert_allowed(&made, &["a.org"]);
    assert_eq!(bench.edit(&made, PolicyEdit::Merge(vec![rule("b.org")])).await.unwrap(), Outcome::Done);
    bench.assert_allowed(&made, &["b.org", "a.org"]);
    let bench = bench.restarted_with_the_filter().await;
    bench.assert_allowed(&made, &["b.org", "a.org"]);
    let remove = PolicyEdit::Remove(vec!["A.org.".parse().unwrap()]);
    assert_eq!(bench.edit(&made, remove.clone()).await.unwrap(), Outcome::Done);
    assert_eq!(bench.edit(&made, remove).await.unwrap(), Outcome::Unchanged);
    bench.assert_allowed(&made, &["b.org"]);
    bench.edit(&made, PolicyEdit::Replace(NetworkPolicy::deny_all())).await.unwrap();
    let bench = bench.restarted_with_the_filter().await;
    bench.assert_allowed(&made, &[]);
}

#[tokio::test]
async fn filtered_sandbox_without_a_policy_reaches_nothing() {
    let bench = TestBench::new().await;
    let mut request = filtered(&[]);
    request.spec.policy = None;
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    assert_eq!(*made.network_policy(), NetworkPolicy::deny_all());
    assert_eq!(bench.backend.policy(&made.id).as_deref(), Some(&NetworkPolicy::deny_all()));
}

#[tokio::test]
async fn concurrent_changes_lose_none() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&[]).await;
    let names: Vec<String> = (0..12).map(|number| format!("n{number}.org")).collect();
    let edits = names.iter().map(|name| bench.edit(&made, PolicyEdit::Merge(vec![rule(name)])));
    assert!(join_all(edits).await.iter().all(Result::is_ok));
    let stored = bench.sandbox(&made.id).network().policy();
    assert_eq!(stored.rules().len(), names.len());
    assert_eq!(bench.backend.policy(&made.id), Some(stored));
}

#[tokio::test]
async fn change_is_not_answered_before_the_backend_has_it() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&[]).await;
    bench.backend.policy_gate.forget_permits(tokio::sync::Semaphore::MAX_PERMITS);
    let mut edit = std::pin::pin!(bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut edit).await;
    assert!(early.is_err(), "{early:?}");
    assert_eq!(bench.backend.policy(&made.id).as_deref(), Some(&allowing(&[])));
    bench.backend.policy_gate.add_permits(1);
    assert_eq!(edit.await.unwrap(), Outcome::Done);
    bench.assert_allowed(&made, &["a.org"]);
}

#[tokio::test]
async fn failed_change_is_stored_and_can_be_repeated() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&["a.org"]).await;
    bench.backend.fail("set policy", 1);
    let replace = PolicyEdit::Replace(allowing(&["b.org"]));
    assert_eq!(bench.edit(&made, replace.clone()).await.unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(targets(&bench.sandbox(&made.id).network().policy()), ["b.org"]);
    assert_eq!(bench.edit(&made, replace).await.unwrap(), Outcome::Unchanged);
    bench.assert_allowed(&made, &["b.org"]);
}

#[tokio::test]
async fn change_of_the_policy_makes_a_sandbox_filtered_for_good() {
    let bench = TestBench::new().await;
    for request in [plain(), on()] {
        let open = request.spec.network == NetworkAccess::On;
        let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
        let same = if open { NetworkPolicy::allow_all() } else { NetworkPolicy::deny_all() };
        assert_eq!(*bench.sandbox(&made.id).network().policy(), same);
        // What it may reach stays as it is, so it needs no filter.
        assert_eq!(bench.edit(&made, PolicyEdit::Replace(same.clone())).await.unwrap(), Outcome::Unchanged);
        assert_eq!(bench.backend.policy(&made.id), None);
        bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])).await.unwrap();
        let now = bench.sandbox(&made.id).current_state();
        assert_eq!(
            (now.spec.network, now.in_force.network()),
            (NetworkAccess::Filtered, Some(&NetworkState::Filtered))
        );
        assert_eq!(now.network_policy().default_action(), same.default_action());
        bench.edit(&made, PolicyEdit::Replace(NetworkPolicy::allow_all())).await.unwrap();
        assert!(bench.sandbox(&made.id).current_state().is_filtered());
    }
    let calls: Vec<_> =
        bench.backend.calls().into_iter().filter(|call| ["set policy", "connect"].contains(call)).collect();
    assert_eq!(calls, ["set policy", "connect", "set policy", "set policy", "connect", "set policy"]);
}

#[tokio::test]
async fn sandbox_that_could_not_be_filtered_stays_as_it_was() {
    let bench = TestBench::new().await;
    let made = bench.service.create_sandbox(&bench.owner, on()).await.unwrap();
    for call in ["set policy", "connect"] {
        bench.backend.fail(call, 1);
        assert!(bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])).await.is_err());
        let now = bench.sandbox(&made.id).current_state();
        assert_eq!((now.spec.network, now.spec.policy), (NetworkAccess::On, None), "after {call}");
    }
    let bench = bench.restarted_with_the_filter().await;
    assert_eq!(bench.sandbox(&made.id).current_state().spec.network, NetworkAccess::On);
}

#[tokio::test]
async fn host_without_a_filter_refuses_it_before_anything_is_made() {
    let backend = FakeBackend::new();
    backend.filtered.store(false, Ordering::Relaxed);
    let bench = TestBench::with(backend, tempfile::tempdir().unwrap(), Clock::from_host()).await;
    let refused = bench.service.create_sandbox(&bench.owner, filtered(&["a.org"])).await.unwrap_err();
    assert!(refused.kind() == ErrorKind::Unsupported && refused.hint().is_some(), "{refused}");
    assert!(!bench.backend.was_asked_to("create"));
    let made = bench.create().await;
    let refused = bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    // Without a filter a sandbox can still have the policy that it has anyway.
    assert!(bench.edit(&made, PolicyEdit::Replace(NetworkPolicy::deny_all())).await.is_ok());
    assert_eq!(
        bench.sandbox(&made.id).network().read_log(0, 1).await.unwrap_err().kind(),
        ErrorKind::Unsupported
    );
}

#[tokio::test]
async fn clients_get_no_wider_network_than_the_operator_allows() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let limited = crate::ServiceConfig { most_network: NetworkAccess::Filtered, ..config(&state) };
    let service = Service::start(limited.clone(), backend.clone()).await.unwrap();
    let bench = TestBench { service, backend, state, owner: domain::Owner::operator() };
    let refused = bench.service.create_sandbox(&bench.owner, on()).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NetworkTooWide { .. }) && refused.kind() == ErrorKind::Invalid);
    bench.filtered(&["a.org"]).await;
    let mut auto = plain();
    auto.spec.network = NetworkAccess::Auto;
    let made = bench.service.create_sandbox(&bench.owner, auto).await.unwrap();
    assert_eq!(made.spec.network, NetworkAccess::Off);
    bench.service.set_config(crate::ServiceConfig { most_network: NetworkAccess::Off, ..limited });
    let refused = bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NetworkTooWide { .. }), "{refused}");
    assert!(bench.service.create_sandbox(&bench.owner, filtered(&[])).await.is_err());
}

#[tokio::test]
async fn policy_of_the_operator_applies_where_a_client_names_none() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let default_policy = Some(Arc::new(allowing(&["a.org"])));
    let service = Service::start(crate::ServiceConfig { default_policy, ..config(&state) }, backend.clone())
        .await
        .unwrap();
    let bench = TestBench { service, backend, state, owner: domain::Owner::operator() };
    let mut request = filtered(&["b.org"]);
    let made = bench.service.create_sandbox(&bench.owner, request.clone()).await.unwrap();
    bench.assert_allowed(&made, &["b.org"]);
    request.spec.policy = None;
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    bench.assert_allowed(&made, &["a.org"]);
    assert_eq!(bench.create().await.spec.policy, None);
}

#[tokio::test]
async fn policy_changes_while_paused_but_not_when_dead() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&[]).await;
    bench.sandbox(&made.id).pause().await.unwrap();
    bench.edit(&made, PolicyEdit::Merge(vec![rule("a.org")])).await.unwrap();
    bench.assert_allowed(&made, &["a.org"]);
    bench.backend.kill(&made.id, EndCause::Oom);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    let denied = bench.edit(&made, PolicyEdit::Merge(vec![rule("b.org")])).await.unwrap_err();
    assert!(matches!(denied, ServiceError::Denied { request: LifecycleRequest::SetPolicy, .. }), "{denied}");
    // A restarted sandbox has its policy before its first process starts.
    bench.sandbox(&made.id).restart().await.unwrap();
    bench.assert_allowed(&made, &["a.org"]);
}

#[tokio::test]
async fn policy_of_the_source_is_inherited_unless_another_is_named() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&["a.org"]).await;
    let taken = super::inheritance::snapshot_of(&bench, &made).await;
    let mut fork = CreateSandboxRequest { source: crate::ImageSource::Snapshot(taken.id.clone()), ..plain() };
    fork.defaulted = vec![crate::DefaultedPart::Network];
    let forked = bench.service.create_sandbox(&bench.owner, fork).await.unwrap();
    bench.assert_allowed(&forked, &["a.org"]);
    let named =
        CreateSandboxRequest { source: crate::ImageSource::Snapshot(taken.id), ..filtered(&["b.org"]) };
    let forked = bench.service.create_sandbox(&bench.owner, named).await.unwrap();
    bench.assert_allowed(&forked, &["b.org"]);
}

fn pool(template: NetworkAccess, names: Option<&[&str]>) -> PoolSpec {
    let template = SandboxSpec {
        network: template,
        policy: names.map(|names| Arc::new(allowing(names))),
        ..SandboxSpec::with_defaults()
    };
    PoolSpec {
        name: "p".to_owned(),
        template,
        capacity: PoolCapacity::with_level(1),
        refill: RefillRate::default(),
    }
}

/// Takes a sandbox from a pool of this kind, if it fits, and returns the calls that bound it.
async fn claim(pool: PoolSpec, request: CreateSandboxRequest) -> (Sandbox, Vec<&'static str>) {
    let bench = TestBench::over(vec![pool], 20, FakeBackend::new(), tempfile::tempdir().unwrap()).await;
    bench.until_warm("p", 1).await;
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    if made.is_filtered() {
        assert_eq!(bench.backend.policy(&made.id), Some(made.network_policy()));
        assert_eq!(
            made.in_force.network().is_some_and(NetworkState::is_filtered),
            made.pool.is_none() || made.in_force.network().is_some()
        );
    }
    let calls = bench.backend.calls().into_iter().filter(|call| ["set policy", "connect"].contains(call));
    (made, calls.collect())
}

#[tokio::test]
async fn warm_sandbox_of_any_network_is_filtered_when_it_is_taken() {
    for network in [NetworkAccess::Off, NetworkAccess::Auto, NetworkAccess::On] {
        let (made, calls) = claim(pool(network, None), filtered(&["a.org"])).await;
        assert_eq!((made.pool.as_deref(), calls), (Some("p"), vec!["set policy", "connect"]), "{network:?}");
    }
    let (made, calls) = claim(pool(NetworkAccess::Filtered, None), filtered(&["a.org"])).await;
    assert_eq!((made.pool.as_deref(), calls), (Some("p"), vec!["set policy"]));
    // It was made with this policy.
    let (made, calls) = claim(pool(NetworkAccess::Filtered, Some(&["a.org"])), filtered(&["a.org"])).await;
    assert_eq!((made.pool.as_deref(), calls), (Some("p"), vec![]));
}

#[tokio::test]
async fn filtered_warm_sandbox_is_never_opened() {
    for wanted in [NetworkAccess::On, NetworkAccess::Auto, NetworkAccess::Off] {
        let spec = SandboxSpec { network: wanted, ..SandboxSpec::with_defaults() };
        let request = CreateSandboxRequest { spec, ..plain() };
        let (made, calls) = claim(pool(NetworkAccess::Filtered, None), request).await;
        assert_eq!((made.pool, calls.len()), (None, 0), "{wanted:?}");
    }
}

fn record(number: u64) -> NetworkRecord {
    NetworkRecord {
        number,
        time: SystemTime::now(),
        kind: NetworkRecordKind::Query,
        name: Some("a.org".to_owned()),
        address: None,
        verdict: PolicyAction::Deny,
        reason: "default".to_owned(),
        bytes_sent: 0,
        bytes_received: 0,
    }
}

#[tokio::test]
async fn log_is_read_from_a_position_and_followed_to_the_end_of_the_sandbox() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&[]).await;
    let sandbox = bench.sandbox(&made.id);
    for number in 1..=5 {
        bench.backend.add_network_record(&made.id, record(number));
    }
    bench.backend.drop_network_records(&made.id, 2);
    let page = sandbox.network().read_log(1, 2).await.unwrap();
    assert_eq!(
        (page.records.iter().map(|record| record.number).collect::<Vec<_>>(), page.dropped),
        (vec![3, 4], 1)
    );
    let mut log = sandbox.network().follow_log(4).unwrap();
    let numbers = |page: Option<Result<backend::NetworkLogPage, ServiceError>>| -> Option<Vec<u64>> {
        Some(page?.unwrap().records.iter().map(|record| record.number).collect())
    };
    assert_eq!(numbers(log.next_page().await), Some(vec![5]));
    let (next, ()) = tokio::join!(log.next_page(), async {
        tokio::task::yield_now().await;
        bench.backend.add_network_record(&made.id, record(6));
    });
    assert_eq!(numbers(next), Some(vec![6]));
    let (next, destroyed) = tokio::join!(log.next_page(), sandbox.destroy());
    assert!(destroyed.is_ok() && numbers(next).is_none());
    assert!(sandbox.network().follow_log(0).is_err());
}

#[tokio::test(start_paused = true)]
async fn bytes_of_sandboxes_are_added_to_the_usage_of_their_owner() {
    let bench = TestBench::new().await;
    let made = bench.filtered(&[]).await;
    let totals = NetworkTotals { bytes_sent: 100, bytes_received: 200, ..NetworkTotals::default() };
    let sandboxes = vec![(made.id.clone(), totals)];
    bench.backend.set_network_counters(NetworkCounters { open_connections: 1, sandboxes });
    let used =
        || bench.service.hourly_usage(None, 1).iter().map(|hour| hour.used.network_received).sum::<u64>();
    while used() == 0 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(used(), 200);
}

//! The checks of filtered networks. What a policy lets through is tested by those who can offer something to reach.

use std::sync::Arc;

use domain::{NetworkAccess, NetworkPolicy, SandboxSpec};

use super::{BackendUnderTest, CheckOutcome, TestSandbox, fresh_id, reconfigure};
use crate::enforced::find_network;
use crate::{BackendError, LogWait, NetworkState};

pub(super) async fn network_is_filtered_later_or_rejected(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let offered = backend.probe().await.expect("the host can be probed").filtered;
    let made = TestSandbox::create_plain(&backend).await;
    if let Ok(filter) = backend.required_network_filter()
        && offered
    {
        let deny_all = Arc::new(NetworkPolicy::deny_all());
        filter
            .set_policy(&made.id, &deny_all)
            .await
            .expect("a policy can be set before the filter is needed");
        for _ in 0..2 {
            let connected = reconfigure(&backend).connect_network(&made.id, NetworkAccess::Filtered).await;
            let connected = connected.expect("a sandbox can become filtered, also twice");
            assert_eq!(find_network(&connected), Some(&NetworkState::Filtered));
        }
        let wider = reconfigure(&backend).connect_network(&made.id, NetworkAccess::On).await;
        assert!(wider.is_err(), "a filtered sandbox lost its filter: {wider:?}");
        let log = filter.read_log(&made.id, 0, 10, LogWait::No).await.expect("the log can be read");
        assert_eq!(log.records, [], "nothing was tried yet");
    } else {
        let asked = reconfigure(&backend).connect_network(&made.id, NetworkAccess::Filtered).await;
        let Err(BackendError::Unsupported { hint: Some(_), .. }) = &asked else {
            panic!("a filter that is not supported: {asked:?}")
        };
    }
    let id = made.id.clone();
    made.ping().await;
    made.destroy().await;
    if offered {
        let gone = reconfigure(&backend).connect_network(&id, NetworkAccess::Filtered).await;
        assert!(matches!(gone, Err(BackendError::Gone)), "{gone:?}");
    }
}

pub(super) async fn filtered_sandbox_is_created_with_its_policy(
    subject: &dyn BackendUnderTest,
) -> CheckOutcome {
    let backend = subject.open().await;
    if !backend.probe().await.expect("the host can be probed").filtered {
        return CheckOutcome::Skipped("this host cannot filter networks");
    }
    let allow_all = Some(Arc::new(NetworkPolicy::allow_all()));
    for policy in [None, allow_all] {
        let spec = SandboxSpec { network: NetworkAccess::Filtered, policy, ..SandboxSpec::with_defaults() };
        let made = TestSandbox::create_from_spec(&backend, &spec).await;
        assert_eq!(made.in_force.network(), Some(&NetworkState::Filtered));
        made.ping().await;
        made.destroy().await;
    }
    let filter = backend.required_network_filter().expect("a host that filters has a filter");
    let counters = filter.counters().await.expect("the counters can be read");
    let unknown = fresh_id();
    assert!(counters.sandboxes.iter().all(|(id, _)| *id != unknown));
    CheckOutcome::Passed
}

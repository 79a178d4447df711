//! The spec that a backend is asked to make: that of a client, with everything decided that the client left open.

use backend::LimitName;
use domain::{Bytes, EndCause, MilliCpus, OnDeath, Phase, SandboxLimits};
use testkit::fake_backend::FakeBackend;

use super::{TestBench, config, plain};
use crate::{CreateSandboxRequest, ImageAliases, ImageSource, ServiceConfig};

#[tokio::test]
async fn backend_gets_the_image_that_a_name_stands_for_and_every_limit() {
    let (backend, state) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let defaults = SandboxLimits {
        memory: Bytes::from_mib(64),
        cpus: MilliCpus(500),
        pids: 7,
        disk: Bytes::from_mib(9),
    };
    let limited = ServiceConfig { default_limits: defaults, ..config(&state) };
    let bench = TestBench::configured(limited, backend, state).await;
    let mut request = CreateSandboxRequest { source: ImageSource::from_name("alias of other"), ..plain() };
    request.spec.resources.pids = Some(30);
    request.spec.on_death = Some(OnDeath::Restart);
    let made = bench.service.create_sandbox(&bench.owner, request).await.unwrap();
    assert_eq!((made.spec.image.as_str(), made.in_force.image.as_str()), ("alias of other", "real other"));
    assert_eq!(made.in_force.stand_in.as_deref(), Some("image `real other` stands in for `alias of other`"));
    let asked = bench.backend.newest_spec().unwrap();
    assert_eq!(asked.spec.image, "real other");
    assert_eq!(asked.limits.limits, SandboxLimits { pids: 30, ..defaults });
    assert_eq!((asked.limits.named, asked.limits.require_all), (vec![LimitName::Pids], true));
    // A restart keeps the image, although the operator may have changed its aliases.
    bench.backend.kill(&made.id, EndCause::AgentDied);
    bench.until(&made, |phase| matches!(phase, Phase::Failed(_))).await;
    let aliases = ImageAliases::default();
    bench.service.set_config(ServiceConfig { aliases, ..config(&bench.state) });
    bench.sandbox(&made.id).restart().await.unwrap();
    assert_eq!(bench.backend.newest_spec().unwrap().spec.image, "real other");
    let refused = bench.service.0.resolve_image("alias of other").await.unwrap_err();
    assert_eq!(refused.to_string(), "image `alias of other` not found");
}

//! Pools of warm sandboxes. Only the operator manages them; every owner may take from them.

use axum::Json;
use axum::extract::{FromRequestParts, State};
use domain::{
    Bytes, MilliCpus, NetworkAccess, Owner, PoolCapacity, PoolSpec, RefillRate, ResourceLimits, SandboxSpec,
};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{PoolReport, PoolSource};

use super::OpenSandboxState;
use super::access::{ApiKeyOwner, JsonBody};
use super::problem::Problem;
use crate::kit::headers::stand_in_headers;
use crate::kit::query::path_param;
use crate::kit::time::format_rfc3339;

/// Proof that the caller is the operator, who holds the configured key.
pub(super) struct PoolOperator;

impl FromRequestParts<OpenSandboxState> for PoolOperator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, Problem> {
        let ApiKeyOwner(owner) = ApiKeyOwner::from_request_parts(parts, state).await?;
        let message = "only the operator may manage pools";
        let foreign = || Problem::new(StatusCode::FORBIDDEN, "FORBIDDEN", message);
        (owner == Owner::operator()).then_some(Self).ok_or_else(foreign)
    }
}

/// The pool named in the path.
pub(super) struct PathPoolName(String);

impl FromRequestParts<OpenSandboxState> for PathPoolName {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &OpenSandboxState) -> Result<Self, Problem> {
        PoolOperator::from_request_parts(parts, state).await?;
        Ok(Self(path_param(parts, "name").await))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreatePoolBody {
    name: String,
    /// A pod template; only its first container is used.
    template: Value,
    capacity_spec: CapacityBody,
    refill: Option<RefillBody>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SetPoolBody {
    capacity_spec: CapacityBody,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CapacityBody {
    buffer_max: u32,
    buffer_min: u32,
    pool_max: u32,
    pool_min: u32,
}

/// How fast the pool is refilled; the reference leaves this to its cluster.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RefillBody {
    per_second: u32,
    at_once: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PoolBody {
    name: String,
    capacity_spec: CapacityBody,
    status: PoolStatusBody,
    created_at: String,
    image: Value,
    resource_limits: Value,
    refill: RefillBody,
    /// `config` or `api`.
    managed_by: &'static str,
}

#[derive(Serialize)]
struct PoolStatusBody {
    total: usize,
    allocated: usize,
    available: usize,
    revision: String,
    /// Since the server started.
    claimed: u64,
    cold: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
}

/// `POST /pools`
pub(super) async fn create_pool(
    State(state): State<OpenSandboxState>,
    _: PoolOperator,
    JsonBody(body): JsonBody<CreatePoolBody>,
) -> Result<(StatusCode, HeaderMap, Json<PoolBody>), Problem> {
    let refill = body.refill.map_or_else(RefillRate::default, |refill| RefillRate {
        per_second: refill.per_second,
        at_once: refill.at_once,
    });
    let template = parse_pod_template(&body.template, state.settings.default_network)?;
    let capacity = body.capacity_spec.into_domain();
    let pool = PoolSpec { name: body.name, template, capacity, refill };
    let made = state.service.create_pool(pool).await?;
    // A missing image is the pool's problem, which its responses show.
    let image = state.service.resolve_image(&made.pool.template.image).await;
    let stand_in = image.ok().and_then(|image| image.stand_in).map(|stand_in| stand_in.to_string());
    let stand_in = stand_in_headers(stand_in.as_deref());
    Ok((StatusCode::CREATED, stand_in, Json(PoolBody::from_report(&made))))
}

/// `GET /pools`
pub(super) async fn list_pools(State(state): State<OpenSandboxState>, _: PoolOperator) -> Json<Value> {
    let items: Vec<PoolBody> = state.service.list_pools().iter().map(PoolBody::from_report).collect();
    Json(json!({ "items": items }))
}

/// `GET /pools/{name}`
pub(super) async fn get_pool(
    State(state): State<OpenSandboxState>,
    PathPoolName(name): PathPoolName,
) -> Result<Json<PoolBody>, Problem> {
    Ok(Json(PoolBody::from_report(&state.service.find_pool(&name)?)))
}

/// `PUT /pools/{name}`: only the capacity can be changed.
pub(super) async fn set_pool_capacity(
    State(state): State<OpenSandboxState>,
    PathPoolName(name): PathPoolName,
    JsonBody(body): JsonBody<SetPoolBody>,
) -> Result<Json<PoolBody>, Problem> {
    let set = state.service.set_pool_capacity(&name, body.capacity_spec.into_domain()).await;
    Ok(Json(PoolBody::from_report(&set.map_err(fixed_pool_problem)?)))
}

/// `DELETE /pools/{name}`: responds once its warm sandboxes are gone.
pub(super) async fn delete_pool(
    State(state): State<OpenSandboxState>,
    PathPoolName(name): PathPoolName,
) -> Result<StatusCode, Problem> {
    state.service.remove_pool(&name).await.map_err(fixed_pool_problem)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives a conflict with a fixed pool a code other than "already exists".
fn fixed_pool_problem(error: service::ServiceError) -> Problem {
    Problem::from(error).with_code_for(StatusCode::CONFLICT, "KUBERNETES::POOL_API_ERROR")
}

impl CapacityBody {
    fn into_domain(self) -> PoolCapacity {
        let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        PoolCapacity {
            level: count(self.buffer_max),
            least_level: count(self.buffer_min),
            most: if self.pool_max == u32::MAX { usize::MAX } else { count(self.pool_max) },
            least: count(self.pool_min),
        }
    }

    fn from_domain(capacity: PoolCapacity) -> Self {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Self {
            buffer_max: count(capacity.level),
            buffer_min: count(capacity.least_level),
            pool_max: count(capacity.most),
            pool_min: count(capacity.least),
        }
    }
}

impl PoolBody {
    fn from_report(report: &PoolReport) -> Self {
        let PoolSpec { name, template, capacity, refill } = &report.pool;
        let limits = &template.resources;
        let mut shown = json!({});
        for (name, amount) in [
            ("memory", limits.memory.map(|amount| amount.to_string())),
            ("cpu", limits.cpus.map(|amount| amount.to_string())),
            ("ephemeral-storage", limits.disk.map(|amount| amount.to_string())),
        ] {
            if let Some(amount) = amount {
                shown[name] = json!(amount);
            }
        }
        Self {
            name: name.clone(),
            capacity_spec: CapacityBody::from_domain(*capacity),
            status: PoolStatusBody::from_report(report),
            created_at: format_rfc3339(report.created),
            image: json!({ "uri": template.image }),
            resource_limits: shown,
            refill: RefillBody { per_second: refill.per_second, at_once: refill.at_once },
            managed_by: match report.source {
                PoolSource::Configuration => "config",
                PoolSource::Client => "api",
            },
        }
    }
}

impl PoolStatusBody {
    fn from_report(report: &PoolReport) -> Self {
        Self {
            total: report.warm + report.taken,
            allocated: report.taken,
            available: report.warm,
            revision: template_revision(&report.pool.template),
            claimed: report.claims,
            cold: report.cold,
            trouble: report.trouble.clone(),
        }
    }
}

/// Returns a text that changes with the template.
fn template_revision(template: &SandboxSpec) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    format!("{template:?}").hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Parses a pod template: image and limits of its first container. The request that takes a sandbox
/// decides what starts in it, so commands are ignored and variables are refused.
fn parse_pod_template(pod: &Value, network: NetworkAccess) -> Result<SandboxSpec, Problem> {
    let containers = pod["spec"]["containers"].as_array().or_else(|| pod["containers"].as_array());
    let container = containers.and_then(|containers| containers.first());
    let container = container.ok_or_else(|| Problem::invalid("`template.spec.containers` is missing"))?;
    let image = container["image"].as_str().filter(|image| !image.trim().is_empty() && image.len() <= 512);
    let image = image.ok_or_else(|| Problem::invalid("the first container of `template` has no `image`"))?;
    if container["env"].as_array().is_some_and(|env| !env.is_empty()) {
        let message = "environment variables are set when a sandbox is created, not in a pool template";
        return Err(Problem::unsupported(message));
    }
    let limits = &container["resources"]["limits"];
    let limit = |name: &str| limits[name].as_str();
    let wrong = |name: &'static str| {
        move |error: domain::quantity::QuantityError| Problem::invalid(format!("limit `{name}`: {error}"))
    };
    let resources = ResourceLimits {
        memory: limit("memory").map(Bytes::parse).transpose().map_err(wrong("memory"))?,
        cpus: limit("cpu").map(MilliCpus::parse).transpose().map_err(wrong("cpu"))?,
        disk: limit("ephemeral-storage").map(Bytes::parse).transpose().map_err(wrong("ephemeral-storage"))?,
        pids: None,
    };
    Ok(SandboxSpec {
        image: image.to_owned(),
        resources,
        network,
        guest: super::guest_settings(),
        ..SandboxSpec::with_defaults()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_template_gives_image_and_limits() {
        let pod = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{
            "name": "main", "image": "python:3.12", "command": ["tail", "-f", "/dev/null"],
            "resources": {"limits": {"memory": "64Mi", "cpu": "500m", "ephemeral-storage": "1Gi"}},
        }]}});
        let spec = parse_pod_template(&pod, NetworkAccess::Off).unwrap();
        assert_eq!(spec.image, "python:3.12");
        let expected = ResourceLimits {
            memory: Some(Bytes::from_mib(64)),
            cpus: Some(MilliCpus(500)),
            disk: Some(Bytes::from_mib(1024)),
            pids: None,
        };
        assert_eq!(spec.resources, expected);
        for wrong in [
            json!({}),
            json!({"spec": {"containers": []}}),
            json!({"spec": {"containers": [{"image": " "}]}}),
            json!({"spec": {"containers": [{"image": "a", "resources": {"limits": {"memory": "lots"}}}]}}),
            json!({"spec": {"containers": [{"image": "a", "env": [{"name": "A", "value": "b"}]}]}}),
        ] {
            assert_eq!(
                parse_pod_template(&wrong, NetworkAccess::Off).unwrap_err().status,
                StatusCode::BAD_REQUEST,
                "{wrong}"
            );
        }
    }

    #[test]
    fn capacity_is_returned_as_sent() {
        for most in [7, u32::MAX] {
            let body = CapacityBody { buffer_max: 5, buffer_min: 1, pool_max: most, pool_min: 2 };
            let returned = serde_json::to_value(CapacityBody::from_domain(body.into_domain())).unwrap();
            assert_eq!(returned, serde_json::to_value(body).unwrap());
        }
    }
}

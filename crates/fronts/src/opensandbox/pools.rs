//! Pools of warm sandboxes. Only the operator manages them; every owner may take from them.

use axum::Json;
use axum::extract::{FromRequestParts, State};
use domain::{Bytes, Capacity, Cpus, Guest, Network, Owner, Pool, Refill, Resources, Spec};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{PoolReport, PoolSource};

use super::Front;
use super::access::{Caller, JsonBody, param};
use super::problem::Problem;
use super::types::rfc3339;
use crate::answer;

/// Proof that the caller is the operator, who holds the configured key.
pub(super) struct Operator;

impl FromRequestParts<Front> for Operator {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Problem> {
        let Caller(owner) = Caller::from_request_parts(parts, front).await?;
        let message = "only the operator may manage pools";
        let foreign = || Problem::new(StatusCode::FORBIDDEN, "FORBIDDEN", message);
        (owner == Owner::single()).then_some(Self).ok_or_else(foreign)
    }
}

/// The pool named in the path.
pub(super) struct Named(String);

impl FromRequestParts<Front> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, front: &Front) -> Result<Self, Problem> {
        Operator::from_request_parts(parts, front).await?;
        Ok(Self(param(parts, "name").await))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CreateBody {
    name: String,
    /// A pod template; only its first container is used.
    template: Value,
    capacity_spec: CapacityBody,
    refill: Option<RefillBody>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SetBody {
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
    status: Status,
    created_at: String,
    image: Value,
    resource_limits: Value,
    refill: RefillBody,
    /// `config` or `api`.
    managed_by: &'static str,
}

#[derive(Serialize)]
struct Status {
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
pub(super) async fn create(
    State(front): State<Front>,
    _: Operator,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, HeaderMap, Json<PoolBody>), Problem> {
    let refill = body.refill.map_or_else(Refill::default, |refill| Refill {
        per_second: refill.per_second,
        at_once: refill.at_once,
    });
    let template = template(&body.template, front.settings.default_network)?;
    let capacity = body.capacity_spec.into_domain();
    let pool = Pool { name: body.name, template, capacity, refill };
    let made = front.service.create_pool(pool).await?;
    // A missing image is the pool's problem, which its responses show.
    let image = front.service.resolve_image(&made.pool.template.image).await;
    let stand_in = answer::stand_in(image.ok().and_then(|image| image.stand_in).as_deref());
    Ok((StatusCode::CREATED, stand_in, Json(PoolBody::of(&made))))
}

/// `GET /pools`
pub(super) async fn list(State(front): State<Front>, _: Operator) -> Json<Value> {
    let items: Vec<PoolBody> = front.service.pools().iter().map(PoolBody::of).collect();
    Json(json!({ "items": items }))
}

/// `GET /pools/{name}`
pub(super) async fn get(State(front): State<Front>, Named(name): Named) -> Result<Json<PoolBody>, Problem> {
    Ok(Json(PoolBody::of(&front.service.pool(&name)?)))
}

/// `PUT /pools/{name}`: only the capacity can be changed.
pub(super) async fn set(
    State(front): State<Front>,
    Named(name): Named,
    JsonBody(body): JsonBody<SetBody>,
) -> Result<Json<PoolBody>, Problem> {
    let set = front.service.set_pool(&name, body.capacity_spec.into_domain()).await;
    Ok(Json(PoolBody::of(&set.map_err(fixed)?)))
}

/// `DELETE /pools/{name}`: responds once its warm sandboxes are gone.
pub(super) async fn delete(State(front): State<Front>, Named(name): Named) -> Result<StatusCode, Problem> {
    front.service.remove_pool(&name).await.map_err(fixed)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives a conflict with a fixed pool a code other than "already exists".
fn fixed(error: service::ServiceError) -> Problem {
    Problem::from(error).coded(StatusCode::CONFLICT, "KUBERNETES::POOL_API_ERROR")
}

impl CapacityBody {
    fn into_domain(self) -> Capacity {
        let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        Capacity {
            level: count(self.buffer_max),
            least_level: count(self.buffer_min),
            most: if self.pool_max == u32::MAX { usize::MAX } else { count(self.pool_max) },
            least: count(self.pool_min),
        }
    }

    fn of(capacity: Capacity) -> Self {
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
    fn of(report: &PoolReport) -> Self {
        let Pool { name, template, capacity, refill } = &report.pool;
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
            capacity_spec: CapacityBody::of(*capacity),
            status: Status::of(report),
            created_at: rfc3339(report.created),
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

impl Status {
    fn of(report: &PoolReport) -> Self {
        Self {
            total: report.warm + report.taken,
            allocated: report.taken,
            available: report.warm,
            revision: revision(&report.pool.template),
            claimed: report.claims,
            cold: report.cold,
            trouble: report.trouble.clone(),
        }
    }
}

/// Returns a text that changes with the template.
fn revision(template: &Spec) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    format!("{template:?}").hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Parses a pod template: image and limits of its first container. The request that takes a sandbox
/// decides what starts in it, so commands are ignored and variables are refused.
fn template(pod: &Value, network: Network) -> Result<Spec, Problem> {
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
        move |error: domain::quantity::NotAQuantity| Problem::invalid(format!("limit `{name}`: {error}"))
    };
    let resources = Resources {
        memory: limit("memory").map(Bytes::parse).transpose().map_err(wrong("memory"))?,
        cpus: limit("cpu").map(Cpus::parse).transpose().map_err(wrong("cpu"))?,
        disk: limit("ephemeral-storage").map(Bytes::parse).transpose().map_err(wrong("ephemeral-storage"))?,
        pids: None,
    };
    Ok(Spec { image: image.to_owned(), resources, network, guest: Guest::root(), ..Spec::plain() })
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
        let spec = template(&pod, Network::Off).unwrap();
        assert_eq!(spec.image, "python:3.12");
        let expected = Resources {
            memory: Some(Bytes::mib(64)),
            cpus: Some(Cpus(500)),
            disk: Some(Bytes::mib(1024)),
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
                template(&wrong, Network::Off).unwrap_err().status,
                StatusCode::BAD_REQUEST,
                "{wrong}"
            );
        }
    }

    #[test]
    fn capacity_is_returned_as_sent() {
        for most in [7, u32::MAX] {
            let body = CapacityBody { buffer_max: 5, buffer_min: 1, pool_max: most, pool_min: 2 };
            let returned = serde_json::to_value(CapacityBody::of(body.into_domain())).unwrap();
            assert_eq!(returned, serde_json::to_value(body).unwrap());
        }
    }
}

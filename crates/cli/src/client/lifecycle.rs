//! Creating, releasing, listing and removing sandboxes.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use domain::{Bytes, MilliCpus, NetworkAccess, OnDeath, SandboxId};
use http::{HeaderMap, HeaderName, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::http::{self as web, ApiClient};
use super::sandbox::SandboxClient;
use crate::values::SandboxLifetime;

const KEY_HEADER: HeaderName = HeaderName::from_static("open-sandbox-api-key");
/// The port under which the API addresses the commands and files of a sandbox.
const EXECD_PORT: u16 = 44772;
/// The largest page that the API returns.
const MAX_PAGE_SIZE: &str = "200";

/// A server, with the access that its API key gives.
#[derive(Clone, Debug)]
pub(crate) struct ServerClient(pub(super) ApiClient);

/// The settings of a new sandbox.
#[derive(Debug, Default)]
pub(crate) struct CreateSandboxRequest {
    pub image: String,
    /// The sandbox begins with the files of this snapshot instead of the image.
    pub snapshot: Option<String>,
    pub timeout: Option<SandboxLifetime>,
    pub idle_timeout: Option<SandboxLifetime>,
    pub key: Option<String>,
    pub pool: Option<String>,
    pub memory: Option<Bytes>,
    pub cpus: Option<MilliCpus>,
    pub pids: Option<u32>,
    pub disk: Option<Bytes>,
    pub network: Option<NetworkAccess>,
    /// The policy of a filtered network, as the API writes it.
    pub policy: Option<serde_json::Value>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// As the API writes them; each gets its own name.
    pub volumes: Vec<serde_json::Value>,
    pub entrypoint: Vec<String>,
    pub on_death: Option<OnDeath>,
}

/// A sandbox as the server describes it. Unknown fields are kept for `--json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxInfo {
    pub id: String,
    pub status: StatusInfo,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageUri>,
    /// As the API writes times: RFC 3339.
    pub created_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    /// The message of the server about an image that stands in for another, at a create.
    #[serde(skip)]
    pub stand_in: Option<String>,
    /// The message of the server about a sandbox that had died under the same name, at a create.
    #[serde(skip)]
    pub revival: Option<String>,
    /// Whether a create found it by its name, so that nothing else in the request had an effect.
    #[serde(skip)]
    pub existing: bool,
    /// Whether network `auto` became `off` at a create.
    #[serde(skip)]
    pub lacks_network: bool,
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StatusInfo {
    pub state: String,
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ImageUri {
    pub uri: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SandboxPage {
    items: Vec<SandboxInfo>,
    pagination: PageInfo,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageInfo {
    pub(super) has_next_page: bool,
}

#[derive(Deserialize)]
struct ReleaseResponse {
    released: bool,
}

/// The address of a port, and the headers that authorize access to it.
#[derive(Deserialize)]
pub(crate) struct PortEndpoint {
    /// `host[:port]/path`, without a scheme.
    pub endpoint: String,
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl ServerClient {
    pub(crate) fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            web::insert_secret_header(&mut headers, KEY_HEADER, key)?;
        }
        let api = ApiClient::new(url, headers.clone())?;
        Ok(Self(api.with_base(format!("{}/v1", api.base()), headers)))
    }

    pub(crate) async fn create_sandbox(&self, request: &CreateSandboxRequest) -> Result<SandboxInfo> {
        let answer = self.0.post_json("/sandboxes", &request.to_json()).await?;
        let (stand_in, revival) = (web::stand_in_message(&answer), web::revival_message(&answer));
        let existing = answer.headers().contains_key("coracle-existing");
        let lacks_network = answer.headers().contains_key("coracle-network");
        Ok(SandboxInfo { stand_in, revival, existing, lacks_network, ..web::read_json(answer).await? })
    }

    /// Returns the server's description of a sandbox.
    pub(crate) async fn sandbox_info(&self, id: &SandboxId) -> Result<SandboxInfo> {
        web::read_json(self.0.get(&format!("/sandboxes/{id}")).await?).await
    }

    /// All sandboxes that have these labels, newest first.
    pub(crate) async fn list_sandboxes(&self, labels: &[(String, String)]) -> Result<Vec<SandboxInfo>> {
        let filter = form_urlencoded::Serializer::new(String::new()).extend_pairs(labels).finish();
        let mut found = Vec::new();
        for page in 1u32.. {
            let number = page.to_string();
            let mut pairs = vec![("page", number.as_str()), ("pageSize", MAX_PAGE_SIZE)];
            if !filter.is_empty() {
                pairs.push(("metadata", &filter));
            }
            let answer = self.0.get(&format!("/sandboxes{}", web::encode_query(&pairs))).await?;
            let page: SandboxPage = web::read_json(answer).await?;
            // An empty page ends the loop whatever the server claims, so it always ends.
            let last = !page.pagination.has_next_page || page.items.is_empty();
            found.extend(page.items);
            if last {
                break;
            }
        }
        Ok(found)
    }

    /// Removes a sandbox; returns whether it existed.
    pub(crate) async fn remove_sandbox(&self, id: &str) -> Result<bool> {
        match self.0.delete(&format!("/sandboxes/{id}")).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether requests carry a key, so that the server may have several owners.
    pub(crate) fn has_key(&self) -> bool {
        self.0.headers().contains_key(KEY_HEADER)
    }

    pub(super) fn api(&self) -> &ApiClient {
        &self.0
    }

    /// Whether this uses the operator socket, which does not serve the API of owners.
    pub(crate) fn is_operator_socket(&self) -> bool {
        self.0.operator_socket
    }

    /// The operator API of the same server.
    pub(super) fn operator_api(&self) -> ApiClient {
        let server = self.0.base().trim_end_matches("/v1");
        self.0.with_base(format!("{server}/coracle/v1"), self.0.headers().clone())
    }

    /// Allows the named sandbox to be evicted for others. `None` if no sandbox has the name, otherwise
    /// whether it was held before.
    pub(crate) async fn release_sandbox(&self, name: &str) -> Result<Option<bool>> {
        let api = self.operator_api();
        let name = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
        match api.post_json(&format!("/names/{name}/release"), &json!({})).await {
            Ok(answer) => web::read_json::<ReleaseResponse>(answer).await.map(|answer| Some(answer.released)),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The commands and files of a sandbox below its path on this server, opened by the API key. No request
    /// is needed first, but the server may refuse it: then [`Self::open_sandbox`] gets the right address.
    pub(crate) fn sandbox_by_path(&self, id: &SandboxId) -> SandboxClient {
        let base = format!("{}/sandboxes/{id}/proxy/{EXECD_PORT}", self.0.base());
        SandboxClient::new(self.0.with_base(base, self.0.headers().clone()))
    }

    /// Asks for the address and the token of the commands and files of a sandbox.
    pub(crate) async fn open_sandbox(&self, id: &SandboxId) -> Result<SandboxClient> {
        let path = format!("/sandboxes/{id}/endpoints/{EXECD_PORT}?use_server_proxy=true");
        let endpoint: PortEndpoint = web::read_json(self.0.get(&path).await?).await?;
        let mut headers = HeaderMap::new();
        for (name, value) in &endpoint.headers {
            let name = HeaderName::try_from(name).context("the server named an odd header")?;
            web::insert_secret_header(&mut headers, name, value)?;
        }
        Ok(SandboxClient::new(self.0.with_base(format!("http://{}", endpoint.endpoint), headers)))
    }
}

impl SandboxInfo {
    /// The name that `create --key` gave it.
    pub(crate) fn name(&self) -> Option<&str> {
        self.rest.get("extensions")?.get("coracle.key")?.as_str()
    }

    /// Its labels, sorted.
    pub(crate) fn labels(&self) -> BTreeMap<String, String> {
        let labels = self.rest.get("metadata").cloned().unwrap_or_default();
        serde_json::from_value(labels).unwrap_or_default()
    }
}

impl CreateSandboxRequest {
    fn to_json(&self) -> serde_json::Value {
        let mut limits = BTreeMap::new();
        limits.extend(self.cpus.map(|cpus| ("cpu", cpus.to_string())));
        limits.extend(self.memory.map(|memory| ("memory", memory.to_string())));
        let waits = ["tail".to_owned(), "-f".to_owned(), "/dev/null".to_owned()];
        let entrypoint = if self.entrypoint.is_empty() { &waits[..] } else { &self.entrypoint };
        let mut body = json!({
            "entrypoint": entrypoint,
            "resourceLimits": limits,
            "env": self.env,
            "metadata": self.labels,
            "extensions": self.extensions(),
        });
        match &self.snapshot {
            Some(snapshot) => body["snapshotId"] = json!(snapshot),
            None => body["image"] = json!({ "uri": self.image }),
        }
        if let Some(SandboxLifetime::After(timeout)) = self.timeout {
            body["timeout"] = json!(web::whole_seconds(timeout));
        }
        let named = |(place, volume): (usize, &serde_json::Value)| {
            let mut volume = volume.clone();
            volume["name"] = json!(format!("v{place}"));
            volume
        };
        if let Some(policy) = &self.policy {
            body["networkPolicy"] = policy.clone();
        }
        if !self.volumes.is_empty() {
            body["volumes"] = self.volumes.iter().enumerate().map(named).collect();
        }
        body
    }

    /// Settings for which the API has no field.
    fn extensions(&self) -> BTreeMap<&'static str, String> {
        // Our own output must be exact, whatever line mode the server uses by default.
        let mut extensions = BTreeMap::from([("coracle.lines", "P".to_owned())]);
        extensions.extend(self.pool.clone().map(|pool| ("poolRef", pool)));
        extensions.extend(self.key.clone().map(|key| ("coracle.key", key)));
        extensions.extend(self.on_death.map(|choice| ("coracle.on-death", choice.name().to_owned())));
        if self.entrypoint.is_empty() && self.image != "host" {
            // The API requires an entrypoint in any case; this extension says to use that of the image.
            extensions.insert("coracle.entrypoint", "image".to_owned());
        }
        extensions.extend(self.pids.map(|pids| ("coracle.pids", pids.to_string())));
        extensions.extend(self.disk.map(|disk| ("coracle.disk", disk.to_string())));
        if self.timeout == Some(SandboxLifetime::Never) {
            extensions.insert("coracle.timeout", "never".to_owned());
        }
        extensions.extend(self.idle_timeout.map(|limit| {
            let text = match limit {
                SandboxLifetime::Never => "never".to_owned(),
                SandboxLifetime::After(time) => web::whole_seconds(time).to_string(),
            };
            ("coracle.idle-timeout", text)
        }));
        extensions.extend(self.network.map(|network| ("coracle.network", network.name().to_owned())));
        extensions
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn minimal_request_has_only_the_fields_that_the_api_requires() {
        let body =
            CreateSandboxRequest { image: "host".to_owned(), ..CreateSandboxRequest::default() }.to_json();
        assert_eq!(
            body,
            json!({
                "image": {"uri": "host"}, "entrypoint": ["tail", "-f", "/dev/null"], "resourceLimits": {},
                "env": {}, "metadata": {}, "extensions": {"coracle.lines": "P"},
            })
        );
    }

    #[test]
    fn snapshot_is_sent_instead_of_the_image() {
        let request =
            CreateSandboxRequest { snapshot: Some("s".to_owned()), ..CreateSandboxRequest::default() };
        assert_eq!((&request.to_json()["snapshotId"], request.to_json().get("image")), (&json!("s"), None));
    }

    #[test]
    fn limits_are_written_in_the_grammar_of_the_api() {
        let request = CreateSandboxRequest {
            memory: Some(Bytes::from_mib(256)),
            cpus: Some(MilliCpus(500)),
            pids: Some(64),
            disk: Some(Bytes::from_mib(100)),
            network: Some(NetworkAccess::Off),
            timeout: Some(SandboxLifetime::After(Duration::from_millis(60_001))),
            image: "host".to_owned(),
            ..CreateSandboxRequest::default()
        };
        let body = request.to_json();
        assert_eq!(body["resourceLimits"], json!({"cpu": "0.5", "memory": "256Mi"}));
        assert_eq!(
            body["extensions"],
            json!({
                "coracle.disk": "100Mi", "coracle.lines": "P", "coracle.network": "off", "coracle.pids": "64",
            })
        );
        assert_eq!(body["timeout"], 61);
        let never = Some(SandboxLifetime::Never);
        let body =
            CreateSandboxRequest { timeout: never, idle_timeout: never, ..CreateSandboxRequest::default() }
                .to_json();
        assert_eq!(body.get("timeout"), None);
        assert_eq!(body["extensions"]["coracle.timeout"], "never");
        assert_eq!(body["extensions"]["coracle.idle-timeout"], "never");
    }

    #[test]
    fn fields_this_client_does_not_know_are_kept() {
        let text = json!({
            "id": "a", "status": {"state": "Running", "reason": "R"}, "createdAt": "2026-11-15T10:00:00Z",
            "entrypoint": ["x"],
        });
        let info: SandboxInfo = serde_json::from_value(text.clone()).expect("it reads");
        assert_eq!(serde_json::to_value(&info).expect("it writes"), text);
    }
}

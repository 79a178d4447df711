//! The operator's view: reports about sandboxes, and their lifecycle events.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use domain::SandboxId;
use http::StatusCode;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::commands::next_chunk;
use super::http as web;
use super::lifecycle::ServerClient;
use super::resolve::OwnerScope;

/// The settings and the usage of a sandbox. Unknown fields are kept for `--json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxReport {
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub phase: String,
    pub owner: String,
    pub image: UsedImage,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub created_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    #[serde(default)]
    pub in_force: BTreeMap<String, String>,
    #[serde(default)]
    pub weaker: Vec<String>,
    #[serde(default)]
    pub usage: BTreeMap<String, u64>,
    #[serde(flatten)]
    pub rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UsedImage {
    pub requested: String,
    pub used: String,
    #[serde(default, rename = "standIn", skip_serializing_if = "Option::is_none")]
    pub stand_in: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct ReportPage {
    pub sandboxes: Vec<SandboxReport>,
    /// Whether the caller is the operator of a server that can have other owners.
    #[serde(default)]
    pub operator: bool,
}

/// The usage of an owner's sandboxes in one hour.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HourlyUsage {
    pub start: String,
    pub owner: String,
    pub created: u64,
    pub alive_millis: u64,
    pub cpu_micros: u64,
    pub memory_byte_seconds: u64,
}

#[derive(Deserialize)]
struct HourlyUsagePage {
    hours: Vec<HourlyUsage>,
}

/// The usage of a sandbox at one moment.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct UsageSample {
    pub time: String,
    pub usage: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct UsageSamplePage {
    samples: Vec<UsageSample>,
}

/// A stream of server-sent events.
pub(crate) struct EventFeed {
    body: Incoming,
    pending: Vec<u8>,
}

/// The first event of a feed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EventsFrom {
    /// After the event with this number.
    After(u64),
    /// This many events before the end.
    Last(usize),
}

/// One event: its kind and its data.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FeedEvent {
    pub kind: String,
    pub data: String,
}

/// More than the server ever puts into one event.
const MAX_EVENT_BYTES: usize = 1 << 20;

impl ServerClient {
    /// `None` if there is no such sandbox.
    pub(crate) async fn sandbox_report(&self, id: &SandboxId) -> Result<Option<SandboxReport>> {
        match self.operator_api().get(&format!("/sandboxes/{id}")).await {
            Ok(answer) => web::read_json(answer).await.map(Some),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every sandbox that the API key can see: the operator's key sees all.
    pub(crate) async fn list_reports(&self) -> Result<Vec<SandboxReport>> {
        let found: ReportPage = web::read_json(self.operator_api().get("/sandboxes").await?).await?;
        Ok(found.sandboxes)
    }

    /// The sandboxes of one owner, or of all, without their usage.
    pub(crate) async fn list_reports_without_usage(&self, scope: &OwnerScope) -> Result<ReportPage> {
        let mut parameters = vec![("usage", "false")];
        parameters.extend(scope.query_parameters());
        let answer =
            self.operator_api().get(&format!("/sandboxes{}", web::encode_query(&parameters))).await?;
        web::read_json(answer).await
    }

    /// Removes a sandbox of any owner, as the operator; returns whether it existed.
    pub(crate) async fn remove_as_operator(&self, id: &str) -> Result<bool> {
        match self.operator_api().delete(&format!("/sandboxes/{id}")).await {
            Ok(()) => Ok(true),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The usage in each of the last hours, as the server reports it.
    pub(crate) async fn hourly_usage(&self, count: u64) -> Result<Vec<HourlyUsage>> {
        let answer = self.operator_api().get(&format!("/usage?hours={count}")).await?;
        web::read_json::<HourlyUsagePage>(answer).await.map(|found| found.hours)
    }

    /// The samples of one sandbox; `None` if there is no such sandbox.
    pub(crate) async fn usage_samples(&self, id: &SandboxId) -> Result<Option<Vec<UsageSample>>> {
        match self.operator_api().get(&format!("/sandboxes/{id}/usage")).await {
            Ok(answer) => web::read_json::<UsageSamplePage>(answer).await.map(|found| Some(found.samples)),
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Events after the one with a number, or the last ones.
    pub(crate) async fn open_event_feed(&self, from: EventsFrom, follow: bool) -> Result<EventFeed> {
        let path = match from {
            EventsFrom::After(after) => format!("/events?after={after}&follow={follow}"),
            EventsFrom::Last(count) => format!("/events?tail={count}&follow={follow}"),
        };
        let answer = self.operator_api().get(&path).await?;
        Ok(EventFeed { body: answer.into_body(), pending: Vec::new() })
    }
}

impl EventFeed {
    pub(super) fn from_response(answer: http::Response<Incoming>) -> Self {
        Self { body: answer.into_body(), pending: Vec::new() }
    }

    pub(crate) async fn next_event(&mut self) -> Result<Option<FeedEvent>> {
        loop {
            if let Some(event) = take_event(&mut self.pending) {
                return Ok(Some(event));
            }
            match next_chunk(&mut self.body).await? {
                Some(chunk) if self.pending.len() + chunk.len() > MAX_EVENT_BYTES => {
                    bail!("the server sent an endless event")
                }
                Some(chunk) => self.pending.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }
}

/// Takes the first complete event off; one that is only a comment is dropped.
fn take_event(pending: &mut Vec<u8>) -> Option<FeedEvent> {
    loop {
        let end = pending.windows(2).position(|pair| pair == b"\n\n")?;
        let block: Vec<u8> = pending.drain(..end + 2).collect();
        let block = String::from_utf8_lossy(&block);
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        if let Some(data) = field("data: ") {
            return Some(FeedEvent { kind: field("event: ").unwrap_or_default(), data });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_do_not_depend_on_chunk_boundaries() {
        let text = b": still there\n\nid: 7\nevent: phase\ndata: {\"id\":7}\n\nevent: missed\ndata: {}\n\n";
        let mut pending = Vec::new();
        let mut found = Vec::new();
        for byte in text {
            pending.push(*byte);
            found.extend(take_event(&mut pending));
        }
        let event = |kind: &str, data: &str| FeedEvent { kind: kind.to_owned(), data: data.to_owned() };
        assert_eq!(found, [event("phase", "{\"id\":7}"), event("missed", "{}")]);
        assert!(pending.is_empty());
    }
}

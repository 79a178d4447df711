//! Calls of the provisioner, and of the API of one of its sandboxes.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::bench::client::BenchClient;

/// A sandbox of the provisioner.
#[derive(Clone, Debug)]
pub(super) struct AioSandbox {
    /// The id that the client has chosen.
    name: String,
    /// The id of the sandbox itself.
    pub(super) container: String,
    /// The path of its API.
    path: String,
}

/// Creates a sandbox with this name, or finds it.
pub(super) fn provision(client: &mut BenchClient, name: &str) -> Result<AioSandbox> {
    let request = json!({"sandbox_id": name, "thread_id": name, "user_id": "bench"});
    let created = client.call("POST", "/api/sandboxes", &request)?;
    let text =
        |field: &str| created[field].as_str().with_context(|| format!("the response has no `{field}`"));
    let url = text("sandbox_url")?;
    let start = url.find("/aio/").context("the address has another form")?;
    Ok(AioSandbox {
        name: name.to_owned(),
        container: text("container_id")?.to_owned(),
        path: url[start..].trim_end_matches('/').to_owned(),
    })
}

impl AioSandbox {
    /// Asks the provisioner for this sandbox.
    pub(super) fn look_up(&self, client: &mut BenchClient) -> Result<()> {
        client.call("GET", &format!("/api/sandboxes/{}", self.name), &Value::Null).map(drop)
    }

    pub(super) fn remove(&self, client: &mut BenchClient) -> Result<()> {
        client.call("DELETE", &format!("/api/sandboxes/{}", self.name), &Value::Null).map(drop)
    }

    /// The path of an operation.
    pub(super) fn path_of(&self, operation: &str) -> String {
        format!("{}/v1/{operation}", self.path)
    }

    /// Calls an operation; returns its data.
    pub(super) fn call(&self, client: &mut BenchClient, operation: &str, body: &Value) -> Result<Value> {
        let mut response = client.call("POST", &self.path_of(operation), body)?;
        ensure!(response["success"] == true, "{operation} failed: {response}");
        Ok(response["data"].take())
    }

    /// Runs a command by `shell/exec` or `bash/exec`, which must succeed.
    pub(super) fn run(&self, client: &mut BenchClient, operation: &str, body: &Value) -> Result<Value> {
        let data = self.call(client, operation, body)?;
        ensure!(data["exit_code"] == 0, "a command failed: {data}");
        Ok(data)
    }
}

//! Starting commands, following their output, asking them to end.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use domain::ProcessId;
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;

use super::events::{Decoder, Event};
use super::http as web;
use super::sandbox::Sandbox;

/// What to run.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    /// Shell text; otherwise `argv` is run without a shell.
    pub text: Option<String>,
    pub argv: Vec<String>,
    pub directory: Option<String>,
    pub env: Vec<(String, String)>,
    pub timeout: Option<Duration>,
    pub user: Option<(u32, u32)>,
}

/// A command whose events arrive.
#[derive(Debug)]
pub(crate) struct Execution {
    body: Incoming,
    decoder: Decoder,
}

/// What has been printed so far, from an offset on.
#[derive(Debug)]
pub(crate) struct Logs {
    body: Incoming,
    /// Where the next call would go on; unknown while following.
    pub next_offset: Option<u64>,
}

const CURSOR_HEADER: &str = "execd-commands-tail-cursor";

impl Sandbox {
    pub(crate) async fn run(&self, wish: &Wish) -> Result<Execution> {
        Ok(Execution::new(self.api.post_json("/command", &wish.body(false)).await?))
    }

    /// Starts a command that nobody waits for and returns its id.
    pub(crate) async fn detach(&self, wish: &Wish) -> Result<String> {
        let mut execution = Execution::new(self.api.post_json("/command", &wish.body(true)).await?);
        while let Some(event) = execution.next().await? {
            match event {
                Event::Started(id) => return Ok(id),
                Event::Failed(failure) => {
                    bail!("the command could not be started: {}", failure.value)
                }
                Event::Stdout(_) | Event::Stderr(_) | Event::Completed => {}
            }
        }
        bail!("the server did not name the process")
    }

    /// Asks the command's whole group to end.
    pub(crate) async fn interrupt(&self, process: &str) -> Result<()> {
        self.api.delete(&format!("/command{}", web::query(&[("id", process)]))).await
    }

    pub(crate) async fn logs(&self, process: &ProcessId, from: u64, follow: bool) -> Result<Logs> {
        let cursor = from.to_string();
        let mut pairs = vec![("cursor", cursor.as_str())];
        if follow {
            pairs.push(("follow", "true"));
        }
        let answer = self.api.get(&format!("/command/{process}/logs{}", web::query(&pairs))).await?;
        let next = answer.headers().get(CURSOR_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
        Ok(Logs { body: answer.into_body(), next_offset: next })
    }
}

impl Wish {
    fn body(&self, background: bool) -> serde_json::Value {
        let mut body = match &self.text {
            Some(text) => json!({ "command": text }),
            None => json!({ "argv": self.argv }),
        };
        if background {
            body["background"] = json!(true);
        }
        if let Some(directory) = &self.directory {
            body["cwd"] = json!(directory);
        }
        if let Some(timeout) = self.timeout {
            body["timeout"] = json!(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1));
        }
        if let Some((uid, gid)) = self.user {
            body["uid"] = json!(uid);
            body["gid"] = json!(gid);
        }
        if !self.env.is_empty() {
            let envs: serde_json::Map<_, _> =
                self.env.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
            body["envs"] = json!(envs);
        }
        body
    }
}

impl Execution {
    fn new(answer: Response<Incoming>) -> Self {
        Self { body: answer.into_body(), decoder: Decoder::default() }
    }

    /// The next event; `None` when the stream has ended. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            if let Some(event) = self.decoder.next()? {
                return Ok(Some(event));
            }
            match next_chunk(&mut self.body).await? {
                Some(chunk) => self.decoder.feed(&chunk)?,
                None => return Ok(None),
            }
        }
    }
}

impl Logs {
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>> {
        next_chunk(&mut self.body).await
    }
}

/// The next bytes of a body; trailers are skipped.
pub(super) async fn next_chunk(body: &mut Incoming) -> Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| anyhow!(error)).context("the server ended the stream too early")?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_arguments_needs_no_shell() {
        let wish = Wish { argv: vec!["ls".to_owned(), "a b".to_owned()], ..Wish::default() };
        assert_eq!(wish.body(false), json!({"argv": ["ls", "a b"]}));
    }

    #[test]
    fn text_and_every_option_are_sent_in_the_units_of_the_api() {
        let wish = Wish {
            text: Some("exit 3".to_owned()),
            directory: Some("/tmp".to_owned()),
            env: vec![("A".to_owned(), "b".to_owned())],
            timeout: Some(Duration::from_secs(5)),
            user: Some((1, 2)),
            ..Wish::default()
        };
        assert_eq!(
            wish.body(true),
            json!({"command": "exit 3", "background": true, "cwd": "/tmp", "timeout": 5000, "uid": 1, "gid": 2, "envs": {"A": "b"}})
        );
    }
}

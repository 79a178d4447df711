//! A session as server-sent events: what it has printed, and then its commands as they print, until it is idle.

use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use domain::{JournalOffset, ProcessId, SessionId};
use futures_util::stream;
use serde_json::json;
use service::{OutputEvent, OutputStream, SandboxRef, ServiceError};
use tokio::time::timeout;

use super::super::commands::session::{GroupSession, SessionGroup};
use super::exec_events::{LiveText, end_event, error_event, format_data, output_event};
use super::view::SessionTranscript;
use crate::kit::sse::event_stream_response;

/// How often clients hear that nothing was printed.
const VIEW_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// A view in progress.
struct ViewStream {
    sandbox: SandboxRef,
    session: SessionId,
    stage: ViewStage,
    text: LiveText,
}

enum ViewStage {
    Begin(Box<SessionTranscript>),
    Following(Box<OutputStream>),
    Over,
}

pub(super) fn stream_session(
    sandbox: SandboxRef,
    session: SessionId,
    transcript: SessionTranscript,
) -> Response {
    let stage = ViewStage::Begin(Box::new(transcript));
    let view = ViewStream { sandbox, session, stage, text: LiveText::default() };
    event_stream_response(stream::unfold(view, |mut view| async move {
        let frame = view.next_frame().await?;
        Some((Ok(Bytes::from(frame)), view))
    }))
}

impl ViewStream {
    async fn next_frame(&mut self) -> Option<String> {
        match std::mem::replace(&mut self.stage, ViewStage::Over) {
            ViewStage::Over => None,
            ViewStage::Begin(transcript) => {
                let text = transcript.finished_text();
                let mut printed = String::new();
                if !text.is_empty() {
                    printed = output_event(&text);
                    self.text = LiveText::after_line();
                }
                let rest = match transcript.current {
                    Some(process) => self.follow_run(&process).await,
                    None => end_event(),
                };
                Some(format!(": connected\n\n{printed}{rest}"))
            }
            ViewStage::Following(mut output) => {
                let frame = match timeout(VIEW_KEEP_ALIVE_INTERVAL, output.next()).await {
                    Err(_elapsed) => format_data(&json!({"keepalive": true})),
                    Ok(Ok(event @ OutputEvent::Ended(_))) => {
                        let last = self.text.add_event(&event);
                        let last = if last.is_empty() { last } else { output_event(&last) };
                        return Some(format!(":\n\n{last}{}", self.follow_next_run().await));
                    }
                    Ok(Ok(event)) => match self.text.add_event(&event) {
                        // A comment, since a frame cannot be empty.
                        text if text.is_empty() => ":\n\n".to_owned(),
                        text => output_event(&text),
                    },
                    Ok(Err(error)) => return Some(error_event(&error.to_string())),
                };
                self.stage = ViewStage::Following(output);
                Some(frame)
            }
        }
    }

    /// Continues with the command that was queued, or ends.
    async fn follow_next_run(&mut self) -> String {
        let status = match self.sandbox.sessions().shared_session(&self.session).await {
            Ok(status) => GroupSession::from_status(SessionGroup::Shell, status),
            Err(error) => return end_or_error(&error),
        };
        let Some(run) = status.and_then(|status| status.running_command().cloned()) else {
            return end_event();
        };
        // Its output is separated from that of the command before.
        self.text = LiveText::after_line();
        self.follow_run(&run).await
    }

    /// Follows a command from its first byte on. Returns the last events if that is not possible.
    async fn follow_run(&mut self, run: &ProcessId) -> String {
        match self.sandbox.processes().follow_output(run, JournalOffset(0)).await {
            Ok(output) => {
                self.stage = ViewStage::Following(Box::new(output));
                String::new()
            }
            Err(error) => end_or_error(&error),
        }
    }
}

/// A session or command that is gone prints nothing any more.
fn end_or_error(error: &ServiceError) -> String {
    match error {
        ServiceError::NoSession(_) | ServiceError::NoProcess(_) => end_event(),
        error => error_event(&error.to_string()),
    }
}

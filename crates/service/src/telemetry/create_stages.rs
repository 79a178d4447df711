//! Logs where the server's part of a create's time goes, at level `trace`. The launcher's part is logged by its
//! client under the same target.

use std::time::Instant;

use backend::STAGE_LOG_TARGET;
use domain::SandboxId;

/// Measures stages that follow each other, if they are logged.
#[derive(Debug)]
pub(crate) struct CreateStages(Option<MeasuredStages>);

#[derive(Debug)]
struct MeasuredStages {
    last: Instant,
    /// Pairs of a stage and its microseconds, as they are logged.
    text: String,
}

impl CreateStages {
    pub(crate) fn start() -> Self {
        let logged = tracing::enabled!(target: STAGE_LOG_TARGET, tracing::Level::TRACE);
        Self(logged.then(|| MeasuredStages { last: Instant::now(), text: String::new() }))
    }

    /// Ends a stage; the next one begins.
    pub(crate) fn end_stage(&mut self, stage: &str) {
        let Some(measured) = &mut self.0 else { return };
        let now = Instant::now();
        let comma = if measured.text.is_empty() { "" } else { "," };
        let micros = now.duration_since(measured.last).as_micros();
        measured.text.push_str(&format!("{comma}{stage}={micros}"));
        measured.last = now;
    }

    pub(crate) fn log(self, id: &SandboxId) {
        let Some(MeasuredStages { text: stages, .. }) = self.0 else { return };
        tracing::trace!(target: STAGE_LOG_TARGET, part = "server", sandbox = %id, stages, "sandbox was created; stages are in microseconds");
    }
}

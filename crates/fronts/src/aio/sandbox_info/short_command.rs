//! Short commands by which this front finds out what a sandbox has. What they print comes from inside the sandbox, so
//! no part of it can be trusted.

use std::time::Duration;

use domain::process::{CommandLine, ProcessSpec};
use service::{OutputEvent, SandboxRef, ServiceError, WaitLimits};

use domain::StreamKind;

/// How long such a command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);
/// How much of its output is read.
const MAX_OUTPUT_BYTES: usize = 4 << 20;

/// Runs shell text as the default user and returns what it has printed to standard output.
pub(super) async fn read_command_output(sandbox: &SandboxRef, text: &str) -> Result<String, ServiceError> {
    let process = ProcessSpec {
        deadline: Some(COMMAND_TIMEOUT),
        ..ProcessSpec::new(CommandLine::Shell { text: text.to_owned(), login: false })
    };
    let mut following = sandbox.processes().launch_process(process).await?;
    let mut printed = Vec::new();
    let limits = WaitLimits { soft: Some(COMMAND_TIMEOUT * 2), quiet: None };
    let waited = following.wait(limits, |event| {
        if let OutputEvent::Output { stream: StreamKind::Stdout, bytes, .. } = event {
            let room = MAX_OUTPUT_BYTES - printed.len();
            printed.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
    });
    waited.await?;
    let process = following.process.clone();
    drop(following);
    // Nobody asks for its output again. A failure leaves it among the finished processes, whose number is bounded.
    if let Err(error) = sandbox.processes().forget_process(&process).await {
        tracing::debug!(sandbox = %sandbox.id(), %error, "failed to forget a finished command; its output stays");
    }
    Ok(String::from_utf8_lossy(&printed).into_owned())
}

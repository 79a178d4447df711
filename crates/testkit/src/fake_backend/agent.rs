//! An agent that answers without doing anything, or as a test's script says.

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::watch;
use wire::process::{ExitReason, ProcessEnd, ProcessStatus};
use wire::{AgentReply, AgentRequest, Fault, FaultKind, Frame, FrameDecoder, Greeting, VersionedRequest};

use super::Script;

/// One connection to an agent that pretends to start everything it is asked to.
pub(super) struct FakeAgent {
    pub(super) stream: DuplexStream,
    pub(super) processes: Vec<ProcessStatus>,
    pub(super) script: Option<Script>,
    pub(super) entrypoint_end: watch::Receiver<Option<ExitReason>>,
}

impl FakeAgent {
    pub(super) async fn serve(mut self) {
        let Some(request) = self.request().await else { return };
        self.say(&Greeting { version: wire::VERSION }).await;
        if let Some(bytes) = self.script.as_ref().and_then(|script| script(&request)) {
            // The client may hang up in the middle of the script.
            self.stream.write_all(&bytes).await.ok();
            if bytes.is_empty() {
                // Stays silent and keeps the connection open.
                self.request().await;
            }
            return;
        }
        match request {
            AgentRequest::Ping | AgentRequest::Adopt { .. } => self.say(&AgentReply::Ok).await,
            AgentRequest::Start(_) => self.say(&AgentReply::Started { pid: 7 }).await,
            AgentRequest::Processes => self.say(&AgentReply::Statuses(self.processes.clone())).await,
            AgentRequest::Status { process } => self.say(&AgentReply::Status(running(&process))).await,
            AgentRequest::Follow { process, .. } => {
                self.say(&AgentReply::Status(running(&process))).await;
                let end = *self.entrypoint_end.wait_for(Option::is_some).await.unwrap();
                self.say(&AgentReply::Ended(ended(end.unwrap()))).await;
            }
            _ => self.say(&AgentReply::Fault(fault(FaultKind::Unsupported))).await,
        }
    }

    async fn request(&mut self) -> Option<AgentRequest> {
        let mut decoder = FrameDecoder::new();
        let mut bytes = [0; 4096];
        loop {
            if let Some(frame) = decoder.next_frame().unwrap() {
                return Some(frame.parse_message::<VersionedRequest>().unwrap().request);
            }
            match self.stream.read(&mut bytes).await {
                Ok(count) if count > 0 => decoder.feed(&bytes[..count]),
                _ => return None,
            }
        }
    }

    async fn say(&mut self, message: &impl serde::Serialize) {
        // The client may not wait for the answer.
        self.stream.write_all(&encoded(&[Frame::from_message(message)])).await.ok();
    }
}

pub fn encoded(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

pub fn fault(kind: FaultKind) -> Fault {
    Fault { kind, errno: None, operation: "test".into(), subject: "subject".to_owned() }
}

pub fn running(process: &str) -> ProcessStatus {
    ProcessStatus {
        process: process.to_owned(),
        pid: 7,
        tag: None,
        session: None,
        command: "test".to_owned(),
        started_ms: 1,
        written: 0,
        first: 0,
        ended: None,
        left: false,
        stderr_before: None,
    }
}

pub fn ended(exit: ExitReason) -> ProcessEnd {
    ProcessEnd {
        exit,
        written: 0,
        ended_ms: 2,
        duration_ms: 1,
        user_ms: 0,
        system_ms: 0,
        max_rss_kib: 0,
        interrupted: false,
        signalled: None,
    }
}

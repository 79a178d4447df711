//! JavaScript in a Node.js process of its own, in a new directory that is removed afterwards.
//!
//! ```text
//! /tmp/coracle-node-{id}/            the files that the client sent; `require` and `import` start here
//! /tmp/coracle-node-{id}/.coracle/   run.cjs (node_run.cjs), code.js, stdin, report.json
//! ```
//! The runner writes the value of the last expression, or the error that ended the code, to `report.json`. The code can
//! change that file, so it is read like everything else from inside.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use domain::process::{CommandLine, ExitReason, MissingDirectory, ProcessSpec, WorkingDirectory};
use domain::{Backpressure, UserIdentity};
use http::StatusCode;
use serde::Deserialize;
use service::{
    CodeError, FileAttributes, FileCaller, LaunchStep, MimeForms, OutputEvent, ProcessEnd, SandboxRef,
    ServiceError, WriteFileRequest, WriteMode, draw_context_name,
};

use super::outputs::{OutputCollector, RunReport, unresponsive_sandbox};
use crate::aio::problem::AioProblem;

/// Runs the code and reports its value.
const RUNNER: &str = include_str!("node_run.cjs");
/// Where runs have their directories.
const RUNS_DIRECTORY: &str = "/tmp";
/// The directory of the runner, below that of the run.
const RUNNER_DIRECTORY: &str = ".coracle";
/// How many files a client may send, and how long their paths may be.
const MAX_FILES: usize = 256;
const MAX_PATH_BYTES: usize = 1024;
/// How much of a report is read.
const MAX_REPORT_BYTES: usize = 2 << 20;
const MAX_TRACEBACK_LINES: usize = 1000;
/// The exit code of a shell that does not find its program.
const NOT_FOUND_EXIT_CODE: i32 = 127;
/// How long a run may take beyond its own limit, for its files and its report.
const RUN_GRACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Code for a process of its own.
pub(super) struct NodeProcess {
    pub(super) code: String,
    pub(super) stdin: Option<String>,
    pub(super) files: BTreeMap<String, String>,
    /// Where it starts; its own directory if there is none.
    pub(super) directory: Option<String>,
    pub(super) timeout: Duration,
}

/// The report of the runner.
#[derive(Debug, Default, Deserialize)]
struct NodeReport {
    result: Option<String>,
    error: Option<NodeError>,
}

#[derive(Debug, Deserialize)]
struct NodeError {
    ename: String,
    evalue: String,
    traceback: Vec<String>,
}

/// Checks the paths of files, which must stay below the directory of the run.
pub(super) fn parse_files(files: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, AioProblem> {
    if files.len() > MAX_FILES {
        return Err(AioProblem::invalid_field("files", format!("at most {MAX_FILES} files can be sent")));
    }
    let is_valid = |path: &String| {
        let is_name = |part: &str| !matches!(part, "" | "." | ".." | RUNNER_DIRECTORY);
        path.len() <= MAX_PATH_BYTES && !path.contains('\0') && path.split('/').all(is_name)
    };
    match files.keys().find(|path| !is_valid(path)) {
        Some(_) => Err(AioProblem::invalid_field("files", "a path of a file must be relative, without `..`")),
        None => Ok(files),
    }
}

/// Runs the code to its end. It continues if the client disconnects, so that its directory is always removed.
pub(super) async fn run_process(sandbox: &SandboxRef, process: NodeProcess) -> Result<RunReport, AioProblem> {
    let sandbox = sandbox.clone();
    let running = tokio::spawn(async move {
        let run = NodeRun::new(&sandbox)?;
        // A sandbox that does not report the end of the run must not keep this task.
        let limit = process.timeout + RUN_GRACE_TIMEOUT;
        let ended = tokio::time::timeout(limit, run.run_to_end(process)).await;
        let ended = ended.unwrap_or_else(|_elapsed| Err(unresponsive_sandbox()));
        if let Err(error) = sandbox.files().remove_file(run.caller(), &run.directory, true).await {
            tracing::debug!(sandbox = %sandbox.id(), %error, "failed to remove the directory of a run; it stays");
        }
        ended
    });
    running
        .await
        .unwrap_or_else(|_panic| Err(AioProblem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error")))
}

struct NodeRun<'a> {
    sandbox: &'a SandboxRef,
    directory: String,
}

impl<'a> NodeRun<'a> {
    fn new(sandbox: &'a SandboxRef) -> Result<Self, AioProblem> {
        let id = draw_context_name()?;
        Ok(Self { sandbox, directory: format!("{RUNS_DIRECTORY}/coracle-node-{}", id.as_str()) })
    }

    fn caller(&self) -> FileCaller<'static> {
        FileCaller { identity: &UserIdentity::Default, isolated_session: None }
    }

    fn own_path(&self, name: &str) -> String {
        format!("{}/{RUNNER_DIRECTORY}/{name}", self.directory)
    }

    async fn run_to_end(&self, process: NodeProcess) -> Result<RunReport, AioProblem> {
        let NodeProcess { code, stdin, files, directory, timeout } = process;
        self.write_files(code, stdin, files).await?;
        // A shell opens the input, since that of a process cannot be a file.
        let words = [
            "sh",
            "-c",
            "exec node \"$1\" <\"$2\"",
            "sh",
            &self.own_path("run.cjs"),
            &self.own_path("stdin"),
        ];
        let has_directory = directory.is_some();
        let path = directory.unwrap_or_else(|| self.directory.clone());
        let spec = ProcessSpec {
            directory: Some(WorkingDirectory { path, missing: MissingDirectory::Fail, expand: false }),
            deadline: Some(timeout),
            backpressure: Backpressure::On { stall_limit: None },
            ..ProcessSpec::new(CommandLine::Argv(words.map(str::to_owned).to_vec()))
        };
        let mut following = match self.sandbox.processes().launch_process(spec).await {
            Ok(following) => following,
            Err(ServiceError::File(error))
                if has_directory && error.launch_step != Some(LaunchStep::Exec) =>
            {
                return Ok(RunReport::directory_error(&error.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let mut collector = OutputCollector::default();
        let end = loop {
            match following.next().await? {
                OutputEvent::Output { stream, bytes, .. } => collector.add_bytes(stream, &bytes),
                OutputEvent::Gap { .. } => {}
                OutputEvent::Ended(end) => break end,
            }
        };
        let process = following.process.clone();
        drop(following);
        // Nobody asks for its output again. A failure leaves it among the finished processes, whose number is bounded.
        if let Err(error) = self.sandbox.processes().forget_process(&process).await {
            tracing::debug!(sandbox = %self.sandbox.id(), %error, "failed to forget a finished run; its output stays");
        }
        self.report(collector, &end).await
    }

    async fn report(
        &self,
        mut collector: OutputCollector,
        end: &ProcessEnd,
    ) -> Result<RunReport, AioProblem> {
        let report = self.read_report().await?;
        if report.is_none() && end.exit == ExitReason::Code(NOT_FOUND_EXIT_CODE) {
            let message = "Node.js is not installed in this sandbox";
            return Err(AioProblem::new(StatusCode::SERVICE_UNAVAILABLE, message));
        }
        let NodeReport { result, error } = report.unwrap_or_default();
        if let Some(error) = error.filter(|_| end.exit != ExitReason::Code(0)) {
            let NodeError { ename, evalue, mut traceback } = error;
            traceback.truncate(MAX_TRACEBACK_LINES);
            collector.add_error(CodeError { name: ename, value: evalue, traceback });
        } else if let Some(text) = result {
            collector.add_result(MimeForms::from([("text/plain".to_owned(), text)]));
        }
        Ok(collector.end_of_process(end))
    }

    async fn write_files(
        &self,
        code: String,
        stdin: Option<String>,
        files: BTreeMap<String, String>,
    ) -> Result<(), ServiceError> {
        let private = FileAttributes { mode: Some(0o700), ..FileAttributes::default() };
        self.make_directory(&self.directory, private).await?;
        self.make_directory(&self.own_path(""), FileAttributes::default()).await?;
        self.write_file(&self.own_path("run.cjs"), RUNNER.to_owned()).await?;
        self.write_file(&self.own_path("code.js"), code).await?;
        self.write_file(&self.own_path("stdin"), stdin.unwrap_or_default()).await?;
        for (name, content) in files {
            if let Some((parents, _)) = name.rsplit_once('/') {
                let path = format!("{}/{parents}", self.directory);
                self.make_directory(&path, FileAttributes::default()).await?;
            }
            self.write_file(&format!("{}/{name}", self.directory), content).await?;
        }
        Ok(())
    }

    async fn make_directory(&self, path: &str, attributes: FileAttributes) -> Result<(), ServiceError> {
        self.sandbox.files().make_directory(self.caller(), path, attributes).await
    }

    async fn write_file(&self, path: &str, content: String) -> Result<(), ServiceError> {
        let (mode, attributes) = (WriteMode::Replace, FileAttributes::default());
        let request = WriteFileRequest { mode, attributes, new_file_mode: None };
        let mut writer = self.sandbox.files().write_file(self.caller(), path, request).await?;
        writer.send_bytes(Bytes::from(content)).await?;
        writer.finish().await
    }

    /// `None` if the runner did not begin.
    async fn read_report(&self) -> Result<Option<NodeReport>, AioProblem> {
        let path = self.own_path("report.json");
        let mut reader = match self.sandbox.files().read_file(self.caller(), &path, 0, None).await {
            Ok(reader) => reader,
            Err(ServiceError::File(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut text = Vec::new();
        while let Some(bytes) = reader.next().await? {
            let room = MAX_REPORT_BYTES - text.len();
            text.extend_from_slice(&bytes[..bytes.len().min(room)]);
            if text.len() >= MAX_REPORT_BYTES {
                break;
            }
        }
        Ok(Some(serde_json::from_slice(&text).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_below_the_directory_of_the_run() {
        let parse = |path: &str| parse_files(BTreeMap::from([(path.to_owned(), String::new())]));
        for path in ["a.js", "lib/b.js", "..a", "a b"] {
            assert!(parse(path).is_ok(), "{path}");
        }
        for path in
            ["", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\0", ".coracle/run.cjs", &"x".repeat(2000)]
        {
            assert_eq!(parse(path).unwrap_err().validation[0].loc, ["body", "files"], "{path}");
        }
    }
}

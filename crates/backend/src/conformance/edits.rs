//! Checks that edits of files can be undone in a sandbox as this backend makes it.

use std::collections::BTreeMap;

use domain::{IsolatedSessions, SandboxSpec};
use wire::file_edits::{TextEdit, TextOccurrence, UndoOutcome, UndoPolicy};
use wire::files::{FileAttributes, FileOperation, FileRequest};
use wire::isolated_session::{EnvFilter, IsolatedSessionSpec};
use wire::process::{OpenSession, UserIdentity};
use wire::{AgentReply, AgentRequest, FaultKind};

use super::{BackendUnderTest, CheckOutcome, TestSandbox};

const SESSION: &str = "ed17ed17ed17ed17ed17ed17ed17ed17";

/// One user's edits, perhaps in the file tree of an isolated session.
struct Editor<'a> {
    sandbox: &'a TestSandbox,
    identity: UserIdentity,
    isolated_session: Option<String>,
}

impl Editor<'_> {
    fn request(&self, operation: FileOperation) -> AgentRequest {
        let (identity, isolated_session) = (self.identity.clone(), self.isolated_session.clone());
        AgentRequest::File(FileRequest { identity, isolated_session, operation })
    }

    async fn edit(&self, path: &str, edit: TextEdit, text: &str) -> AgentReply {
        let operation = FileOperation::Edit { path: path.to_owned(), edit, max_content: 0 };
        self.sandbox.send_request_with_text(self.request(operation), text).await
    }

    async fn edit_undoable(&self, path: &str, edit: TextEdit, text: &str) {
        let reply = self.edit(path, edit, text).await;
        assert!(
            matches!(&reply, AgentReply::Edited(report) if report.changed && report.undoable),
            "{reply:?}"
        );
    }

    async fn undo(&self, path: &str) -> UndoOutcome {
        let operation =
            FileOperation::UndoEdit { path: path.to_owned(), if_changed: UndoPolicy::Refuse, max_content: 0 };
        let reply = self.sandbox.read_first_reply(self.request(operation)).await;
        let AgentReply::Undone(report) = reply else { panic!("the edit cannot be undone: {reply:?}") };
        report.outcome
    }

    async fn edit_and_undo(&self, path: &str) {
        self.edit_undoable(path, create(), "first\n").await;
        self.edit_undoable(path, replace("first"), "second").await;
        assert_eq!(self.undo(path).await, UndoOutcome::Restored);
        assert_eq!(self.undo(path).await, UndoOutcome::Removed);
        assert_eq!(self.undo(path).await, UndoOutcome::NoHistory);
    }
}

fn create() -> TextEdit {
    TextEdit::Create { attributes: FileAttributes::default() }
}

fn replace(old: &str) -> TextEdit {
    TextEdit::Replace { old: old.to_owned(), occurrence: TextOccurrence::Only, adapt_line_ends: false }
}

fn root(sandbox: &TestSandbox) -> Editor<'_> {
    Editor { sandbox, identity: UserIdentity::Default, isolated_session: None }
}

pub(super) async fn edits_are_taken_back_after_the_backend_was_reopened(subject: &dyn BackendUnderTest) {
    let backend = subject.open().await;
    let made = TestSandbox::create_plain(&backend).await;
    root(&made).edit_and_undo("/tmp/a").await;
    root(&made).edit_undoable("/tmp/a", create(), "created\n").await;
    let seen = made.run_script("ls -a / /proc /proc/1/fd /proc/self/fd; find / -xdev -name '*.edits*'").await;
    assert!(!seen.output.contains(".edits"), "the history is visible inside: {}", seen.output);
    let other = Editor { identity: UserIdentity::Ids { uid: 1000, gid: 1000 }, ..root(&made) };
    match other.edit("/tmp/b", create(), "first\n").await {
        // A sandbox with a single user has no other.
        AgentReply::Fault(fault) => assert_eq!(fault.kind, FaultKind::Permission, "{fault:?}"),
        AgentReply::Edited(report) => {
            assert!(report.undoable);
            assert_eq!(other.undo("/tmp/a").await, UndoOutcome::NoHistory, "another user's edit");
            assert_eq!(root(&made).undo("/tmp/b").await, UndoOutcome::NoHistory, "another user's edit");
            assert_eq!(other.undo("/tmp/b").await, UndoOutcome::Removed);
        }
        reply => panic!("`{reply:?}` instead of an edit"),
    }
    drop(backend);
    let made = made.through_backend(&subject.open().await);
    assert_eq!(root(&made).undo("/tmp/a").await, UndoOutcome::Removed);
    let listed = made.run_script("ls /tmp").await;
    assert_eq!(listed.output, "", "undone creates leave no file");
    made.destroy().await;
}

pub(super) async fn edits_in_isolated_sessions_have_their_own_history(
    subject: &dyn BackendUnderTest,
) -> CheckOutcome {
    let backend = subject.open().await;
    let spec = SandboxSpec { isolated_sessions: IsolatedSessions::On, ..SandboxSpec::with_defaults() };
    let made = TestSandbox::create_from_spec(&backend, &spec).await;
    let open = OpenSession {
        session: SESSION.to_owned(),
        identity: UserIdentity::Default,
        directory: None,
        env: BTreeMap::new(),
        terminal: None,
        text_terminal: false,
        sharing: None,
        isolation: Some(IsolatedSessionSpec {
            mounts: Vec::new(),
            share_temporary: false,
            share_network: true,
            screen: EnvFilter { only: None, without: Vec::new() },
            idle_ms: None,
            note: String::new(),
        }),
    };
    let reply = made.read_first_reply(AgentRequest::OpenSession(open)).await;
    if matches!(reply, AgentReply::Fault(_)) {
        let supported = made.read_first_reply(AgentRequest::IsolatedSessions).await;
        assert!(matches!(supported, AgentReply::Fault(_)), "no session could be opened: {reply:?}");
        made.destroy().await;
        return CheckOutcome::Skipped("isolated sessions are not supported here");
    }
    let outside = root(&made);
    let inside = Editor { isolated_session: Some(SESSION.to_owned()), ..root(&made) };
    outside.edit_undoable("/tmp/a", create(), "outside\n").await;
    inside.edit_and_undo("/tmp/a").await;
    assert_eq!(outside.undo("/tmp/a").await, UndoOutcome::Removed);
    made.destroy().await;
    CheckOutcome::Passed
}

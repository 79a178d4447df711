//! A malicious agent that answers searches: more than was requested, something else, or without end.

use domain::{SandboxId, UserIdentity};
use wire::files::FileKind;
use wire::search::{GlobEntry, GlobSummary, GrepSummary};
use wire::{AgentReply, Frame};

use super::TestBench;
use crate::{ErrorKind, GlobKinds, GlobMatches, GlobOrder, GlobQuery, GrepPattern, GrepQuery, ServiceError};
use testkit::fake_backend::encoded;

#[tokio::test]
async fn more_search_results_than_requested_are_refused() {
    let paths = |count| AgentReply::GlobEntries(vec![glob_entry("/a"); count]);
    let end = AgentReply::GlobEnd(GlobSummary { total: u64::MAX, truncated: true });
    for (replies, accepted) in [
        (vec![paths(3), end.clone()], true),
        (vec![paths(2), paths(1), end.clone()], true),
        (vec![paths(4), end.clone()], false),
        (vec![paths(2), paths(2), end.clone()], false),
        (vec![paths(1), AgentReply::Ok], false),
        (vec![paths(1)], false),
    ] {
        let bench = TestBench::new().await;
        let made = bench.create().await;
        let frames: Vec<Frame> = replies.iter().map(Frame::from_message).collect();
        let bytes = encoded(&frames);
        bench.backend.set_script(move |_| Some(bytes.clone()));
        let found = find_paths(&bench, &made.id).await;
        assert_eq!(found.is_ok(), accepted, "{replies:?}");
        if let Err(error) = found {
            assert_eq!(error.kind(), ErrorKind::Internal);
        }
    }
}

#[tokio::test]
async fn endless_pages_of_a_search_are_cut_off() {
    for page in
        [AgentReply::GlobEntries(Vec::new()), AgentReply::GlobEntries(vec![glob_entry(&"n".repeat(900_000))])]
    {
        let bench = TestBench::new().await;
        let made = bench.create().await;
        let page = encoded(&[Frame::from_message(&page)]);
        let pages = page.repeat((80 << 20) / page.len());
        bench.backend.set_script(move |_| Some(pages.clone()));
        let sandbox = bench.sandbox(&made.id);
        let query = GlobQuery { limit: u32::MAX, ..glob_query() };
        let found = sandbox.files().find_paths(&UserIdentity::Default, "/", query).await;
        assert_eq!(found.unwrap_err().kind(), ErrorKind::Internal);
    }
}

#[tokio::test]
async fn matches_that_do_not_fit_a_search_are_refused() {
    let found = wire::search::GrepMatch {
        path: "/a".to_owned(),
        line: u64::MAX,
        text: "x".repeat(1000),
        cut: true,
        before: Vec::new(),
        after: vec![String::new(); 3],
    };
    let matches = |count| AgentReply::GrepMatches(vec![found.clone(); count]);
    let end =
        AgentReply::GrepEnd(GrepSummary { files_searched: 0, files_matched: u64::MAX, truncated: false });
    let paths_end = AgentReply::GlobEnd(GlobSummary { total: 0, truncated: false });
    for (replies, accepted) in [
        (vec![matches(3), end.clone()], true),
        (vec![end.clone()], true),
        (vec![matches(1), matches(3), end], false),
        (vec![matches(1), paths_end], false),
        (vec![matches(1)], false),
        (vec![AgentReply::GlobEntries(Vec::new())], false),
    ] {
        let bench = TestBench::new().await;
        let made = bench.create().await;
        let frames: Vec<Frame> = replies.iter().map(Frame::from_message).collect();
        let bytes = encoded(&frames);
        bench.backend.set_script(move |_| Some(bytes.clone()));
        let sandbox = bench.sandbox(&made.id);
        let found = sandbox.files().search_text(&UserIdentity::Default, "/", grep_query()).await;
        assert_eq!(found.is_ok(), accepted, "{replies:?}");
    }
}

fn grep_query() -> GrepQuery {
    GrepQuery {
        pattern: GrepPattern::Literal("x".to_owned()),
        ignore_case: false,
        multiline: false,
        before: 0,
        after: 0,
        include: Vec::new(),
        exclude: Vec::new(),
        file_type: None,
        recursive: true,
        max_file_size: None,
        offset: 0,
        limit: 3,
    }
}

#[tokio::test]
async fn agent_that_does_not_know_searches_is_reported() {
    let bench = TestBench::new().await;
    let made = bench.create().await;
    let error = find_paths(&bench, &made.id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

fn glob_entry(path: &str) -> GlobEntry {
    let (size, modified_ms) = (Some(1), Some(i64::MIN));
    GlobEntry { path: path.to_owned(), kind: FileKind::File, size, modified_ms }
}

fn glob_query() -> GlobQuery {
    GlobQuery {
        pattern: "*".to_owned(),
        exclude: Vec::new(),
        hidden: false,
        kinds: GlobKinds::Files,
        metadata: true,
        order: GlobOrder::Path,
        descending: false,
        limit: 3,
    }
}

async fn find_paths(bench: &TestBench, id: &SandboxId) -> Result<GlobMatches, ServiceError> {
    bench.sandbox(id).files().find_paths(&UserIdentity::Default, "/", glob_query()).await
}

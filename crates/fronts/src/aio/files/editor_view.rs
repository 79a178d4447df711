//! The command `view` of the editor: the numbered lines of a file, or two levels of a directory.

use service::{EditContents, FileKind, FileReader, GlobKinds, GlobOrder, GlobQuery};

use super::FileCall;
use super::editor::{EditorResult, edit_problem, is_directory};
use crate::aio::problem::AioProblem;

/// The longest file, or range of one, that is shown.
const MAX_VIEW_BYTES: usize = 8 << 20;
/// How many entries of a directory are shown for each level.
const MAX_VIEW_ENTRIES: u32 = 5000;
/// How many lines before and behind a change are shown.
const SNIPPET_LINES: u64 = 4;
const EFBIG: i32 = 27;

pub(super) async fn view_path(call: &FileCall, range: Vec<i64>) -> Result<EditorResult, AioProblem> {
    if is_directory(call).await? {
        if !range.is_empty() {
            return Err(range_problem(&range, "it is not allowed when `path` points to a directory."));
        }
        return view_directory(call).await;
    }
    let (first, end) = parse_range(&range)?;
    let content = read_range(call, first - 1, end).await?;
    let lines = content.lines().count() as u64;
    let is_beyond = first > 1 && lines == 0;
    let ends_early = end.is_some_and(|end| lines < end + 1 - first);
    if is_beyond || ends_early {
        let last = if is_beyond { "the number of lines".to_owned() } else { (first + lines - 1).to_string() };
        let reason = format!("Its lines should be within the range of lines of the file: [1, {last}].");
        return Err(range_problem(&range, &reason));
    }
    let output = numbered_lines(&call.path, &content, first);
    Ok(EditorResult::new(&call.path, output, true, EditContents::default()))
}

/// The first line, counted from 1, and the last; `None` is the end of the file.
fn parse_range(range: &[i64]) -> Result<(u64, Option<u64>), AioProblem> {
    match *range {
        [] => Ok((1, None)),
        [first, -1] if first >= 1 => Ok((first.unsigned_abs(), None)),
        [first, last] if first >= 1 && last >= first => Ok((first.unsigned_abs(), Some(last.unsigned_abs()))),
        [_, _] => Err(range_problem(
            range,
            "Its first element should be at least 1, and its second at least the first, or -1 for the end.",
        )),
        _ => Err(range_problem(range, "It should be a list of two integers.")),
    }
}

fn range_problem(range: &[i64], reason: &str) -> AioProblem {
    let shown = &range[..range.len().min(4)];
    AioProblem::bad_request(format!("Invalid `view_range` parameter: {shown:?}. {reason}"))
}

/// Reads lines from `start`, counted from zero.
async fn read_range(call: &FileCall, start: u64, end: Option<u64>) -> Result<String, AioProblem> {
    let reader = call.files().read_lines(&call.identity, &call.path, start, end).await;
    read_text(call, reader.map_err(|error| edit_problem(call, error))?).await
}

async fn read_text(call: &FileCall, mut reader: FileReader) -> Result<String, AioProblem> {
    let mut content = Vec::new();
    while let Some(piece) = reader.next().await.map_err(|error| edit_problem(call, error))? {
        if content.len() + piece.len() > MAX_VIEW_BYTES {
            return Err(call.errno_problem(EFBIG));
        }
        content.extend_from_slice(&piece);
    }
    // The sandbox has checked it; the file may have changed since.
    Ok(String::from_utf8_lossy(&content).into_owned())
}

async fn view_directory(call: &FileCall) -> Result<EditorResult, AioProblem> {
    let path = call.path.trim_end_matches('/');
    let mut entries = Vec::new();
    for pattern in ["*", "*/*"] {
        let query = GlobQuery {
            pattern: pattern.to_owned(),
            exclude: Vec::new(),
            hidden: false,
            kinds: GlobKinds::All,
            metadata: false,
            order: GlobOrder::Path,
            descending: false,
            limit: MAX_VIEW_ENTRIES,
        };
        let found = call.files().find_paths(&call.identity, &call.path, query).await;
        entries.extend(found.map_err(|error| edit_problem(call, error))?.paths);
    }
    let mut lines: Vec<String> = entries
        .into_iter()
        .map(|entry| if entry.kind == FileKind::Directory { format!("{}/", entry.path) } else { entry.path })
        .collect();
    lines.sort_unstable();
    let output = format!(
        "Here's the files and directories up to 2 levels deep in {}, excluding hidden items:\n{path}/\n{}",
        call.path,
        lines.join("\n")
    );
    Ok(EditorResult::new(&call.path, output, true, EditContents::default()))
}

/// Lines with their numbers, as `cat -n` prints them, below a heading.
pub(super) fn numbered_lines(path: &str, content: &str, first: u64) -> String {
    format!("Here's the result of running `cat -n` on {path}:\n{}", number_lines(content, first))
}

/// The lines around a changed one.
pub(super) fn snippet_around(content: &str, line: u64) -> String {
    let first = line.saturating_sub(SNIPPET_LINES).max(1);
    let skipped = usize::try_from(first - 1).unwrap_or(usize::MAX);
    let count = usize::try_from(line + SNIPPET_LINES - first + 1).unwrap_or(usize::MAX);
    let lines: Vec<&str> = content.lines().skip(skipped).take(count).collect();
    number_lines(&lines.join("\n"), first)
}

fn number_lines(content: &str, first: u64) -> String {
    let mut numbered = String::with_capacity(content.len() + content.len() / 4);
    for (number, line) in (first..).zip(content.lines()) {
        numbered.push_str(&format!("{number:6}\t{line}\n"));
    }
    numbered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_numbered_like_cat() {
        assert_eq!(number_lines("a\r\nb\n", 9), "     9\ta\n    10\tb\n");
        assert_eq!(number_lines("", 1), "");
        assert_eq!(snippet_around("1\n2\n3\n4\n5\n6\n7\n8\n9\n", 7).lines().count(), 7);
        assert!(snippet_around("1\n2\n", 1).starts_with("     1\t1\n     2\t2\n"));
    }

    #[test]
    fn ranges_are_checked() {
        assert_eq!(parse_range(&[]).unwrap(), (1, None));
        assert_eq!(parse_range(&[2, -1]).unwrap(), (2, None));
        assert_eq!(parse_range(&[2, 3]).unwrap(), (2, Some(3)));
        for range in [&[1][..], &[0, 1], &[3, 2], &[-1, -1], &[1, -2], &[1, 2, 3]] {
            assert!(parse_range(range).unwrap_err().message.contains("view_range"), "{range:?}");
        }
    }
}

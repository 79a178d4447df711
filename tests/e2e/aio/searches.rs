//! Searches as DeerFlow reads them. Agents in process have no real search.

use e2e::aio::AioSandbox;
use serde_json::json;

#[test]
fn n33_n34_n35_grep_names_files_lines_and_nothing_outside_its_root() {
    let server = super::start_server();
    let mut sandbox = AioSandbox::create(&server, "searches");
    let root = "/home/gem/root";
    for (file, content) in [
        (format!("{root}/a.py"), "x = 1\nneedle = 2\n"),
        (format!("{root}/sub/b.py"), "needle\n"),
        (format!("{root}-2/c.py"), "needle\n"),
    ] {
        sandbox.post("/v1/file/write", &json!({"file": file, "content": content}));
    }
    for (path, count) in [(root.to_owned(), 2), (format!("{root}/a.py"), 1)] {
        let found = sandbox.post("/v1/file/grep", &json!({"path": path, "pattern": "needle"}));
        let matches = found["matches"].as_array().expect("it is a list");
        assert_eq!(matches.len(), count, "{found}");
        assert_eq!(matches[0]["file"], format!("{root}/a.py"));
        assert_eq!(
            (&matches[0]["line_number"], &matches[0]["line_content"]),
            (&json!(2), &json!("needle = 2"))
        );
    }
}

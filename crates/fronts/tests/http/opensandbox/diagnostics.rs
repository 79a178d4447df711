//! Diagnostics of sandboxes with a real agent.

use serde_json::json;

use super::{create_body, id_of, path_of};
use crate::setup::start_with_agents;

#[tokio::test]
async fn lines_of_logs_carry_times() {
    let server = start_with_agents().await;
    let mut body = create_body();
    body["entrypoint"] = json!(["sh", "-c", "echo one; echo two; exec sleep 60"]);
    let before = jiff::Timestamp::now().as_second();
    let id = id_of(&server.post("/v1/sandboxes", body).await);
    let logs = async |query: &str| {
        let path = format!("{}/diagnostics/logs?{query}", path_of(&id));
        server.get(&path).await.text().to_owned()
    };
    let shown = loop {
        let shown = logs("tail=10").await;
        if shown.ends_with("two\n") {
            break shown;
        }
        tokio::task::yield_now().await;
    };
    let lines: Vec<(&str, &str)> = shown.lines().map(|line| line.split_once(' ').unwrap()).collect();
    assert_eq!(lines.iter().map(|(_, text)| *text).collect::<Vec<_>>(), ["one", "two"]);
    for (time, _) in lines {
        let time: jiff::Timestamp = time.parse().unwrap();
        assert!((before..=jiff::Timestamp::now().as_second()).contains(&time.as_second()), "{shown}");
    }
    assert_eq!(logs("tail=10&since=1h").await, shown);
}

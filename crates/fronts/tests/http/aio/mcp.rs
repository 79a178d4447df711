//! Tools for models, over the protocol and over plain HTTP. The agent of these tests has no kernel for JavaScript and no
//! search for text.

use serde_json::{Value, json};
use testkit::test_client::{TestRequest, TestResponse};

use super::AioSandbox;
use crate::setup::start_with_keys_and_agents;

const TOOL_NAMES: [&str; 6] = [
    "sandbox_execute_bash",
    "sandbox_execute_code",
    "sandbox_file_operations",
    "sandbox_str_replace_editor",
    "sandbox_get_context",
    "sandbox_get_packages",
];

impl AioSandbox<'_> {
    /// A message, with the headers that clients of the protocol send.
    fn message(&self, path: &str) -> TestRequest {
        let request = self.request("POST", path).header("content-type", "application/json");
        request.header("accept", "application/json, text/event-stream")
    }

    /// Sends a request and returns the whole JSON-RPC response.
    async fn rpc(&self, method: &str, params: Value) -> Value {
        let body = json!({"jsonrpc": "2.0", "id": 7, "method": method, "params": params});
        let response = self.message("/mcp").body(body.to_string()).send().await;
        let answer = event_of(&response);
        assert_eq!((&answer["jsonrpc"], &answer["id"]), (&json!("2.0"), &json!(7)), "{answer}");
        answer
    }

    /// Calls a tool and returns its result.
    async fn call(&self, tool: &str, arguments: Value) -> Value {
        let answer = self.rpc("tools/call", json!({"name": tool, "arguments": arguments})).await;
        assert!(answer["result"].is_object(), "{answer}");
        answer["result"].clone()
    }

    /// Calls a tool that must succeed, and returns its data, which is also its text.
    async fn call_data(&self, tool: &str, arguments: Value) -> Value {
        let result = self.call(tool, arguments).await;
        assert_eq!(result["isError"], false, "{result}");
        let text: Value = serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(text, result["structuredContent"]);
        text
    }

    /// Calls a tool that must fail, and returns its message.
    async fn call_failure(&self, tool: &str, arguments: Value) -> String {
        let result = self.call(tool, arguments).await;
        assert_eq!(result["isError"], true, "{result}");
        result["content"][0]["text"].as_str().unwrap().to_owned()
    }
}

/// The only message of an event stream.
fn event_of(response: &TestResponse) -> Value {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let mut events = response.text().lines().filter_map(|line| line.strip_prefix("data:"));
    let event = events.next().unwrap_or_else(|| panic!("no event in {:?}", response.text()));
    assert_eq!(events.next(), None);
    serde_json::from_str(event).unwrap()
}

#[tokio::test]
async fn tools_are_listed_without_a_session() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let params = json!({
            "protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        });
        let result = sandbox.rpc("initialize", params).await["result"].clone();
        assert_eq!(
            (&result["protocolVersion"], &result["serverInfo"]["name"]),
            (&json!(version), &json!("sandbox"))
        );
        assert!(result["capabilities"]["tools"].is_object(), "{result}");
    }
    let listed = sandbox.rpc("tools/list", json!({})).await["result"]["tools"].clone();
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, TOOL_NAMES);
    for tool in listed.as_array().unwrap() {
        assert_eq!(tool["inputSchema"]["type"], "object", "{tool}");
        assert!(tool["description"].as_str().is_some_and(|text| !text.is_empty()), "{tool}");
    }
    let initialized = json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string();
    assert_eq!(sandbox.message("/v1/mcp").body(initialized).send().await.status, 202);
    for method in ["GET", "DELETE"] {
        let refused = sandbox.request(method, "/mcp").header("accept", "text/event-stream").send().await;
        assert_eq!(refused.expect(405)["success"], false, "{method}");
    }
}

#[tokio::test]
async fn commands_share_a_session() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let run = async |arguments: Value| sandbox.call_data("sandbox_execute_bash", arguments).await;
    let first = run(json!({"cmd": "export A=1; echo out; echo err >&2; (exit 3)", "cwd": "/usr"})).await;
    assert_eq!(
        (&first["status"], &first["output"], &first["exit_code"], &first["cwd"]),
        (&json!("completed"), &json!("out\nerr"), &json!(3), &json!("/usr"))
    );
    let second = run(json!({"cmd": "cd /tmp; echo $A", "timeout": null, "new_session": false})).await;
    assert_eq!((&second["output"], &second["cwd"]), (&json!("1"), &json!("/tmp")));
    assert_eq!(first["session_id"], second["session_id"]);
    let fresh = run(json!({"cmd": "echo \"<$A>\"", "new_session": true})).await;
    assert_eq!(fresh["output"], "<>");
    assert_ne!(fresh["session_id"], second["session_id"]);
    let long = run(json!({"cmd": "seq 10000"})).await["output"].as_str().unwrap().to_owned();
    assert!(long.contains("truncated") && long.chars().count() <= 30_000, "{}", long.len());
    let whole = sandbox.call("sandbox_execute_bash", json!({"cmd": "seq 20000", "truncate": false})).await;
    let text: Value = serde_json::from_str(whole["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(text["output"].as_str().unwrap().ends_with("\n20000"));
    assert_eq!(whole.get("structuredContent"), None, "a second copy of a long text");
    // The command goes on after the wait for it.
    let slow = run(json!({"cmd": "echo begun; read line", "timeout": 0.5, "new_session": true})).await;
    assert_eq!(
        (&slow["status"], &slow["output"], &slow["exit_code"]),
        (&json!("running"), &json!("begun"), &json!(null))
    );
    assert!(slow["hint"].as_str().unwrap().contains("new_session"), "{slow}");
    let missing =
        sandbox.call_failure("sandbox_execute_bash", json!({"cmd": "true", "cwd": "/no/such"})).await;
    assert!(missing.contains("/no/such No such file or directory"), "{missing}");
}

#[tokio::test]
async fn code_shows_values_images_and_exceptions() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let done = sandbox.call_data("sandbox_execute_code", json!({"code": "print('hi'); 2 ** 10"})).await;
    assert_eq!(
        (&done["status"], &done["stdout"], &done["result"], &done["traceback"]),
        (&json!("ok"), &json!("hi\n"), &json!("1024"), &json!(null))
    );
    let raised =
        sandbox.call_data("sandbox_execute_code", json!({"code": "1/0", "language": "python"})).await;
    assert_eq!(raised["status"], "error");
    assert!(raised["traceback"].to_string().contains("ZeroDivisionError"), "{raised}");
    let image = "class I:\n  def _repr_png_(self): return b'png'\ndisplay(I())";
    let shown = sandbox.call("sandbox_execute_code", json!({"code": image})).await;
    assert_eq!(shown["content"][1], json!({"type": "image", "data": "cG5n", "mimeType": "image/png"}));
    for (arguments, expected) in [
        (json!({"code": "1", "language": "cobol"}), "`language`"),
        (json!({"code": "1", "timeout": 301}), "1 to 300 seconds"),
        (json!({"language": "python"}), "Missing argument `code`"),
    ] {
        let message = sandbox.call_failure("sandbox_execute_code", arguments).await;
        assert!(message.contains(expected), "{message}");
    }
}

#[tokio::test]
async fn every_file_operation_works() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let directory = sandbox.call_data("sandbox_execute_bash", json!({"cmd": "mktemp -d"})).await;
    let directory = directory["output"].as_str().unwrap().to_owned();
    let file = format!("{directory}/a.txt");
    let run = async |mut arguments: Value| {
        arguments["path"] = arguments.get("path").cloned().unwrap_or(json!(directory));
        sandbox.call_data("sandbox_file_operations", arguments).await
    };
    let written =
        run(json!({"action": "write", "path": file, "content": "one\ntwo\n", "encoding": "utf-8"})).await;
    assert_eq!(written, json!({"action": "write", "path": file, "bytes_written": 8, "success": true}));
    run(
        json!({"action": "write", "path": file, "content": "dGhyZWUK", "encoding": "base64", "append": true}),
    )
    .await;
    let read = run(json!({"action": "read", "path": file})).await;
    assert_eq!(
        read,
        json!({"action": "read", "path": file, "content": "one\ntwo\nthree\n", "success": true})
    );
    let lines = run(json!({"action": "read", "path": file, "start_line": 1, "end_line": 2})).await;
    assert_eq!(lines["content"], "two");
    let replaced = run(json!({"action": "replace", "path": file, "content": "two", "target": "TWO"})).await;
    assert_eq!(replaced["replaced_count"], 1);
    // A stand-in for the search answers with one match.
    let found = run(json!({"action": "search", "path": file, "content": "^t"})).await;
    assert_eq!((&found["line_numbers"], &found["match_count"]), (&json!([0]), &json!(1)));
    sandbox
        .call_data(
            "sandbox_execute_bash",
            json!({"cmd": format!("cd {directory}; touch .h; mkdir d; echo two > d/b.py")}),
        )
        .await;
    let found = run(json!({"action": "find", "pattern": "**/*.py"})).await;
    assert_eq!((&found["files"], &found["file_count"]), (&json!([format!("{directory}/d/b.py")]), &json!(1)));
    let listed = run(json!({"action": "list"})).await;
    assert_eq!(
        (&listed["total_count"], &listed["directory_count"], &listed["files"][0]["name"]),
        (&json!(2), &json!(1), &json!("a.txt"))
    );
    assert_eq!(
        run(json!({"action": "list", "show_hidden": true, "recursive": true})).await["total_count"],
        4
    );
    assert_eq!(run(json!({"action": "grep", "pattern": "two", "recursive": true})).await["match_count"], 1);
    let globbed = run(json!({"action": "glob", "pattern": "**/*", "max_results": 1})).await;
    assert_eq!((&globbed["truncated"], &globbed["files"][0]["name"]), (&json!(true), &json!("a.txt")));
    sandbox.call_data("sandbox_execute_bash", json!({"cmd": format!("rm -r {directory}")})).await;
}

#[tokio::test]
async fn failed_file_operations_say_why() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    for (arguments, expected) in [
        (json!({"action": "read", "path": "/no/such"}), "[Errno 2] No such file or directory: '/no/such'"),
        (json!({"action": "read", "path": "relative"}), "absolute path"),
        (json!({"action": "read", "path": "/tmp", "start_line": -1}), "`start_line`"),
        (json!({"action": "read", "path": 7}), "`file`"),
        (json!({"action": "remove", "path": "/tmp"}), "unknown variant `remove`"),
        (json!({"action": "read"}), "Missing argument `path`"),
        (json!({"action": "read", "path": "/tmp", "lines": 3}), "Unknown argument `lines`"),
        (json!({"action": "write", "path": "/tmp/a"}), "Missing argument `content`"),
        (json!({"action": "write", "path": "/tmp/a", "content": 7}), "not a text"),
        (
            json!({"action": "write", "path": "/tmp/a", "content": "x", "encoding": "base64"}),
            "Invalid base64",
        ),
        (json!({"action": "write", "path": "/tmp/a", "content": "x", "encoding": "latin-1"}), "`encoding`"),
        (json!({"action": "replace", "path": "/tmp/a", "content": "x"}), "Missing argument `target`"),
        (json!({"action": "grep", "path": "/tmp"}), "Missing argument `pattern`"),
        (json!({"action": "grep", "path": "/tmp", "pattern": "x", "context_before": 21}), "`context_before`"),
        (json!({"action": "find", "path": "/tmp", "pattern": "["}), "pattern"),
        (json!({"action": "glob", "path": "/tmp", "pattern": "*", "max_results": 0}), "`max_results`"),
    ] {
        let message = sandbox.call_failure("sandbox_file_operations", arguments.clone()).await;
        assert!(message.contains(expected), "{arguments}: {message}");
    }
    let missing =
        sandbox.call("sandbox_file_operations", json!({"action": "read", "path": "/no/such"})).await;
    assert_eq!(missing["structuredContent"]["error"]["error_type"], "not_found", "{missing}");
    let many = "head -c 1100000 /dev/zero | tr '\\0' x > /tmp/mcp-large-file";
    sandbox.call_data("sandbox_execute_bash", json!({"cmd": many})).await;
    let large = json!({"action": "read", "path": "/tmp/mcp-large-file"});
    assert!(sandbox.call_failure("sandbox_file_operations", large).await.contains("start_line"));
    sandbox.call_data("sandbox_execute_bash", json!({"cmd": "rm /tmp/mcp-large-file"})).await;
}

#[tokio::test]
async fn editor_creates_changes_and_undoes() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let directory = sandbox.call_data("sandbox_execute_bash", json!({"cmd": "mktemp -d"})).await;
    let directory = directory["output"].as_str().unwrap();
    let path = format!("{directory}/a.txt");
    let edit = async |mut arguments: Value| {
        arguments["path"] = json!(path);
        sandbox.call_data("sandbox_str_replace_editor", arguments).await
    };
    let created = edit(json!({"command": "create", "file_text": "a\nb\na\n"})).await;
    assert_eq!(
        (&created["command"], &created["success"], &created["prev_exist"], &created["path"]),
        (&json!("create"), &json!(true), &json!(false), &json!(path))
    );
    edit(json!({"command": "str_replace", "old_str": "b", "new_str": "B"})).await;
    edit(json!({"command": "insert", "insert_line": 0, "new_str": "top\n"})).await;
    let viewed =
        edit(json!({"command": "view", "view_range": [1, 3]})).await["output"].as_str().unwrap().to_owned();
    assert!(viewed.contains("top") && viewed.contains('B'), "{viewed}");
    let twice = json!({"command": "str_replace", "path": path, "old_str": "a", "new_str": "x"});
    let message = sandbox.call_failure("sandbox_str_replace_editor", twice).await;
    assert!(message.contains("not unique"), "{message}");
    edit(json!({"command": "str_replace", "old_str": "a", "new_str": "x", "replace_mode": "LAST"})).await;
    let undone = edit(json!({"command": "undo_edit"})).await;
    assert_eq!(undone["new_content"], "top\na\nB\na\n");
    for (arguments, expected) in [
        (json!({"command": "create", "path": path, "file_text": ""}), "already exists"),
        (json!({"command": "create", "path": format!("{path}2")}), "`file_text` is required"),
        (json!({"command": "delete", "path": path}), "`command`"),
        (json!({"command": "view", "path": path, "view_range": [1, "x"]}), "`view_range.1`"),
    ] {
        let message = sandbox.call_failure("sandbox_str_replace_editor", arguments).await;
        assert!(message.contains(expected), "{message}");
    }
    sandbox.call_data("sandbox_execute_bash", json!({"cmd": format!("rm -r {directory}")})).await;
}

#[tokio::test]
async fn context_and_packages_are_described() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let context = sandbox.call_data("sandbox_get_context", json!({})).await;
    assert_eq!(context["home_dir"], "/home/gem");
    assert!(context["info"].as_str().unwrap().contains("Python: 3"), "{context}");
    for (arguments, titles) in [
        (json!({}), vec!["Python", "Node.js"]),
        (json!({"language": null}), vec!["Python", "Node.js"]),
        (json!({"language": "python"}), vec!["Python"]),
        (json!({"language": "node"}), vec!["Node.js"]),
    ] {
        let result = sandbox.call("sandbox_get_packages", arguments).await;
        let text = result["content"][0]["text"].as_str().unwrap();
        for title in ["Python", "Node.js"] {
            assert_eq!(text.contains(&format!("{title} Packages:")), titles.contains(&title), "{text}");
        }
    }
    let message = sandbox.call_failure("sandbox_get_packages", json!({"language": "perl"})).await;
    assert!(message.contains("`language`"), "{message}");
}

#[tokio::test]
async fn requests_that_name_nothing_are_errors_of_the_protocol() {
    let server = start_with_keys_and_agents(|settings| settings.json_body_limit = 10_000).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    let unknown = sandbox.rpc("tools/call", json!({"name": "browser_navigate", "arguments": {}})).await;
    assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
    assert!(
        unknown["error"]["message"].as_str().unwrap().contains("unknown tool `browser_navigate`"),
        "{unknown}"
    );
    assert_eq!(sandbox.rpc("no/such", json!({})).await["error"]["code"], -32601);
    for (body, status, code) in [
        ("garbage".to_owned(), 400, -32700),
        (String::new(), 400, -32700),
        ("{\"jsonrpc\":".to_owned(), 400, -32700),
        ("[".repeat(5000), 400, -32600),
        ("{}".to_owned(), 400, -32600),
        (json!([{"jsonrpc": "2.0", "id": 1, "method": "ping"}]).to_string(), 400, -32600),
        (json!({"jsonrpc": "2.0", "id": 1, "result": {}}).to_string(), 400, -32600),
        (
            format!("{{\"jsonrpc\": \"2.0\", \"id\": 1, \"method\": \"ping\"}}{}", " ".repeat(10_000)),
            413,
            -32600,
        ),
    ] {
        let refused = sandbox.message("/mcp").body(body.clone()).send().await.expect(status);
        assert_eq!(refused["error"]["code"], code, "{body:.40}: {refused}");
    }
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    let plain = sandbox.request("POST", "/mcp").json(&ping).send().await;
    assert_eq!(plain.expect(406)["error"]["code"], -32600);
    assert_eq!(
        event_of(
            &sandbox.message("/mcp").body(ping.to_string()).header("host", "other.example").send().await
        )["result"],
        json!({})
    );
}

#[tokio::test]
async fn tools_are_called_over_plain_http() {
    let server = start_with_keys_and_agents(|_| {}).await;
    let sandbox = AioSandbox::create(&server, "one").await;
    assert_eq!(
        sandbox.get("/v1/mcp/servers?include_hidden=true").await.expect(200)["data"],
        json!(["sandbox"])
    );
    let listed = sandbox.get("/v1/mcp/sandbox/tools").await.expect(200)["data"]["tools"].clone();
    assert_eq!(listed.as_array().unwrap().len(), TOOL_NAMES.len());
    let path = "/v1/mcp/sandbox/tools/sandbox_execute_bash";
    let called = sandbox.post(path, json!({"cmd": "echo hi"})).await.expect(200);
    assert_eq!((&called["success"], &called["data"]["isError"]), (&json!(true), &json!(false)), "{called}");
    assert_eq!(called["data"]["structuredContent"]["output"], "hi");
    let failed = sandbox.post(path, json!({"command": "echo hi"})).await.expect(200);
    assert_eq!((&failed["success"], &failed["data"]["isError"]), (&json!(false), &json!(true)), "{failed}");
    assert!(
        failed["data"]["content"][0]["text"].as_str().unwrap().contains("Unknown argument `command`"),
        "{failed}"
    );
    let described = sandbox.request("POST", "/v1/mcp/sandbox/tools/sandbox_get_context").send().await;
    assert_eq!(described.expect(200)["data"]["isError"], false, "an empty body");
    for (path, message) in [
        ("/v1/mcp/browser/tools", "MCP server browser not found"),
        ("/v1/mcp/browser/tools/navigate", "MCP server browser not found"),
        ("/v1/mcp/sandbox/tools/navigate", "Tool navigate not found"),
    ] {
        let method = if path.ends_with("tools") { "GET" } else { "POST" };
        let refused = sandbox.request(method, path).send().await.expect(404);
        assert_eq!((&refused["success"], &refused["message"]), (&json!(false), &json!(message)));
    }
    for body in ["[]", "{", "7"] {
        let refused = sandbox.request("POST", path).body(body).send().await.expect(422);
        assert!(refused["detail"].is_array(), "{refused}");
    }
}

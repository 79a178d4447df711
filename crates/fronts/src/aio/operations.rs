//! Every operation of this front, for the server's OpenAPI document. A test checks that the tables match the routes.

use crate::openapi::{ApiOperation, ApiSection, OpenApiPart, operation};

/// The schemas of request bodies.
pub(super) const SCHEMAS: &str = include_str!("openapi.json");

/// The part of the document about the API of a sandbox.
pub(super) fn openapi_part() -> OpenApiPart {
    OpenApiPart { sections: openapi_sections(), schemas: SCHEMAS, security: &[], remark: "" }
}

fn openapi_sections() -> Vec<ApiSection> {
    // The address itself opens the sandbox.
    let section = |(tag, operations)| ApiSection { tag, prefix: "/aio/{address}", operations, open: true };
    offered_operations().into_iter().chain([("aio: not supported", UNSUPPORTED)]).map(section).collect()
}

/// The operations that a sandbox really offers, by the part of the API that they belong to.
pub(super) fn offered_operations() -> Vec<(&'static str, &'static [ApiOperation])> {
    vec![
        ("aio: documents", DOCUMENTS),
        ("aio: access", ACCESS),
        ("aio: sandbox", SANDBOX),
        ("aio: observe", OBSERVE),
        ("aio: shell", SHELL),
        ("aio: files", FILES),
        ("aio: ports", PORTS),
        ("aio: bash", BASH),
        ("aio: code", CODE),
        ("aio: skills", SKILLS),
        ("aio: MCP", MCP),
    ]
}

const DOCUMENTS: &[ApiOperation] = &[
    operation("GET /", "A page about the sandbox", "", "", "200 404"),
    operation("GET /index.html", "The same page", "", "", "200 404"),
    operation("GET /v1/docs", "The operations as a page", "", "", "200 404"),
    operation("GET /v1/openapi.json", "The operations as OpenAPI", "", "", "200 404"),
    operation("GET /llms.txt", "A manual for agents", "", "", "200 404"),
];

const ACCESS: &[ApiOperation] = &[
    operation("POST /tickets", "Create a ticket, which works once", "", "", "200 401 404 429"),
    operation("GET /auth", "Check the credentials of another request", "", "", "200 401 404"),
];

const SANDBOX: &[ApiOperation] = &[
    operation("GET /v1/sandbox", "Describe the sandbox", "", "", "200 404 409 500"),
    operation("GET /v1/sandbox/packages/python", "List Python packages", "", "", "200 400 404 409 500"),
    operation(
        "GET /v1/sandbox/packages/nodejs",
        "List global Node.js packages",
        "",
        "",
        "200 400 404 409 500",
    ),
    operation("GET /v1/sandbox/hooks", "List shutdown hooks", "event", "", "200 404"),
    operation(
        "POST /v1/sandbox/hooks",
        "Add a shutdown hook",
        "",
        "AioRegisterHook",
        "200 400 404 409 422 500",
    ),
    operation("DELETE /v1/sandbox/hooks/{name}", "Remove a shutdown hook", "", "", "200 404 409 500"),
];

const OBSERVE: &[ApiOperation] = &[
    operation("GET /v1/sandbox/observe/status", "Show the present session", "", "", "200 404"),
    operation("GET /v1/sandbox/observe/live", "Measure the sandbox", "", "", "200 404 409 500"),
    operation("POST /v1/sandbox/observe/start", "Begin a session", "", "AioObserveStart?", "200 404 409 422"),
    operation("POST /v1/sandbox/observe/stop", "End a session", "", "AioObserveStop?", "200 404 422"),
    operation("POST /v1/sandbox/observe/export", "Make a report", "", "AioObserveExport?", "200 404 422 500"),
    operation("GET /v1/sandbox/observe/reports", "List reports", "", "", "200 404"),
    operation("GET /v1/sandbox/observe/reports/{report_id}", "Download a report", "", "", "200 404"),
    operation("DELETE /v1/sandbox/observe/reports/{report_id}", "Delete a report", "", "", "200 404"),
];

const SHELL: &[ApiOperation] = &[
    operation("POST /v1/shell/exec", "Run a command in a session", "", "ShellExec", SHELL_ANSWERS),
    operation("POST /v1/shell/view", "Show the output of a session", "", "ShellSession", SHELL_ANSWERS),
    operation("POST /v1/shell/wait", "Wait until a session is idle", "", "ShellWait", SHELL_ANSWERS),
    operation("POST /v1/shell/write", "Type into the running program", "", "ShellWrite", SHELL_ANSWERS),
    operation("POST /v1/shell/kill", "Close a session", "", "ShellSession", SHELL_ANSWERS),
    operation("POST /v1/shell/sessions/create", "Open a session", "", "ShellCreate?", SHELL_ANSWERS),
    operation("POST /v1/shell/sessions/update", "Change a session", "", "ShellUpdate", SHELL_ANSWERS),
    operation("GET /v1/shell/sessions", "List sessions", "", "", SHELL_READ),
    operation("DELETE /v1/shell/sessions", "Close all sessions", "", "", SHELL_READ),
    operation("GET /v1/shell/sessions/stats", "Count sessions", "", "", SHELL_READ),
    operation("DELETE /v1/shell/sessions/{id}", "Close a session", "", "", SHELL_READ),
    operation("GET /v1/shell/terminal-url", "Create a terminal and return its page", "", "", SHELL_READ),
    operation(
        "GET /v1/shell/ws",
        "Connect to a terminal (WebSocket)",
        "session_id",
        "",
        "101 400 404 409 500",
    ),
    operation("GET /terminal", "The page of a terminal", "session_id", "", "200 404 409"),
];

/// A paused sandbox is a conflict, and an agent that does not answer an internal error.
const SHELL_ANSWERS: &str = "200 400 404 409 422 429 500 504";

const SHELL_READ: &str = "200 404 409 500";

const FILES: &[ApiOperation] = &[
    operation("POST /v1/file/read", "Read a text file or some of its lines", "", "AioReadFile", FILE_ANSWERS),
    operation("POST /v1/file/write", "Write or append to a file", "", "AioWriteFile", FILE_ANSWERS),
    operation("POST /v1/file/replace", "Replace a text in a file", "", "AioReplaceText", FILE_ANSWERS),
    operation("POST /v1/file/search", "Search in a file", "", "AioSearchFile", FILE_ANSWERS),
    operation("POST /v1/file/find", "Find paths by a glob", "", "AioFindFiles", FILE_ANSWERS),
    operation("POST /v1/file/grep", "Search for text in files", "", "AioGrepFiles", FILE_ANSWERS),
    operation("POST /v1/file/glob", "Find files by a glob", "", "AioGlobFiles", FILE_ANSWERS),
    operation("POST /v1/file/list", "List a directory", "", "AioListPath", FILE_ANSWERS),
    operation("POST /v1/file/upload", "Upload a file", "", "multipart:AioUploadFile", FILE_ANSWERS),
    operation(
        "GET /v1/file/download",
        "Download a file",
        "path! change_policy",
        "",
        "200 400 404 409 422 500",
    ),
    operation(
        "POST /v1/file/str_replace_editor",
        "View or edit a file",
        "",
        "AioEditorCommand",
        FILE_ANSWERS,
    ),
    operation("GET /v1/file/watch", "List file watches", "", "", WATCH_READ),
    operation("POST /v1/file/watch", "Watch files", "", "AioCreateWatch", FILE_ANSWERS),
    operation("POST /v1/file/watch/wait", "Wait for an event of a file", "", "AioWaitEvent", FILE_ANSWERS),
    operation("DELETE /v1/file/watch/{id}", "Remove a file watch", "", "", WATCH_READ),
    operation("POST /v1/file/watch/{id}/poll", "Read events of a watch", "", "AioPollWatch?", FILE_ANSWERS),
    operation("GET /v1/file/watch/{id}/events", "Stream events of a watch", "", "", WATCH_READ),
];

const FILE_ANSWERS: &str = "200 400 403 404 409 422 429 500 507";

const WATCH_READ: &str = "200 404 409 429 500";

/// Every method is accepted.
const PORTS: &[ApiOperation] = &[
    operation("GET /proxy/{port}", "Redirect to the root of a port", "", "", "307 404 422"),
    operation("GET /proxy/{port}/", "Forward to the root of a port", "", "", FORWARDED),
    operation("GET /proxy/{port}/{path}", "Forward to a port", "", "", FORWARDED),
    operation("GET /absproxy/{port}", "Redirect to the root of a port", "", "", "307 404 422"),
    operation("GET /absproxy/{port}/", "Forward to a port with the whole path", "", "", FORWARDED),
    operation("GET /absproxy/{port}/{path}", "Forward to a port with the whole path", "", "", FORWARDED),
];

/// Besides these, the service behind the port answers as it likes.
const FORWARDED: &str = "101 200 400 404 409 422 429 502 504";

const BASH: &[ApiOperation] = &[
    operation("POST /v1/bash/exec", "Run a command", "", "BashExec", "200 400 404 409 422 429 500 504"),
    operation(
        "POST /v1/bash/output",
        "Read output after offsets",
        "",
        "BashOutput",
        "200 404 409 422 500 504",
    ),
    operation(
        "POST /v1/bash/write",
        "Write to the input of a command",
        "",
        "BashWrite",
        "200 400 404 409 422 500",
    ),
    operation("POST /v1/bash/kill", "Signal the running command", "", "BashKill", "200 404 409 422 500"),
    operation("GET /v1/bash/sessions", "List sessions", "", "", "200 404 409 500"),
    operation(
        "POST /v1/bash/sessions/create",
        "Create a session, or find it",
        "",
        "BashSession?",
        "200 400 404 409 422 500",
    ),
    operation("POST /v1/bash/sessions/{id}/close", "Close a session", "", "", "200 400 404 409 500"),
    operation("GET /v1/bash/ws", "Run commands over a WebSocket", "session_id", "", "101 400 404 409 500"),
];

/// An error of the code is a success with `success: false`.
const CODE: &[ApiOperation] = &[
    operation("POST /v1/jupyter/execute", "Run Python in a session", "", "AioJupyterExecute", RAN),
    operation("GET /v1/jupyter/info", "Describe the Python kernel", "", "", CODE_READ),
    operation("GET /v1/jupyter/sessions", "List Python sessions", "", "", CODE_READ),
    operation("DELETE /v1/jupyter/sessions", "Close all Python sessions", "", "", CODE_READ),
    operation("POST /v1/jupyter/sessions/create", "Open a Python session", "", "AioJupyterSession?", RAN),
    operation("DELETE /v1/jupyter/sessions/{session_id}", "Close a Python session", "", "", CODE_READ),
    operation("POST /v1/nodejs/execute", "Run JavaScript", "", "AioNodeExecute", RAN),
    operation("GET /v1/nodejs/info", "Describe Node.js", "", "", CODE_READ),
    operation("GET /v1/nodejs/sessions", "List JavaScript sessions", "version", "", CODE_READ),
    operation("POST /v1/nodejs/sessions", "Open a JavaScript session", "version", "AioNodeSession?", RAN),
    operation(
        "GET /v1/nodejs/sessions/{session_id}",
        "Describe a JavaScript session",
        "version",
        "",
        CODE_READ,
    ),
    operation(
        "PATCH /v1/nodejs/sessions/{session_id}",
        "Change a JavaScript session",
        "version",
        "AioNodeSessionUpdate?",
        RAN,
    ),
    operation(
        "DELETE /v1/nodejs/sessions/{session_id}",
        "Close a JavaScript session",
        "version",
        "",
        CODE_READ,
    ),
    operation("POST /v1/code/execute", "Run Python or JavaScript", "", "AioCodeExecute", RAN),
    operation("GET /v1/code/info", "List languages", "", "", CODE_READ),
];

const RAN: &str = "200 400 404 409 413 422 429 500 503 504";

const CODE_READ: &str = "200 400 404 409 429 500";

const SKILLS: &[ApiOperation] = &[
    operation("POST /v1/skills/register", "Register skills", "", "multipart:AioRegisterSkills", SKILL_ADDED),
    operation("GET /v1/skills/metadatas", "List skills", "names", "", SKILL_READ),
    operation("GET /v1/skills/{name}/content", "Read the text of a skill", "", "", SKILL_READ),
    operation("DELETE /v1/skills/{name}", "Remove a skill", "", "", SKILL_READ),
    operation("DELETE /v1/skills", "Remove all skills", "", "", SKILL_READ),
];

const SKILL_ADDED: &str = "200 400 404 409 413 422 429 500 504";

const SKILL_READ: &str = "200 400 404 409 413 429 500 504";

const MCP: &[ApiOperation] = &[
    operation("POST /mcp", "Send a message of the Model Context Protocol", "", "McpMessage", MCP_ANSWERS),
    operation("POST /v1/mcp", "Send a message of the Model Context Protocol", "", "McpMessage", MCP_ANSWERS),
    operation("GET /v1/mcp/servers", "List MCP servers", "include_hidden", "", "200 404"),
    operation("GET /v1/mcp/{server}/tools", "List the tools of an MCP server", "", "", "200 404"),
    operation(
        "POST /v1/mcp/{server}/tools/{tool}",
        "Call a tool of an MCP server",
        "",
        "McpToolArguments?",
        "200 404 422 429",
    ),
];

const MCP_ANSWERS: &str = "200 202 400 404 406 413 415 429";

const UNSUPPORTED: &[ApiOperation] = &[
    operation("GET /v1/browser/{path}", "Not supported", "", "", "404 501"),
    operation("GET /v1/display/{path}", "Not supported", "", "", "404 501"),
    operation("GET /vnc", "Not supported", "", "", "404 501"),
    operation("GET /vnc/", "Not supported", "", "", "404 501"),
    operation("GET /vnc/{path}", "Not supported", "", "", "404 501"),
    operation("GET /cdp", "Not supported", "", "", "404 501"),
    operation("GET /cdp/", "Not supported", "", "", "404 501"),
    operation("GET /cdp/{path}", "Not supported", "", "", "404 501"),
    operation("GET /websockify", "Not supported", "", "", "404 501"),
    operation("GET /json/version", "Not supported", "", "", "404 501"),
    operation("GET /code-server", "Not supported", "", "", "404 501"),
    operation("GET /code-server/", "Not supported", "", "", "404 501"),
    operation("GET /code-server/{path}", "Not supported", "", "", "404 501"),
    operation("GET /jupyter", "Not supported", "", "", "404 501"),
    operation("GET /jupyter/", "Not supported", "", "", "404 501"),
    operation("GET /jupyter/{path}", "Not supported", "", "", "404 501"),
    operation("POST /v1/util/convert_to_markdown", "Not supported", "", "", "404 501"),
    operation("GET /v1/proxy/{path}", "Not supported", "", "", "404 501"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aio::routes::sandbox_routes;
    use crate::openapi::tests::assert_operations_match;

    #[test]
    fn every_route_is_described() {
        let routes: Vec<_> =
            sandbox_routes().into_iter().map(|(path, route)| (path.to_owned(), route)).collect();
        let all: Vec<_> =
            openapi_sections().iter().flat_map(|section| section.operations.iter().copied()).collect();
        assert_operations_match(&all, &routes);
    }
}

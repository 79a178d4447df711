//! Every operation of this front, for the server's OpenAPI document. A test holds it equal to
//! the routes.

use crate::openapi::{Operation, Section, operation};

/// Schemas of the bodies that are named here.
pub(crate) const SCHEMAS: &str = include_str!("openapi.json");

pub(crate) fn sections() -> Vec<Section> {
    let section = |tag, prefix, operations| Section { tag, prefix, operations, open: false };
    vec![
        section("lifecycle", "/v1", LIFECYCLE),
        Section { tag: "gateway", prefix: "", operations: GATEWAY, open: true },
        section("ports", "/v1", PORTS),
        section("execution", "/v1/sandboxes/{id}/proxy/44772", EXECUTION),
        section("files", "/v1/sandboxes/{id}/proxy/44772", FILES),
        section("files as somebody", "/v1/sandboxes/{id}/proxy/44772/v1/filesystem/{uid}/{gid}", FILES),
        section("files in isolation", IN_ISOLATION, FILES),
        section("egress", "/v1/sandboxes/{id}/proxy/18080", EGRESS),
    ]
}

const IN_ISOLATION: &str = "/v1/sandboxes/{id}/proxy/44772/v1/isolated/session/{name}";

const GATEWAY: &[Operation] = &[operation("GET /status.ok", "Whether the gateway is well", "", "", "200")];

const LIFECYCLE: &[Operation] = &[
    operation("GET /sandboxes", "List sandboxes", "state* metadata page:int pageSize:int", "", "200 400"),
    operation("POST /sandboxes", "Create a sandbox", "", "CreateSandbox", "202 404 409 500"),
    operation("GET /sandboxes/{id}", "Look at a sandbox", "", "", "200 404"),
    operation("DELETE /sandboxes/{id}", "Remove a sandbox", "", "", "204 404 409 500"),
    operation("PATCH /sandboxes/{id}/metadata", "Change its labels", "", "Labels", "200 404 409"),
    operation("POST /sandboxes/{id}/renew-expiration", "Move its expiry", "", "Renew", "200 404 409"),
    operation("POST /sandboxes/{id}/pause", "Pause it", "", "", "202 404 409 500 501"),
    operation("POST /sandboxes/{id}/resume", "Resume it", "", "", "202 404 409 500 501"),
    operation("POST /sandboxes/{id}/snapshots", "Take a snapshot", "", "CreateSnapshot?", "202 404 409 500"),
    operation(
        "GET /snapshots",
        "List snapshots",
        "sandboxId name state* page:int pageSize:int",
        "",
        "200 400",
    ),
    operation("GET /snapshots/{id}", "Look at a snapshot", "", "", "200 404"),
    operation("DELETE /snapshots/{id}", "Remove a snapshot", "", "", "204 404 409 500"),
    operation(
        "GET /sandboxes/{id}/endpoints/{port}",
        "Where a port is reached",
        "use_server_proxy:bool expires:int",
        "",
        "200 400 404",
    ),
    operation("GET /pools", "List pools", "", "", "200"),
    operation("POST /pools", "Create a pool", "", "CreatePool", "201 404 409 500"),
    operation("GET /pools/{name}", "Look at a pool", "", "", "200 404"),
    operation("PUT /pools/{name}", "Change how much a pool keeps", "", "SetPool", "200 404 409 500"),
    operation("DELETE /pools/{name}", "Remove a pool", "", "", "204 404 409 500"),
    operation(
        "GET /sandboxes/{id}/diagnostics/{kind}",
        "Output and events: logs, events, inspect, summary",
        "scope tail:int since container limit:int event_limit:int",
        "",
        "200 400 404",
    ),
    operation("GET /sandboxes/{id}/networkpolicy", "What a sandbox may reach", "", "", "200 404"),
    operation("PUT /sandboxes/{id}/networkpolicy", "Replace the policy", "", "", "404 501"),
    operation("PATCH /sandboxes/{id}/networkpolicy", "Add rules", "", "", "404 501"),
    operation("DELETE /sandboxes/{id}/networkpolicy", "Remove rules", "", "", "404 501"),
    operation("GET /templates", "Not offered", "", "", "501"),
    operation("POST /templates", "Not offered", "", "", "501"),
    operation("GET /templates/{id}", "Not offered", "", "", "501"),
    operation("DELETE /templates/{id}", "Not offered", "", "", "501"),
    operation("POST /metrics/events", "A client's own measurements, which nobody keeps", "", "", "204"),
];

/// What a service inside answers is its own business.
const PORTS: &[Operation] = &[
    operation(
        "GET /sandboxes/{id}/proxy/{port}",
        "The root of a port, with every method, or a WebSocket",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
    operation("GET /sandboxes/{id}/proxy/{port}/", "The same", "", "", "101 200 400 404 409 502 504"),
    operation(
        "GET /sandboxes/{id}/proxy/{port}/{path}",
        "A path of a port, with every method, or a WebSocket",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
];

const EXECUTION: &[Operation] = &[
    operation("GET /ping", "Whether commands can run", "", "", "200 404 409"),
    operation("POST /command", "Run a command; the answer is a stream of events", "", "RunCommand", ON_RUNS),
    operation("DELETE /command", "End a command", "id!", "", "200 400 404 409"),
    operation("GET /command/status/{name}", "Look at a command", "", "", "200 404 409"),
    operation(
        "GET /command/{name}/logs",
        "What a command printed",
        "cursor:int follow:bool coracle.records:bool",
        "",
        "200 400 404 409",
    ),
    operation("POST /session", "Open a shell", "", "OpenSession?", "200 404 409"),
    operation("DELETE /session/{name}", "Close a shell", "", "", "200 404 409"),
    operation("POST /session/{name}/run", "Run a command in a shell", "", "RunInSession", ON_RUNS),
    operation("POST /pty", "Prepare a terminal", "", "CreateTerminal?", "201 404 409"),
    operation("GET /pty/{name}", "Look at a terminal", "", "", "200 404 409"),
    operation("DELETE /pty/{name}", "End a terminal", "", "", "200 404 409"),
    operation(
        "GET /pty/{name}/ws",
        "Sit at a terminal, by WebSocket",
        "pty since:int takeover:bool",
        "",
        "101 400 404 409 426",
    ),
    operation("GET /metrics", "What the sandbox uses", "", "", "200 404 409 501"),
    operation("GET /metrics/watch", "The same every second, as events", "", "", "200 404"),
    operation("POST /code", "Run code in a context", "", "RunCode", "200 400 404 409 429 501"),
    operation("DELETE /code", "Interrupt code", "id!", "", "200 400 404 409 501"),
    operation("POST /code/context", "Open a context", "", "CreateContext", "200 400 404 409 429 501"),
    operation("GET /code/contexts", "List contexts", "language", "", "200 404 409 501"),
    operation(
        "DELETE /code/contexts",
        "Close the contexts of a language",
        "language!",
        "",
        "200 400 404 409 501",
    ),
    operation("GET /code/contexts/{name}", "Look at a context", "", "", "200 404 409 501"),
    operation("DELETE /code/contexts/{name}", "Close a context", "", "", "200 404 409 501"),
    operation("POST /code/contexts/{name}/restart", "Begin a context anew", "", "", "200 404 409 501"),
    operation("GET /v1/isolated/capabilities", "Whether shells can be isolated", "", "", "200 404 409"),
    operation("POST /v1/isolated/session", "Open an isolated shell", "", "OpenIsolated", "201 404 409 503"),
    operation("GET /v1/isolated/sessions", "List isolated shells", "", "", "200 404 409 503"),
    operation("GET /v1/isolated/session/{name}", "Look at one", "", "", "200 404 409 503"),
    operation("DELETE /v1/isolated/session/{name}", "Close one", "", "", "200 204 404 409 503"),
    operation(
        "POST /v1/isolated/session/{name}/run",
        "Run code in one",
        "",
        "RunIsolated",
        "200 202 404 409 503",
    ),
    operation(
        "GET /v1/isolated/session/{name}/runs/{run}",
        "Look at what runs in one",
        "",
        "",
        "200 404 409 503",
    ),
    operation(
        "GET /v1/isolated/session/{name}/runs/{run}/logs",
        "What it printed",
        "cursor:int",
        "",
        "200 400 404 409 503",
    ),
    operation("GET /v1/isolated/session/{name}/diff", "Not offered", "", "", "404 409 503"),
    operation("POST /v1/isolated/session/{name}/commit", "Not offered", "", "", "404 409 503"),
    operation("GET /proxy/{name}", "The root of a port", "", "", "101 200 400 404 409 502 504"),
    operation("GET /proxy/{name}/", "The same", "", "", "101 200 400 404 409 502 504"),
    operation("GET /proxy/{name}/{path}", "A path of a port", "", "", "101 200 400 404 409 502 504"),
];

const ON_RUNS: &str = "200 400 404 409";

/// Errors that the kernel knows and this API does not are 500, as in the reference.
const FILES: &[Operation] = &[
    operation("DELETE /files", "Remove files", "path*", "", ON_FILES),
    operation("GET /files/info", "Look at files", "path*", "", ON_FILES),
    operation("GET /files/search", "Find files by name", "path! pattern", "", ON_FILES),
    operation("POST /files/mv", "Move files", "", "MoveFiles", ON_FILES),
    operation("POST /files/permissions", "Change who may use files", "", "Permissions", ON_FILES),
    operation("POST /files/replace", "Replace text in files", "verbose:bool", "Replace", ON_FILES),
    operation("POST /files/upload", "Write files", "", "multipart", ON_FILES),
    operation(
        "GET /files/download",
        "Read a file, or lines of it",
        "path! offset:int limit:int",
        "",
        "200 206 400 404 409 416 500 503",
    ),
    operation("POST /files/links", "Make symbolic links", "", "Links", ON_FILES),
    operation("POST /directories", "Make directories", "", "Permissions", ON_FILES),
    operation("DELETE /directories", "Remove directories", "path*", "", ON_FILES),
    operation("GET /directories/list", "List a directory", "path! depth:int", "", ON_FILES),
];

const ON_FILES: &str = "200 400 404 409 500 503";

const EGRESS: &[Operation] = &[
    operation("GET /policy", "What the sandbox may reach", "", "", "200 404"),
    operation("PUT /policy", "Replace the policy", "", "", "404 501"),
    operation("POST /policy", "Replace the policy", "", "", "404 501"),
    operation("PATCH /policy", "Add rules", "", "", "404 501"),
    operation("DELETE /policy", "Remove rules", "", "", "404 501"),
    operation("GET /healthz", "Whether it is well", "", "", "200 404"),
    operation("GET /credential-vault", "Not offered", "", "", "404 501"),
    operation("POST /credential-vault", "Not offered", "", "", "404 501"),
    operation("PATCH /credential-vault", "Not offered", "", "", "404 501"),
    operation("DELETE /credential-vault", "Not offered", "", "", "404 501"),
    operation("GET /credential-vault/credentials", "Not offered", "", "", "404 501"),
    operation("GET /credential-vault/bindings", "Not offered", "", "", "404 501"),
];

#[cfg(test)]
mod tests {
    use super::super::{execd, proxy, routes};
    use super::*;
    use crate::openapi::tests::check;

    /// Routes that are there under `/v1` too are described there.
    fn versioned<S: Clone>(
        table: Vec<(String, axum::routing::MethodRouter<S>)>,
    ) -> Vec<(String, axum::routing::MethodRouter<S>)> {
        table
            .into_iter()
            .filter_map(|(path, route)| Some((path.strip_prefix("/v1")?.to_owned(), route)))
            .collect()
    }

    #[test]
    fn what_is_described_is_what_is_answered() {
        check(LIFECYCLE, &versioned(routes::table()));
        check(PORTS, &versioned(proxy::table()));
        check(EXECUTION, &execd::plain_table());
        check(FILES, &execd::file_table());
    }

    #[test]
    fn what_has_no_version_has_a_twin_that_has_one() {
        let all = routes::table();
        let versioned = versioned(routes::table());
        let alone = all.iter().filter(|(path, _)| !path.starts_with("/v1"));
        let alone: Vec<_> = alone
            .filter(|(path, _)| !versioned.iter().any(|(twin, _)| twin == path))
            .map(|(path, _)| path)
            .collect();
        assert_eq!(alone, ["/status.ok"]);
    }
}

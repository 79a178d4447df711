//! Every operation of this front, for the server's OpenAPI document. A test checks that the table
//! matches the routes.

use crate::openapi::{ApiOperation, ApiSection, OpenApiPart, operation};

/// Returns this front's part of the document.
pub(super) fn openapi_part() -> OpenApiPart {
    OpenApiPart {
        sections: openapi_sections(),
        schemas: include_str!("openapi.json"),
        security: &[
            ("key", "OPEN-SANDBOX-API-KEY"),
            ("execution", "X-EXECD-ACCESS-TOKEN"),
            ("egress", "OPENSANDBOX-EGRESS-AUTH"),
        ],
        remark: "Every path that begins with /v1/sandboxes, /v1/snapshots, /v1/pools or /v1/templates is \
                 also available without /v1.",
    }
}

fn openapi_sections() -> Vec<ApiSection> {
    let section = |tag, prefix, operations| ApiSection { tag, prefix, operations, open: false };
    vec![
        section("lifecycle", "/v1", LIFECYCLE),
        ApiSection { tag: "gateway", prefix: "", operations: GATEWAY, open: true },
        section("ports", "/v1", PORTS),
        section("execution", "/v1/sandboxes/{id}/proxy/44772", EXECUTION),
        section("files", "/v1/sandboxes/{id}/proxy/44772", FILES),
        section("files as a given user", "/v1/sandboxes/{id}/proxy/44772/v1/filesystem/{uid}/{gid}", FILES),
        section("files in isolated sessions", ISOLATED_FILES_PREFIX, FILES),
        section("egress", "/v1/sandboxes/{id}/proxy/18080", EGRESS),
    ]
}

const ISOLATED_FILES_PREFIX: &str = "/v1/sandboxes/{id}/proxy/44772/v1/isolated/session/{name}";

const GATEWAY: &[ApiOperation] = &[operation("GET /status.ok", "Check the gateway's health", "", "", "200")];

const LIFECYCLE: &[ApiOperation] = &[
    operation("GET /sandboxes", "List sandboxes", "state* metadata page:int pageSize:int", "", "200 400"),
    operation("POST /sandboxes", "Create a sandbox", "", "CreateSandbox", "202 404 409 500"),
    operation("GET /sandboxes/{id}", "Get a sandbox", "", "", "200 404"),
    operation("DELETE /sandboxes/{id}", "Remove a sandbox", "", "", "204 404 409 500"),
    operation(
        "PATCH /sandboxes/{id}/metadata",
        "Change the metadata of a sandbox",
        "",
        "Labels",
        "200 404 409",
    ),
    operation(
        "POST /sandboxes/{id}/renew-expiration",
        "Change the expiry of a sandbox",
        "",
        "Renew",
        "200 404 409",
    ),
    operation("POST /sandboxes/{id}/pause", "Pause a sandbox", "", "", "202 404 409 500 501"),
    operation("POST /sandboxes/{id}/resume", "Resume a sandbox", "", "", "202 404 409 500 501"),
    operation("POST /sandboxes/{id}/snapshots", "Take a snapshot", "", "CreateSnapshot?", "202 404 409 500"),
    operation(
        "GET /snapshots",
        "List snapshots",
        "sandboxId name state* page:int pageSize:int",
        "",
        "200 400",
    ),
    operation("GET /snapshots/{id}", "Get a snapshot", "", "", "200 404"),
    operation("DELETE /snapshots/{id}", "Remove a snapshot", "", "", "204 404 409 500"),
    operation(
        "GET /sandboxes/{id}/endpoints/{port}",
        "Get the address of a port",
        "use_server_proxy:bool expires:int",
        "",
        "200 400 404",
    ),
    operation("GET /pools", "List pools", "", "", "200"),
    operation("POST /pools", "Create a pool", "", "CreatePool", "201 404 409 500"),
    operation("GET /pools/{name}", "Get a pool", "", "", "200 404"),
    operation("PUT /pools/{name}", "Change the capacity of a pool", "", "SetPool", "200 404 409 500"),
    operation("DELETE /pools/{name}", "Remove a pool", "", "", "204 404 409 500"),
    operation(
        "GET /sandboxes/{id}/diagnostics/{kind}",
        "Get diagnostics: logs, events, inspect or summary",
        "scope tail:int since container limit:int event_limit:int",
        "",
        "200 400 404",
    ),
    operation("GET /sandboxes/{id}/networkpolicy", "Get the network policy", "", "", "200 404"),
    operation(
        "PUT /sandboxes/{id}/networkpolicy",
        "Replace the network policy",
        "",
        "NetworkPolicy?",
        POLICY_STATUSES,
    ),
    operation("PATCH /sandboxes/{id}/networkpolicy", "Add rules", "", "PolicyRules", POLICY_STATUSES),
    operation("DELETE /sandboxes/{id}/networkpolicy", "Remove rules", "", "PolicyTargets", POLICY_STATUSES),
    operation("GET /templates", "Not supported", "", "", "501"),
    operation("POST /templates", "Not supported", "", "", "501"),
    operation("GET /templates/{id}", "Not supported", "", "", "501"),
    operation("DELETE /templates/{id}", "Not supported", "", "", "501"),
    operation("POST /metrics/events", "Accept and discard a client's measurements", "", "", "204"),
];

/// The service inside decides how it responds.
const PORTS: &[ApiOperation] = &[
    operation(
        "GET /sandboxes/{id}/proxy/{port}",
        "Forward any method, or a WebSocket, to the root of a port",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
    operation(
        "GET /sandboxes/{id}/proxy/{port}/",
        "Same as without the trailing slash",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
    operation(
        "GET /sandboxes/{id}/proxy/{port}/{path}",
        "Forward any method, or a WebSocket, to a path of a port",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
];

const EXECUTION: &[ApiOperation] = &[
    operation("GET /ping", "Check that commands can run", "", "", "200 404 409"),
    operation(
        "POST /command",
        "Run a command; the response is a stream of events",
        "",
        "RunCommand",
        RUN_STATUSES,
    ),
    operation("DELETE /command", "Terminate a command", "id!", "", "200 400 404 409"),
    operation("GET /command/status/{name}", "Get the status of a command", "", "", "200 404 409"),
    operation(
        "GET /command/{name}/logs",
        "Get the output of a command",
        "cursor:int follow:bool coracle.records:bool",
        "",
        "200 400 404 409",
    ),
    operation("POST /session", "Open a shell", "", "OpenSession?", "200 404 409 500"),
    operation("DELETE /session/{name}", "Close a shell", "", "", "200 404 409"),
    operation("POST /session/{name}/run", "Run a command in a shell", "", "RunInSession", RUN_STATUSES),
    operation("POST /pty", "Create a terminal", "", "CreateTerminal?", "201 404 409"),
    operation("GET /pty/{name}", "Get a terminal", "", "", "200 404 409"),
    operation("DELETE /pty/{name}", "Delete a terminal", "", "", "200 404 409"),
    operation(
        "GET /pty/{name}/ws",
        "Attach to a terminal by WebSocket",
        "pty since:int takeover:bool",
        "",
        "101 400 404 409 426",
    ),
    operation("GET /metrics", "Get the resource usage of the sandbox", "", "", "200 404 409 501"),
    operation("GET /metrics/watch", "Stream the resource usage every second", "", "", "200 404"),
    operation("POST /code", "Run code in a context", "", "RunCode", "200 400 404 409 429 501"),
    operation("DELETE /code", "Interrupt running code", "id!", "", "200 400 404 409 501"),
    operation("POST /code/context", "Open a context", "", "CreateContext", "200 400 404 409 429 500 501"),
    operation("GET /code/contexts", "List contexts", "language", "", "200 404 409 501"),
    operation(
        "DELETE /code/contexts",
        "Close the contexts of a language",
        "language!",
        "",
        "200 400 404 409 501",
    ),
    operation("GET /code/contexts/{name}", "Get a context", "", "", "200 404 409 501"),
    operation("DELETE /code/contexts/{name}", "Close a context", "", "", "200 404 409 501"),
    operation("POST /code/contexts/{name}/restart", "Restart a context", "", "", "200 404 409 501"),
    operation(
        "GET /v1/isolated/capabilities",
        "Get the capabilities of isolated sessions",
        "",
        "",
        "200 404 409",
    ),
    operation(
        "POST /v1/isolated/session",
        "Open an isolated session",
        "",
        "OpenIsolated",
        "201 404 409 500 503",
    ),
    operation("GET /v1/isolated/sessions", "List isolated sessions", "", "", "200 404 409 503"),
    operation("GET /v1/isolated/session/{name}", "Get an isolated session", "", "", "200 404 409 503"),
    operation(
        "DELETE /v1/isolated/session/{name}",
        "Close an isolated session",
        "",
        "",
        "200 204 404 409 503",
    ),
    operation(
        "POST /v1/isolated/session/{name}/run",
        "Run code in an isolated session",
        "",
        "RunIsolated",
        "200 202 404 409 500 503",
    ),
    operation(
        "GET /v1/isolated/session/{name}/runs/{run}",
        "Get the status of a run in an isolated session",
        "",
        "",
        "200 404 409 503",
    ),
    operation(
        "GET /v1/isolated/session/{name}/runs/{run}/logs",
        "Get the output of a run in an isolated session",
        "cursor:int",
        "",
        "200 400 404 409 503",
    ),
    operation("GET /v1/isolated/session/{name}/diff", "Not supported", "", "", "404 409 503"),
    operation("POST /v1/isolated/session/{name}/commit", "Not supported", "", "", "404 409 503"),
    operation("GET /proxy/{name}", "Forward to the root of a port", "", "", "101 200 400 404 409 502 504"),
    operation(
        "GET /proxy/{name}/",
        "Same as without the trailing slash",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
    operation(
        "GET /proxy/{name}/{path}",
        "Forward to a path of a port",
        "",
        "",
        "101 200 400 404 409 502 504",
    ),
];

/// A directory that cannot be made, on a full disk for example, is 500 as in the reference.
const RUN_STATUSES: &str = "200 400 404 409 500";

/// Kernel errors without an equivalent in this API are 500, as in the reference.
const FILES: &[ApiOperation] = &[
    operation("DELETE /files", "Remove files", "path*", "", FILE_STATUSES),
    operation("GET /files/info", "Get the attributes of files", "path*", "", FILE_STATUSES),
    operation("GET /files/search", "Search files by name", "path! pattern", "", FILE_STATUSES),
    operation("POST /files/mv", "Move files", "", "MoveFiles", FILE_STATUSES),
    operation("POST /files/permissions", "Change mode and owner of files", "", "Permissions", FILE_STATUSES),
    operation("POST /files/replace", "Replace text in files", "verbose:bool", "Replace", FILE_STATUSES),
    operation("POST /files/upload", "Write files", "", "multipart:Upload", FILE_STATUSES),
    operation(
        "GET /files/download",
        "Read a file, or lines of it",
        "path! offset:int limit:int",
        "",
        "200 206 400 404 409 416 500 503",
    ),
    operation("POST /files/links", "Create symbolic links", "", "Links", FILE_STATUSES),
    operation("POST /directories", "Create directories", "", "Permissions", FILE_STATUSES),
    operation("DELETE /directories", "Remove directories", "path*", "", FILE_STATUSES),
    operation("GET /directories/list", "List a directory", "path! depth:int", "", FILE_STATUSES),
];

const FILE_STATUSES: &str = "200 400 404 409 500 503";

/// On a host that cannot filter networks, changes are 501.
const POLICY_STATUSES: &str = "200 404 409 500 501";

const EGRESS: &[ApiOperation] = &[
    operation("GET /policy", "Get the network policy", "", "", "200 404"),
    operation("PUT /policy", "Replace the network policy", "", "NetworkPolicy?", POLICY_STATUSES),
    operation("POST /policy", "Replace the network policy", "", "NetworkPolicy?", POLICY_STATUSES),
    operation("PATCH /policy", "Add rules", "", "PolicyRules", POLICY_STATUSES),
    operation("DELETE /policy", "Remove rules", "", "PolicyTargets", POLICY_STATUSES),
    operation("GET /healthz", "Check the egress API's health", "", "", "200 404"),
    operation("GET /credential-vault", "Get the credential vault, without values", "", "", "200 404"),
    operation(
        "POST /credential-vault",
        "Create the credential vault",
        "",
        "CreateCredentialVault",
        "201 400 404 409 412",
    ),
    operation(
        "PATCH /credential-vault",
        "Change the credential vault",
        "",
        "ChangeCredentialVault",
        "200 400 404 409 412",
    ),
    operation("DELETE /credential-vault", "Delete the credential vault", "", "", "204 404 412"),
    operation("GET /credential-vault/credentials", "List the credentials", "", "", "200 404"),
    operation(
        "GET /credential-vault/credentials/{name}",
        "Get a credential, without its value",
        "",
        "",
        "200 404",
    ),
    operation("GET /credential-vault/bindings", "List the bindings", "", "", "200 404"),
    operation("GET /credential-vault/bindings/{name}", "Get a binding", "", "", "200 404"),
];

#[cfg(test)]
mod tests {
    use super::super::{execd, proxy, routes};
    use super::*;
    use crate::openapi::tests::assert_operations_match;

    /// Returns the routes under `/v1`, which is where they are described.
    fn versioned<S: Clone>(
        table: Vec<(String, axum::routing::MethodRouter<S>)>,
    ) -> Vec<(String, axum::routing::MethodRouter<S>)> {
        table
            .into_iter()
            .filter_map(|(path, route)| Some((path.strip_prefix("/v1")?.to_owned(), route)))
            .collect()
    }

    #[test]
    fn described_operations_match_the_routes() {
        assert_operations_match(LIFECYCLE, &versioned(routes::lifecycle_routes()));
        assert_operations_match(PORTS, &versioned(proxy::proxy_routes()));
        assert_operations_match(EXECUTION, &execd::plain_table());
        assert_operations_match(FILES, &execd::file_table());
    }

    #[test]
    fn unversioned_routes_exist_under_v1_too() {
        let all = routes::lifecycle_routes();
        let versioned = versioned(routes::lifecycle_routes());
        let alone = all.iter().filter(|(path, _)| !path.starts_with("/v1"));
        let alone: Vec<_> = alone
            .filter(|(path, _)| !versioned.iter().any(|(twin, _)| twin == path))
            .map(|(path, _)| path)
            .collect();
        assert_eq!(alone, ["/status.ok"]);
    }
}

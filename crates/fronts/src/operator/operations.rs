//! Every operation of this front, for the server's OpenAPI document. A test checks that the table
//! matches the routes.

use crate::openapi::{ApiOperation, ApiSection, OpenApiPart, operation};

/// Returns this front's part of the document.
pub(super) fn openapi_part() -> OpenApiPart {
    OpenApiPart {
        sections: vec![
            ApiSection { tag: "health", prefix: "", operations: OPEN_OPERATIONS, open: true },
            ApiSection { tag: "operators", prefix: "", operations: OPERATOR_OPERATIONS, open: false },
        ],
        schemas: include_str!("openapi.json"),
        security: &[("key", "OPEN-SANDBOX-API-KEY")],
        remark: "",
    }
}

const OPEN_OPERATIONS: &[ApiOperation] = &[
    operation("GET /health", "Check the server's health", "", "", "200"),
    operation("GET /version", "Get the server's version", "", "", "200"),
];

const OPERATOR_OPERATIONS: &[ApiOperation] = &[
    operation("GET /metrics", "Get metrics as Prometheus text", "", "", "200 501"),
    operation(
        "GET /coracle/v1/sandboxes",
        "List sandboxes with their enforcement and usage",
        "owner mine:bool usage:bool",
        "",
        "200 400",
    ),
    operation(
        "POST /coracle/v1/sandboxes",
        "Create a sandbox for the clients of another API, or find it by its name",
        "",
        "CreateGuestSandbox",
        "200 201 400 409 429 500",
    ),
    operation(
        "GET /coracle/v1/sandboxes/{id}/url",
        "Get the address of the API of a sandbox",
        "",
        "",
        "200 404",
    ),
    operation("GET /coracle/v1/sandboxes/{id}", "Inspect a sandbox", "", "", "200 404"),
    operation(
        "POST /coracle/v1/sandboxes/{id}/restart",
        "Restart a dead sandbox",
        "",
        "",
        "200 400 404 409 429 500",
    ),
    operation(
        "DELETE /coracle/v1/sandboxes/{id}",
        "Remove a sandbox; the operator may remove any",
        "",
        "",
        "204 404 500",
    ),
    operation("GET /coracle/v1/snapshots", "List snapshots", "owner mine:bool", "", "200 400"),
    operation("GET /coracle/v1/snapshots/{id}", "Inspect a snapshot", "", "", "200 404"),
    operation("DELETE /coracle/v1/snapshots/{id}", "Remove a snapshot", "", "", "204 404 409 500"),
    operation(
        "GET /coracle/v1/sandboxes/{id}/processes/{process}/logs",
        "Get the output of a command as records",
        "cursor:int follow:bool",
        "",
        "200 400 404 409 500",
    ),
    operation(
        "GET /coracle/v1/sandboxes/{id}/usage",
        "Get a sandbox's usage of the last hour",
        "",
        "",
        "200 404",
    ),
    operation(
        "GET /coracle/v1/sandboxes/{id}/network",
        "Get or stream what a sandbox tried to reach",
        "after:int limit:int follow:bool denied:bool",
        "",
        "200 400 404 500 501",
    ),
    operation(
        "GET /coracle/v1/sandboxes/{id}/processes",
        "List the processes of a sandbox",
        "ended:bool",
        "",
        "200 404 409 500",
    ),
    operation(
        "POST /coracle/v1/sandboxes/{id}/processes/{process}/signal",
        "Signal a command, session or context",
        "",
        "SignalProcess?",
        "204 404 409 500",
    ),
    operation("GET /coracle/v1/usage", "Get the usage of recent hours", "hours:int", "", "200 400"),
    operation(
        "GET /coracle/v1/events",
        "Stream lifecycle events",
        "after:int tail:int follow:bool",
        "",
        "200 400",
    ),
    operation("GET /coracle/v1/errors", "List recent failed requests", "", "", "200"),
    operation("GET /coracle/v1/capabilities", "Get the host's capabilities", "", "", "200"),
    operation("GET /coracle/v1/keys", "List keys", "", "", "200"),
    operation("POST /coracle/v1/keys", "Issue a key", "", "IssueKey", "200 201 409"),
    operation("DELETE /coracle/v1/keys/{id}", "Revoke a key", "sandboxes:bool", "", "200 204 404 500"),
    operation("GET /coracle/v1/volumes", "List volumes", "owner mine:bool", "", "200 400"),
    operation("POST /coracle/v1/volumes", "Create a volume", "", "CreateVolume", "200 201 409"),
    operation("GET /coracle/v1/volumes/{name}", "Inspect a volume", "owner", "", "200 400 404"),
    operation("DELETE /coracle/v1/volumes/{name}", "Remove a volume", "owner", "", "204 400 404 409"),
    operation("GET /coracle/v1/images", "List images, or inspect one", "name", "", "200 404"),
    operation("POST /coracle/v1/images", "Pull an image", "", "PullImage", "200 202 400 404 409 500"),
    operation("DELETE /coracle/v1/images", "Remove an image", "name!", "", "200 204 400 404 409"),
    operation(
        "POST /coracle/v1/images/import",
        "Import an image archive",
        "name!",
        "binary",
        "200 400 500 501",
    ),
    operation(
        "POST /coracle/v1/images/commit",
        "Create an image from a sandbox or snapshot",
        "",
        "CommitImage",
        "200 404 409 501",
    ),
    operation("POST /coracle/v1/images/gc", "Remove unused image layers", "", "", "200"),
    operation("GET /coracle/v1/names/{name}", "Find a sandbox by name", "", "", "200 404"),
    operation("POST /coracle/v1/names/{name}/release", "Release a name", "", "", "200 404"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tests::assert_operations_match;

    #[test]
    fn described_operations_match_the_routes() {
        let all = [OPEN_OPERATIONS, OPERATOR_OPERATIONS].concat();
        let routes =
            super::super::operator_routes().into_iter().map(|(path, route)| (path.to_owned(), route));
        assert_operations_match(&all, &routes.collect::<Vec<_>>());
    }
}

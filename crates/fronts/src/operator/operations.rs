//! Every operation of this front, for the server's OpenAPI document. A test holds it equal to the
//! routes.

use crate::openapi::{Operation, Section, operation};

/// Schemas of the bodies that are named here.
pub(crate) const SCHEMAS: &str = include_str!("openapi.json");

pub(crate) fn sections() -> Vec<Section> {
    vec![
        Section { tag: "well-being", prefix: "", operations: OPEN, open: true },
        Section { tag: "operators", prefix: "", operations: OPERATORS, open: false },
    ]
}

const OPEN: &[Operation] = &[
    operation("GET /health", "Whether the server is well", "", "", "200"),
    operation("GET /version", "Which version it is", "", "", "200"),
];

const OPERATORS: &[Operation] = &[
    operation("GET /metrics", "Measurements as Prometheus reads them", "", "", "200 501"),
    operation(
        "GET /coracle/v1/sandboxes",
        "What holds for every sandbox",
        "owner mine:bool usage:bool",
        "",
        "200 400",
    ),
    operation("GET /coracle/v1/sandboxes/{id}", "What holds for a sandbox", "", "", "200 404"),
    operation(
        "POST /coracle/v1/sandboxes/{id}/restart",
        "Start a dead sandbox again",
        "",
        "",
        "200 400 404 409 429 500",
    ),
    operation(
        "DELETE /coracle/v1/sandboxes/{id}",
        "Remove a sandbox, as the operator anybody's",
        "",
        "",
        "204 404 500",
    ),
    operation("GET /coracle/v1/snapshots", "List snapshots", "owner mine:bool", "", "200 400"),
    operation("GET /coracle/v1/snapshots/{id}", "Look at a snapshot", "", "", "200 404"),
    operation("DELETE /coracle/v1/snapshots/{id}", "Remove a snapshot", "", "", "204 404 409 500"),
    operation(
        "GET /coracle/v1/sandboxes/{id}/processes/{process}/logs",
        "What a command has printed, as records",
        "cursor:int follow:bool",
        "",
        "200 400 404 409 500",
    ),
    operation("GET /coracle/v1/sandboxes/{id}/usage", "What it used in the last hour", "", "", "200 404"),
    operation(
        "GET /coracle/v1/sandboxes/{id}/processes",
        "What runs in a sandbox",
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
    operation("GET /coracle/v1/usage", "What sandboxes used in the last hours", "hours:int", "", "200 400"),
    operation(
        "GET /coracle/v1/events",
        "What became of sandboxes",
        "after:int tail:int follow:bool",
        "",
        "200 400",
    ),
    operation("GET /coracle/v1/errors", "The last requests that failed", "", "", "200"),
    operation("GET /coracle/v1/capabilities", "What this host offers", "", "", "200"),
    operation("GET /coracle/v1/keys", "List keys", "", "", "200"),
    operation("POST /coracle/v1/keys", "Issue a key", "", "IssueKey", "200 201 409"),
    operation("DELETE /coracle/v1/keys/{id}", "Revoke a key", "sandboxes:bool", "", "200 204 404 500"),
    operation("GET /coracle/v1/volumes", "List volumes", "owner mine:bool", "", "200 400"),
    operation("POST /coracle/v1/volumes", "Make a volume", "", "CreateVolume", "200 201 409"),
    operation("GET /coracle/v1/volumes/{name}", "Look at a volume", "owner", "", "200 400 404"),
    operation("DELETE /coracle/v1/volumes/{name}", "Remove a volume", "owner", "", "204 400 404 409"),
    operation("GET /coracle/v1/images", "List images, or look at one", "name", "", "200 404"),
    operation("POST /coracle/v1/images", "Fetch an image", "", "PullImage", "200 202 400 404 409 500"),
    operation("DELETE /coracle/v1/images", "Remove an image", "name!", "", "200 204 400 404 409"),
    operation("POST /coracle/v1/images/import", "Take in an archive", "name!", "binary", "200 400 500 501"),
    operation(
        "POST /coracle/v1/images/commit",
        "Make an image of a sandbox",
        "",
        "CommitImage",
        "200 404 409 501",
    ),
    operation("POST /coracle/v1/images/gc", "Remove what no image needs", "", "", "200"),
    operation("GET /coracle/v1/names/{name}", "What a name leads to", "", "", "200 404"),
    operation("POST /coracle/v1/names/{name}/release", "Let it make room", "", "", "200 404"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tests::check;

    #[test]
    fn what_is_described_is_what_is_answered() {
        let all = [OPEN, OPERATORS].concat();
        let routes = super::super::table().into_iter().map(|(path, route)| (path.to_owned(), route));
        check(&all, &routes.collect::<Vec<_>>());
    }
}

//! Every operation of the provisioner, for the server's OpenAPI document.

use crate::openapi::{ApiOperation, ApiSection, OpenApiPart, operation};

/// The part of the document about the provisioner.
pub(super) fn openapi_part() -> OpenApiPart {
    let sections = vec![ApiSection { tag: "deerflow", prefix: "", operations: OPERATIONS, open: false }];
    OpenApiPart {
        sections,
        schemas: include_str!("openapi.json"),
        security: &[("provisioner", "X-API-Key")],
        remark: "",
    }
}

const OPERATIONS: &[ApiOperation] = &[
    operation("GET /api/capabilities", "What may be requested", "", "", "200"),
    operation("GET /api/sandboxes", "List living sandboxes", "", "", "200"),
    operation(
        "POST /api/sandboxes",
        "Create or find a sandbox",
        "",
        "ProvisionSandbox",
        "200 400 409 422 500 503",
    ),
    operation("GET /api/sandboxes/{id}", "Get a living sandbox", "", "", "200 404"),
    operation("DELETE /api/sandboxes/{id}", "Remove a sandbox", "", "", "200 500"),
    operation(
        "GET /api/sandboxes/{id}/presence",
        "Tell whether anything is left of a sandbox",
        "",
        "",
        "200",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openapi::tests::assert_operations_match;

    #[test]
    fn every_route_is_described() {
        let routes = super::super::provisioner_routes();
        let routes: Vec<_> = routes.into_iter().map(|(path, route)| (path.to_owned(), route)).collect();
        assert_operations_match(OPERATIONS, &routes);
    }
}

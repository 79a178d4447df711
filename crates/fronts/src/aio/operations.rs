//! Every operation of this front, for the server's OpenAPI document. A test checks that the tables match the routes.

use crate::openapi::{ApiOperation, ApiSection, OpenApiPart, operation};

/// The part of the document about the API of a sandbox.
pub(super) fn openapi_part() -> OpenApiPart {
    OpenApiPart {
        sections: openapi_sections(),
        schemas: include_str!("openapi.json"),
        security: &[],
        remark: "",
    }
}

fn openapi_sections() -> Vec<ApiSection> {
    // The address itself opens the sandbox.
    let section = |tag, operations| ApiSection { tag, prefix: "/aio/{address}", operations, open: true };
    vec![section("aio: sandbox", SANDBOX), section("aio: not supported", UNSUPPORTED)]
}

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
];

const UNSUPPORTED: &[ApiOperation] = &[
    operation("GET /v1/browser/{path}", "Not supported", "", "", "404 501"),
    operation("GET /v1/display/{path}", "Not supported", "", "", "404 501"),
    operation("GET /vnc/{path}", "Not supported", "", "", "404 501"),
    operation("GET /cdp/{path}", "Not supported", "", "", "404 501"),
    operation("GET /websockify", "Not supported", "", "", "404 501"),
    operation("GET /json/version", "Not supported", "", "", "404 501"),
    operation("GET /code-server/{path}", "Not supported", "", "", "404 501"),
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

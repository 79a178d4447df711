//! Parts of AIO Sandbox that this server does not have. They answer 501 with the reason, and no list names them.

use axum::routing::any;
use http::StatusCode;

use super::problem::AioProblem;
use super::routes::AioRoute;

pub(super) fn routes() -> Vec<AioRoute> {
    vec![
        ("/v1/browser/{*path}", any(refuse_browser)),
        ("/v1/display/{*path}", any(refuse_browser)),
        // A wildcard does not match the bare path, with or without a slash.
        ("/vnc", any(refuse_browser)),
        ("/vnc/", any(refuse_browser)),
        ("/vnc/{*path}", any(refuse_browser)),
        ("/cdp", any(refuse_browser)),
        ("/cdp/", any(refuse_browser)),
        ("/cdp/{*path}", any(refuse_browser)),
        ("/websockify", any(refuse_browser)),
        ("/json/version", any(refuse_browser)),
        ("/code-server", any(refuse_editors)),
        ("/code-server/", any(refuse_editors)),
        ("/code-server/{*path}", any(refuse_editors)),
        ("/jupyter", any(refuse_editors)),
        ("/jupyter/", any(refuse_editors)),
        ("/jupyter/{*path}", any(refuse_editors)),
        ("/v1/util/convert_to_markdown", any(refuse_conversion)),
        ("/v1/proxy/{*path}", any(refuse_proxy_rules)),
    ]
}

async fn refuse_browser() -> AioProblem {
    refuse("this sandbox has no display and no browser")
}

async fn refuse_editors() -> AioProblem {
    refuse("code-server and JupyterLab are not part of this sandbox; start one inside and open its port")
}

async fn refuse_conversion() -> AioProblem {
    refuse("conversion to Markdown is not supported")
}

async fn refuse_proxy_rules() -> AioProblem {
    refuse("rules for an egress proxy are not supported")
}

fn refuse(message: &str) -> AioProblem {
    AioProblem::new(StatusCode::NOT_IMPLEMENTED, message)
}

//! A terminal for people: its WebSocket, its page, and links to the page.
//!
//! Terminals are those of the service, as other APIs of this server have them. They are not sessions: a person's shell
//! prints prompts and escape sequences, and programs must not type into it.

use std::sync::LazyLock;

use axum::Json;
use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{WebSocket, WebSocketUpgrade};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::SinkExt;
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderValue, Uri, header};
use service::{CreateTerminalRequest, ErrorKind, SandboxRef, TerminalAttachment, TerminalMode};
use sha2::{Digest, Sha256};

use super::super::envelope::{ResponseEnvelope, data_response};
use super::super::problem::AioProblem;
use super::super::target::AioTarget;
use super::super::{AioState, access};
use super::terminal_messages::{
    NEW_TERMINAL_CODEC, RESTORED_TERMINAL_CODEC, encode_output, error_message, session_message,
};
use crate::kit::axum_socket::split_socket;
use crate::kit::headers::{header_text, request_host};
use crate::kit::query::QueryParams;
use crate::kit::socket::{CLOSE_NORMAL, CloseReason, close_socket};
use crate::kit::terminal_socket::{SEND_TIMEOUT, TerminalClient, serve_terminal};
use crate::ports::target::AddressForm;
use crate::settings::HttpSettings;

/// The longest message of a client.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

const PAGE_STYLE: &str = include_str!("terminal.css");
const PAGE_SCRIPT: &str = include_str!("terminal.js");

/// The terminal that a client is connected to.
enum TerminalTarget {
    New(TerminalAttachment),
    Restored(TerminalAttachment),
    Refused(String),
}

/// `GET /v1/shell/ws?session_id=…`: without an id, a new terminal.
pub(super) async fn attach_terminal(
    target: AioTarget,
    uri: Uri,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, AioProblem> {
    let upgrade = upgrade.map_err(|rejection| AioProblem::bad_request(rejection.to_string()))?;
    target.begin_stream()?;
    let id = QueryParams::from_uri(&uri).first("session_id").unwrap_or_default().to_owned();
    let found = find_terminal(&target.sandbox, &id).await?;
    let upgrade = upgrade.max_message_size(MAX_MESSAGE_BYTES);
    Ok(upgrade.on_upgrade(|socket| serve_socket(socket, target.sandbox, found)).into_response())
}

/// Finds the terminal with this id. The client learns over the socket if that is not possible.
async fn find_terminal(sandbox: &SandboxRef, id: &str) -> Result<TerminalTarget, AioProblem> {
    let terminals = sandbox.terminals();
    if id.is_empty() {
        let terminal = terminals.create_terminal(CreateTerminalRequest::default()).await?;
        let attached = terminal.attach_client(false).map(TerminalTarget::New);
        return attached.ok_or_else(|| AioProblem::bad_request("the new terminal is in use"));
    }
    match terminals.find_terminal(id).await {
        Ok(terminal) => Ok(match terminal.attach_client(false) {
            Some(attachment) => TerminalTarget::Restored(attachment),
            None => TerminalTarget::Refused("Session is already connected".to_owned()),
        }),
        Err(error) if error.kind() == ErrorKind::NoSession => {
            Ok(TerminalTarget::Refused("Session not found".to_owned()))
        }
        Err(error) => Err(error.into()),
    }
}

async fn serve_socket(socket: WebSocket, sandbox: SandboxRef, found: TerminalTarget) {
    let (sink, mut stream) = split_socket(socket);
    let mut sink = Box::pin(encode_output(sink));
    let (first, codec, attachment) = match found {
        TerminalTarget::New(attachment) => {
            let first = session_message(&attachment.terminal().name);
            (Some(first), &NEW_TERMINAL_CODEC, attachment)
        }
        TerminalTarget::Restored(attachment) => (None, &RESTORED_TERMINAL_CODEC, attachment),
        TerminalTarget::Refused(reason) => {
            let sent = tokio::time::timeout(SEND_TIMEOUT, sink.send(error_message(&reason))).await;
            if matches!(sent, Ok(Ok(()))) {
                let close = CloseReason::new(CLOSE_NORMAL, "refused");
                close_socket(&mut sink, &mut stream, close, SEND_TIMEOUT).await;
            }
            return;
        }
    };
    if let Some(first) = first
        && !matches!(tokio::time::timeout(SEND_TIMEOUT, sink.send(first)).await, Ok(Ok(())))
    {
        return;
    }
    let client = TerminalClient { sandbox, mode: TerminalMode::Terminal, since: 0 };
    serve_terminal((sink, stream), codec, client, attachment).await;
}

/// `GET /v1/shell/terminal-url`: the address of the page with a new terminal.
pub(super) async fn create_terminal_url(
    State(state): State<AioState>,
    target: AioTarget,
    request: Parts,
) -> Result<Json<ResponseEnvelope<String>>, AioProblem> {
    let terminal = target.sandbox.terminals().create_terminal(CreateTerminalRequest::default()).await?;
    let address = external_address(&state.settings, (target.form, &target.mount), &request);
    Ok(data_response(format!("{address}/terminal?session_id={}", terminal.name)))
}

/// The address of this API as the client reaches it. A proxy before the server names its own in headers; those of
/// anybody else are ignored, since the address that opens the sandbox would be sent to the host that they name.
fn external_address(settings: &HttpSettings, (form, mount): (AddressForm, &str), request: &Parts) -> String {
    let is_proxied = settings.trusts_proxy(&request.extensions);
    let first = |name: &str| {
        let value = header_text(&request.headers, name).filter(|_| is_proxied)?;
        Some(value.split(',').next().unwrap_or_default().trim()).filter(|value| !value.is_empty())
    };
    let scheme = first("x-forwarded-proto").filter(|scheme| matches!(*scheme, "http" | "https"));
    let forwarded_host = first("x-forwarded-host").filter(|host| host.parse::<Authority>().is_ok());
    let public_address = settings.public_address.clone().filter(|_| form == AddressForm::Path);
    let host = public_address
        .or_else(|| forwarded_host.map(str::to_owned))
        .or_else(|| request_host(&request.uri, &request.headers));
    let prefix = first("x-forwarded-prefix").filter(|prefix| prefix.starts_with('/')).unwrap_or_default();
    let (scheme, host) = (scheme.unwrap_or("http"), host.unwrap_or_else(|| settings.listen.to_string()));
    format!("{scheme}://{host}{}{mount}", prefix.trim_end_matches('/'))
}

/// Where the page has a ticket for its WebSocket, if that needs one.
const TICKET_PLACE: &str = "<!-- ticket -->";

static PAGE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content=\"width=device-width\">\n\
         <title>Terminal</title>{TICKET_PLACE}\n<style>{PAGE_STYLE}</style>\n<pre id=screen tabindex=0 autofocus></pre>\n\
         <script>{PAGE_SCRIPT}</script>\n</html>\n"
    )
});

/// Allows the style and the script of the page, and connections to its own server.
static CONTENT_POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self' ws: wss:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(PAGE_STYLE),
        hash(PAGE_SCRIPT)
    );
    HeaderValue::try_from(policy).expect("base64 is a valid header value")
});

/// `GET /terminal`
pub(super) async fn show_page(
    State(state): State<AioState>,
    target: AioTarget,
) -> Result<Response, AioProblem> {
    // The WebSocket cannot send headers, and the ticket that may have opened the page is used up.
    let page = match access::ticket_for_page(&state, target.access)? {
        Some(ticket) => PAGE.replacen(TICKET_PLACE, &format!("<meta name=ticket content={ticket}>"), 1),
        None => PAGE.replacen(TICKET_PLACE, "", 1),
    };
    let mut response = Html(page).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, CONTENT_POLICY.clone());
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // The address of the page opens the sandbox.
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use crate::server::connection::ClientPeer;

    #[track_caller]
    fn check(peer: &str, form: AddressForm, public: Option<&str>, expected: &str) {
        let mut settings = HttpSettings::new("127.0.0.1:8080".parse().unwrap());
        settings.trusted_proxies = vec!["10.0.0.0/8".parse().unwrap()];
        settings.public_address = public.map(str::to_owned);
        let request = Request::builder()
            .header("host", "box:81")
            .header("x-forwarded-proto", "https")
            .header("x-forwarded-host", "front.example, other.example")
            .header("x-forwarded-prefix", "/p/");
        let (mut parts, ()) = request.body(()).unwrap().into_parts();
        parts.extensions.insert(ClientPeer::Network(peer.parse().unwrap()));
        let mount = if form == AddressForm::Path { "/aio/x" } else { "" };
        assert_eq!(external_address(&settings, (form, mount), &parts), expected);
    }

    #[test]
    fn only_trusted_proxies_choose_where_links_lead() {
        use AddressForm::{Gateway, Path};
        check("192.0.2.1:5", Path, None, "http://box:81/aio/x");
        check("192.0.2.1:5", Gateway, None, "http://box:81");
        check("10.1.2.3:5", Path, None, "https://front.example/p/aio/x");
        check("127.0.0.1:5", Gateway, None, "https://front.example/p");
    }

    #[test]
    fn public_address_is_for_paths() {
        use AddressForm::{Gateway, Path};
        check("192.0.2.1:5", Path, Some("public.example"), "http://public.example/aio/x");
        check("192.0.2.1:5", Gateway, Some("public.example"), "http://box:81");
    }
}

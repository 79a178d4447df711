//! The one sandbox of a server of one's own.

use anyhow::Result;
use fronts::HttpSettings;
use serde_json::json;
use service::{Sandbox, Service};

use crate::config::{AnnouncementFormat, OwnServerConfig};
use crate::output::{Printer, WithHint};

/// Makes the sandbox, or finds it after a restart of the server, and reports what is weaker than it should be.
pub(super) async fn open_sandbox(
    service: &Service,
    settings: &HttpSettings,
    own: &OwnServerConfig,
    printer: &Printer,
) -> Result<Sandbox> {
    let opened = fronts::open_root_sandbox(service, settings, &own.root, &own.sandbox).await;
    let sandbox = match opened {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let hint = error.hint().map(str::to_owned);
            let error = anyhow::Error::from(error).context("could not create the sandbox");
            return match hint {
                Some(hint) => Err(error).with_hint(hint),
                None => Err(error),
            };
        }
    };
    if let Some(stand_in) = &sandbox.in_force.stand_in {
        printer.warn(stand_in);
    }
    if !sandbox.in_force.degraded.is_empty() {
        let lacks = sandbox.in_force.degraded.join("; ");
        printer.warn(format!("{lacks}; `coracle doctor` says how to get what is missing"));
    }
    Ok(sandbox)
}

/// Prints where the sandbox can be used.
pub(super) fn announce_sandbox(
    sandbox: &Sandbox,
    url: &str,
    format: AnnouncementFormat,
    printer: &Printer,
) -> Result<()> {
    match format {
        AnnouncementFormat::Text => printer.print_line(format!("coracle listening on {url}")),
        AnnouncementFormat::Json => printer.print_line(json!({"url": url, "sandbox": sandbox.id.as_str()})),
    }
}

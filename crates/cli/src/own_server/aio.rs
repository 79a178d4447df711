//! `coracle aio`: the API of AIO Sandbox with one sandbox, at the root of a server of one's own.

use std::process::ExitCode;

use anyhow::Result;

use super::OwnServer;
use crate::args::AioArgs;
use crate::output::Printer;

/// The front that is served.
const FRONT: &str = "aio";

pub(crate) fn serve_aio(args: AioArgs, printer: &Printer) -> Result<ExitCode> {
    OwnServer::plan(FRONT, args.server, printer)?.run()
}

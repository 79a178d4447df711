//! `image import`, `ls` and `rm`: the images in the state directory of this host.

use std::process::ExitCode;

use anyhow::Result;

use crate::args::ImageCommand;
use crate::config::Config;
use crate::output::Printer;

pub(crate) fn image(command: &ImageCommand, _printer: &Printer) -> Result<ExitCode> {
    let (ImageCommand::Import { state, .. } | ImageCommand::Ls { state } | ImageCommand::Rm { state, .. }) =
        command;
    let config = Config::for_host(state)?;
    anyhow::bail!("images in `{}` cannot be handled by this build", config.state_dir.display())
}

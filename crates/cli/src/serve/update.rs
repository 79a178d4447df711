//! New settings for running parts: each part gets them through a pipe, as a length and a [`ChildSettings`],
//! applies what it can and confirms with one byte.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe::{Receiver, Sender};

use super::child_settings::ChildSettings;

/// How long a part may take to confirm. The launcher may be in the middle of an operation on a sandbox.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);
/// More than any configuration that people write.
const MAX_SETTINGS_BYTES: u32 = 16 << 20;

/// Sends settings to a part and waits until they are applied there. `expected` is how many bytes the
/// part writes until then: one more than usual if it has not reported yet that it is ready.
pub(super) async fn send_settings(
    settings: &mut Sender,
    confirmations: &mut Receiver,
    contents: &ChildSettings,
    expected: usize,
) -> Result<()> {
    let bytes = serde_json::to_vec(contents)?;
    let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_SETTINGS_BYTES);
    let length = length.context("the configuration is too large")?;
    let exchange = async {
        settings.write_all(&length.to_le_bytes()).await?;
        settings.write_all(&bytes).await?;
        confirmations.read_exact(&mut vec![0; expected]).await
    };
    match tokio::time::timeout(CONFIRM_TIMEOUT, exchange).await {
        Ok(done) => done.map(drop).context("it ended meanwhile"),
        Err(_) => bail!("it did not confirm within {} s", CONFIRM_TIMEOUT.as_secs()),
    }
}

/// Reads settings in the launcher, which has one thread and no runtime. `None` when the supervisor is
/// gone.
pub(super) fn read_settings_blocking(pipe: &OwnedFd) -> Option<ChildSettings> {
    let mut pipe = File::from(pipe.try_clone().ok()?);
    let mut length = [0; 4];
    pipe.read_exact(&mut length).ok()?;
    let mut bytes = vec![0; parse_length(length).ok()?];
    pipe.read_exact(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Reads settings in the server. Fails when the supervisor is gone.
pub(super) async fn read_settings(pipe: &mut Receiver) -> Result<ChildSettings> {
    let mut length = [0; 4];
    pipe.read_exact(&mut length).await?;
    let mut bytes = vec![0; parse_length(length)?];
    pipe.read_exact(&mut bytes).await?;
    Ok(serde_json::from_slice(&bytes)?)
}

fn parse_length(length: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_le_bytes(length);
    if length > MAX_SETTINGS_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    usize::try_from(length).map_err(io::Error::other)
}

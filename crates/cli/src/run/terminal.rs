//! Our own terminal: its size, and raw mode while the command inside uses it.

use anyhow::Result;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Columns and rows.
pub(super) fn terminal_size() -> Result<(u16, u16)> {
    let size = tcgetwinsize(std::io::stdin())?;
    Ok((size.ws_col.max(1), size.ws_row.max(1)))
}

/// Raw mode until it is dropped.
pub(super) struct RawTerminal(Termios);

impl RawTerminal {
    pub(super) fn enter() -> Result<Self> {
        let before = tcgetattr(std::io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // The terminal may be gone; then there is nothing to restore.
        tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0).unwrap_or_default();
    }
}

//! `[output]`: how much output of commands is kept, and how long a command waits for its reader.

use std::time::Duration;

use anyhow::{Result, bail};
use domain::{Bytes, OutputRetention};
use serde::{Deserialize, Serialize};

use super::quantity;
use super::raw::RawOutput;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct OutputSettings {
    /// How many bytes are kept of a command whose caller does not say.
    #[serde(with = "quantity")]
    pub kept: Bytes,
    /// The maximum that a caller may ask to be kept.
    #[serde(with = "quantity")]
    pub max_kept: Bytes,
    /// A reader that takes no byte for this long no longer holds its command back.
    pub stall_timeout: Duration,
}

impl OutputSettings {
    pub(crate) fn to_service_settings(self) -> service::OutputSettings {
        service::OutputSettings {
            retention: OutputRetention::with_total_size(self.kept),
            max_kept: self.max_kept,
            stall_limit: self.stall_timeout,
        }
    }
}

pub(super) fn check_output(raw: &RawOutput) -> Result<OutputSettings> {
    let kept = super::parse_bytes_or("output.kept", raw.kept.as_ref(), Bytes::from_mib(16))?;
    let default_max = Bytes::from_mib(256).max(kept);
    let max_kept = super::parse_bytes_or("output.max_kept", raw.max_kept.as_ref(), default_max)?;
    if kept > max_kept {
        bail!("`output.kept` ({kept}) is more than `output.max_kept` ({max_kept})");
    }
    let stall_timeout = super::parse_duration_or("output.stall_timeout", raw.stall_timeout.as_ref(), 10)?;
    Ok(OutputSettings { kept, max_kept, stall_timeout })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_size_is_sixteen_mebibytes_of_which_one_is_the_beginning() {
        let settings = check_output(&RawOutput::default()).expect("defaults are right").to_service_settings();
        assert_eq!(settings.retention, OutputRetention::default());
        assert_eq!(settings.stall_limit, Duration::from_secs(10));
    }

    #[test]
    fn default_size_beyond_the_maximum_is_refused() {
        let raw: RawOutput = toml::from_str("kept = \"2m\"\nmax_kept = \"1m\"").expect("it is TOML");
        assert!(check_output(&raw).is_err());
        let raw: RawOutput = toml::from_str("kept = \"1g\"").expect("it is TOML");
        assert_eq!(check_output(&raw).expect("it is right").max_kept, Bytes(1 << 30));
    }
}

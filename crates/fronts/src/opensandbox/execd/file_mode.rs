//! Permission bits in this API's notation: the octal digits read as a decimal number, so that `0644`
//! is the number 644.

use serde::Deserialize;
use service::FileAttributes;

/// Converts from this notation; `None` if a digit is not octal or there are more than four.
pub(super) fn from_decimal(written: u32) -> Option<u32> {
    let octal = u32::from_str_radix(&written.to_string(), 8).ok()?;
    (octal <= 0o7777).then_some(octal)
}

pub(super) fn to_decimal(mode: u32) -> u32 {
    format!("{:o}", mode & 0o7777).parse().expect("octal digits are decimal digits")
}

/// The attributes that a client may set on a file or directory.
#[derive(Default, Deserialize)]
pub(super) struct FilePermissions {
    mode: Option<u32>,
    owner: Option<String>,
    group: Option<String>,
}

impl FilePermissions {
    /// Converts to attributes; zero and absent mean "unchanged, or the default".
    pub(super) fn into_attributes(self) -> Result<FileAttributes, String> {
        let mode = self.mode.filter(|mode| *mode != 0);
        let wrong =
            |written: u32| format!("`{written}` is not a valid mode: write its octal digits, such as 644");
        let mode = mode.map(|written| from_decimal(written).ok_or_else(|| wrong(written))).transpose()?;
        let named = |name: Option<String>| name.filter(|name| !name.is_empty());
        Ok(FileAttributes { mode, owner: named(self.owner), group: named(self.group) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn modes_are_converted_from_octal_digits() {
        for (written, mode) in [(644, 0o644), (755, 0o755), (1777, 0o1777), (7, 0o7), (4755, 0o4755)] {
            assert_eq!(from_decimal(written), Some(mode), "{written}");
            assert_eq!(to_decimal(mode), written);
        }
        for written in [8, 689, 17777, u32::MAX] {
            assert_eq!(from_decimal(written), None, "{written}");
        }
    }

    proptest! {
        #[test]
        fn every_mode_round_trips(mode in 0u32..=0o7777) {
            prop_assert_eq!(from_decimal(to_decimal(mode)), Some(mode));
        }
    }
}

//! Files of the host that sandboxes of the image `host` do not see.

use std::path::PathBuf;

use super::HostCheck;
use crate::images;

/// The largest number of paths in the report.
const MAX_PATHS: usize = 100;

/// Lists the paths below `/usr` that not everyone may read, which are hidden inside.
pub(super) fn check_hidden_files() -> HostCheck {
    const NAME: &str = "hidden files";
    let listed = images::host_image_trees().and_then(|image| images::list_hidden_paths(&image));
    match listed {
        Ok(paths) => HostCheck::ok(NAME, describe_paths(&paths)),
        Err(error) => HostCheck::weaker(
            NAME,
            format!(
                "{error}: {}",
                std::error::Error::source(&error).map_or_else(String::new, ToString::to_string)
            ),
            "the image `host` cannot be used",
        ),
    }
}

fn describe_paths(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().take(MAX_PATHS).map(|path| path.display().to_string()).collect();
    let rest = paths.len() - shown.len();
    match (paths.len(), rest) {
        (0, _) => "all of /usr is world-readable".to_owned(),
        (_, 0) => shown.join(", "),
        (_, rest) => format!("{} and {rest} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(describe_paths(&[]), "all of /usr is world-readable");
        assert_eq!(describe_paths(&[PathBuf::from("/usr/a"), PathBuf::from("/usr/b")]), "/usr/a, /usr/b");
        let many = vec![PathBuf::from("/usr/a"); MAX_PATHS + 7];
        assert!(describe_paths(&many).ends_with("/usr/a and 7 more"));
    }
}

//! Files of the host that sandboxes of the image `host` do not see.

use super::HostCheck;
use crate::images;

/// The largest number of paths in the report as text; the one in JSON has all.
const MAX_TEXT_PATHS: usize = 100;

/// Lists the paths below `/usr` that not everyone may read, which are hidden inside.
pub(super) fn check_hidden_files() -> HostCheck {
    const NAME: &str = "hidden files";
    let listed = images::host_image_trees().and_then(|image| images::list_hidden_paths(&image));
    match listed {
        Ok(paths) => {
            let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            HostCheck { paths: paths.clone(), ..HostCheck::ok(NAME, describe_paths(&paths)) }
        }
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

fn describe_paths(paths: &[String]) -> String {
    let shown = &paths[..paths.len().min(MAX_TEXT_PATHS)];
    let rest = paths.len() - shown.len();
    match (paths.len(), rest) {
        (0, _) => "all of /usr is world-readable".to_owned(),
        (_, 0) => shown.join(", "),
        (_, rest) => format!("{} and {rest} more, listed by `coracle --json doctor`", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_in_text() {
        assert_eq!(describe_paths(&[]), "all of /usr is world-readable");
        assert_eq!(describe_paths(&["/usr/a".to_owned(), "/usr/b".to_owned()]), "/usr/a, /usr/b");
        let many = vec!["/usr/a".to_owned(); MAX_TEXT_PATHS + 7];
        assert!(describe_paths(&many).ends_with("/usr/a and 7 more, listed by `coracle --json doctor`"));
    }
}

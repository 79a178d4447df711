//! The package index of the test internet: one Python package, for `pip install`.

use std::io::{Cursor, Write};
use std::sync::OnceLock;

use zip::write::SimpleFileOptions;

/// What pip installs from the test internet, and what its only module prints.
pub const PACKAGE_NAME: &str = "coracle-test-package";
pub const PACKAGE_GREETING: &str = "installed from the test internet";

const WHEEL_PATH: &str = "/files/coracle_test_package-1.0-py3-none-any.whl";

/// The page of the index at this path, with its content type.
pub(super) fn find_page(path: &str) -> Option<(&'static str, Vec<u8>)> {
    if path == WHEEL_PATH {
        return Some(("application/octet-stream", wheel().to_vec()));
    }
    if path.trim_end_matches('/') == format!("/simple/{PACKAGE_NAME}") {
        let name = WHEEL_PATH.rsplit('/').next().expect("a path has parts");
        let page = format!("<!DOCTYPE html><html><body><a href=\"{WHEEL_PATH}\">{name}</a></body></html>");
        return Some(("text/html", page.into_bytes()));
    }
    None
}

/// The package as a wheel: a zip archive with its metadata; see PEP 427.
fn wheel() -> &'static [u8] {
    static WHEEL: OnceLock<Vec<u8>> = OnceLock::new();
    WHEEL.get_or_init(|| {
        const ABOUT: &str = "coracle_test_package-1.0.dist-info";
        let files = [
            ("coracle_test_package.py".to_owned(), format!("print('{PACKAGE_GREETING}')\n")),
            (
                format!("{ABOUT}/METADATA"),
                format!("Metadata-Version: 2.1\nName: {PACKAGE_NAME}\nVersion: 1.0\n"),
            ),
            (
                format!("{ABOUT}/WHEEL"),
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n".to_owned(),
            ),
            (
                format!("{ABOUT}/RECORD"),
                format!("coracle_test_package.py,,\n{ABOUT}/METADATA,,\n{ABOUT}/WHEEL,,\n{ABOUT}/RECORD,,\n"),
            ),
        ];
        let mut archive = zip::ZipWriter::new(Cursor::new(Vec::new()));
        for (path, text) in files {
            archive.start_file(path, SimpleFileOptions::default()).expect("memory can be written");
            archive.write_all(text.as_bytes()).expect("memory can be written");
        }
        archive.finish().expect("memory can be written").into_inner()
    })
}

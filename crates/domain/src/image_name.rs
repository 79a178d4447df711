//! The names of images.

/// The image that is made from the files of the host itself.
pub const HOST_IMAGE: &str = "host";

/// Splits off the tag of a name. A colon before a slash belongs to a port.
pub fn split_image_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (name, None),
    }
}

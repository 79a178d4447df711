//! Parameters of a request: those of its query, with form decoding and repeated names, and those of
//! its path.

use axum::extract::{FromRequestParts, RawPathParams};
use http::request::Parts;

/// The decoded pairs of a query, in order. A `+` is a space.
pub(crate) struct QueryParams(Vec<(String, String)>);

impl QueryParams {
    pub(crate) fn from_uri(uri: &http::Uri) -> Self {
        Self(form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect())
    }

    /// Returns the first value of a name.
    pub(crate) fn first(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
    }

    /// Whether a value is true; absent, empty and unknown values are false.
    pub(crate) fn is_on(&self, name: &str) -> bool {
        self.first(name).is_some_and(|value| matches!(value, "true" | "True" | "TRUE" | "1"))
    }

    /// Parses a number; `None` if absent or empty.
    pub(crate) fn parse_number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, String> {
        match self.first(name).filter(|text| !text.is_empty()) {
            None => Ok(None),
            Some(text) => {
                text.parse().map(Some).or(Err(format!("`{name}` is not a number or is out of range")))
            }
        }
    }
}

/// Returns a path parameter. One that is not valid text is returned as empty, which matches nothing.
pub(crate) async fn path_param(parts: &mut Parts, name: &str) -> String {
    let params = RawPathParams::from_request_parts(parts, &()).await.ok();
    let found = params.iter().flatten().find(|(key, _)| *key == name);
    found.map(|(_, value)| value.to_owned()).unwrap_or_default()
}

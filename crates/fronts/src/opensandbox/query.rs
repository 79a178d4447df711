//! The filter and the page of a list request.

use std::collections::BTreeMap;

use domain::Phase;
use http::StatusCode;

use super::problem::Problem;
use super::types::state_name;
use crate::kit::query::QueryParams;

const MAX_PAGE_SIZE: usize = 200;

/// The filter and page of a list request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ListQuery {
    states: Vec<String>,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) page: usize,
    pub(super) page_size: usize,
}

impl ListQuery {
    pub(super) fn parse(query: &QueryParams) -> Result<Self, Problem> {
        let (page, page_size) = parse_page(query)?;
        let metadata = query.first("metadata").map(parse_metadata).transpose()?.unwrap_or_default();
        Ok(Self { states: query.all("state"), metadata, page, page_size })
    }

    pub(super) fn offset(&self) -> usize {
        (self.page - 1).saturating_mul(self.page_size)
    }

    pub(super) fn includes_phase(&self, phase: Phase) -> bool {
        self.states.is_empty()
            || self.states.iter().any(|wanted| wanted.eq_ignore_ascii_case(state_name(phase)))
    }
}

/// Parses the page number and page size.
pub(super) fn parse_page(query: &QueryParams) -> Result<(usize, usize), Problem> {
    let page = query.parse_number("page").map_err(Problem::invalid)?.unwrap_or(1);
    let page_size = query.parse_number("pageSize").map_err(Problem::invalid)?.unwrap_or(20);
    if page < 1 || !(1..=MAX_PAGE_SIZE).contains(&page_size) {
        let message = format!("`page` must be at least 1 and `pageSize` from 1 to {MAX_PAGE_SIZE}");
        return Err(Problem::invalid(message));
    }
    Ok((page, page_size))
}

/// Parses the value of `metadata`, which is itself a form-encoded list of pairs. Some clients encode
/// the inner values and some do not; a form decoder accepts both.
fn parse_metadata(text: &str) -> Result<BTreeMap<String, String>, Problem> {
    let wrong = |part: &str| {
        let message = format!("`{part}` in `metadata` is not of the form key=value");
        Problem::new(StatusCode::BAD_REQUEST, "INVALID_METADATA_FORMAT", message)
    };
    let parts = || text.split('&').filter(|part| !part.is_empty());
    if let Some(part) = parts().find(|part| part.find('=').is_none_or(|at| at == 0)) {
        return Err(wrong(part));
    }
    Ok(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn listing(query: &str) -> Result<ListQuery, Problem> {
        ListQuery::parse(&QueryParams::from_uri(&format!("/sandboxes?{query}").parse().unwrap()))
    }

    fn metadata(query: &str) -> Vec<(String, String)> {
        listing(query).unwrap().metadata.into_iter().collect()
    }

    #[test]
    fn inner_values_may_be_encoded_or_not() {
        let expected = [("a".to_owned(), "b c".to_owned()), ("d".to_owned(), "e&f".to_owned())];
        assert_eq!(metadata("metadata=a%3Db%2520c%26d%3De%2526f"), expected);
        assert_eq!(metadata("metadata=a%3Db+c%26d%3Dx")[0], expected[0]);
        assert_eq!(metadata("metadata=a%3Db%20c"), expected[..1]);
        assert_eq!(metadata("metadata="), []);
    }

    #[test]
    fn fragment_without_a_pair_is_refused() {
        for query in ["metadata=a", "metadata=a%3Db%26c", "metadata=%3Db"] {
            assert_eq!(listing(query).unwrap_err().code, "INVALID_METADATA_FORMAT", "{query}");
        }
    }

    #[test]
    fn pages_are_bounded() {
        for query in ["page=0", "page=-1", "page=x", "pageSize=0", "pageSize=201"] {
            assert_eq!(listing(query).unwrap_err().status, StatusCode::BAD_REQUEST, "{query}");
        }
        assert_eq!(listing("page=3&pageSize=7").unwrap().offset(), 14);
        assert_eq!(listing("page=18446744073709551615&pageSize=200").unwrap().offset(), usize::MAX);
    }

    #[test]
    fn states_are_alternatives_and_case_insensitive() {
        let listing = listing("state=running&state=PAUSED").unwrap();
        assert!(listing.includes_phase(Phase::Running) && listing.includes_phase(Phase::Paused));
        assert!(!listing.includes_phase(Phase::Starting));
    }

    proptest! {
        #[test]
        fn any_pairs_survive_double_encoding(pairs in prop::collection::btree_map(".+", ".*", 0..5)) {
            let mut inner = form_urlencoded::Serializer::new(String::new());
            inner.extend_pairs(&pairs);
            let mut outer = form_urlencoded::Serializer::new(String::new());
            outer.append_pair("metadata", &inner.finish());
            prop_assert_eq!(listing(&outer.finish()).unwrap().metadata, pairs);
        }
    }
}

//! Who may do what: API keys, the operator, quotas and tokens.

pub(crate) mod api_keys;
pub(crate) mod operator;
pub(crate) mod quota;
pub(crate) mod tokens;

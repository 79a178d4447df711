//! The durable copy of what the service knows.

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StoreError(String);

impl StoreError {
    pub(crate) fn is_full(&self) -> bool {
        false
    }
}

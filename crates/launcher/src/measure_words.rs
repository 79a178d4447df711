//! Measures in messages: each is a pair of its name and its words, as clients read them.

use backend::{EnforcedMeasures, Measure};
use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(measures: &[Measure], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(measures.iter().map(|measure| (measure.name(), measure.words())))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EnforcedMeasures, D::Error> {
    let pairs = Vec::<(String, String)>::deserialize(deserializer)?;
    Ok(pairs.iter().map(|(name, words)| Measure::from_words(name, words)).collect())
}

//! Quantities as bare numbers, in the copy of the settings that the parts of a server get. The types of
//! `domain` are not serialisable, so a field names this module: `#[serde(with = "quantity")]`.

use domain::{Bytes, MilliCpus};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A quantity that is written as a number.
pub(super) trait AsNumber {
    type Number: Serialize + for<'a> Deserialize<'a>;

    fn to_number(&self) -> Self::Number;

    fn from_number(number: Self::Number) -> Self;
}

impl AsNumber for Bytes {
    type Number = u64;

    fn to_number(&self) -> u64 {
        self.0
    }

    fn from_number(number: u64) -> Self {
        Self(number)
    }
}

impl AsNumber for MilliCpus {
    type Number = u32;

    fn to_number(&self) -> u32 {
        self.0
    }

    fn from_number(number: u32) -> Self {
        Self(number)
    }
}

impl<Q: AsNumber> AsNumber for Option<Q> {
    type Number = Option<Q::Number>;

    fn to_number(&self) -> Self::Number {
        self.as_ref().map(Q::to_number)
    }

    fn from_number(number: Self::Number) -> Self {
        number.map(Q::from_number)
    }
}

pub(super) fn serialize<Q: AsNumber, S: Serializer>(quantity: &Q, serializer: S) -> Result<S::Ok, S::Error> {
    quantity.to_number().serialize(serializer)
}

pub(super) fn deserialize<'a, Q: AsNumber, D: Deserializer<'a>>(deserializer: D) -> Result<Q, D::Error> {
    Q::Number::deserialize(deserializer).map(Q::from_number)
}

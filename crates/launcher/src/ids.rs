//! Ids in messages and records. They become parts of paths, and the server, which faces the network, is not
//! trusted, so a message with anything else in place of an id cannot be read at all.

use std::fmt::Display;

use domain::{SandboxId, SnapshotId, VolumeId};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An id with its checked text form. Ids are types of `domain`, which knows no serialisation.
pub(crate) trait IdText: Sized {
    fn from_text(text: &str) -> Result<Self, impl Display>;
    fn as_text(&self) -> &str;
}

macro_rules! id_text {
    ($($id:ty),*) => {$(
        impl IdText for $id {
            fn from_text(text: &str) -> Result<Self, impl Display> {
                Self::parse(text)
            }

            fn as_text(&self) -> &str {
                self.as_str()
            }
        }
    )*};
}

id_text!(SandboxId, SnapshotId, VolumeId);

/// An id inside a list, an option or a pair.
struct CheckedId<T>(T);

impl<T: IdText> Serialize for CheckedId<&T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.as_text())
    }
}

impl<'de, T: IdText> Deserialize<'de> for CheckedId<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        T::from_text(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

pub(crate) fn serialize<T: IdText, S: Serializer>(id: &T, serializer: S) -> Result<S::Ok, S::Error> {
    CheckedId(id).serialize(serializer)
}

pub(crate) fn deserialize<'de, T: IdText, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    CheckedId::deserialize(deserializer).map(|checked| checked.0)
}

/// An id that may be absent.
pub(crate) mod optional {
    use super::*;

    pub(crate) fn serialize<T: IdText, S: Serializer>(
        id: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        id.as_ref().map(CheckedId).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: IdText, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        let checked = Option::<CheckedId<T>>::deserialize(deserializer)?;
        Ok(checked.map(|checked| checked.0))
    }
}

/// A list of ids.
pub(crate) mod list {
    use super::*;

    pub(crate) fn serialize<T: IdText, S: Serializer>(ids: &[T], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ids.iter().map(CheckedId))
    }

    pub(crate) fn deserialize<'de, T: IdText, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<T>, D::Error> {
        let checked = Vec::<CheckedId<T>>::deserialize(deserializer)?;
        Ok(checked.into_iter().map(|checked| checked.0).collect())
    }
}

/// A list of ids, each with a number.
pub(crate) mod numbered {
    use super::*;

    pub(crate) fn serialize<T: IdText, S: Serializer>(
        ids: &[(T, u64)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(ids.iter().map(|(id, number)| (CheckedId(id), number)))
    }

    pub(crate) fn deserialize<'de, T: IdText, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(T, u64)>, D::Error> {
        let checked = Vec::<(CheckedId<T>, u64)>::deserialize(deserializer)?;
        Ok(checked.into_iter().map(|(checked, number)| (checked.0, number)).collect())
    }
}

/// An id that begins with `name`, for tests.
#[cfg(test)]
pub(crate) fn test_id(name: &str) -> SandboxId {
    SandboxId::parse(&format!("{name:x<20}")).expect("a short name of letters and digits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Message {
        #[serde(with = "super")]
        sandbox: SandboxId,
        #[serde(default, with = "super::optional")]
        snapshot: Option<SnapshotId>,
        #[serde(default, with = "super::list")]
        volumes: Vec<VolumeId>,
    }

    #[test]
    fn message_with_a_path_in_place_of_an_id_cannot_be_read() {
        let read = serde_json::from_str::<Message>;
        let good = read(r#"{"sandbox":"abcdefghij0123456789","volumes":["vbcdefghij0123456789"]}"#);
        let good = good.expect("all ids are valid");
        assert_eq!((good.sandbox.as_str(), good.volumes.len()), ("abcdefghij0123456789", 1));
        assert_eq!(good.snapshot, None);
        for wrong in [
            r#"{"sandbox":"../../../../tmp/xyz0"}"#,
            r#"{"sandbox":""}"#,
            r#"{"sandbox":"abcdefghij0123456789","snapshot":"../planted"}"#,
            r#"{"sandbox":"abcdefghij0123456789","volumes":["vbcdefghij0123456789","../boxes"]}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}

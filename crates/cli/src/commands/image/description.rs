//! An image as it is printed.

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use jiff::Timestamp;
use launcher::images::{HOST_IMAGE, ImageBase, ImageRecord};
use serde::{Deserialize, Serialize};

use crate::output::format_bytes;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ImageDescription {
    pub name: String,
    pub digest: Option<String>,
    pub bytes: u64,
    /// From the bottom up.
    pub layers: Vec<String>,
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    env: BTreeMap<String, String>,
    user: Option<String>,
    workdir: Option<String>,
    last_used: Option<String>,
    /// Whether its layers are on top of the files of this host.
    above_host: bool,
}

impl ImageDescription {
    /// The image that consists of this host.
    pub(super) fn host() -> Self {
        Self { name: HOST_IMAGE.to_owned(), ..Self::default() }
    }

    pub(super) fn from_record(record: &ImageRecord, used: Option<SystemTime>) -> Self {
        let time = |time: SystemTime| Timestamp::try_from(time).ok().map(|time| time.to_string());
        let config = record.config.clone();
        Self {
            name: record.name.clone(),
            digest: record.manifest.as_ref().map(ToString::to_string),
            bytes: record.bytes(),
            layers: record.layers.iter().map(|layer| layer.digest.to_string()).collect(),
            entrypoint: config.entrypoint,
            cmd: config.cmd,
            env: config.env.into_iter().collect(),
            user: config.user,
            workdir: config.workdir,
            last_used: used.and_then(time),
            above_host: record.base == ImageBase::Host,
        }
    }

    /// The part of the digest that people compare.
    pub(super) fn short_digest(&self) -> String {
        let digits = self.digest.as_ref().and_then(|digest| digest.get(7..19));
        digits.unwrap_or("-").to_owned()
    }

    pub(super) fn last_used(&self) -> String {
        let seconds = self.last_used.as_ref().and_then(|time| time.get(..19));
        seconds.map_or_else(|| "-".to_owned(), |time| time.replace('T', " "))
    }
}

impl fmt::Display for ImageDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        writeln!(f, "name:        {}", self.name)?;
        writeln!(f, "digest:      {}", or_none(&self.digest))?;
        writeln!(f, "size:        {}", format_bytes(self.bytes))?;
        writeln!(f, "entrypoint:  {:?}", self.entrypoint)?;
        writeln!(f, "cmd:         {:?}", self.cmd)?;
        writeln!(f, "user:        {}", or_none(&self.user))?;
        writeln!(f, "workdir:     {}", or_none(&self.workdir))?;
        if self.above_host {
            writeln!(f, "base:        this host's files, as they are when a sandbox is made")?;
        }
        for (name, value) in &self.env {
            writeln!(f, "env:         {name}={value}")?;
        }
        for (place, layer) in self.layers.iter().enumerate() {
            let end = if place + 1 == self.layers.len() { "" } else { "\n" };
            write!(f, "layer:       {layer}{end}")?;
        }
        Ok(())
    }
}

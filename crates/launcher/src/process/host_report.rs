//! The software in the image `host`, as the launcher reports it to the server.

use backend::{HostProgram, HostSoftware, OsRelease};
use serde::{Deserialize, Serialize};

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct HostSoftwareReport {
    pub os_release: Option<OsReleaseReport>,
    pub python: Option<ProgramReport>,
    pub node: Option<ProgramReport>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct OsReleaseReport {
    pub id: String,
    pub version_id: Option<String>,
    pub codename: Option<String>,
    pub name: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ProgramReport {
    pub version: Option<String>,
}

impl From<HostSoftware> for HostSoftwareReport {
    fn from(software: HostSoftware) -> Self {
        let program = |HostProgram { version }| ProgramReport { version };
        let release =
            |OsRelease { id, version_id, codename, name }| OsReleaseReport { id, version_id, codename, name };
        Self {
            os_release: software.os_release.map(release),
            python: software.python.map(program),
            node: software.node.map(program),
        }
    }
}

impl From<HostSoftwareReport> for HostSoftware {
    fn from(report: HostSoftwareReport) -> Self {
        let program = |ProgramReport { version }| HostProgram { version };
        let release =
            |OsReleaseReport { id, version_id, codename, name }| OsRelease { id, version_id, codename, name };
        Self {
            os_release: report.os_release.map(release),
            python: report.python.map(program),
            node: report.node.map(program),
        }
    }
}

//! Resolves user input to ids: sandboxes, snapshots, volumes and keys by id, by name, or by the
//! beginning of an id.
//!
//! The API knows ids only, so this is done here. A whole id is accepted without asking the server, so
//! commands with ids need only one request. A name that equals the text is preferred to ids that begin
//! with it. A name must be written in full: names often begin alike, and `coracle rm build` must never
//! remove `build-linux` because `build` is already gone.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow};
use domain::{ProcessId, SandboxId, SnapshotId};
use http::StatusCode;
use serde::Deserialize;

use super::http::{self as web};
use super::lifecycle::ServerClient;
use crate::output::WithHint;

/// How many candidates an error lists.
const MAX_LISTED_CANDIDATES: usize = 10;

/// A sandbox as it is written on the command line: an id, a name or the beginning of an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxRef(String);

/// A snapshot as it is written on the command line: an id, a name or the beginning of an id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotRef(String);

/// The owners whose objects a command is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum OwnerScope {
    /// The caller's own.
    #[default]
    Own,
    /// One owner's; for the operator.
    Owner(String),
    /// Every owner's; for the operator.
    All,
}

/// The name of a volume and, for the operator, its owner; together they identify it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeKey {
    pub name: String,
    pub owner: Option<String>,
}

/// Something that a text may refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolveCandidate {
    pub id: String,
    pub name: Option<String>,
    pub owner: Option<String>,
}

/// How a text matches the candidates.
#[derive(Debug, PartialEq, Eq)]
enum CandidateMatch<'a> {
    One(&'a ResolveCandidate),
    Nothing,
    Several(Vec<&'a ResolveCandidate>),
}

impl FromStr for SandboxRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            Err("an id or a name cannot be empty".to_owned())
        } else {
            Ok(Self(text.to_owned()))
        }
    }
}

impl FromStr for SnapshotRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            Err("an id or a name cannot be empty".to_owned())
        } else {
            Ok(Self(text.to_owned()))
        }
    }
}

impl fmt::Display for SandboxRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for SnapshotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl SandboxRef {
    /// The id, if the text is a whole one.
    pub(crate) fn exact_id(&self) -> Option<SandboxId> {
        SandboxId::parse(&self.0).ok()
    }
}

impl SnapshotRef {
    fn exact_id(&self) -> Option<SnapshotId> {
        SnapshotId::parse(&self.0).ok()
    }
}

impl OwnerScope {
    /// As query parameters of Coracle's own API.
    pub(super) fn query_parameters(&self) -> Vec<(&str, &str)> {
        match self {
            Self::Own => vec![("mine", "true")],
            Self::Owner(name) => vec![("owner", name)],
            Self::All => vec![("owner", "*")],
        }
    }
}

#[derive(Deserialize)]
struct CandidatePage {
    sandboxes: Vec<CandidateItem>,
}

#[derive(Deserialize)]
struct CandidateItem {
    id: String,
    owner: String,
    #[serde(default)]
    name: Option<String>,
}

impl ServerClient {
    /// The id of one of the caller's own sandboxes.
    pub(crate) async fn resolve_sandbox(&self, reference: &SandboxRef) -> Result<SandboxId> {
        self.resolve_sandbox_in(reference, &OwnerScope::Own).await
    }

    /// The id of a sandbox among those of `scope`.
    pub(crate) async fn resolve_sandbox_in(
        &self,
        reference: &SandboxRef,
        scope: &OwnerScope,
    ) -> Result<SandboxId> {
        if let Some(id) = reference.exact_id() {
            return Ok(id);
        }
        let found = pick_candidate(&reference.0, &self.sandbox_candidates(scope).await?, &SANDBOX_KIND)?;
        found
            .ok_or_else(|| anyhow!("no sandbox has the id or name `{reference}`"))
            .with_hint(self.sandboxes_hint(scope))
    }

    /// The ids of several sandboxes, and the references that were not found. Requests the list at most
    /// once. An ambiguous reference is an error.
    pub(crate) async fn resolve_sandboxes(
        &self,
        references: &[SandboxRef],
        scope: &OwnerScope,
    ) -> Result<(Vec<SandboxId>, Vec<String>)> {
        let inexact = references.iter().any(|reference| reference.exact_id().is_none());
        let candidates = if inexact { self.sandbox_candidates(scope).await? } else { Vec::new() };
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for reference in references {
            let id = match reference.exact_id() {
                Some(id) => Some(id),
                None => pick_candidate(&reference.0, &candidates, &SANDBOX_KIND)?,
            };
            match id {
                Some(id) if found.contains(&id) => {}
                Some(id) => found.push(id),
                None => missing.push(reference.to_string()),
            }
        }
        Ok((found, missing))
    }

    /// The id of one of the caller's own snapshots.
    pub(crate) async fn resolve_snapshot(&self, reference: &SnapshotRef) -> Result<SnapshotId> {
        self.resolve_snapshot_in(reference, &OwnerScope::Own).await
    }

    pub(crate) async fn resolve_snapshot_in(
        &self,
        reference: &SnapshotRef,
        scope: &OwnerScope,
    ) -> Result<SnapshotId> {
        if let Some(id) = reference.exact_id() {
            return Ok(id);
        }
        let found = self.resolve_snapshots(std::slice::from_ref(reference), scope).await?.0.pop();
        found
            .ok_or_else(|| anyhow!("no snapshot has the id or name `{reference}`"))
            .with_hint(SNAPSHOT_KIND.hint)
    }

    /// As [`ServerClient::resolve_sandboxes`], for snapshots.
    pub(crate) async fn resolve_snapshots(
        &self,
        references: &[SnapshotRef],
        scope: &OwnerScope,
    ) -> Result<(Vec<SnapshotId>, Vec<String>)> {
        let inexact = references.iter().any(|reference| reference.exact_id().is_none());
        let candidates = if inexact { self.snapshot_candidates(scope).await? } else { Vec::new() };
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for reference in references {
            let id = match reference.exact_id() {
                Some(id) => Some(id),
                None => pick_candidate(&reference.0, &candidates, &SNAPSHOT_KIND)?,
            };
            match id {
                Some(id) if found.contains(&id) => {}
                Some(id) => found.push(id),
                None => missing.push(reference.to_string()),
            }
        }
        Ok((found, missing))
    }

    /// The ids of keys, and the texts that match none. An ambiguous text is an error.
    pub(crate) async fn resolve_keys(&self, texts: &[String]) -> Result<(Vec<String>, Vec<String>)> {
        let candidate =
            |key: super::KeyInfo| ResolveCandidate { id: key.id, name: None, owner: Some(key.owner) };
        let candidates: Vec<ResolveCandidate> = self.list_keys().await?.into_iter().map(candidate).collect();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for text in texts {
            match pick_candidate::<String>(text, &candidates, &KEY_KIND)? {
                Some(id) if found.contains(&id) => {}
                Some(id) => found.push(id),
                None => missing.push(text.clone()),
            }
        }
        Ok((found, missing))
    }

    async fn snapshot_candidates(&self, scope: &OwnerScope) -> Result<Vec<ResolveCandidate>> {
        if *scope == OwnerScope::Own {
            let candidate =
                |found: super::SnapshotInfo| ResolveCandidate { id: found.id, name: found.name, owner: None };
            return Ok(self.list_snapshots(None).await?.into_iter().map(candidate).collect());
        }
        let candidate = |found: super::OwnedSnapshot| ResolveCandidate {
            id: found.id,
            name: found.name,
            owner: Some(found.owner),
        };
        Ok(self.list_owned_snapshots(scope).await?.into_iter().map(candidate).collect())
    }

    /// The volume whose name or id is the text, or whose id begins with it.
    pub(crate) async fn resolve_volume(&self, text: &str, scope: &OwnerScope) -> Result<Option<VolumeKey>> {
        let volumes = self.list_volumes(scope).await?;
        let candidate = |volume: &super::VolumeInfo| ResolveCandidate {
            id: volume.id.clone(),
            name: Some(volume.name.clone()),
            owner: Some(volume.owner.clone()),
        };
        let candidates: Vec<ResolveCandidate> = volumes.iter().map(candidate).collect();
        let id = pick_candidate::<String>(text, &candidates, &VOLUME_KIND)?;
        let found = id.and_then(|id| volumes.into_iter().find(|volume| volume.id == id));
        Ok(found.map(|volume| VolumeKey { name: volume.name, owner: Some(volume.owner) }))
    }

    /// Finds one of the caller's own sandboxes, also by its whole id.
    pub(crate) async fn find_sandbox(&self, text: &str) -> Result<Option<ResolveCandidate>> {
        let candidates = self.sandbox_candidates(&OwnerScope::Own).await?;
        let id = pick_candidate::<String>(text, &candidates, &SANDBOX_KIND)?;
        Ok(candidates.into_iter().find(|candidate| Some(&candidate.id) == id.as_ref()))
    }

    /// The hint that says where sandboxes are listed, for an error about one that was not found.
    pub(crate) fn sandboxes_hint(&self, scope: &OwnerScope) -> &'static str {
        match scope {
            OwnerScope::Own if self.is_operator_socket() => {
                "the operators' socket needs --all-owners or --owner NAME; `coracle ls --all-owners` lists the sandboxes"
            }
            OwnerScope::Own => SANDBOX_KIND.hint,
            OwnerScope::Owner(_) | OwnerScope::All => "`coracle ls --all-owners` lists the sandboxes",
        }
    }

    /// Every sandbox that a text may refer to. A server that is not Coracle has no operator list, so the
    /// list of the OpenSandbox API is used.
    async fn sandbox_candidates(&self, scope: &OwnerScope) -> Result<Vec<ResolveCandidate>> {
        let mut parameters = vec![("usage", "false")];
        parameters.extend(scope.query_parameters());
        match self.operator_api().get(&format!("/sandboxes{}", web::encode_query(&parameters))).await {
            Ok(answer) => {
                let found: CandidatePage = web::read_json(answer).await?;
                let candidate = |item: CandidateItem| ResolveCandidate {
                    id: item.id,
                    name: item.name,
                    owner: Some(item.owner),
                };
                Ok(found.sandboxes.into_iter().map(candidate).collect())
            }
            Err(error) if super::failed_with_status(&error, StatusCode::NOT_FOUND) => {
                let candidate = |info: super::SandboxInfo| ResolveCandidate {
                    name: info.name().map(str::to_owned),
                    id: info.id,
                    owner: None,
                };
                Ok(self.list_sandboxes(&[]).await?.into_iter().map(candidate).collect())
            }
            Err(error) => Err(error),
        }
    }
}

/// The kind of object that is looked for, as messages name it.
pub(super) struct ObjectKind {
    singular: &'static str,
    plural: &'static str,
    hint: &'static str,
    /// Whether a name identifies one. The names of processes are their command texts, which do not.
    by_name: bool,
}

pub(super) const PROCESS_KIND: ObjectKind = ObjectKind {
    singular: "process",
    plural: "processes",
    hint: "`coracle ps --all SANDBOX` lists the processes",
    by_name: false,
};
const KEY_KIND: ObjectKind =
    ObjectKind { singular: "key", plural: "keys", hint: "`coracle key ls` lists the keys", by_name: false };
const SANDBOX_KIND: ObjectKind = ObjectKind {
    singular: "sandbox",
    plural: "sandboxes",
    hint: "`coracle ls` lists the sandboxes",
    by_name: true,
};
const SNAPSHOT_KIND: ObjectKind = ObjectKind {
    singular: "snapshot",
    plural: "snapshots",
    hint: "`coracle snapshot ls` lists the snapshots",
    by_name: true,
};
const VOLUME_KIND: ObjectKind = ObjectKind {
    singular: "volume",
    plural: "volumes",
    hint: "`coracle volume ls` lists the volumes",
    by_name: true,
};

/// An id as the API writes it.
pub(crate) trait ParseId: Sized {
    fn parse_id(text: &str) -> Result<Self>;
}

impl ParseId for SandboxId {
    fn parse_id(text: &str) -> Result<Self> {
        Self::parse(text).context("the server sent an id that is none")
    }
}

impl ParseId for SnapshotId {
    fn parse_id(text: &str) -> Result<Self> {
        Self::parse(text).context("the server sent an id that is none")
    }
}

impl ParseId for ProcessId {
    fn parse_id(text: &str) -> Result<Self> {
        Self::parse(text).context("the server sent an id that is none")
    }
}

impl ParseId for String {
    fn parse_id(text: &str) -> Result<Self> {
        Ok(text.to_owned())
    }
}

pub(super) fn pick_candidate<Id: ParseId>(
    text: &str,
    candidates: &[ResolveCandidate],
    kind: &ObjectKind,
) -> Result<Option<Id>> {
    match match_candidates(text, candidates, kind) {
        CandidateMatch::One(candidate) => Id::parse_id(&candidate.id).map(Some),
        CandidateMatch::Nothing => Ok(None),
        CandidateMatch::Several(meant) => {
            let listed: Vec<String> =
                meant.iter().take(MAX_LISTED_CANDIDATES).map(|one| one.describe()).collect();
            let more = meant.len().saturating_sub(MAX_LISTED_CANDIDATES);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let (count, plural) = (meant.len(), kind.plural);
            Err(anyhow!("`{text}` could mean {count} {plural}: {}{more}", listed.join(", "))).with_hint(
                format!(
                    "write more of the id{} of the {} that is meant",
                    if kind.by_name { ", or the whole name," } else { "" },
                    kind.singular
                ),
            )
        }
    }
}

fn match_candidates<'a>(
    text: &str,
    candidates: &'a [ResolveCandidate],
    kind: &ObjectKind,
) -> CandidateMatch<'a> {
    if text.is_empty() {
        return CandidateMatch::Nothing;
    }
    let name = |one: &'a ResolveCandidate| one.name.as_deref().filter(|_| kind.by_name);
    let named: Vec<&ResolveCandidate> = candidates.iter().filter(|one| name(one) == Some(text)).collect();
    let whole = candidates.iter().find(|one| one.id == text);
    let meant = match whole {
        _ if !named.is_empty() => named,
        Some(whole) => vec![whole],
        None => candidates.iter().filter(|one| one.id.starts_with(text)).collect(),
    };
    match meant[..] {
        [] => CandidateMatch::Nothing,
        [one] => CandidateMatch::One(one),
        _ => CandidateMatch::Several(meant),
    }
}

impl ResolveCandidate {
    fn describe(&self) -> String {
        let remarks: Vec<&str> = self.name.as_deref().into_iter().chain(self.owner.as_deref()).collect();
        if remarks.is_empty() { self.id.clone() } else { format!("{} ({})", self.id, remarks.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: &str, name: Option<&str>) -> ResolveCandidate {
        ResolveCandidate { id: id.to_owned(), name: name.map(str::to_owned), owner: None }
    }

    #[test]
    fn name_is_preferred_to_prefix_and_ambiguity_lists_candidates() {
        let all = [
            candidate("abcdefghijklmnopqrst", Some("web")),
            candidate("abxdefghijklmnopqrst", None),
            candidate("webdefghijklmnopqrst", Some("abc")),
        ];
        let found = |text| match_candidates(text, &all, &SANDBOX_KIND);
        assert_eq!(found("web"), CandidateMatch::One(&all[0]));
        assert_eq!(found("webd"), CandidateMatch::One(&all[2]));
        assert_eq!(found("abx"), CandidateMatch::One(&all[1]));
        assert_eq!((found("zzz"), found("")), (CandidateMatch::Nothing, CandidateMatch::Nothing));
        let error = pick_candidate::<SandboxId>("ab", &all, &SANDBOX_KIND).expect_err("two begin so");
        assert_eq!(
            error.to_string(),
            "`ab` could mean 2 sandboxes: abcdefghijklmnopqrst (web), abxdefghijklmnopqrst"
        );
    }

    #[test]
    fn name_prefix_does_not_match() {
        let all = [candidate("k1", Some("build-linux"))];
        assert_eq!(match_candidates("build", &all, &SANDBOX_KIND), CandidateMatch::Nothing);
        assert_eq!(match_candidates("build-linux", &all, &SANDBOX_KIND), CandidateMatch::One(&all[0]));
        assert_eq!(match_candidates("build-linux", &all, &PROCESS_KIND), CandidateMatch::Nothing);
        let all = [candidate("k1", Some("web")), candidate("m2", Some("web2")), candidate("webx", None)];
        assert_eq!(match_candidates("web", &all, &VOLUME_KIND), CandidateMatch::One(&all[0]));
        assert_eq!(match_candidates("webx", &all, &VOLUME_KIND), CandidateMatch::One(&all[2]));
    }

    #[test]
    fn equal_names_are_ambiguous() {
        let all = [candidate("a1", Some("daily")), candidate("b2", Some("daily"))];
        assert!(
            matches!(match_candidates("daily", &all, &SNAPSHOT_KIND), CandidateMatch::Several(meant) if meant.len() == 2)
        );
    }

    #[test]
    fn whole_id_is_exact() {
        let exact = |text: &str| text.parse::<SandboxRef>().expect("it is not empty").exact_id().is_some();
        assert!(exact("abcdefghijklmnopqrst"));
        assert!(!exact("abcdefghijklmnopqrs") && !exact("web"));
        assert!("".parse::<SandboxRef>().is_err());
    }
}

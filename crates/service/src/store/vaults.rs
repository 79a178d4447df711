//! Vaults as rows. Values are sealed; the database never contains an open one.

use backend::VaultAuthority;
use domain::{
    Binding, BindingAuth, Credential, HeaderCredential, RequestMatch, SandboxId, SealedSecret, Substitution,
    SubstitutionSurface, Vault,
};
use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::StoreError;
use super::rows::to_json;
use crate::vaults::StoredVault;

#[derive(Serialize, Deserialize)]
struct VaultJson {
    revision: u64,
    credentials: Vec<CredentialJson>,
    bindings: Vec<BindingJson>,
}

#[derive(Serialize, Deserialize)]
struct CredentialJson {
    name: String,
    revision: u64,
    fits_header: bool,
    sealed: String,
}

#[derive(Serialize, Deserialize)]
struct BindingJson {
    name: String,
    hosts: Vec<String>,
    schemes: Vec<String>,
    methods: Vec<String>,
    paths: Vec<String>,
    auth: AuthJson,
    #[serde(default)]
    substitutions: Vec<SubstitutionJson>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AuthJson {
    Bearer(String),
    Basic(String),
    ApiKey(HeaderJson),
    CustomHeaders(Vec<HeaderJson>),
    Passthrough,
}

#[derive(Serialize, Deserialize)]
struct HeaderJson {
    header: String,
    credential: String,
}

#[derive(Serialize, Deserialize)]
struct SubstitutionJson {
    credential: String,
    placeholder: String,
    surfaces: Vec<SurfaceJson>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SurfaceJson {
    Path,
    Query,
    Header,
    Body,
}

/// A vault that this version cannot read is left out: its sandbox sends requests without secrets.
pub(super) fn read_vaults(connection: &Connection) -> Result<Vec<(SandboxId, StoredVault)>, StoreError> {
    let failed = |source| StoreError::Sqlite { action: "read the vaults", source };
    let mut statement = connection
        .prepare("SELECT sandbox, certificate, authority_key, vault FROM vaults")
        .map_err(failed)?;
    let rows = statement.query_map([], |row| {
        let authority =
            VaultAuthority { certificate: row.get(1)?, sealed_key: SealedSecret::new(row.get(2)?) };
        Ok((row.get::<_, String>(0)?, authority, row.get::<_, Option<String>>(3)?))
    });
    let mut vaults = Vec::new();
    for row in rows.map_err(failed)? {
        let (id, authority, text) = row.map_err(failed)?;
        let vault = text.as_deref().and_then(parse_vault);
        if text.is_some() && vault.is_none() {
            tracing::error!(
                sandbox = id,
                "failed to read a stored vault; its sandbox sends requests without secrets"
            );
        }
        let id = SandboxId::parse(&id).ok().ok_or(StoreError::NotOurs(id))?;
        vaults.push((id, StoredVault { authority, vault }));
    }
    Ok(vaults)
}

pub(super) fn write_vault(
    connection: &Connection,
    id: &SandboxId,
    stored: &StoredVault,
) -> Result<(), StoreError> {
    const SQL: &str =
        "INSERT OR REPLACE INTO vaults (sandbox, certificate, authority_key, vault) VALUES (?1, ?2, ?3, ?4)";
    let vault = stored.vault.as_ref().map(|vault| to_json(&VaultJson::from_domain(vault)));
    let VaultAuthority { certificate, sealed_key } = &stored.authority;
    let written = connection.execute(SQL, params![id.as_str(), certificate, sealed_key.as_str(), vault]);
    written.map(drop).map_err(|source| StoreError::Sqlite { action: "store a vault", source })
}

fn parse_vault(text: &str) -> Option<Vault<SealedSecret>> {
    let json: VaultJson = serde_json::from_str(text).ok()?;
    let credential = |one: CredentialJson| Credential {
        name: one.name,
        revision: one.revision,
        fits_header: one.fits_header,
        value: SealedSecret::new(one.sealed),
    };
    let bindings = json.bindings.into_iter().map(BindingJson::into_domain).collect::<Option<_>>()?;
    Vault::restore(json.revision, json.credentials.into_iter().map(credential).collect(), bindings).ok()
}

impl VaultJson {
    fn from_domain(vault: &Vault<SealedSecret>) -> Self {
        let credential = |one: &Credential<SealedSecret>| CredentialJson {
            name: one.name.clone(),
            revision: one.revision,
            fits_header: one.fits_header,
            sealed: one.value.as_str().to_owned(),
        };
        Self {
            revision: vault.revision(),
            credentials: vault.credentials().map(credential).collect(),
            bindings: vault.bindings().map(BindingJson::from_domain).collect(),
        }
    }
}

impl BindingJson {
    fn from_domain(binding: &Binding) -> Self {
        let request = &binding.request;
        Self {
            name: binding.name.clone(),
            hosts: request.hosts().iter().map(ToString::to_string).collect(),
            schemes: request.schemes().iter().map(ToString::to_string).collect(),
            methods: request.methods().to_vec(),
            paths: request.paths().iter().map(ToString::to_string).collect(),
            auth: AuthJson::from_domain(&binding.auth),
            substitutions: binding.substitutions.iter().map(SubstitutionJson::from_domain).collect(),
        }
    }

    fn into_domain(self) -> Option<Binding> {
        let request = RequestMatch::new(&self.hosts, &self.schemes, &self.methods, &self.paths, &[]).ok()?;
        let substitutions = self.substitutions.into_iter().map(SubstitutionJson::into_domain).collect();
        Binding::new(self.name, request, self.auth.into_domain(), substitutions).ok()
    }
}

impl AuthJson {
    fn from_domain(auth: &BindingAuth) -> Self {
        let header = |one: &HeaderCredential| HeaderJson {
            header: one.header.clone(),
            credential: one.credential.clone(),
        };
        match auth {
            BindingAuth::Bearer { credential } => Self::Bearer(credential.clone()),
            BindingAuth::Basic { credential } => Self::Basic(credential.clone()),
            BindingAuth::ApiKey(one) => Self::ApiKey(header(one)),
            BindingAuth::CustomHeaders(all) => Self::CustomHeaders(all.iter().map(header).collect()),
            BindingAuth::Passthrough => Self::Passthrough,
        }
    }

    fn into_domain(self) -> BindingAuth {
        let header = |one: HeaderJson| HeaderCredential { header: one.header, credential: one.credential };
        match self {
            Self::Bearer(credential) => BindingAuth::Bearer { credential },
            Self::Basic(credential) => BindingAuth::Basic { credential },
            Self::ApiKey(one) => BindingAuth::ApiKey(header(one)),
            Self::CustomHeaders(all) => BindingAuth::CustomHeaders(all.into_iter().map(header).collect()),
            Self::Passthrough => BindingAuth::Passthrough,
        }
    }
}

impl SubstitutionJson {
    fn from_domain(substitution: &Substitution) -> Self {
        let surface = |surface: &SubstitutionSurface| match surface {
            SubstitutionSurface::Path => SurfaceJson::Path,
            SubstitutionSurface::Query => SurfaceJson::Query,
            SubstitutionSurface::Header => SurfaceJson::Header,
            SubstitutionSurface::Body => SurfaceJson::Body,
        };
        Self {
            credential: substitution.credential.clone(),
            placeholder: substitution.placeholder.clone(),
            surfaces: substitution.surfaces.iter().map(surface).collect(),
        }
    }

    fn into_domain(self) -> Substitution {
        let surface = |surface| match surface {
            SurfaceJson::Path => SubstitutionSurface::Path,
            SurfaceJson::Query => SubstitutionSurface::Query,
            SurfaceJson::Header => SubstitutionSurface::Header,
            SurfaceJson::Body => SubstitutionSurface::Body,
        };
        Substitution {
            credential: self.credential,
            placeholder: self.placeholder,
            surfaces: self.surfaces.into_iter().map(surface).collect(),
        }
    }
}

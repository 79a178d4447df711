//! Credential vaults: how they are made, changed, stored and restored, and what never contains a value.

use std::sync::Arc;

use domain::{
    Binding, BindingAuth, ChangeSet, NetworkAccess, NetworkPolicy, NewCredential, PolicyAction, PolicyEdit,
    PolicyRule, RequestMatch, SandboxSpec, SecretText, VaultChanges, VaultError,
};

use super::{TestBench, plain};
use crate::{CreateSandboxRequest, Sandbox, ServiceError, VaultAccessError};

const CANARY: &str = "canary-5d41402abc4b2a76";

fn policy(names: &[&str]) -> NetworkPolicy {
    let rule = |name: &&str| PolicyRule { action: PolicyAction::Allow, target: name.parse().unwrap() };
    NetworkPolicy::new(names.iter().map(rule).collect(), PolicyAction::Deny).unwrap()
}

fn token(name: &str, value: &str) -> (String, SecretText) {
    (name.to_owned(), SecretText::new(value.to_owned()))
}

fn binding(name: &str, host: &str) -> Binding {
    let request = RequestMatch::new(&[host.to_owned()], &[], &[], &[], &[]).unwrap();
    let auth = BindingAuth::Bearer { credential: "token".to_owned() };
    Binding::new(name.to_owned(), request, auth, Vec::new()).unwrap()
}

fn adding(expected_revision: Option<u64>, name: &str, value: &str) -> VaultChanges<SecretText> {
    let (name, value) = token(name, value);
    let add = vec![NewCredential { name, fits_header: true, value }];
    let credentials = ChangeSet { add, ..ChangeSet::default() };
    VaultChanges { expected_revision, credentials, bindings: ChangeSet::default() }
}

impl TestBench {
    async fn with_proxy(&self) -> Sandbox {
        let policy = Some(Arc::new(policy(&["*.example.org"])));
        let spec = SandboxSpec { network: NetworkAccess::Filtered, policy, ..SandboxSpec::with_defaults() };
        let request = CreateSandboxRequest { spec, ..plain() };
        let sandbox = self.service.create_sandbox(&self.owner, request).await.unwrap();
        let certificate = self.sandbox(&sandbox.id).vault().enable_proxy().await.unwrap();
        assert!(certificate.contains("BEGIN CERTIFICATE"));
        sandbox
    }
}

#[tokio::test]
async fn vault_needs_a_credential_proxy() {
    let bench = TestBench::new().await;
    let sandbox = bench.service.create_sandbox(&bench.owner, plain()).await.unwrap();
    let reference = bench.sandbox(&sandbox.id);
    let vault = reference.vault();
    assert!(!vault.has_proxy());
    assert!(matches!(vault.create(Vec::new(), Vec::new()).await, Err(VaultAccessError::NoProxy(_))));
    assert!(matches!(vault.delete().await, Err(VaultAccessError::NoProxy(_))));
    assert!(matches!(vault.current().await, Err(VaultAccessError::NoVault(_))));
}

#[tokio::test]
async fn vault_is_sealed_applied_and_survives_restarts() {
    let bench = TestBench::new().await;
    let sandbox = bench.with_proxy().await;
    let reference = bench.sandbox(&sandbox.id);
    let bindings = vec![binding("api", "api.example.org")];
    let made = reference.vault().create(vec![token("token", CANARY)], bindings).await.unwrap();
    assert_eq!(made.revision(), 1);
    let active = bench.backend.vault(&sandbox.id).unwrap();
    assert_eq!(active.vault, made);
    assert!(!active.vault.credential("token").unwrap().value.as_str().contains(CANARY));
    assert!(matches!(
        reference.vault().create(Vec::new(), Vec::new()).await,
        Err(VaultAccessError::Exists(_))
    ));
    let changed = reference.vault().change(adding(Some(1), "other", "value")).await.unwrap();
    assert_eq!(changed.revision(), 2);
    let conflict = reference.vault().change(adding(Some(1), "third", "value")).await;
    assert!(matches!(
        conflict,
        Err(VaultAccessError::Invalid(VaultError::Revision { expected: 1, current: 2 }))
    ));
    bench.backend.forget_vaults();
    drop(reference);
    let bench = bench.restarted().await;
    let reference = bench.sandbox(&sandbox.id);
    assert_eq!(reference.vault().current().await.unwrap(), changed);
    assert_eq!(bench.backend.vault(&sandbox.id).unwrap().vault, changed);
    reference.vault().delete().await.unwrap();
    assert!(bench.backend.vault(&sandbox.id).is_none());
    assert!(matches!(reference.vault().delete().await, Err(VaultAccessError::NoVault(_))));
    // A new vault begins again with the first revision.
    assert_eq!(reference.vault().create(Vec::new(), Vec::new()).await.unwrap().revision(), 1);
}

#[tokio::test]
async fn invalid_vaults_are_refused_before_anything_is_sealed() {
    let bench = TestBench::new().await;
    let sandbox = bench.with_proxy().await;
    let reference = bench.sandbox(&sandbox.id);
    for (credentials, bindings) in [
        (vec![token("token", "")], Vec::new()),
        (vec![token("token", CANARY)], vec![binding("b", "example.net")]),
        (Vec::new(), vec![binding("b", "api.example.org")]),
        (vec![token("token", "line\nbreak")], vec![binding("b", "api.example.org")]),
    ] {
        let refused = reference.vault().create(credentials, bindings).await.unwrap_err();
        assert!(matches!(refused, VaultAccessError::Invalid(_)), "{refused}");
        assert!(!format!("{refused} {refused:?}").contains("canary"));
    }
    assert!(bench.backend.vault(&sandbox.id).is_none());
    assert!(matches!(reference.vault().current().await, Err(VaultAccessError::NoVault(_))));
}

#[tokio::test]
async fn policy_must_go_on_allowing_the_hosts_of_the_vault() {
    let bench = TestBench::new().await;
    let sandbox = bench.with_proxy().await;
    let reference = bench.sandbox(&sandbox.id);
    let bindings = vec![binding("api", "api.example.org")];
    reference.vault().create(vec![token("token", CANARY)], bindings).await.unwrap();
    let narrow = PolicyEdit::Replace(policy(&["example.net"]));
    let refused = reference.network().edit_policy(narrow).await.unwrap_err();
    assert!(matches!(refused, ServiceError::VaultPolicy(_)), "{refused}");
    let exact = PolicyEdit::Replace(policy(&["api.example.org"]));
    reference.network().edit_policy(exact).await.unwrap();
}

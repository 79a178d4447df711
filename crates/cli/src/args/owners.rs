//! The flags with which an operator selects the owner whose objects a command acts on.

use clap::Args;

use crate::client::OwnerScope;

#[derive(Debug, Default, Args)]
pub(crate) struct OwnerArgs {
    /// Act on the objects of this owner; requires the operator's API key
    #[arg(long, value_name = "NAME", help_heading = "For operators")]
    pub owner: Option<String>,

    /// Act on the objects of all owners; requires the operator's API key
    #[arg(long, conflicts_with = "owner", help_heading = "For operators")]
    pub all_owners: bool,
}

impl OwnerArgs {
    pub(crate) fn scope(&self) -> OwnerScope {
        match &self.owner {
            Some(owner) => OwnerScope::Owner(owner.clone()),
            None if self.all_owners => OwnerScope::All,
            None => OwnerScope::Own,
        }
    }
}

//! Whose things a command is about: the flags that the operator of a server has.

use clap::Args;

use crate::client::OwnerScope;

#[derive(Debug, Default, Args)]
pub(crate) struct OwnerArgs {
    /// Act on the things of this owner; needs the operator's key
    #[arg(long, value_name = "NAME", help_heading = "For operators")]
    pub owner: Option<String>,

    /// Act on the things of every owner; needs the operator's key
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

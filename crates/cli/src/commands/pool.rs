//! `pool ls`, `create`, `set`, `inspect` and `rm`: sandboxes that are kept warm.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use domain::Refill;
use serde_json::json;

use crate::args::PoolCommand;
use crate::client::{NewPool, PoolInfo, Server};
use crate::output::{Printer, WithHint};

pub(crate) async fn pool(server: &Server, command: PoolCommand, printer: &Printer) -> Result<ExitCode> {
    match command {
        PoolCommand::Ls => {
            let pools = server.pools().await?;
            let heads = ["name", "image", "warm", "level", "taken", "max", "by", "trouble"];
            printer.list(&pools, &heads, pools.iter().map(row).collect())?;
        }
        PoolCommand::Create { name, image, size, memory, cpus, disk, per_second, at_once } => {
            let usual = Refill::default();
            let refill = (per_second.is_some() || at_once.is_some())
                .then(|| (per_second.unwrap_or(usual.per_second), at_once.unwrap_or(usual.at_once)));
            let wish = NewPool { name, image, size, memory, cpus, disk, refill };
            let made = server.create_pool(&wish).await?;
            made.stand_in.iter().for_each(|stand_in| printer.warn(stand_in));
            changed(&made, printer)?;
        }
        PoolCommand::Set { name, mut size } => {
            if size.max.is_none() {
                // The API takes both values or none.
                size.max = Some(server.pool(&name).await?.capacity_spec.pool_max);
            }
            changed(&server.set_pool(&name, size).await?, printer)?;
        }
        PoolCommand::Inspect { name } => inspect(&server.pool(&name).await?, printer)?,
        PoolCommand::Rm { names } => remove(server, &names, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn row(pool: &PoolInfo) -> Vec<String> {
    let status = &pool.status;
    vec![
        pool.name.clone(),
        pool.image.uri.clone(),
        status.available.to_string(),
        pool.capacity_spec.buffer_max.to_string(),
        status.allocated.to_string(),
        most(pool),
        pool.managed_by.clone(),
        status.trouble.clone().unwrap_or_default(),
    ]
}

fn most(pool: &PoolInfo) -> String {
    match pool.capacity_spec.pool_max {
        u32::MAX => "none".to_owned(),
        most => most.to_string(),
    }
}

fn changed(pool: &PoolInfo, printer: &Printer) -> Result<()> {
    if printer.json() { printer.value(pool) } else { printer.line(&pool.name) }
}

fn inspect(pool: &PoolInfo, printer: &Printer) -> Result<()> {
    if printer.json() {
        return printer.value(pool);
    }
    let status = &pool.status;
    for (name, value) in [
        ("name", pool.name.clone()),
        ("image", pool.image.uri.clone()),
        ("managed by", pool.managed_by.clone()),
        ("warm", format!("{} of {}", status.available, pool.capacity_spec.buffer_max)),
        ("taken", format!("{} alive, most in all {}", status.allocated, most(pool))),
        ("since the server started", format!("{} taken, {} made cold", status.claimed, status.cold)),
        ("trouble", status.trouble.clone().unwrap_or_else(|| "none".to_owned())),
    ] {
        printer.line(format!("{name:<25} {value}"))?;
    }
    Ok(())
}

/// Removes all pools that exist; a missing one is reported as an error at the end.
async fn remove(server: &Server, names: &[String], printer: &Printer) -> Result<()> {
    let (mut removed, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        let list = if server.remove_pool(name).await? { &mut removed } else { &mut missing };
        list.push(name.as_str());
    }
    if printer.json() {
        printer.value(&json!({ "removed": removed, "missing": missing }))?;
    } else {
        removed.iter().try_for_each(|name| printer.line(name))?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such pool as `{}`", missing.join("`, `")))
        .hint("`coracle pool ls` lists the pools")
}

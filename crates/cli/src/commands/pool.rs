//! `pool ls`, `create`, `set`, `inspect` and `rm`: sandboxes that are kept warm.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use domain::RefillRate;
use serde_json::json;

use crate::args::PoolCommand;
use crate::client::{CreatePoolRequest, PoolInfo, ServerClient};
use crate::output::{Printer, WithHint};

pub(crate) async fn run_pool_command(
    server: &ServerClient,
    command: PoolCommand,
    printer: &Printer,
) -> Result<ExitCode> {
    match command {
        PoolCommand::Ls => {
            let pools = server.list_pools().await?;
            let heads = ["name", "image", "warm", "level", "taken", "max", "by", "trouble"];
            printer.print_json_or_table(&pools, &heads, pools.iter().map(pool_row).collect())?;
        }
        PoolCommand::Create { name, image, size, memory, cpus, disk, per_second, at_once } => {
            let usual = RefillRate::default();
            let refill = (per_second.is_some() || at_once.is_some())
                .then(|| (per_second.unwrap_or(usual.per_second), at_once.unwrap_or(usual.at_once)));
            let request = CreatePoolRequest { name, image, size, memory, cpus, disk, refill };
            let made = server.create_pool(&request).await?;
            made.stand_in.iter().for_each(|stand_in| printer.warn(stand_in));
            print_pool(&made, printer)?;
        }
        PoolCommand::Set { name, mut size } => {
            if size.max.is_none() {
                // The API takes both values or none.
                size.max = Some(server.pool_info(&name).await?.capacity_spec.pool_max);
            }
            print_pool(&server.set_pool(&name, size).await?, printer)?;
        }
        PoolCommand::Inspect { name } => inspect_pool(&server.pool_info(&name).await?, printer)?,
        PoolCommand::Rm { names } => remove_pools(server, &names, printer).await?,
    }
    Ok(ExitCode::SUCCESS)
}

fn pool_row(pool: &PoolInfo) -> Vec<String> {
    let status = &pool.status;
    vec![
        pool.name.clone(),
        pool.image.uri.clone(),
        status.available.to_string(),
        pool.capacity_spec.buffer_max.to_string(),
        status.allocated.to_string(),
        format_max(pool),
        pool.managed_by.clone(),
        status.trouble.clone().unwrap_or_default(),
    ]
}

fn format_max(pool: &PoolInfo) -> String {
    match pool.capacity_spec.pool_max {
        u32::MAX => "none".to_owned(),
        most => most.to_string(),
    }
}

fn print_pool(pool: &PoolInfo, printer: &Printer) -> Result<()> {
    if printer.is_json() { printer.print_json(pool) } else { printer.print_line(&pool.name) }
}

fn inspect_pool(pool: &PoolInfo, printer: &Printer) -> Result<()> {
    if printer.is_json() {
        return printer.print_json(pool);
    }
    let status = &pool.status;
    for (name, value) in [
        ("name", pool.name.clone()),
        ("image", pool.image.uri.clone()),
        ("managed by", pool.managed_by.clone()),
        ("warm", format!("{} of {}", status.available, pool.capacity_spec.buffer_max)),
        ("taken", format!("{} alive, most in all {}", status.allocated, format_max(pool))),
        ("since the server started", format!("{} taken, {} made cold", status.claimed, status.cold)),
        ("trouble", status.trouble.clone().unwrap_or_else(|| "none".to_owned())),
    ] {
        printer.print_line(format!("{name:<25} {value}"))?;
    }
    Ok(())
}

/// Removes all pools that exist; a missing one is reported as an error at the end.
async fn remove_pools(server: &ServerClient, names: &[String], printer: &Printer) -> Result<()> {
    let (mut removed, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        let list = if server.remove_pool(name).await? { &mut removed } else { &mut missing };
        list.push(name.as_str());
    }
    if printer.is_json() {
        printer.print_json(&json!({ "removed": removed, "missing": missing }))?;
    } else {
        removed.iter().try_for_each(|name| printer.print_line(name))?;
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("there is no such pool as `{}`", missing.join("`, `")))
        .with_hint("`coracle pool ls` lists the pools")
}

//! The results, as a table for people and as JSON for programs.

use anyhow::Result;
use serde::Serialize;

use super::statistics::TimeSummary;
use crate::output::Printer;

/// Every measurement of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct BenchReport {
    times: Vec<TimeRow>,
    bars: Vec<BarResult>,
    /// The measurements that this host does not allow, with the reason.
    absent: Vec<String>,
    /// The stages of a create, if they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    stages: Vec<StageRow>,
    /// Notes needed to read the numbers: the preparations, and the other side of each comparison.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct TimeRow {
    name: String,
    #[serde(flatten)]
    summary: TimeSummary,
}

/// One stage of a create.
#[derive(Debug, Serialize)]
pub(crate) struct StageRow {
    /// The process that works: `client`, `server` or `launcher`, which includes the new process.
    pub(crate) part: String,
    pub(crate) stage: String,
    /// The median in milliseconds.
    pub(crate) p50: f64,
    /// The part of the whole create, from 0 to 1.
    pub(crate) share: f64,
}

/// One promise: a value, its bound, and whether the bound was kept.
#[derive(Debug, Serialize)]
struct BarResult {
    name: &'static str,
    value: f64,
    bound: f64,
    /// The unit of the numbers: `times the floor`, `MiB`, ...
    unit: &'static str,
    kept: bool,
}

impl BenchReport {
    pub(crate) fn add_time(&mut self, name: impl Into<String>, summary: TimeSummary) {
        self.times.push(TimeRow { name: name.into(), summary });
    }

    /// Compares a value with a bound that it must not exceed.
    pub(crate) fn require_at_most(&mut self, name: &'static str, value: f64, bound: f64, unit: &'static str) {
        self.bars.push(BarResult { name, value, bound, unit, kept: value <= bound });
    }

    /// Compares a value with a bound that it must reach.
    pub(crate) fn require_at_least(
        &mut self,
        name: &'static str,
        value: f64,
        bound: f64,
        unit: &'static str,
    ) {
        self.bars.push(BarResult { name, value, bound, unit, kept: value >= bound });
    }

    pub(crate) fn add_unmeasured(&mut self, why: impl Into<String>) {
        self.absent.push(why.into());
    }

    pub(crate) fn add_note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub(crate) fn add_stage(&mut self, row: StageRow) {
        self.stages.push(row);
    }

    pub(crate) fn all_passed(&self) -> bool {
        self.bars.iter().all(|bar| bar.kept)
    }

    pub(crate) fn print(&self, printer: &Printer) -> Result<()> {
        if printer.is_json() {
            return printer.print_json(self);
        }
        printer.print_table(&["milliseconds", "runs", "p50", "p90", "p99"], self.time_rows())?;
        if !self.stages.is_empty() {
            printer.print_line("")?;
            printer.print_table(&["part", "stage", "p50", "share"], self.stage_rows())?;
        }
        if !self.bars.is_empty() {
            printer.print_line("")?;
            printer.print_table(&["bar", "value", "bound", "", "verdict"], self.bar_rows())?;
        }
        for why in &self.absent {
            printer.print_line(format!("not measured: {why}"))?;
        }
        for note in &self.notes {
            printer.print_line(format!("note: {note}"))?;
        }
        Ok(())
    }

    fn time_rows(&self) -> Vec<Vec<String>> {
        let number = |value: f64| format!("{value:.2}");
        self.times
            .iter()
            .map(|TimeRow { name, summary }| {
                let TimeSummary { runs, p50, p90, p99 } = *summary;
                vec![name.clone(), runs.to_string(), number(p50), number(p90), number(p99)]
            })
            .collect()
    }

    fn stage_rows(&self) -> Vec<Vec<String>> {
        let row = |row: &StageRow| {
            let share = format!("{:.0} %", row.share * 100.0);
            vec![row.part.clone(), row.stage.clone(), format!("{:.3}", row.p50), share]
        };
        self.stages.iter().map(row).collect()
    }

    fn bar_rows(&self) -> Vec<Vec<String>> {
        self.bars
            .iter()
            .map(|bar| {
                let verdict = if bar.kept { "PASS" } else { "FAIL" };
                vec![
                    bar.name.to_owned(),
                    format!("{:.2}", bar.value),
                    format!("{:.2}", bar.bound),
                    bar.unit.to_owned(),
                    verdict.to_owned(),
                ]
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_missed_bar_fails_the_report() {
        let mut report = BenchReport::default();
        report.require_at_most("create", 2.9, 3.0, "times the floor");
        report.require_at_least("download", 0.5, 0.5, "of nginx");
        assert!(report.all_passed());
        report.require_at_most("exec", 4.1, 4.0, "times a spawn");
        assert!(!report.all_passed());
        assert_eq!(report.bar_rows()[2][4], "FAIL");
    }
}

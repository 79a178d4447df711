//! Metrics per owner as Prometheus text. They are rendered from the service's rows at each request,
//! so series of owners exist only where the configuration asks for them.

use std::collections::BTreeMap;
use std::fmt::Write;

use service::{OwnerLabel, OwnerMetrics};

type OwnerRows = BTreeMap<OwnerLabel, OwnerMetrics>;

/// One metric: its name without the prefix, its type, its help text, and its value in a row.
type OwnerMetric = (&'static str, &'static str, &'static str, fn(&OwnerMetrics) -> String);

const METRICS: [OwnerMetric; 4] = [
    ("creates_total", "counter", "Sandboxes created, by owner", |row| row.created.to_string()),
    ("cpu_seconds_total", "counter", "Processor time used by sandboxes, by owner", |row| {
        format!("{}.{:06}", row.cpu_micros / 1_000_000, row.cpu_micros % 1_000_000)
    }),
    ("memory_bytes", "gauge", "Memory used by sandboxes, by owner", |row| row.memory.to_string()),
    ("disk_bytes", "gauge", "Disk space used by sandboxes, by owner", |row| row.disk.to_string()),
];

/// Owners' names need no escaping: they have letters, digits, `-`, `_` and `.` only.
pub(super) fn render_owner_metrics(rows: &OwnerRows) -> String {
    let mut text = String::new();
    let phases = rows.iter().flat_map(|(label, row)| {
        let series = |(phase, count)| {
            format!("coracle_owner_sandboxes{{owner=\"{}\",phase=\"{phase}\"}} {count}", label.as_str())
        };
        row.phases.iter().map(series)
    });
    add_metric(&mut text, "sandboxes", "gauge", "Sandboxes by owner and phase", phases);
    for (name, kind, help, value) in METRICS {
        let series = rows.iter().map(|(label, row)| {
            format!("coracle_owner_{name}{{owner=\"{}\"}} {}", label.as_str(), value(row))
        });
        add_metric(&mut text, name, kind, help, series);
    }
    text
}

fn add_metric(text: &mut String, name: &str, kind: &str, help: &str, series: impl Iterator<Item = String>) {
    // Writing to a `String` cannot fail.
    writeln!(text, "# HELP coracle_owner_{name} {help}\n# TYPE coracle_owner_{name} {kind}").ok();
    for line in series {
        writeln!(text, "{line}").ok();
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use domain::Owner;

    use super::*;

    #[test]
    fn rows_become_prometheus_series() {
        let row = OwnerMetrics {
            phases: BTreeMap::from([("running", 2)]),
            created: 3,
            cpu_micros: 1_500_000,
            memory: 4096,
            disk: 512,
        };
        let rest = OwnerMetrics::default();
        let text = render_owner_metrics(&OwnerRows::from([
            (OwnerLabel::Named(Owner::from_valid_name("one")), row),
            (OwnerLabel::Other, rest),
        ]));
        for line in [
            "# TYPE coracle_owner_sandboxes gauge",
            "coracle_owner_sandboxes{owner=\"one\",phase=\"running\"} 2",
            "# TYPE coracle_owner_creates_total counter",
            "coracle_owner_creates_total{owner=\"one\"} 3",
            "coracle_owner_creates_total{owner=\"_other\"} 0",
            "coracle_owner_cpu_seconds_total{owner=\"one\"} 1.500000",
            "coracle_owner_memory_bytes{owner=\"one\"} 4096",
            "coracle_owner_disk_bytes{owner=\"one\"} 512",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
        }
    }
}

//! The host's table of open files, with a made-up reading and made-up counts.

use domain::{EndCause, Phase};

use super::TestBench;
use crate::telemetry::file_table::{FileTable, end_largest_holder};

#[tokio::test]
async fn sandbox_with_most_open_files_is_ended_at_the_threshold() {
    let bench = TestBench::new().await;
    let [small, large] = [bench.create().await, bench.create().await];
    bench.backend.set_open_files(vec![(small.id.clone(), 300), (large.id.clone(), 400)]);
    let core = &bench.service.0;

    end_largest_holder(core, FileTable { used: 799, max: 1000 }).await;
    assert!(!bench.backend.calls().contains(&"open files"), "nothing is counted below the threshold");

    end_largest_holder(core, FileTable { used: 800, max: 1000 }).await;
    let phase = bench.handle(&large).phase();
    assert_eq!(phase, Phase::Failed(EndCause::TooManyFiles));
    assert_eq!(bench.handle(&small).phase(), Phase::Running);
    assert!(bench.backend.calls().contains(&"stop"), "its processes are ended");
    let events = core.telemetry.events.sandbox_events(&bench.owner, &large.id, 1);
    assert_eq!(events[0].cause, Some(EndCause::TooManyFiles));
}

#[tokio::test]
async fn sandboxes_stay_when_other_processes_have_most_files() {
    let bench = TestBench::new().await;
    let sandbox = bench.create().await;
    bench.backend.set_open_files(vec![(sandbox.id.clone(), 300)]);
    end_largest_holder(&bench.service.0, FileTable { used: 900, max: 1000 }).await;
    assert_eq!(bench.handle(&sandbox).phase(), Phase::Running);
}

#[tokio::test]
async fn many_equal_sandboxes_are_ended_until_the_table_has_room() {
    const EACH: u64 = 97;
    let bench = TestBench::new().await;
    let mut sandboxes = Vec::new();
    for _ in 0..10 {
        sandboxes.push(bench.create().await);
    }
    let living = |bench: &TestBench| {
        let running = |sandbox: &&_| bench.handle(sandbox).phase() == Phase::Running;
        sandboxes.iter().filter(running).map(|sandbox| (sandbox.id.clone(), EACH)).collect::<Vec<_>>()
    };
    // Each reading of the table, until all of these files together are below the threshold.
    for left in [9, 8, 8] {
        let holders = living(&bench);
        let used = EACH * u64::try_from(holders.len()).expect("a small number");
        bench.backend.set_open_files(holders);
        end_largest_holder(&bench.service.0, FileTable { used, max: 1000 }).await;
        assert_eq!(living(&bench).len(), left);
    }
}

#[tokio::test(start_paused = true)]
async fn sandbox_whose_driver_is_busy_does_not_keep_others_from_being_ended() {
    let bench = TestBench::new().await;
    let busy = bench.create().await;
    let other = bench.create().await;
    // As with a hook that runs for hours.
    bench.occupy_driver(&busy).await;
    bench.backend.set_open_files(vec![(busy.id.clone(), 500), (other.id.clone(), 400)]);
    end_largest_holder(&bench.service.0, FileTable { used: 900, max: 1000 }).await;
    assert_eq!(bench.handle(&other).phase(), Phase::Failed(EndCause::TooManyFiles));
}

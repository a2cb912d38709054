//! The three cadences: when they run, what they find, and who stands down.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    Cadence, DeadReason, EventState, HandlerError, Outbox, PassReport, Relay, RelayBuilder,
    RelayError, SettledResult, StoreErrorKind,
};
use tokio::time::Instant;

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, Unhandled, publish_for_relays, scripted, settled};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);

/// A relay that neither polls nor listens, and whose passes begin only when they are asked for.
async fn quiet_relay(outbox: &Outbox<MemoryStore>) -> Relay<MemoryStore> {
    quiet(outbox).start().await.unwrap()
}

fn quiet(outbox: &Outbox<MemoryStore>) -> RelayBuilder<MemoryStore> {
    outbox
        .relay()
        .cadences_only()
        .sweep_interval(24 * HOUR)
        .backstop_interval(7 * 24 * HOUR)
        .maintenance_interval(7 * 24 * HOUR)
}

#[tokio::test(start_paused = true)]
async fn every_pass_dispatches_what_is_due_without_a_poll() {
    for cadence in Cadence::ALL {
        let store = MemoryStore::new();
        let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
        let outbox = builder(&store).on(handler).build().unwrap();
        let relay = quiet_relay(&outbox).await;
        for n in 0..40 {
            publish_for_relays(&outbox, &Ticked { n }).await;
        }
        let report = relay.pass(cadence).await.unwrap();
        assert_eq!(report.dispatched, 40, "{cadence}");
        for _ in 0..40 {
            runs.recv().await.unwrap();
        }
        assert_eq!(store.calls(Operation::Claim), 0);
        assert_eq!(store.calls(Operation::Listen), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_application_can_live_on_the_cadences_alone() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|run| match run.delivery.attempt().get() {
        1 => Step::Return(Err(HandlerError::retry("down"))),
        _ => Step::Return(Ok(())),
    });
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let _relay = outbox.relay().cadences_only().start().await.unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let begun = Instant::now();
    runs.recv().await.unwrap();
    runs.recv().await.unwrap();
    assert!(matches!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Retry { .. }
    ));
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    // The first sweep within 10 s, the backoff, and the next sweep.
    assert!(begun.elapsed() <= 6 * MINUTE, "{:?}", begun.elapsed());
    assert_eq!(store.calls(Operation::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn passes_come_at_their_intervals_after_a_random_offset() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let begun = Instant::now();
    let _relay = outbox.relay().cadences_only().start().await.unwrap();
    // Sweeps look at all rows, maintenance counts them.
    store.wait_for_calls(Operation::Sweep, 1).await;
    let first = begun.elapsed();
    assert!(first <= Duration::from_secs(10), "{first:?}");
    store.wait_for_calls(Operation::Sweep, 2).await;
    assert_eq!(begun.elapsed() - first, 5 * MINUTE);
    assert_eq!(store.calls(Operation::Stats), 1);
    store.wait_for_calls(Operation::Stats, 2).await;
    let day = begun.elapsed();
    assert!(
        (24 * HOUR..24 * HOUR + 2 * MINUTE).contains(&day),
        "{day:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_instance_stands_down_while_another_one_is_at_the_cadence() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet_relay(&outbox).await;
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    for cadence in Cadence::ALL {
        store.begin_pass_elsewhere(cadence);
        let report = relay.pass(cadence).await.unwrap();
        assert!(report.stood_down, "{cadence}");
        assert_eq!(report.dispatched, 0);
    }
    // Another cadence's lock is another lock.
    store.end_pass_elsewhere(Cadence::Backstop);
    let report = relay.pass(Cadence::Backstop).await.unwrap();
    assert_eq!((report.dispatched, report.stood_down), (1, false));
}

#[tokio::test(start_paused = true)]
async fn p7_a_sweep_buries_what_has_no_attempt_left_and_cuts_impossible_leases() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let (builder, mut outcomes) = settled(
        builder(&store)
            .on(handler)
            .on(|_: OrderPaid| async { Ok::<_, HandlerError>("done".to_owned()) })
            .max_attempts(1),
    );
    let outbox = builder.build().unwrap();
    let relay = quiet_relay(&outbox).await;
    let lost = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let unknown = publish_for_relays(&outbox, &Unhandled).await;
    relay.pass(Cadence::Backstop).await.unwrap();
    runs.recv().await.unwrap();
    store.set_lease(lost.row(), 30 * 24 * HOUR);
    let report = relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!((report.cut_leases, report.exhausted), (1, 0));
    assert_eq!(report.unhandled["unhandled"], 1);

    store.expire_lease(lost.row());
    let report = relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(report.exhausted, 1);
    let reason = DeadReason::LeaseExpired;
    let outcome = outcomes.recv().await.unwrap();
    assert!(
        matches!(outcome.result, SettledResult::DeadLetter { reason: r, .. } if r == reason),
        "{outcome:?}"
    );
    let record = outbox.find(unknown).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn p17_maintenance_removes_everything_past_its_retention_and_a_sweep_some() {
    let store = MemoryStore::new();
    let outbox = builder(&store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>("done".to_owned()) })
        .retention(HOUR)
        .build()
        .unwrap();
    let relay = quiet_relay(&outbox).await;
    for order in 0..3 {
        publish_for_relays(&outbox, &OrderPaid { order }).await;
    }
    relay.pass(Cadence::Backstop).await.unwrap();
    store.wait_for_calls(Operation::Settle, 1).await;
    for cadence in [Cadence::Sweep, Cadence::Maintenance] {
        let report = relay.pass(cadence).await.unwrap();
        assert_eq!(report.purged, 0, "nothing is past its retention: {cadence}");
    }
    tokio::time::advance(2 * HOUR).await;
    // The events; their keys are kept for a day.
    assert_eq!(relay.pass(Cadence::Sweep).await.unwrap().purged, 3);
    tokio::time::advance(23 * HOUR).await;
    assert_eq!(relay.pass(Cadence::Maintenance).await.unwrap().purged, 3);
    assert!(store.records().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pass_that_fails_is_reported_and_the_next_one_goes_on() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet_relay(&outbox).await;
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::ClaimIn, StoreErrorKind::TimedOut, 1);
    let error = relay.pass(Cadence::Backstop).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert_eq!(outbox.counters().store_errors, 1);
    assert_eq!(relay.pass(Cadence::Backstop).await.unwrap().dispatched, 1);
    runs.recv().await.unwrap();
}

/// P16: a database that is too slow for a chunk is asked for less, and the pass goes on.
#[tokio::test(start_paused = true)]
async fn a_chunk_that_is_too_slow_is_halved() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet_relay(&outbox).await;
    store.fail_next(Operation::Sweep, StoreErrorKind::TimedOut, 2);
    store.fail_next(Operation::Purge, StoreErrorKind::TimedOut, 3);
    relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(store.calls(Operation::Sweep), 3);
    assert_eq!(store.calls(Operation::Purge), 4);

    // Down to fifty rows; then something else is wrong.
    store.fail_next(Operation::Purge, StoreErrorKind::TimedOut, 100);
    let error = relay.pass(Cadence::Maintenance).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert_eq!(store.calls(Operation::Purge), 4 + 5);
}

#[tokio::test(start_paused = true)]
async fn partitions_that_cannot_be_made_now_are_left_to_the_sweeps_and_stop_nothing() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet_relay(&outbox).await;
    relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(store.calls(Operation::Upkeep), 0);

    store.fail_next(Operation::Upkeep, StoreErrorKind::Locked, 1);
    relay.pass(Cadence::Maintenance).await.unwrap();
    assert_eq!(store.calls(Operation::Stats), 1, "the pass went on");
    relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(store.calls(Operation::Upkeep), 2);
    relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(store.calls(Operation::Upkeep), 2, "it was done");

    // A role that may not is not asked again before the next day.
    store.fail_next(Operation::Upkeep, StoreErrorKind::Denied, 1);
    relay.pass(Cadence::Maintenance).await.unwrap();
    relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(store.calls(Operation::Upkeep), 3);
}

#[tokio::test(start_paused = true)]
async fn a_pass_runs_no_more_handlers_at_once_than_allowed() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(MINUTE / 6));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet(&outbox).concurrency(4).start().await.unwrap();
    for n in 0..12 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let begun = Instant::now();
    // The first regular passes fall into the same time, and share the permits.
    relay.pass(Cadence::Backstop).await.unwrap();
    for _ in 0..12 {
        runs.recv().await.unwrap();
    }
    // Three rounds of four.
    assert!(begun.elapsed() >= 2 * (MINUTE / 6), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn handlers_that_keep_every_permit_keep_no_later_pass_from_its_work() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Hang);
    let outbox = builder(&store)
        .on(handler)
        .lease(20 * HOUR)
        .handler_timeout(10 * HOUR)
        .build()
        .unwrap();
    let relay = outbox.relay().cadences_only().concurrency(1);
    for n in 0..2 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let begun = Instant::now();
    let _relay = relay.start().await.unwrap();
    store.wait_for_calls(Operation::Sweep, 3).await;
    assert!(begun.elapsed() < 11 * MINUTE, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_cadence_of_zero_and_a_batch_of_zero_are_refused_by_name() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    for (relay, expected) in [
        (
            outbox.relay().sweep_interval(Duration::ZERO),
            "`sweep_interval` cannot be 0ns",
        ),
        (
            outbox.relay().backstop_interval(Duration::ZERO),
            "`backstop_interval` cannot be 0ns",
        ),
        (
            outbox.relay().maintenance_interval(Duration::ZERO),
            "`maintenance_interval` cannot be 0ns",
        ),
        (
            outbox.relay().pass_batch(Cadence::Sweep, 0),
            "`pass_batch` cannot be 0",
        ),
        (
            outbox
                .relay()
                .pass_statement_limit(Cadence::Sweep, Duration::ZERO),
            "`pass_statement_limit` cannot be 0ns",
        ),
    ] {
        let error = relay.start().await.unwrap_err();
        assert!(matches!(error, RelayError::Setting(_)));
        assert!(error.to_string().starts_with(expected), "{error}");
    }
    // Nothing was left running: the outbox can still have its relay.
    outbox.relay().start().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pass_of_a_stopped_relay_says_so() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let relay = quiet_relay(&outbox).await;
    assert_eq!(
        relay.pass(Cadence::Backstop).await.unwrap(),
        PassReport::default()
    );
    outbox.shutdown(MINUTE).await.unwrap();
    let error = relay.pass(Cadence::Backstop).await.unwrap_err();
    assert!(
        error.to_string().contains("the relay has stopped"),
        "{error}"
    );
}

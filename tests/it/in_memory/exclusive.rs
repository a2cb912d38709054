//! What one instance does while the others stand down.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{Exclusive, ExclusiveError, LockError, Outbox, StoreErrorKind};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::builder;

fn instance(store: &MemoryStore) -> Outbox<MemoryStore> {
    builder(store).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn one_instance_runs_and_the_others_stand_down_at_once() {
    let store = MemoryStore::new();
    let (a, b) = (instance(&store), instance(&store));
    let (finish, finished) = oneshot::channel::<()>();
    let (began, has_begun) = oneshot::channel();
    let running = tokio::spawn(async move {
        a.run_exclusive("report", |_| async move {
            began.send(()).unwrap();
            finished.await.unwrap();
            7
        })
        .await
    });
    has_begun.await.unwrap();
    let other = b.run_exclusive("report", |_| async { 8 }).await.unwrap();
    assert_eq!(other, Exclusive::StoodDown);
    let unrelated = b.run_exclusive("invoices", |_| async { 9 }).await.unwrap();
    assert_eq!(unrelated, Exclusive::Finished(9));

    // However long it takes, the lock is kept.
    tokio::time::advance(Duration::from_secs(3_600)).await;
    let other = b.run_exclusive("report", |_| async { 8 }).await.unwrap();
    assert_eq!(other, Exclusive::StoodDown);
    finish.send(()).unwrap();
    assert_eq!(running.await.unwrap().unwrap(), Exclusive::Finished(7));
    let next = b.run_exclusive("report", |_| async { 8 }).await.unwrap();
    assert_eq!(next, Exclusive::Finished(8));
}

#[tokio::test(start_paused = true)]
async fn whoever_loses_the_lock_is_told_and_what_it_did_is_marked() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let begun = Instant::now();
    let result = outbox
        .run_exclusive("report", |tenure| {
            let store = store.clone();
            async move {
                store.break_exclusive("report");
                assert!(!tenure.is_lost());
                tenure.lost().await;
                "stopped"
            }
        })
        .await
        .unwrap();
    assert_eq!(result, Exclusive::LockLost("stopped"));
    assert!(
        begun.elapsed() <= Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_loss_that_nobody_had_noticed_is_found_at_the_end() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let result = outbox
        .run_exclusive("report", |_| async { store.break_exclusive("report") })
        .await
        .unwrap();
    assert_eq!(result, Exclusive::LockLost(()));
}

#[tokio::test(start_paused = true)]
async fn a_database_that_does_not_answer_is_trusted_for_less_than_a_lease() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let begun = Instant::now();
    let result = outbox
        .run_exclusive("report", |tenure| {
            store.unreachable(true);
            async move {
                tenure.lost().await;
                begun.elapsed()
            }
        })
        .await
        .unwrap();
    let Exclusive::LockLost(after) = result else {
        panic!("{result:?}");
    };
    let bounds = Duration::from_secs(10)..=Duration::from_secs(20);
    assert!(bounds.contains(&after), "{after:?}");
}

#[tokio::test(start_paused = true)]
async fn a_proof_that_does_not_come_back_is_waited_for_no_longer_than_the_lock_is_trusted() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let begun = Instant::now();
    let hold = store.hold(Operation::KeepExclusive);
    let result = outbox
        .run_exclusive("report", |tenure| async move {
            let lost = tokio::time::timeout(Duration::from_secs(3_600), tenure.lost()).await;
            drop(hold);
            (lost.is_ok(), begun.elapsed())
        })
        .await
        .unwrap();
    let Exclusive::LockLost((true, after)) = result else {
        panic!("{result:?}");
    };
    assert!(after <= Duration::from_secs(20), "{after:?}");
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_costs_nobody_the_lock() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    store.fail_next(Operation::KeepExclusive, StoreErrorKind::TimedOut, 2);
    let result = outbox
        .run_exclusive("report", |_| async {
            store.wait_for_calls(Operation::KeepExclusive, 3).await;
        })
        .await
        .unwrap();
    assert_eq!(result, Exclusive::Finished(()));
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_an_error_and_frees_the_lock() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let error = outbox
        .run_exclusive("report", |_| async { panic!("no paper") })
        .await
        .map(|done: Exclusive<()>| done)
        .unwrap_err();
    assert!(matches!(error, ExclusiveError::Panicked { .. }));
    assert_eq!(
        error.to_string(),
        "what ran under the exclusive lock `report` panicked: no paper"
    );
    let next = outbox.run_exclusive("report", |_| async {}).await.unwrap();
    assert_eq!(next, Exclusive::Finished(()));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_future_frees_the_lock() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    let (began, has_begun) = oneshot::channel();
    let dropped = tokio::spawn({
        let outbox = outbox.clone();
        async move {
            outbox
                .run_exclusive("report", |_| async move {
                    began.send(()).unwrap();
                    std::future::pending::<()>().await;
                })
                .await
        }
    });
    has_begun.await.unwrap();
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    store.wait_for_calls(Operation::KeepExclusive, 1).await;
    let next = outbox.run_exclusive("report", |_| async {}).await.unwrap();
    assert_eq!(next, Exclusive::Finished(()));
}

#[tokio::test(start_paused = true)]
async fn names_and_namespaces_are_checked_before_the_database_is_asked() {
    let store = MemoryStore::new();
    let outbox = instance(&store);
    for name in ["", "a\0b", &"x".repeat(129)] {
        let error = outbox.run_exclusive(name, |_| async {}).await.unwrap_err();
        assert!(
            matches!(error, ExclusiveError::InvalidName { .. }),
            "{error}"
        );
    }
    let mut tx = outbox.begin().await.unwrap();
    for namespace in [0x6f75_0000, 0x6f75_7462, 0x6f76_ffff] {
        let error = tx.lock_entity(namespace, 7).await.unwrap_err();
        assert!(matches!(error, LockError::ReservedNamespace { .. }));
        assert!(
            error.to_string().contains("1869938688 to 1870069759"),
            "{error}"
        );
    }
    assert_eq!(store.calls(Operation::LockEntity), 0);
    tx.lock_entity(1, "order 7").await.unwrap();
    tx.lock_entity(i32::MAX, 7_i64).await.unwrap();
    tx.commit().await.unwrap();
}

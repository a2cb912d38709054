//! Events in savepoints of the application's own transactions.

use std::error::Error;
use std::time::Duration;

use outbox_core::{EventState, Outbox};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use sqlx::Connection;

use crate::events::{Step, Ticked, scripted};
use crate::support::{PgDb, SqliteDb, within};

const LIMIT: Duration = Duration::from_secs(60);

/// Begin; publish 1; savepoint; publish 2; roll back to it; publish 3; commit.
macro_rules! a_rolled_back_savepoint_takes_its_events_with_it {
    ($outbox:expr) => {{
        let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
        let outbox = $outbox.on(handler).build().unwrap();
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(&Ticked { n: 1 }).await.unwrap();
        let mut nested = (&mut *tx).begin().await.unwrap();
        let undone = outbox.publish(&mut nested, &Ticked { n: 2 }).await.unwrap();
        nested.rollback().await.unwrap();
        sqlx::query("SAVEPOINT by_hand")
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.publish(&Ticked { n: 20 }).await.unwrap();
        sqlx::query("ROLLBACK TO SAVEPOINT by_hand")
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.publish(&Ticked { n: 3 }).await.unwrap();
        tx.commit().await.unwrap().settled().await;

        let mut handled = vec![runs.recv().await.unwrap().n, runs.recv().await.unwrap().n];
        handled.sort_unstable();
        assert_eq!(handled, [1, 3]);
        // Nor does a relay find what was undone.
        let relay = outbox.relay().start().await.unwrap();
        outbox.dispatch(undone).unwrap().settled().await;
        relay.shutdown(Duration::from_secs(10)).await.unwrap();
        assert!(runs.try_recv().is_err());
    }};
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_rolled_back_savepoint_takes_its_events_with_it_on_postgres() {
    let db = PgDb::new().await;
    within(LIMIT, async {
        a_rolled_back_savepoint_takes_its_events_with_it!(Outbox::builder(PgStore::new(db.pool())));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_rolled_back_savepoint_takes_its_events_with_it_on_sqlite() {
    let db = SqliteDb::new().await;
    within(LIMIT, async {
        a_rolled_back_savepoint_takes_its_events_with_it!(Outbox::builder(SqliteStore::new(
            db.pool()
        )));
    })
    .await;
}

/// What a released savepoint published goes when the outer transaction rolls back, and its
/// dedup key with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_released_savepoint_is_no_commit() {
    let db = PgDb::new().await;
    let outbox = Outbox::builder(PgStore::new(db.pool())).build().unwrap();
    let keyed = outbox_core::PublishOptions::new().dedup_key("k");

    let mut tx = db.pool().begin().await.unwrap();
    let mut nested = tx.begin().await.unwrap();
    let undone = outbox
        .publish_with(&mut nested, &Ticked { n: 1 }, &keyed)
        .await
        .unwrap();
    nested.commit().await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(outbox.find(undone.event_id()).await.unwrap(), None);

    let mut tx = db.pool().begin().await.unwrap();
    let kept = outbox
        .publish_with(&mut tx, &Ticked { n: 1 }, &keyed)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert!(kept.duplicate().is_none());
    let kept = outbox.find(kept.event_id()).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Pending);
}

/// A COMMIT of an aborted transaction answers without an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_the_commit_of_an_aborted_transaction_dispatches_nothing() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(PgStore::new(db.pool()))
        .on(handler)
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&Ticked { n: 1 }).await.unwrap();
    sqlx::query("SELECT 1 / 0")
        .execute(&mut *tx)
        .await
        .unwrap_err();
    tx.commit().await.unwrap().settled().await;

    assert!(runs.try_recv().is_err());
    assert_eq!(outbox.counters().vanished, 1);
    assert_eq!(outbox.find(published.event_id()).await.unwrap(), None);
}

/// Begin; publish; begin a savepoint and drop that half way; commit. sqlx has rolled back by then.
macro_rules! a_commit_of_what_sqlx_has_rolled_back_is_an_error {
    ($store:expr) => {{
        let outbox = Outbox::builder($store).build().unwrap();
        // On a busy machine the answer can be there at the first poll: that was not half way.
        let (tx, lost) = loop {
            let mut tx = outbox.begin().await.unwrap();
            let lost = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
            let mut beginning = (&mut *tx).begin();
            let is_half_way = tokio::select! {
                biased;
                _ = &mut beginning => false,
                () = std::future::ready(()) => true,
            };
            drop(beginning);
            if is_half_way {
                break (tx, lost);
            }
            tx.rollback().await.unwrap();
        };
        let error = tx.commit().await.unwrap_err();
        assert!(error.source().unwrap().to_string().contains("savepoint"));
        assert!(outbox.find(lost).await.unwrap().is_none());
    }};
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_commit_of_what_sqlx_has_rolled_back_is_an_error_on_postgres() {
    let db = PgDb::new().await;
    within(LIMIT, async {
        a_commit_of_what_sqlx_has_rolled_back_is_an_error!(PgStore::new(db.pool()));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_commit_of_what_sqlx_has_rolled_back_is_an_error_on_sqlite() {
    let db = SqliteDb::new().await;
    within(LIMIT, async {
        a_commit_of_what_sqlx_has_rolled_back_is_an_error!(SqliteStore::new(db.pool()));
    })
    .await;
}

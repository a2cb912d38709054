//! Parts of a transaction, numbers that are given again, and outcomes in a caller's transaction.

use outbox_core::lease::HeldLease;
use outbox_core::store::BornLease;
use sqlx::Connection;

use super::*;

fn born(token: LeaseToken) -> NewEvent {
    NewEvent {
        lease: Some(BornLease {
            token,
            duration: LEASE,
            instance: "publisher".into(),
        }),
        ..event()
    }
}

fn of(row: i64, token: LeaseToken, outcome: Outcome) -> Settlement {
    Settlement {
        lease: HeldLease { row, token },
        outcome,
    }
}

/// SQLite gives the number of a row that was undone to the next row. The token tells them apart.
#[tokio::test]
async fn an_outcome_for_a_row_that_was_undone_does_not_settle_the_next_one() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let (first, second) = (LeaseToken::random(), LeaseToken::random());
    let mut tx = store.begin().await.unwrap();
    let mut part = tx.begin().await.unwrap();
    let undone = store.insert(&mut part, &[born(first)]).await.unwrap();
    let undone = inserted(&undone[0]).row();
    drop(part);
    let next = store.insert(&mut tx, &[born(second)]).await.unwrap();
    let next = inserted(&next[0]).row();
    assert_eq!(next, undone);

    let settlements = [
        of(undone, first, dead("never was")),
        of(next, second, processed(Some("1"))),
    ];
    let answers = store.settle_through(&mut tx, &settlements).await.unwrap();
    assert_eq!(answers, [Settled::LeaseLost, Settled::Recorded]);
    store.commit(tx).await.unwrap();
    assert_eq!(record(&store, next).await.state, EventState::Processed);
}

/// SQLite undoes the statement that failed, and nothing else: without a part of its own the copy in
/// the history would be committed beside the event.
#[tokio::test]
async fn a_failed_outcome_leaves_the_callers_transaction_as_it_was() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    execute(
        &db.pool(),
        "CREATE TRIGGER picky BEFORE UPDATE ON outbox_events_keys WHEN NEW.output = '\"bad\"'
        BEGIN SELECT RAISE(ABORT, 'not this one'); END",
    )
    .await;
    let token = LeaseToken::random();
    let keyed = NewEvent {
        dedup_key: Some("k".to_owned()),
        ..born(token)
    };
    let mut tx = store.begin().await.unwrap();
    let row = store.insert(&mut tx, &[keyed]).await.unwrap();
    let row = inserted(&row[0]).row();
    let bad = [of(row, token, processed(Some("\"bad\"")))];
    let error = store.settle_through(&mut tx, &bad).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Data);
    let copied: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox_events_history")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert_eq!(copied, 0);
    let good = [of(row, token, processed(Some("1")))];
    let answers = store.settle_through(&mut tx, &good).await.unwrap();
    assert_eq!(answers, [Settled::Recorded]);
    store.commit(tx).await.unwrap();
    assert_eq!(record(&store, row).await.output.as_deref(), Some("1"));
}

/// Depth is counted by sqlx, in whatever way the transaction began.
#[tokio::test]
async fn parts_nest_in_deferred_and_in_immediate_transactions() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    for begin in ["BEGIN", "BEGIN IMMEDIATE"] {
        let mut tx = db.pool().begin_with(begin).await.unwrap();
        let mut outer = tx.begin().await.unwrap();
        let kept = store.insert(&mut outer, &[event()]).await.unwrap();
        let mut inner = outer.begin().await.unwrap();
        store.insert(&mut inner, &[event()]).await.unwrap();
        drop(inner);
        let mut inner = outer.begin().await.unwrap();
        store.insert(&mut inner, &[event()]).await.unwrap();
        inner.rollback().await.unwrap();
        outer.commit().await.unwrap();
        tx.commit().await.unwrap();
        let claimed = claim(&store, 10).await;
        assert_eq!(rows(&claimed), [inserted(&kept[0]).row()], "{begin}");
        // The connection goes back as one that is in no transaction.
        let free = db.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
        free.rollback().await.unwrap();
    }
}

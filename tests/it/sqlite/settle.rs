//! What is claimed and settled.

use super::*;

#[tokio::test]
async fn what_is_reserved_is_for_what_waited() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let urgent = NewEvent {
        priority: Priority::Critical,
        ..event()
    };
    let delayed = NewEvent {
        delay: Duration::from_secs(60),
        priority: Priority::Low,
        ..event()
    };
    publish(&store, &vec![urgent; 20]).await;
    let waiting = publish_rows(&store, &vec![delayed; 4]).await;
    // The last of them became due first; numbers decide all the same.
    execute(
        &db.pool(),
        "UPDATE outbox_events SET due_at = 1000 - id WHERE due_at IS NOT NULL",
    )
    .await;

    let claimed = claim(&store, 5).await;
    let waited: Vec<i64> = claimed
        .iter()
        .filter(|claimed| claimed.waited)
        .map(|claimed| claimed.id.row())
        .collect();
    assert_eq!(claimed.len(), 5);
    assert_eq!(rows(&claimed)[3..], waiting[..2]);
    assert_eq!(waited.len(), 2);
    // With nothing else due, what waited gets all of it.
    assert_eq!(claim(&store, 17).await.len(), 17);
    assert_eq!(claim(&store, 5).await.len(), 2);
}

#[tokio::test]
async fn a_row_with_broken_text_does_not_stop_the_others() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let ids = publish_rows(&store, &vec![event(); 2]).await;
    execute(
        &db.pool(),
        format!(
            "UPDATE outbox_events SET payload = CAST(x'7bff' AS TEXT) WHERE id = {}",
            ids[0]
        ),
    )
    .await;
    assert_eq!(rows(&claim(&store, 10).await), ids);
    assert_eq!(record(&store, ids[0]).await.payload, "{\u{fffd}");
}

#[tokio::test]
async fn a_second_outcome_for_a_lease_in_one_batch_comes_too_late() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let row = publish_one(&store, event()).await;
    let claimed = claim_one(&store).await;
    let of = |outcome| Settlement {
        lease: claimed.lease(),
        outcome,
    };
    let batch = [
        of(processed(Some("0"))),
        of(retry(LEASE, "a second opinion")),
    ];
    let answers = store.settle(&batch).await.unwrap();
    assert_eq!(answers, [Settled::Recorded, Settled::LeaseLost]);
    let seen = record(&store, row).await;
    assert_eq!(seen.state, EventState::Processed);
    assert_eq!(seen.failures, []);
}

#[tokio::test]
async fn a_claim_given_back_costs_nothing_and_is_due_at_once() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let row = publish_one(&store, event()).await;
    let first = claim_one(&store).await;
    settle(&store, &first, retry(LEASE, "no")).await;
    execute(&db.pool(), "UPDATE outbox_events SET due_at = 1").await;
    for _ in 0..10 {
        let claimed = claim_one(&store).await;
        assert_eq!(claimed.attempt, number(2));
        assert_eq!(
            store
                .release(&[claimed.lease(), claimed.lease()])
                .await
                .unwrap(),
            [Settled::Recorded, Settled::LeaseLost]
        );
    }
    let seen = record(&store, row).await;
    assert_eq!((seen.attempts, seen.state), (1, EventState::Failed));
    assert_eq!(seen.failures.len(), 1);
}

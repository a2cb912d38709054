//! Parts of a transaction and outcomes in one, where sqlx and the caller's settings matter.

use outbox_core::lease::HeldLease;
use outbox_core::outcome::DeadReason;

use super::*;

/// A SAVEPOINT that fails must not end the transaction without a word: what the caller sends next
/// would be kept.
#[tokio::test]
async fn a_part_of_an_aborted_transaction_leaves_it_aborted() {
    let (_db, store) = installed().await;
    let mut tx = store.begin().await.unwrap();
    tx.execute("SELECT 1/0").await.unwrap_err();
    let part = store.begin_part(&mut tx).await;
    let error = part.err().expect("there is no savepoint");
    assert!(error.to_string().contains("aborted"), "{error}");
    store.insert(&mut tx, &[event()]).await.unwrap_err();
    store.commit(tx).await.unwrap();
    let rows = "SELECT count(*) FROM outbox.outbox_events";
    assert_eq!(number(store.pool(), rows).await, 0);
}

#[tokio::test]
async fn there_is_no_part_of_no_transaction() {
    let (_db, store) = installed().await;
    let mut connection = store.pool().acquire().await.unwrap();
    assert!(store.begin_part(&mut connection).await.is_err());
    store.insert(&mut connection, &[event()]).await.unwrap();
    let rows = "SELECT count(*) FROM outbox.outbox_events";
    assert_eq!(number(store.pool(), rows).await, 1);
}

/// An error that a part met is undone with it, whether it is undone or kept by mistake.
#[tokio::test]
async fn an_aborted_part_leaves_the_rest() {
    let (_db, store) = installed().await;
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[keyed("before")]).await.unwrap();
    for keep in [true, false] {
        let mut part = store.begin_part(&mut tx).await.unwrap();
        store
            .insert(part.connection(), &[keyed("part")])
            .await
            .unwrap();
        part.connection().execute("SELECT 1/0").await.unwrap_err();
        if keep {
            part.keep().await.unwrap_err();
        } else {
            part.undo().await.unwrap();
        }
    }
    store.insert(&mut tx, &[keyed("after")]).await.unwrap();
    store.commit(tx).await.unwrap();
    let rows = "SELECT count(*) FROM outbox.outbox_events WHERE dedup_key IN ('before', 'after')";
    assert_eq!(number(store.pool(), rows).await, 2);
    let rows = "SELECT count(*) FROM outbox.outbox_events";
    assert_eq!(number(store.pool(), rows).await, 2);
}

/// Every outcome, with functions and operators of the caller's in the way.
#[tokio::test]
async fn an_outcome_does_not_depend_on_the_callers_search_path() {
    let (_db, store) = installed().await;
    run(
        store.pool(),
        "CREATE SCHEMA hostile;
         CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS $$ SELECT '1970-01-01'::timestamptz $$;
         CREATE FUNCTION hostile.width_bucket(bigint, bigint[]) RETURNS int LANGUAGE sql
             AS $$ SELECT 1000 $$;
         CREATE FUNCTION hostile.later(timestamptz, interval) RETURNS timestamptz LANGUAGE sql
             AS $$ SELECT '1970-01-01'::timestamptz $$;
         CREATE OPERATOR hostile.+ (LEFTARG = timestamptz, RIGHTARG = interval,
             FUNCTION = hostile.later);
         CREATE FUNCTION hostile.never(bigint, bigint) RETURNS boolean LANGUAGE sql
             AS $$ SELECT false $$;
         CREATE OPERATOR hostile.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = hostile.never);
         CREATE DOMAIN hostile.text AS pg_catalog.text CHECK (false);
         CREATE DOMAIN hostile.jsonb AS pg_catalog.jsonb CHECK (false)",
    )
    .await;
    for path in ["''", "hostile, pg_catalog"] {
        let mut tx = store.begin().await.unwrap();
        let set = format!("SET LOCAL search_path = {path}");
        tx.execute(sqlx::raw_sql(AssertSqlSafe(set))).await.unwrap();
        let token = LeaseToken::random();
        let born = |key: &str| NewEvent {
            lease: Some(BornLease {
                token,
                duration: MINUTE,
                instance: "here".into(),
            }),
            retention: MINUTE,
            ..keyed(&format!("{key} {path}"))
        };
        let error = ErrorText::new(&"no");
        let outcomes = [
            Outcome::Processed {
                output: Some("7".to_owned()),
            },
            Outcome::Retry {
                after: MINUTE,
                error: error.clone(),
            },
            Outcome::Dead {
                reason: DeadReason::Permanent,
                error: error.clone(),
            },
            Outcome::Discarded { error },
        ];
        let events: Vec<_> = ["a", "b", "c", "d"].map(born).to_vec();
        let inserted_rows = store.insert(&mut tx, &events).await.unwrap();
        let settlements: Vec<_> = inserted_rows
            .iter()
            .zip(outcomes)
            .map(|(insertion, outcome)| Settlement {
                lease: HeldLease {
                    row: inserted(std::slice::from_ref(insertion)),
                    token,
                },
                outcome,
            })
            .collect();
        let settled = store.settle_through(&mut tx, &settlements).await.unwrap();
        assert_eq!(settled, [Settled::Recorded; 4]);
        store.commit(tx).await.unwrap();
        let mut states = Vec::new();
        for settlement in &settlements {
            let record = store.find(settlement.lease.row).await.unwrap();
            states.push(record.map(|record| record.state));
        }
        let expected = [
            Some(EventState::Processed),
            Some(EventState::Failed),
            Some(EventState::DeadLetter),
            None,
        ];
        assert_eq!(states, expected);
    }
    let odd = "SELECT (SELECT count(*) FROM outbox.outbox_events WHERE due_at < now())
        + (SELECT count(*) FROM outbox.outbox_events_history WHERE expires_at < now())
        + (SELECT count(*) FROM outbox.outbox_events_keys WHERE expires_at < now())";
    assert_eq!(number(store.pool(), odd).await, 0);
}

/// Wherever the future that begins a part is dropped, the transaction is what it was: what is
/// written before and after is in it, and commits or rolls back with it.
#[tokio::test]
async fn a_part_that_is_dropped_while_it_begins_leaves_the_transaction_as_it_was() {
    let (_db, store) = installed().await;
    let rows = "SELECT count(*) FROM outbox.outbox_events";
    let mut began = 0;
    for polls in 1..=12 {
        for commits in [false, true] {
            let mut tx = store.begin().await.unwrap();
            store.insert(&mut tx, &[event()]).await.unwrap();
            began += u32::from(polled(store.begin_part(&mut tx), polls).await.is_some());
            store.insert(&mut tx, &[event()]).await.unwrap();
            let before = number(store.pool(), rows).await;
            if commits {
                store.commit(tx).await.unwrap();
                assert_eq!(number(store.pool(), rows).await, before + 2, "{polls}");
            } else {
                store.rollback(tx).await.unwrap();
                assert_eq!(number(store.pool(), rows).await, before, "{polls}");
            }
        }
    }
    // How many polls that takes is the network's to say; after a dozen some have begun.
    assert!(began > 0);
}

/// What `future` comes to within so many polls. Dropped after them.
async fn polled<T>(future: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(value) => std::task::Poll::Ready(Some(value)),
        std::task::Poll::Pending => {
            left -= 1;
            if left == 0 {
                std::task::Poll::Ready(None)
            } else {
                std::task::Poll::Pending
            }
        }
    })
    .await
}

//! Ordering keys: their locks, and what they cost.

use outbox_core::store::{EventRef, Settled, Split, SplitPart};

use super::*;

fn ordered(key: &str) -> NewEvent {
    NewEvent {
        ordering_key: Some(key.to_owned()),
        retention: MINUTE,
        ..event()
    }
}

/// The first event that was inserted.
fn event_ref(answers: &[Insertion]) -> EventRef {
    match &answers[0] {
        Insertion::Inserted(id) => EventRef::Id(*id),
        other => panic!("{other:?}"),
    }
}

/// Fifty publishers of one key, each with a business row in the same transaction: all commit, and
/// the numbers of the events are in the order of the commits.
///
/// The business row says in which order they committed: each publisher reads the last one under a
/// lock that it keeps until it commits, which it takes *after* its event has its number. Had an event
/// got its number before its key was locked, the two orders would differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_are_in_the_order_of_the_commits_of_fifty_publishers() {
    let (db, store) = installed().await;
    run(
        store.pool(),
        "CREATE TABLE commits (nth bigint PRIMARY KEY, event bigint NOT NULL);
         INSERT INTO commits VALUES (0, 0)",
    )
    .await;
    let pool = PgPoolOptions::new().max_connections(50);
    let many = PgStore::new(pool.connect_lazy_with(db.options()));
    let mut publishers = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let store = many.clone();
        publishers.spawn(async move {
            let mut tx = store.begin().await.unwrap();
            let row = inserted(&store.insert(&mut tx, &[ordered("k")]).await.unwrap());
            sqlx::query("LOCK TABLE commits IN EXCLUSIVE MODE")
                .execute(&mut *tx)
                .await
                .unwrap();
            sqlx::query("INSERT INTO commits SELECT max(nth) + 1, $1 FROM commits")
                .bind(row)
                .execute(&mut *tx)
                .await
                .unwrap();
            store.commit(tx).await.unwrap();
        });
    }
    assert_eq!(publishers.join_all().await.len(), 50);
    let out_of_order = "SELECT count(*) FROM commits AS one JOIN commits AS other
         ON one.nth < other.nth AND one.event > other.event";
    assert_eq!(number(store.pool(), out_of_order).await, 0);
    assert_eq!(
        number(store.pool(), "SELECT max(nth) FROM commits").await,
        50
    );
}

/// A publish waits for open transactions that have published its key, and for no others.
#[tokio::test]
async fn a_publish_waits_for_its_own_key_alone() {
    let (_db, store) = installed().await;
    let mut open = store.begin().await.unwrap();
    let first = inserted(&store.insert(&mut open, &[ordered("k")]).await.unwrap());
    publish(&store, &[ordered("j"), event()]).await;

    let other = store.clone();
    let waiting = tokio::spawn(async move { inserted(&publish(&other, &[ordered("k")]).await) });
    until_waiting(store.pool(), 1).await;
    store.commit(open).await.unwrap();
    assert!(waiting.await.unwrap() > first);
}

/// Two publishers that take two keys in opposite order, one event at a time, deadlock: one of them is
/// told so, and that it may run again.
#[tokio::test]
async fn a_deadlock_between_two_keys_is_transient() {
    let (_db, store) = installed().await;
    let mut one = store.begin().await.unwrap();
    store.insert(&mut one, &[ordered("a")]).await.unwrap();
    let other = store.clone();
    let crossing = tokio::spawn(async move {
        let mut two = other.begin().await.unwrap();
        other.insert(&mut two, &[ordered("b")]).await.unwrap();
        let crossed = other.insert(&mut two, &[ordered("a")]).await;
        let _ = other.rollback(two).await;
        crossed.map(|_| ())
    });
    until_waiting(store.pool(), 1).await;
    let crossed = store.insert(&mut one, &[ordered("b")]).await;
    let _ = store.rollback(one).await;
    let results = [crossed.map(|_| ()), crossing.await.unwrap()];
    let refused: Vec<_> = results
        .iter()
        .filter_map(|result| result.as_ref().err())
        .collect();
    assert_eq!(refused.len(), 1, "{results:?}");
    assert!(refused[0].is_transient());
}

/// Two relays, a hundred events of one key: never two of them at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_claimers_never_hold_two_events_of_a_key() {
    let (_db, store) = installed().await;
    publish(&store, &vec![ordered("k"); 100]).await;
    let held = "SELECT count(*) FROM outbox.outbox_events WHERE lease_token IS NOT NULL";
    let mut claimers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let store = store.clone();
        claimers.spawn(async move {
            let mut settled = 0;
            while number(store.pool(), "SELECT count(*) FROM outbox.outbox_events").await > 0 {
                for claimed in store.claim(&request(10)).await.unwrap() {
                    assert_eq!(number(store.pool(), held).await, 1);
                    let answers = store.settle(&[processed(&claimed)]).await.unwrap();
                    assert_eq!(answers, [Settled::Recorded]);
                    settled += 1;
                }
            }
            settled
        });
    }
    assert_eq!(claimers.join_all().await.iter().sum::<i32>(), 100);
    let unordered = "SELECT count(*) FROM (
             SELECT id, lag(id) OVER (ORDER BY settled_at) AS before
             FROM outbox.outbox_events_history
         ) AS settled WHERE id < before";
    assert_eq!(number(store.pool(), unordered).await, 0);
}

/// With whatever `search_path` the caller has, ordering and cancelling name what they mean.
#[tokio::test]
async fn a_hostile_search_path_changes_neither_order_nor_cancellation() {
    let (_db, store) = installed().await;
    run(
        store.pool(),
        "CREATE SCHEMA hostile;
         CREATE FUNCTION hostile.pg_advisory_xact_lock(integer, integer) RETURNS void
             LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
         CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz
             LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
         CREATE FUNCTION hostile.differs(bigint, bigint) RETURNS boolean
             LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
         CREATE OPERATOR hostile.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = hostile.differs)",
    )
    .await;
    let mut tx = store.begin().await.unwrap();
    sqlx::query("SET LOCAL search_path = hostile, pg_catalog")
        .execute(&mut *tx)
        .await
        .unwrap();
    let keyed = NewEvent {
        dedup_key: Some("d".to_owned()),
        ..ordered("k")
    };
    let rows = store.insert(&mut tx, &[ordered("k"), keyed]).await.unwrap();
    let free = store.lock_ordering_key(&mut tx, "k").await.unwrap();
    assert!(!free);
    let by_key = EventRef::Key {
        name: NAME.to_owned(),
        key: "d".to_owned(),
    };
    for event in [event_ref(&rows), by_key] {
        let found = store.cancel(&mut tx, &event).await.unwrap().unwrap();
        assert_eq!(found.state, EventState::Pending);
        let again = store.cancel(&mut tx, &event).await.unwrap().unwrap();
        assert_eq!(again.state, EventState::Cancelled);
    }
    assert!(store.lock_ordering_key(&mut tx, "k").await.unwrap());
    store.commit(tx).await.unwrap();
}

/// A cancellation waits for the settlement that has locked the row, and then finds it settled.
#[tokio::test]
async fn a_cancellation_waits_for_a_settlement_and_comes_too_late() {
    let (_db, store) = installed().await;
    let kept = NewEvent {
        retention: MINUTE,
        ..event()
    };
    let event = event_ref(&publish(&store, &[kept]).await);
    let claimed = claim_one(&store).await;
    let mut settling = store.begin().await.unwrap();
    let answers = store
        .settle_through(&mut settling, &[processed(&claimed)])
        .await;
    assert_eq!(answers.unwrap(), [Settled::Recorded]);

    let other = store.clone();
    let cancelling = tokio::spawn(async move {
        let mut tx = other.begin().await.unwrap();
        let found = other.cancel(&mut tx, &event).await.unwrap();
        other.commit(tx).await.unwrap();
        found.unwrap().state
    });
    until_waiting(store.pool(), 1).await;
    store.commit(settling).await.unwrap();
    assert_eq!(cancelling.await.unwrap(), EventState::Processed);
}

/// In this order:
///
/// 1. A transaction has an event's row locked.
/// 2. The event is to be split, and then to be cancelled. Both wait.
/// 3. The transaction ends: the split adds a part that the waiting statement of the cancellation does
///    not see. It is cancelled all the same.
#[tokio::test]
async fn a_cancellation_takes_the_parts_of_a_split_that_it_has_waited_for() {
    let (_db, store) = installed().await;
    let kept = NewEvent {
        retention: MINUTE,
        ..event()
    };
    let event = event_ref(&publish(&store, &[kept]).await);
    let lease = claim_one(&store).await.lease();
    let mut locking = store.pool().begin().await.unwrap();
    sqlx::query("SELECT FROM outbox.outbox_events WHERE id = $1 FOR UPDATE")
        .bind(lease.row)
        .execute(&mut *locking)
        .await
        .unwrap();

    let other = store.clone();
    let splitting = tokio::spawn(async move {
        let part = |handler| SplitPart {
            handler,
            max_attempts: None,
            held: true,
        };
        let parts = vec![part("email"), part("ledger")];
        other.split(&[Split { lease, parts }]).await.unwrap()
    });
    until_waiting(store.pool(), 1).await;
    let other = store.clone();
    let cancelling = tokio::spawn(async move {
        let mut tx = other.begin().await.unwrap();
        let found = other.cancel(&mut tx, &event).await.unwrap();
        other.commit(tx).await.unwrap();
        found.unwrap().state
    });
    until_waiting(store.pool(), 2).await;
    locking.rollback().await.unwrap();

    let parts = splitting.await.unwrap().remove(0);
    assert_eq!(parts.map(|parts| parts.len()), Some(2));
    assert_eq!(cancelling.await.unwrap(), EventState::InProgress);
    let left = "SELECT count(*) FROM outbox.outbox_events";
    assert_eq!(number(store.pool(), left).await, 0);
    let cancelled = "SELECT count(*) FROM outbox.outbox_events_history WHERE state = 'cancelled'";
    assert_eq!(number(store.pool(), cancelled).await, 2);
}

/// Twenty thousand events behind a dead letter, in every state of the statistics: each is asked for
/// with a look into an index, and not by walking over a table.
#[tokio::test]
async fn what_is_blocked_is_found_by_its_index_in_every_state_of_the_table() {
    let (_db, store) = installed().await;
    let arguments = "gen_random_uuid(), '30s', 'here', '{order.paid/}', '{3}', 100, 25, 7, 7, 7, 7";
    let freed_types = format!("{CLAIM_TYPES}, bigint[]");
    let freed = format!("{arguments}, '{{1,2,3}}'");
    let lease = "ARRAY[5], ARRAY[gen_random_uuid()]";
    let watched = "ARRAY[5, 6], ARRAY['order.paid', NULL], ARRAY['k', NULL]";
    let statements = [
        ("claim", CLAIM_TYPES, arguments),
        ("claim_freed", &freed_types, &freed),
        ("verify", "bigint[], uuid[]", lease),
        ("watch", "bigint[], text[], text[]", watched),
        ("is_free", "text", "'k'"),
        ("next_in_order", "text[]", "'{k,j}'"),
    ];
    for state in [
        "VACUUM ANALYZE",
        "INSERT INTO outbox.outbox_events
             (name, version, payload, ordering_key, blocks, priority, max_attempts, retention)
         SELECT 'order.paid', 1, '{}', 'k' || n % 3, true, 1, 5, interval '0'
         FROM generate_series(1, 20000) AS n",
        "VACUUM ANALYZE",
        "DELETE FROM pg_statistic",
    ] {
        run(store.pool(), state).await;
        for mode in ["force_custom_plan", "force_generic_plan"] {
            for (name, types, arguments) in statements {
                let plan = plan(&store, mode, name, types, arguments).await;
                for scan in ["Seq Scan on outbox_events", "Bitmap"] {
                    assert!(!plan.contains(scan), "{name}, {state}, {mode}:\n{plan}");
                }
                if name.starts_with("claim") {
                    for index in ["outbox_events_order", "outbox_events_dead_order"] {
                        assert!(plan.contains(index), "{name}, {state}, {mode}:\n{plan}");
                    }
                }
            }
        }
    }
}

/// An ordered publish takes one lock for each key of its batch, and no statement of its own for that:
/// what is prepared for the first is all there is.
#[tokio::test]
async fn an_ordered_publish_takes_its_locks_in_its_one_statement() {
    let (_db, store) = installed().await;
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[ordered("a")]).await.unwrap();
    let prepared =
        "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%outbox_events%'
         AND statement NOT LIKE '%installation%'";
    let prepared: i64 = sqlx::query_scalar(prepared)
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert_eq!(prepared, 1);
    let batch = ["b", "c", "b", "a"].map(ordered);
    store.insert(&mut tx, &batch).await.unwrap();
    let locks = "SELECT count(*) FROM pg_locks
         WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 2";
    let locks: i64 = sqlx::query_scalar(locks).fetch_one(&mut *tx).await.unwrap();
    assert_eq!(locks, 3);
    store.rollback(tx).await.unwrap();
}

//! Dead letters on PostgreSQL: two operators, the plans of a large table, and rights.

use outbox_core::dead_letter::{
    DeadLetterChange, DeadLetterFilter, DeadLetterRows, DeadLetterScan,
};
use outbox_core::outcome::DeadReason;
use outbox_core::store::PauseRef;

use super::*;

const REQUEUE: DeadLetterChange = DeadLetterChange::Requeue {
    delay: Duration::ZERO,
    spacing: Duration::ZERO,
};

async fn buried(store: &PgStore, n: usize) -> Vec<i64> {
    publish(store, &vec![event(); n]).await;
    let limit = u32::try_from(n).unwrap();
    let claimed = store.claim(&request(limit)).await.unwrap();
    let dead: Vec<_> = claimed
        .iter()
        .map(|claimed| Settlement {
            lease: claimed.lease(),
            outcome: Outcome::Dead {
                reason: DeadReason::Permanent,
                error: ErrorText::new(&"no"),
            },
        })
        .collect();
    store.settle(&dead).await.unwrap();
    let mut rows: Vec<i64> = dead.iter().map(|dead| dead.lease.row).collect();
    rows.sort_unstable();
    rows
}

fn all(filter: &DeadLetterFilter) -> DeadLetterScan<'_> {
    DeadLetterScan {
        filter,
        beyond: 0,
        scan: NonZeroU32::new(100).unwrap(),
        limit: NonZeroU32::new(100).unwrap(),
    }
}

/// Whoever names a row waits for the other operator, and does nothing if that one was first.
#[tokio::test]
async fn an_operator_waits_for_a_named_row_and_passes_over_a_found_one() {
    let (_db, store) = installed().await;
    let rows = buried(&store, 3).await;
    let mut other = store.begin().await.unwrap();
    let lock = "DELETE FROM outbox.outbox_events_dead WHERE id = $1";
    sqlx::query(lock)
        .bind(rows[1])
        .execute(&mut *other)
        .await
        .unwrap();

    let filter = DeadLetterFilter::all();
    let found = DeadLetterRows::Matching(all(&filter));
    let changed = store.change_dead_letters(found, REQUEUE).await.unwrap();
    assert_eq!(changed.rows, [rows[0], rows[2]]);

    let named = store.clone();
    let row = rows[1];
    let waiting = tokio::spawn(async move {
        let rows = DeadLetterRows::Numbered(&[row]);
        named.change_dead_letters(rows, REQUEUE).await
    });
    until_waiting(store.pool(), 1).await;
    store.commit(other).await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().rows, [0_i64; 0]);
}

#[tokio::test]
async fn changes_keep_to_their_indexes_in_every_state_of_the_table() {
    let (_db, store) = installed().await;
    let scan_types = "bigint, bigint, bigint, text, text, interval, interval, text, text";
    let scan = "5, 100, 100, 'order.paid', NULL, NULL, '1 day', 'no', NULL";
    let requeue_types = format!("{scan_types}, interval, interval");
    let requeue = format!("{scan}, '0', '1 s'");
    let numbered = "bigint[], interval, interval";
    let numbers = "ARRAY[5, 6], '0', '1 s'";
    let statements = [
        ("dead_letters", scan_types, scan),
        ("requeue_matching", &requeue_types, &requeue),
        ("discard_matching", scan_types, scan),
        ("purge_matching", scan_types, scan),
        ("requeue_numbered", numbered, numbers),
        ("discard_numbered", "bigint[]", "ARRAY[5, 6]"),
        ("purge_numbered", "bigint[]", "ARRAY[5, 6]"),
    ];
    for state in [
        "VACUUM ANALYZE",
        "INSERT INTO outbox.outbox_events_dead
             (id, name, version, payload, blocks, priority, attempts, max_attempts, retention,
              created_at, settled_at, dead_reason, last_error)
         SELECT
             n, 'order.paid', 1, '{}', false, 1, 5, 5, interval '0', now(), now(), 'permanent', 'no'
         FROM generate_series(1, 20000) AS n",
        "VACUUM ANALYZE",
        "DELETE FROM pg_statistic",
    ] {
        run(store.pool(), state).await;
        for mode in ["force_custom_plan", "force_generic_plan"] {
            for (name, types, arguments) in statements {
                let plan = plan(&store, mode, name, types, arguments).await;
                assert!(
                    !plan.contains("Seq Scan"),
                    "{name}, {state}, {mode}:\n{plan}"
                );
                assert!(!plan.contains("Bitmap"), "{name}, {state}, {mode}:\n{plan}");
                assert!(
                    plan.contains("Index Cond: (id "),
                    "{name}, {state}, {mode}:\n{plan}"
                );
            }
        }
    }
}

#[tokio::test]
async fn the_rights_of_an_operator_are_enough() {
    let (db, owner) = installed().await;
    let role = format!("operator_{}", LeaseToken::random().as_uuid().simple());
    run(
        owner.pool(),
        &format!(
            "CREATE ROLE {role} LOGIN;
             GRANT USAGE ON SCHEMA outbox TO {role};
             GRANT SELECT, UPDATE, DELETE ON outbox.outbox_events_dead TO {role};
             GRANT INSERT ON outbox.outbox_events, outbox.outbox_events_history TO {role};
             GRANT SELECT, INSERT, UPDATE ON outbox.outbox_events_keys TO {role};
             GRANT SELECT ON outbox.outbox_events_all, outbox.outbox_events_installation TO {role};
             GRANT SELECT, INSERT, DELETE ON outbox.outbox_events_paused TO {role}"
        ),
    )
    .await;
    let options = db.options().username(&role);
    let operator = PgStore::new(PgPoolOptions::new().connect_lazy_with(options));
    let rows = buried(&owner, 3).await;
    let filter = DeadLetterFilter::all();
    let list = DeadLetterScan {
        beyond: i64::MAX,
        ..all(&filter)
    };
    assert_eq!(operator.dead_letters(&list).await.unwrap().found.len(), 3);
    for (row, change) in
        rows.iter()
            .zip([REQUEUE, DeadLetterChange::Discard, DeadLetterChange::Purge])
    {
        let rows = DeadLetterRows::Numbered(std::slice::from_ref(row));
        let changed = operator.change_dead_letters(rows, change).await.unwrap();
        assert_eq!(changed.rows, [*row]);
    }
    assert!(operator.find(rows[0]).await.unwrap().is_some());
    let pause = PauseRef {
        name: "order.paid".to_owned(),
        handler: None,
    };
    assert!(operator.set_paused(&pause, true).await.unwrap());
    assert_eq!(operator.paused().await.unwrap().len(), 1);
    assert!(operator.set_paused(&pause, false).await.unwrap());
    run(
        owner.pool(),
        &format!("DROP OWNED BY {role}; DROP ROLE {role}"),
    )
    .await;
}

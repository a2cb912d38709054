//! Passes: one instance at a time, and statements that end.

use outbox_core::cadence::Cadence;
use outbox_core::store::Pass;

use super::*;

fn pass(cadence: Cadence) -> Pass {
    Pass {
        cadence,
        statement_limit: MINUTE,
    }
}

/// The lock that a store takes for a cadence, seen while a chunk of it waits for a row.
async fn lock_of(store: &PgStore, cadence: Cadence) -> (i64, i64) {
    settled_with_retention(store).await;
    let mut holder = store.begin().await.unwrap();
    holder
        .execute("LOCK TABLE outbox.outbox_events_history IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let purging = store.clone();
    let purge = tokio::spawn(async move { purging.purge(pass(cadence), NonZeroU32::MIN).await });
    until_waiting(store.pool(), 1).await;
    let lock = "SELECT classid::bigint, objid::bigint FROM pg_locks
         JOIN pg_database AS db ON db.oid = database
         WHERE datname = current_database() AND locktype = 'advisory' AND objsubid = 2";
    let row = sqlx::query(lock).fetch_one(store.pool()).await.unwrap();
    store.rollback(holder).await.unwrap();
    purge.await.unwrap().unwrap();
    (row.get(0), row.get(1))
}

async fn settled_with_retention(store: &PgStore) {
    let kept = NewEvent {
        retention: MINUTE,
        ..event()
    };
    publish(store, &[kept]).await;
    let claimed = claim_one(store).await;
    store.settle(&[processed(&claimed)]).await.unwrap();
}

#[tokio::test]
async fn a_chunk_does_nothing_while_another_instance_is_at_its_cadence() {
    let (db, store) = installed().await;
    publish(&store, &[event()]).await;
    let (namespace, id) = lock_of(&store, Cadence::Sweep).await;
    assert_eq!((namespace >> 16, id), (0x6f75, 1));
    let mut other = db.session().await;
    let lock = format!("SELECT pg_advisory_lock({namespace}, {id})");
    other
        .execute(sqlx::raw_sql(AssertSqlSafe(lock)))
        .await
        .unwrap();

    let sweep = pass(Cadence::Sweep);
    let claimed = store.claim_in(sweep, &request(10)).await.unwrap();
    assert!(claimed.is_none());
    assert_eq!(store.purge(sweep, NonZeroU32::MIN).await.unwrap(), None);
    assert_eq!(store.upkeep(sweep, MINUTE).await.unwrap(), None);
    // The others have locks of their own, and so has every other outbox.
    let backstop = pass(Cadence::Backstop);
    let claimed = store.claim_in(backstop, &request(10)).await.unwrap();
    assert_eq!(claimed.unwrap().len(), 1);
    let more = PgStore::builder(db.pool()).table("more").build().unwrap();
    more.migrate().await.unwrap();
    assert_eq!(more.purge(sweep, NonZeroU32::MIN).await.unwrap(), Some(0));

    other.close().await.unwrap();
    let free = async || store.claim_in(sweep, &request(10)).await.unwrap().is_some();
    eventually(LIMIT, free).await;
}

/// An application that takes locks of one number cannot meet ours, whatever number it takes.
#[tokio::test]
async fn a_lock_of_one_number_is_no_lock_of_two() {
    let (db, store) = installed().await;
    let (namespace, id) = lock_of(&store, Cadence::Maintenance).await;
    let mut other = db.session().await;
    let lock = format!("SELECT pg_advisory_lock({})", namespace << 32 | id);
    other
        .execute(sqlx::raw_sql(AssertSqlSafe(lock)))
        .await
        .unwrap();
    let maintenance = pass(Cadence::Maintenance);
    let purged = store.purge(maintenance, NonZeroU32::MIN).await.unwrap();
    assert_eq!(purged, Some(0));
}

/// P16: a statement of a pass ends when its limit says so, and its lock with it.
#[tokio::test]
async fn a_statement_of_a_pass_ends_at_its_limit() {
    let (_db, store) = installed().await;
    settled_with_retention(&store).await;
    let mut holder = store.begin().await.unwrap();
    holder
        .execute("LOCK TABLE outbox.outbox_events_history IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let hurried = Pass {
        statement_limit: Duration::from_millis(20),
        ..pass(Cadence::Sweep)
    };
    let error = store.purge(hurried, NonZeroU32::MIN).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    store.rollback(holder).await.unwrap();
    while store.purge(hurried, NonZeroU32::MIN).await.is_err() {}
}

/// P7: no combination of columns is invisible to both, unless it waits for a time.
#[tokio::test]
async fn every_row_the_constraints_allow_is_the_claims_or_the_sweeps_or_waits_for_a_time() {
    let (_db, store) = installed().await;
    let mut allowed = 0;
    for attempts in 0..=2 {
        for lease in ["none", "ended", "held", "beyond"] {
            for due in ["NULL", "now() - interval '1 s'", "now() + interval '1 h'"] {
                run(store.pool(), "TRUNCATE outbox.outbox_events").await;
                let end = match lease {
                    "ended" => "now() - interval '1 s'",
                    "held" => "now() + interval '1 h'",
                    _ => "now() + interval '30 days'",
                };
                let lease_columns = match lease {
                    "none" => "NULL, NULL, NULL".to_owned(),
                    _ => format!("gen_random_uuid(), {end}, 'a'"),
                };
                let insert = format!(
                    "INSERT INTO outbox.outbox_events
                         (name, version, payload, priority, max_attempts, retention, attempts,
                          due_at, lease_token, lease_expires_at, claimed_by)
                     VALUES ('{NAME}', 1, '{{}}', 1, 2, interval '0', {attempts}, {due},
                         {lease_columns})"
                );
                let insert = sqlx::raw_sql(AssertSqlSafe(insert));
                if store.pool().execute(insert).await.is_err() {
                    assert_eq!((attempts, lease == "none"), (0, false));
                    continue;
                }
                allowed += 1;
                let claimed = store.claim(&request(10)).await.unwrap().len();
                let chunk = sweep(&store).await;
                // A lease ends before its row waits for another time.
                let waits = lease == "held" || due.contains('+');
                assert_eq!(
                    claimed + chunk.exhausted.len() + usize::from(waits || lease == "beyond"),
                    1,
                    "attempts {attempts}, lease {lease}, due {due}"
                );
                assert_eq!(chunk.cut_leases, u64::from(lease == "beyond"));
            }
        }
    }
    // Without an attempt there is no lease.
    assert_eq!(allowed, 2 * 4 * 3 + 3);
}

#[tokio::test]
async fn a_sweep_keeps_to_the_primary_key_in_every_state_of_the_table() {
    let (_db, store) = installed().await;
    let statements = [
        ("sweep_cut", "bigint, bigint, interval", "5, 500, '1 day'"),
        (
            "sweep_take",
            "uuid, interval, text, bigint, bigint",
            "gen_random_uuid(), '1 min', 'a', 5, 500",
        ),
    ];
    for state in STATES {
        run(store.pool(), state).await;
        for mode in ["force_custom_plan", "force_generic_plan"] {
            for (name, types, arguments) in statements {
                let plan = plan(&store, mode, name, types, arguments).await;
                assert!(
                    !plan.contains("Seq Scan"),
                    "{name}, {state}, {mode}:\n{plan}"
                );
                let bounds = plan.matches("Index Cond: ((id > ").count();
                assert_eq!(bounds, 1, "{name}, {state}, {mode}:\n{plan}");
            }
        }
    }
}

async fn sweep(store: &PgStore) -> outbox_core::store::SweepChunk {
    let request = outbox_core::store::SweepRequest {
        after: 0,
        scan: NonZeroU32::new(100).unwrap(),
        lease: MINUTE,
        token: LeaseToken::random(),
        instance: "sweeper",
        events: &[KNOWN],
    };
    let chunk = store.sweep(pass(Cadence::Sweep), &request).await.unwrap();
    chunk.expect("nobody else has the lock")
}

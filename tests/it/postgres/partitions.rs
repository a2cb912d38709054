//! Partitions of the history: made ahead, dropped when their day is past, and never in the way of a
//! settlement for long.

use std::time::Instant;

use outbox_core::cadence::Cadence;
use outbox_core::store::{Pass, Upkeep};

use super::*;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn pass() -> Pass {
    Pass {
        cadence: Cadence::Maintenance,
        statement_limit: MINUTE,
    }
}

async fn step(store: &PgStore, ahead: Duration) -> Upkeep {
    let step = store.upkeep(pass(), ahead).await.unwrap();
    step.expect("nobody else has the lock")
}

/// Does everything there is to do, and answers how many steps that took.
async fn all_steps(store: &PgStore, ahead: Duration) -> usize {
    for steps in 0..1_000 {
        if step(store, ahead).await == Upkeep::Done {
            return steps;
        }
    }
    panic!("upkeep does not end");
}

async fn partitions(pool: &PgPool) -> i64 {
    let partitions = "SELECT count(*) FROM pg_inherits
         WHERE inhparent = 'outbox.outbox_events_history'::regclass";
    number(pool, partitions).await
}

async fn in_default(pool: &PgPool) -> i64 {
    number(
        pool,
        "SELECT count(*) FROM outbox.outbox_events_history_default",
    )
    .await
}

/// Rows of the history that expire so many days from now.
async fn history(pool: &PgPool, days: i32, rows: i32) {
    run(
        pool,
        &format!(
            "INSERT INTO outbox.outbox_events_history
                 (id, state, name, version, payload, priority, attempts, max_attempts,
                  created_at, settled_at, expires_at)
             SELECT n, 'processed', 'order.paid', 1, '{{}}', 1, 1, 5, now(), now(),
                 now() + {days} * interval '1 day'
             FROM generate_series(1, {rows}) AS n"
        ),
    )
    .await;
}

/// A partition of a day that is past, as upkeep made it then, with a row in it.
async fn past_day(pool: &PgPool, days_ago: i32) {
    run(
        pool,
        &format!(
            "SET TimeZone = 'UTC';
             DO $$ DECLARE day date := current_date - {days_ago}; BEGIN EXECUTE format(
                 'CREATE TABLE outbox.%I PARTITION OF outbox.outbox_events_history
                      FOR VALUES FROM (%L) TO (%L)',
                 'outbox_events_history_' || to_char(day, 'YYYYMMDD'),
                 day::timestamptz, (day + 1)::timestamptz); END $$;
             RESET TimeZone"
        ),
    )
    .await;
    history(pool, -days_ago, 1).await;
}

async fn settle_one(store: &PgStore, retention: Duration) {
    let kept = NewEvent {
        retention,
        ..event()
    };
    publish(store, &[kept]).await;
    let claimed = claim_one(store).await;
    let settled = store.settle(&[processed(&claimed)]).await.unwrap();
    assert_eq!(settled, [Settled::Recorded]);
}

#[tokio::test]
async fn the_coming_days_have_partitions_from_the_beginning() {
    let (_db, store) = installed().await;
    // Today and nine more, and the default.
    assert_eq!(partitions(store.pool()).await, 11);
    assert_eq!(step(&store, 9 * DAY).await, Upkeep::Done);
    settle_one(&store, 7 * DAY).await;
    assert_eq!(in_default(store.pool()).await, 0);
}

#[tokio::test]
async fn partitions_are_made_one_by_one_as_far_ahead_as_is_asked() {
    let (_db, store) = installed().await;
    assert_eq!(step(&store, 30 * DAY).await, Upkeep::Changed);
    assert_eq!(partitions(store.pool()).await, 12);
    assert_eq!(all_steps(&store, 30 * DAY).await, 20);
    settle_one(&store, 29 * DAY).await;
    assert_eq!(in_default(store.pool()).await, 0);
}

/// P1: what no partition covers is kept all the same.
#[tokio::test]
async fn the_default_partition_takes_what_no_other_one_covers() {
    let (_db, store) = installed().await;
    settle_one(&store, 100 * DAY).await;
    assert_eq!(in_default(store.pool()).await, 1);
    assert_eq!(store.purge(pass(), NonZeroU32::MAX).await.unwrap(), Some(0));
    run(
        store.pool(),
        "UPDATE outbox.outbox_events_history_default SET expires_at = now() - interval '9 days'",
    )
    .await;
    assert_eq!(store.purge(pass(), NonZeroU32::MAX).await.unwrap(), Some(1));
}

/// P17: a day that is past goes as a whole; today's, a later one's and what is not ours stay.
#[tokio::test]
async fn a_partition_is_dropped_when_its_day_is_past() {
    let (_db, store) = installed().await;
    let pool = store.pool();
    past_day(pool, 1).await;
    past_day(pool, 40).await;
    // Whoever attached these may want to keep them.
    run(
        pool,
        "CREATE TABLE outbox.outbox_events_history_archive
             PARTITION OF outbox.outbox_events_history FOR VALUES FROM ('2019-01-01') TO ('2020-01-01');
         CREATE TABLE outbox.outbox_events_history_20200101
             PARTITION OF outbox.outbox_events_history FOR VALUES FROM ('2020-01-01') TO ('2021-01-01')",
    )
    .await;
    settle_one(&store, MINUTE).await;
    assert_eq!(all_steps(&store, 9 * DAY).await, 2);
    assert_eq!(partitions(pool).await, 13);
    let rows = "SELECT count(*) FROM outbox.outbox_events_history";
    assert_eq!(number(pool, rows).await, 1);
}

/// The first days after an installation, or after a longer retention was configured.
#[tokio::test]
async fn rows_of_a_new_day_move_out_of_the_default_partition() {
    let (_db, store) = installed().await;
    history(store.pool(), 12, 500).await;
    history(store.pool(), 13, 501).await;
    // The days 10, 11, 12 and 14: the 13th is left to be removed row by row.
    assert_eq!(all_steps(&store, 14 * DAY).await, 4);
    assert_eq!(in_default(store.pool()).await, 501);
    let rows = "SELECT count(*) FROM outbox.outbox_events_history";
    assert_eq!(number(store.pool(), rows).await, 1_001);
}

/// Attaching a partition reads the default one from end to end.
#[tokio::test]
async fn nothing_is_attached_while_the_default_partition_is_large() {
    let (_db, store) = installed().await;
    run(
        store.pool(),
        "ALTER TABLE outbox.outbox_events_history_default SET (fillfactor = 10)",
    )
    .await;
    // Some ten to a page.
    history(store.pool(), 500, 50_000).await;
    assert_eq!(step(&store, 20 * DAY).await, Upkeep::Done);
    assert_eq!(partitions(store.pool()).await, 11);
    past_day(store.pool(), 1).await;
    assert_eq!(step(&store, 20 * DAY).await, Upkeep::Changed);
}

#[tokio::test]
async fn a_lock_that_somebody_holds_is_not_waited_for() {
    let (db, store) = installed().await;
    let mut reader = db.session().await;
    reader
        .execute("BEGIN; SELECT count(*) FROM outbox.outbox_events_all")
        .await
        .unwrap();
    for (ahead, prepare) in [(10 * DAY, false), (9 * DAY, true)] {
        if prepare {
            // Beside the open transaction: it is not in its snapshot and not under its lock.
            reader.execute("ROLLBACK").await.unwrap();
            past_day(store.pool(), 3).await;
            reader
                .execute("BEGIN; SELECT count(*) FROM outbox.outbox_events_all")
                .await
                .unwrap();
        }
        let began = Instant::now();
        let error = store.upkeep(pass(), ahead).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Locked);
        assert!(began.elapsed() < Duration::from_secs(1), "{began:?}");
        // A settlement waits for neither.
        settle_one(&store, DAY).await;
    }
    reader.execute("ROLLBACK").await.unwrap();
    assert_eq!(all_steps(&store, 10 * DAY).await, 2);
}

#[tokio::test]
async fn upkeep_may_be_run_by_many_at_once() {
    let (db, store) = installed().await;
    past_day(store.pool(), 2).await;
    let running = (0..4).map(|_| {
        let pool = db.pool();
        tokio::spawn(async move {
            // Past the lock of the cadence, as a person would.
            for _ in 0..20 {
                let step = "SELECT outbox.outbox_events_upkeep(interval '15 days')";
                if let Err(error) = sqlx::query(step).execute(&pool).await {
                    let code = error.as_database_error().and_then(|error| error.code());
                    assert_eq!(code.as_deref(), Some("55P03"), "{error}");
                }
            }
        })
    });
    for running in running.collect::<Vec<_>>() {
        running.await.unwrap();
    }
    all_steps(&store, 15 * DAY).await;
    // Today, fifteen more, and the default.
    assert_eq!(partitions(store.pool()).await, 17);
}

#[tokio::test]
async fn days_are_those_of_utc_whatever_the_session_says() {
    let (db, store) = installed().await;
    let mut session = db.session().await;
    session
        .execute(
            "SET TimeZone = 'Pacific/Kiritimati'; SET DateStyle = 'SQL, DMY';
             SELECT outbox.outbox_events_upkeep(interval '10 days')",
        )
        .await
        .unwrap();
    assert_eq!(step(&store, 10 * DAY).await, Upkeep::Done);
    let odd = "SELECT count(*) FROM pg_class
         WHERE relispartition AND relkind = 'r' AND relname ~ '_[0-9]{8}$'
         AND pg_get_expr(relpartbound, oid) !~ '^FOR VALUES FROM .* 00:00:00'";
    let mut utc = db.session().await;
    utc.execute("SET TimeZone = 'UTC'").await.unwrap();
    let odd: i64 = sqlx::query_scalar(odd).fetch_one(&mut utc).await.unwrap();
    assert_eq!(odd, 0);
}

/// It was on its way into the default partition. That is nothing its content could be blamed for.
#[tokio::test]
async fn an_outcome_that_meets_a_new_partition_is_recorded_at_the_next_try() {
    let (_db, store) = installed().await;
    let kept = NewEvent {
        retention: 100 * DAY,
        ..event()
    };
    publish(&store, &[kept]).await;
    let outcome = [processed(&claim_one(&store).await)];
    let mut attaching = store.pool().begin().await.unwrap();
    let lock = "LOCK TABLE ONLY outbox.outbox_events_history_default IN ACCESS EXCLUSIVE MODE";
    attaching.execute(lock).await.unwrap();
    let settling = tokio::spawn({
        let (store, outcome) = (store.clone(), outcome.clone());
        async move { store.settle(&outcome).await }
    });
    until_waiting(store.pool(), 1).await;
    let attach = "CREATE TABLE outbox.later (LIKE outbox.outbox_events_history INCLUDING ALL);
         DO $$ BEGIN EXECUTE format(
             'ALTER TABLE outbox.outbox_events_history ATTACH PARTITION outbox.later
                  FOR VALUES FROM (%L) TO (%L)',
             now() + interval '99 days', now() + interval '101 days'); END $$";
    attaching.execute(sqlx::raw_sql(attach)).await.unwrap();
    attaching.commit().await.unwrap();
    let error = settling.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict);
    let settled = store.settle(&outcome).await.unwrap();
    assert_eq!(settled, [Settled::Recorded]);
    assert_eq!(in_default(store.pool()).await, 0);
}

/// PostgreSQL's own way to read a backslash in a string is a setting.
#[tokio::test]
async fn partitions_are_made_whatever_a_backslash_means() {
    let db = PgDb::empty().await;
    let setting = "SET standard_conforming_strings = off";
    let pool = many().after_connect(move |connection, _| {
        Box::pin(async move { connection.execute(setting).await.map(drop) })
    });
    let store = PgStore::new(pool.connect_lazy_with(db.options()));
    store.migrate().await.unwrap();
    past_day(store.pool(), 1).await;
    assert_eq!(partitions(store.pool()).await, 12);
    let steps = "SELECT count(*) FROM generate_series(1, 3)
         WHERE outbox.outbox_events_upkeep(interval '10 days')";
    assert_eq!(number(store.pool(), steps).await, 2);
}

/// A role needs no right to create or drop anything, but may run the function.
#[tokio::test]
async fn upkeep_is_a_right_of_its_own() {
    let (db, owner) = installed().await;
    let role = format!("upkeep_{}", LeaseToken::random().as_uuid().simple());
    run(
        owner.pool(),
        &format!("CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA outbox TO {role}"),
    )
    .await;
    let options = db.options().username(&role);
    let store = PgStore::new(PgPoolOptions::new().connect_lazy_with(options));
    let error = store.upkeep(pass(), 10 * DAY).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied);

    run(
        owner.pool(),
        &format!("GRANT EXECUTE ON FUNCTION outbox.outbox_events_upkeep(interval) TO {role}"),
    )
    .await;
    past_day(owner.pool(), 1).await;
    assert_eq!(all_steps(&store, 10 * DAY).await, 2);
    run(
        owner.pool(),
        &format!("DROP OWNED BY {role}; DROP ROLE {role}"),
    )
    .await;
}

/// A settlement names the history and none of its partitions: it pays for the one it writes to.
#[tokio::test]
async fn many_partitions_cost_a_settlement_and_a_purge_nothing() {
    let (_db, store) = installed().await;
    all_steps(&store, 40 * DAY).await;
    let arguments = "ARRAY[5], ARRAY[gen_random_uuid()], ARRAY['1']";
    for mode in ["force_custom_plan", "force_generic_plan"] {
        let types = "bigint[], uuid[], text[]";
        let settle = plan(&store, mode, "processed", types, arguments).await;
        assert!(!settle.contains("history_2"), "{mode}:\n{settle}");
        // Of those that only a later day's rows are in, none is looked at.
        let mut session = session(&store, mode, "purge", "bigint").await;
        let explain = "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) EXECUTE it(5)";
        let rows = session.fetch_all(explain).await.unwrap();
        let purge: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let removed = purge
            .iter()
            .filter(|line| line.contains("Subplans Removed"));
        let never = purge.iter().filter(|line| line.contains("never executed"));
        assert!(
            removed.count() + never.count() >= 2,
            "{mode}:\n{}",
            purge.join("\n")
        );
    }
}

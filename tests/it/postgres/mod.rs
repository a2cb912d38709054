//! What only PostgreSQL can get wrong: plans, locks, isolation, rights, names and migrations. What
//! every store promises is in `contract`.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use outbox_core::event::{BehindDead, Priority};
use outbox_core::lease::LeaseToken;
use outbox_core::outcome::{ErrorText, Outcome};
use outbox_core::store::{
    BornLease, ClaimRequest, Claimed, EventState, Existing, Insertion, KnownEvent, LowWater,
    NewEvent, Renewal, Settled, Settlement, Store, StoreError, StoreErrorKind, Wakeups,
};
use outbox_sqlx::PgStore;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Row};

use crate::support::{PgDb, eventually};

mod dead_letters;
mod locks;
mod order;
mod partitions;
mod parts;
mod passes;
mod stats;

const NAME: &str = "order.paid";

/// What claims and sweeps here know.
const KNOWN: KnownEvent = KnownEvent {
    name: NAME,
    handler: None,
    newest_version: NonZeroU32::MIN,
};
const MINUTE: Duration = Duration::from_secs(60);

/// How long to wait for what only the server knows.
const LIMIT: Duration = Duration::from_secs(30);

async fn installed() -> (PgDb, PgStore) {
    let db = PgDb::empty().await;
    let store = PgStore::new(db.pool());
    store.migrate().await.unwrap();
    (db, store)
}

fn event() -> NewEvent {
    NewEvent {
        name: NAME,
        version: NonZeroU32::MIN,
        payload: r#"{"n": 1.10, "n": 1}"#.to_owned(),
        headers: None,
        dedup_key: None,
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Normal,
        max_attempts: NonZeroU32::new(5).unwrap(),
        delay: Duration::ZERO,
        expires_in: None,
        retention: Duration::ZERO,
        key_retention: MINUTE,
        lease: None,
    }
}

fn keyed(key: &str) -> NewEvent {
    NewEvent {
        dedup_key: Some(key.to_owned()),
        ..event()
    }
}

async fn publish(store: &PgStore, events: &[NewEvent]) -> Vec<Insertion> {
    let mut tx = store.begin().await.unwrap();
    let insertions = store.insert(&mut tx, events).await.unwrap();
    store.commit(tx).await.unwrap();
    insertions
}

#[track_caller]
fn inserted(insertions: &[Insertion]) -> i64 {
    match insertions {
        [Insertion::Inserted(id)] => id.row(),
        other => panic!("not one inserted row: {other:?}"),
    }
}

#[track_caller]
fn existing(insertions: Vec<Insertion>) -> Existing {
    match <[_; 1]>::try_from(insertions) {
        Ok([Insertion::Existing(existing)]) => existing,
        other => panic!("not one duplicate: {other:?}"),
    }
}

fn request(limit: u32) -> ClaimRequest<'static> {
    ClaimRequest {
        limit: NonZeroU32::new(limit).unwrap(),
        reserved: 0,
        lease: MINUTE,
        token: LeaseToken::random(),
        instance: "here",
        events: &[KNOWN],
        low_water: LowWater::BEGINNING,
        freed: &[],
    }
}

async fn claim_one(store: &PgStore) -> Claimed {
    let mut claimed = store.claim(&request(1)).await.unwrap();
    claimed.pop().expect("a due row")
}

fn processed(claimed: &Claimed) -> Settlement {
    Settlement {
        lease: claimed.lease(),
        outcome: Outcome::Processed {
            output: Some("7".to_owned()),
        },
    }
}

async fn run(pool: &PgPool, sql: &str) {
    let script = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    pool.execute(script).await.unwrap();
}

async fn number(pool: &PgPool, sql: &str) -> i64 {
    let query = sqlx::query(AssertSqlSafe(sql.to_owned()));
    query.fetch_one(pool).await.unwrap().get(0)
}

async fn make_due(pool: &PgPool) {
    run(
        pool,
        "UPDATE outbox.outbox_events SET due_at = clock_timestamp() - interval '1 second'
         WHERE due_at IS NOT NULL",
    )
    .await;
}

/// Returns once `n` sessions of this database wait for a lock.
async fn until_waiting(pool: &PgPool, n: i64) {
    let waiting = "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND wait_event_type = 'Lock'";
    eventually(LIMIT, async || number(pool, waiting).await >= n).await;
}

fn many() -> PgPoolOptions {
    PgPoolOptions::new().max_connections(20)
}

#[tokio::test]
async fn a_planner_that_repeats_subqueries_does_not_make_a_claim_exceed_its_limit() {
    let db = PgDb::empty().await;
    // The store's own settings come on top of these.
    let hostile = [
        ("enable_hashagg", "off"),
        ("enable_material", "off"),
        ("enable_memoize", "off"),
        ("enable_indexonlyscan", "off"),
        ("plan_cache_mode", "force_generic_plan"),
    ];
    let options = PgConnectOptions::from_str(&db.url())
        .unwrap()
        .options(hostile);
    let store = PgStore::new(many().connect_with(options).await.unwrap());
    store.migrate().await.unwrap();
    publish(&store, &vec![event(); 20]).await;
    let delayed = NewEvent {
        delay: MINUTE,
        ..event()
    };
    publish(&store, &vec![delayed; 20]).await;
    make_due(store.pool()).await;
    run(store.pool(), "DELETE FROM pg_statistic").await;

    let leased = "SELECT count(*) FROM outbox.outbox_events WHERE lease_token IS NOT NULL";
    for round in 1..=3 {
        let claimed = store.claim(&request(3)).await.unwrap();
        assert_eq!(claimed.len(), 3);
        assert_eq!(number(store.pool(), leased).await, 3 * round);
    }
}

/// Nothing here touches an indexed column, so each update that finds room in its page makes one
/// dead tuple and no index entry.
#[tokio::test]
async fn claiming_renewing_and_giving_back_are_hot_updates() {
    let (_db, store) = installed().await;
    // Room for every version: whether one can be pruned depends on who else has a snapshot.
    run(
        store.pool(),
        "ALTER TABLE outbox.outbox_events SET (fillfactor = 10)",
    )
    .await;
    let ids: Vec<String> = publish(&store, &vec![event(); 100])
        .await
        .iter()
        .map(|insertion| inserted(std::slice::from_ref(insertion)).to_string())
        .collect();
    let token = LeaseToken::random().as_uuid();
    let held = format!(
        "ARRAY[{}]::bigint[], array_fill('{token}'::uuid, '{{100}}')",
        ids.join(",")
    );
    let claim = claim_arguments(token);
    for (name, types, arguments) in [
        ("claim", CLAIM_TYPES, &claim),
        (
            "renew",
            "bigint[], uuid[], interval",
            &format!("{held}, '1 min'"),
        ),
        ("release", "bigint[], uuid[]", &held),
    ] {
        execute(&store, name, types, arguments).await;
    }
    assert_eq!(cold_updates(&store, 300).await, 0);
}

/// A lease makes a row longer: the second copies of a page's rows must still fit into it.
#[tokio::test]
async fn a_page_has_room_for_the_claim_of_all_its_rows() {
    let (_db, store) = installed().await;
    publish(&store, &vec![event(); 1_000]).await;
    for _ in 0..10 {
        let claim = claim_arguments(LeaseToken::random().as_uuid());
        execute(&store, "claim", CLAIM_TYPES, &claim).await;
    }
    assert_eq!(cold_updates(&store, 1_000).await, 0);
}

fn claim_arguments(token: impl std::fmt::Display) -> String {
    let instance = "an-ordinary-host-name-7f9c4b-4711";
    format!("'{token}', '1 min', '{instance}', '{{{NAME}/}}', '{{1}}', 100, 25, 0, 0, 0, 0")
}

/// How many of the `expected` updates wrote index entries.
async fn cold_updates(store: &PgStore, expected: i64) -> i64 {
    // A session reports what it did when it ends, a moment later.
    let updates = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox_events'";
    eventually(LIMIT, async || {
        number(store.pool(), updates).await >= expected
    })
    .await;
    let cold = "SELECT n_tup_upd - n_tup_hot_upd FROM pg_stat_user_tables
                WHERE relname = 'outbox_events'";
    number(store.pool(), cold).await
}

const CLAIM_TYPES: &str =
    "uuid, interval, text, text[], integer[], bigint, bigint, bigint, bigint, bigint, bigint";

/// Runs a statement of the store in a session that ends with it.
async fn execute(store: &PgStore, name: &str, types: &str, arguments: &str) {
    let mut session = session(store, "auto", name, types).await;
    let execute = format!("EXECUTE it({arguments})");
    session
        .execute(sqlx::raw_sql(AssertSqlSafe(execute)))
        .await
        .unwrap();
    session.close().await.unwrap();
}

/// A session like the store's own, with one of its statements prepared as `it`.
async fn session(store: &PgStore, mode: &str, name: &str, types: &str) -> PgConnection {
    let options = store.pool().connect_options();
    let mut session = PgConnection::connect_with(&options).await.unwrap();
    let statements = store.statements();
    let (_, sql) = statements.iter().find(|(of, _)| *of == name).unwrap();
    let types = if types.is_empty() {
        String::new()
    } else {
        format!("({types})")
    };
    let script = format!(
        "{}; SET plan_cache_mode = {mode}; PREPARE it{types} AS {sql}",
        store.session_settings()
    );
    let script = sqlx::raw_sql(AssertSqlSafe(script));
    session.execute(script).await.unwrap();
    session
}

async fn plan(store: &PgStore, mode: &str, name: &str, types: &str, arguments: &str) -> String {
    let mut session = session(store, mode, name, types).await;
    let explain = format!("EXPLAIN EXECUTE it({arguments})");
    let rows = session
        .fetch_all(sqlx::raw_sql(AssertSqlSafe(explain)))
        .await
        .unwrap();
    let lines: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    lines.join("\n")
}

/// The states in which a planner is tempted to scan or sort: statistics of an empty table, of one
/// filled in bulk, and none at all.
const STATES: [&str; 4] = [
    "VACUUM ANALYZE",
    "INSERT INTO outbox.outbox_events
         (name, version, payload, priority, max_attempts, retention)
     SELECT 'order.paid', 1, '{}', 1, 5, interval '0' FROM generate_series(1, 20000)",
    "VACUUM ANALYZE",
    "DELETE FROM pg_statistic",
];

/// Each with a plan for these arguments and one for any.
#[tokio::test]
async fn statements_keep_to_their_indexes_in_every_state_of_the_table() {
    let (_db, store) = installed().await;
    let claim_arguments =
        "gen_random_uuid(), '30s', 'here', '{order.paid/}', '{3}', 100, 25, 7, 7, 7, 7";
    let settle_types = "bigint[], uuid[], text[]";
    let settle_arguments = "ARRAY[5], ARRAY[gen_random_uuid()], ARRAY['1']";
    for state in STATES {
        run(store.pool(), state).await;
        for mode in ["force_custom_plan", "force_generic_plan"] {
            let claim = plan(&store, mode, "claim", CLAIM_TYPES, claim_arguments).await;
            assert!(!claim.contains("Seq Scan"), "{state}, {mode}:\n{claim}");
            assert!(!claim.contains("Bitmap"), "{state}, {mode}:\n{claim}");
            let update = claim
                .lines()
                .position(|line| line.starts_with("  ->  Index Scan"));
            let update = update.expect("the update reads an index");
            let update = claim.lines().nth(update).unwrap();
            assert!(
                update.contains("outbox_events_pkey"),
                "{state}, {mode}:\n{claim}"
            );
            // The low-water mark bounds the index, and does not filter what the index gave.
            let bounds = claim
                .lines()
                .filter(|line| {
                    line.contains("Index Cond: ((priority = ") && line.contains("(id + 0) >= ")
                })
                .count();
            assert_eq!(bounds, 4, "{state}, {mode}:\n{claim}");
            let due = claim
                .lines()
                .filter(|line| line.contains("Index Cond") && line.contains("due_at <= "))
                .count();
            assert_eq!(due, 8, "{state}, {mode}:\n{claim}");

            let settle = plan(&store, mode, "processed", settle_types, settle_arguments).await;
            assert!(!settle.contains("Seq Scan"), "{state}, {mode}:\n{settle}");
            assert!(
                settle.contains("Index Cond: (id = ANY "),
                "{state}, {mode}:\n{settle}"
            );
            assert!(!settle.contains("Join"), "{state}, {mode}:\n{settle}");
            assert!(!settle.contains("Nested"), "{state}, {mode}:\n{settle}");

            // The installation is one row.
            let find = plan(&store, mode, "find", "bigint", "5").await;
            let walks = find.lines().filter(|line| line.contains("Seq Scan"));
            let walked = walks.filter(|line| !line.contains("_installation")).count();
            assert_eq!(walked, 0, "{state}, {mode}:\n{find}");
            let purge = plan(&store, mode, "purge", "bigint", "5").await;
            assert!(!purge.contains("Seq Scan"), "{state}, {mode}:\n{purge}");
            let sweep = plan(
                &store,
                mode,
                "sweep_look",
                "bigint, bigint, interval",
                "5, 5, '1 day'",
            )
            .await;
            assert!(!sweep.contains("Seq Scan"), "{state}, {mode}:\n{sweep}");
        }
    }
}

#[tokio::test]
async fn ten_processes_that_migrate_at_once_install_one_schema() {
    let db = PgDb::empty().await;
    let mut running = Vec::new();
    for _ in 0..10 {
        let store = PgStore::new(db.pool());
        running.push(tokio::spawn(async move { store.migrate().await }));
    }
    for one in running {
        one.await.unwrap().unwrap();
    }
    let versions = "SELECT count(*) FROM outbox.outbox_events_schema";
    assert_eq!(number(&db.pool(), versions).await, 1);
    PgStore::new(db.pool()).check().await.unwrap();
}

#[tokio::test]
async fn a_migration_that_nobody_waits_for_is_finished_or_leaves_nothing() {
    let db = PgDb::empty().await;
    let pool = db.pool();
    for round in 0..20_u64 {
        let store = PgStore::builder(pool.clone())
            .table(format!("round_{round}"))
            .build()
            .unwrap();
        let patience = Duration::from_micros(500 * round);
        let _ = tokio::time::timeout(patience, store.migrate()).await;
        store.migrate().await.unwrap();
        store.check().await.unwrap();
    }
    let open = "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND state = 'idle in transaction'";
    assert_eq!(number(&pool, open).await, 0);
}

#[tokio::test]
async fn the_printed_migration_installs_what_the_migrator_does() {
    let db = PgDb::empty().await;
    let store = PgStore::new(db.pool());
    let mut tx = store.begin().await.unwrap();
    let script = sqlx::raw_sql(AssertSqlSafe(store.migration_sql()));
    tx.execute(script).await.unwrap();
    tx.commit().await.unwrap();
    store.migrate().await.unwrap();
    store.check().await.unwrap();
}

async fn check_error(store: &PgStore) -> StoreError {
    store.check().await.unwrap_err()
}

#[tokio::test]
async fn a_schema_that_does_not_fit_is_named_with_what_was_found_and_what_is_needed() {
    let db = PgDb::empty().await;
    let store = PgStore::new(db.pool());
    assert_eq!(
        check_error(&store).await.kind(),
        StoreErrorKind::SchemaMissing
    );
    let claim = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(claim.kind(), StoreErrorKind::SchemaMissing);

    store.migrate().await.unwrap();
    run(
        store.pool(),
        "UPDATE outbox.outbox_events_schema SET version = 9",
    )
    .await;
    for error in [
        check_error(&store).await,
        store.migrate().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::SchemaNewer);
        assert!(
            error
                .to_string()
                .contains("version 9; this release needs 1"),
            "{error}"
        );
    }

    run(
        store.pool(),
        "UPDATE outbox.outbox_events_schema SET version = -1",
    )
    .await;
    let error = check_error(&store).await;
    assert_eq!(error.kind(), StoreErrorKind::SchemaOlder);
    assert!(
        error
            .to_string()
            .contains("version -1; this release needs 1"),
        "{error}"
    );
}

#[tokio::test]
async fn odd_names_work_and_several_outboxes_share_a_database() {
    let db = PgDb::empty().await;
    let longest = "t".repeat(46);
    let names = [
        ("outbox", "outbox_events"),
        ("outbox", "more_events"),
        ("Mixed Case", "Events"),
        (r#"quo"ted"#, r#"it's "here"\"#),
        ("{events}", "{schema} {keys"),
        ("größe", longest.as_str()),
    ];
    let mut stores = Vec::new();
    for (schema, table) in names {
        let store = PgStore::builder(db.pool())
            .schema(schema)
            .table(table)
            .build()
            .unwrap();
        store.migrate().await.unwrap();
        store.check().await.unwrap();
        publish(&store, &[keyed("k"), event()]).await;
        stores.push(store);
    }
    for store in stores {
        let claimed = store.claim(&request(10)).await.unwrap();
        assert_eq!(claimed.len(), 2, "{store:?}");
        let settlements: Vec<_> = claimed.iter().map(processed).collect();
        assert_eq!(
            store.settle(&settlements).await.unwrap(),
            [Settled::Recorded; 2]
        );
    }

    let too_long = "t".repeat(70);
    let error = PgStore::builder(db.pool())
        .table(&too_long)
        .build()
        .unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Config);
    assert!(error.to_string().contains(&too_long), "{error}");
}

/// A role that row-level security, or a missing right, keeps from the rows.
#[tokio::test]
async fn the_check_finds_rows_that_are_hidden_and_rights_that_are_missing() {
    let (db, owner) = installed().await;
    let role = format!("role_{}", LeaseToken::random().as_uuid().simple());
    run(
        owner.pool(),
        &format!(
            "CREATE ROLE {role} LOGIN;
             GRANT USAGE ON SCHEMA outbox TO {role};
             GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {role};
             GRANT ALL ON ALL SEQUENCES IN SCHEMA outbox TO {role}"
        ),
    )
    .await;
    let as_role = || {
        let options = PgConnectOptions::from_str(&db.url())
            .unwrap()
            .username(&role);
        PgStore::new(PgPoolOptions::new().connect_lazy_with(options))
    };
    as_role().check().await.unwrap();

    run(
        owner.pool(),
        "ALTER TABLE outbox.outbox_events ENABLE ROW LEVEL SECURITY",
    )
    .await;
    assert_eq!(check_error(&as_role()).await.kind(), StoreErrorKind::Denied);

    // May insert, and sees nothing of it.
    run(
        owner.pool(),
        "CREATE POLICY writes ON outbox.outbox_events FOR INSERT WITH CHECK (true)",
    )
    .await;
    assert_eq!(check_error(&as_role()).await.kind(), StoreErrorKind::Denied);

    run(
        owner.pool(),
        "ALTER TABLE outbox.outbox_events DISABLE ROW LEVEL SECURITY",
    )
    .await;
    run(
        owner.pool(),
        &format!("REVOKE UPDATE ON outbox.outbox_events FROM {role}"),
    )
    .await;
    assert_eq!(check_error(&as_role()).await.kind(), StoreErrorKind::Denied);

    run(
        owner.pool(),
        &format!("DROP OWNED BY {role}; DROP ROLE {role}"),
    )
    .await;
}

#[tokio::test]
async fn the_rights_in_the_documentation_are_enough() {
    let (db, owner) = installed().await;
    let suffix = LeaseToken::random().as_uuid().simple().to_string();
    let (publisher, relay) = (format!("publisher_{suffix}"), format!("relay_{suffix}"));
    run(
        owner.pool(),
        &format!(
            "CREATE ROLE {publisher} LOGIN;
             CREATE ROLE {relay} LOGIN;
             GRANT USAGE ON SCHEMA outbox TO {publisher}, {relay};
             GRANT INSERT, SELECT ON outbox.outbox_events, outbox.outbox_events_keys
                 TO {publisher}, {relay};
             GRANT USAGE ON SEQUENCE outbox.outbox_events_id_seq TO {publisher}, {relay};
             GRANT SELECT ON outbox.outbox_events_installation TO {publisher}, {relay};
             GRANT UPDATE, DELETE ON outbox.outbox_events, outbox.outbox_events_keys TO {relay};
             GRANT SELECT, INSERT, UPDATE, DELETE ON outbox.outbox_events_history TO {relay};
             GRANT SELECT, INSERT ON outbox.outbox_events_dead TO {relay};
             GRANT SELECT ON outbox.outbox_events_all, outbox.outbox_events_schema TO {relay};
             GRANT SELECT ON outbox.outbox_events_paused TO {relay}"
        ),
    )
    .await;
    let as_role = |role: &str| {
        let options = PgConnectOptions::from_str(&db.url())
            .unwrap()
            .username(role);
        PgStore::new(PgPoolOptions::new().connect_lazy_with(options))
    };
    let store = as_role(&publisher);
    inserted(&publish(&store, &[keyed("k")]).await);
    existing(publish(&store, &[keyed("k")]).await);
    let claim = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(claim.kind(), StoreErrorKind::Denied);
    as_role(&relay).check().await.unwrap();

    run(
        owner.pool(),
        &format!("DROP OWNED BY {publisher}, {relay}; DROP ROLE {publisher}, {relay}"),
    )
    .await;
}

/// Of new sessions.
async fn make_serializable_the_default(pool: &PgPool) {
    run(
        pool,
        "DO $$ BEGIN EXECUTE format(
             'ALTER DATABASE %I SET default_transaction_isolation = serializable',
             current_database()); END $$",
    )
    .await;
}

#[tokio::test]
async fn p2_a_transaction_of_the_store_is_read_committed_whatever_the_default() {
    let (db, store) = installed().await;
    make_serializable_the_default(store.pool()).await;
    let store = PgStore::new(PgPool::connect(&db.url()).await.unwrap());
    let isolation = "SELECT current_setting('transaction_isolation')";
    let by_default: String = sqlx::query_scalar(isolation)
        .fetch_one(store.pool())
        .await
        .unwrap();
    assert_eq!(by_default, "serializable");
    let mut tx = store.begin().await.unwrap();
    let stated: String = sqlx::query_scalar(isolation)
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert_eq!(stated, "read committed");
    store.rollback(tx).await.unwrap();
}

#[tokio::test]
async fn a_check_leaves_nothing_and_works_under_a_stricter_default() {
    let (_db, store) = installed().await;
    make_serializable_the_default(store.pool()).await;
    let checks = (0..4).map(|_| {
        let store = store.clone();
        tokio::spawn(async move { store.check().await })
    });
    for check in checks.collect::<Vec<_>>() {
        check.await.unwrap().unwrap();
    }
    let rows = "SELECT (SELECT count(*) FROM outbox.outbox_events_all)
                     + (SELECT count(*) FROM outbox.outbox_events_keys)";
    assert_eq!(number(store.pool(), rows).await, 0);
}

#[tokio::test]
async fn a_winner_that_commits_is_what_the_loser_is_told() {
    let (_db, store) = installed().await;
    let mut winner = store.begin().await.unwrap();
    let insertion = store.insert(&mut winner, &[keyed("k")]).await.unwrap();
    let row = inserted(&insertion);

    let other = store.clone();
    let loser = tokio::spawn(async move { publish(&other, &[event(), keyed("k")]).await });
    until_waiting(store.pool(), 1).await;
    store.commit(winner).await.unwrap();

    let told = loser.await.unwrap();
    assert!(matches!(told[0], Insertion::Inserted(_)), "{told:?}");
    let existing = existing(told[1..].to_vec());
    assert_eq!(
        (existing.id.row(), existing.state),
        (row, EventState::Pending)
    );
}

#[tokio::test]
async fn batches_with_the_same_keys_do_not_deadlock() {
    let db = PgDb::empty().await;
    let store = PgStore::new(many().connect(&db.url()).await.unwrap());
    store.migrate().await.unwrap();
    for round in 0..20 {
        let keys: Vec<_> = (0..20).map(|n| keyed(&format!("{round}-{n}"))).collect();
        let reversed: Vec<_> = keys.iter().rev().cloned().collect();
        let other = store.clone();
        let there = tokio::spawn(async move { publish(&other, &reversed).await });
        publish(&store, &keys).await;
        there.await.unwrap();
    }
    let rows = "SELECT count(*) FROM outbox.outbox_events";
    assert_eq!(number(store.pool(), rows).await, 400);
}

/// A publisher must find the holder of its key wherever it is at that moment: in the hot table, on
/// its way out, or nowhere but in the key, where its retention is zero.
#[tokio::test]
async fn a_duplicate_finds_an_event_that_is_just_being_settled() {
    let (_db, store) = installed().await;
    for round in 0..100 {
        let retention = if round % 2 == 0 {
            Duration::ZERO
        } else {
            MINUTE
        };
        let event = NewEvent {
            retention,
            ..keyed(&format!("k{round}"))
        };
        let row = inserted(&publish(&store, std::slice::from_ref(&event)).await);
        let claimed = claim_one(&store).await;

        let (settling, publishing) = (store.clone(), store.clone());
        let settle = tokio::spawn(async move { settling.settle(&[processed(&claimed)]).await });
        let told = tokio::spawn(async move { publish(&publishing, &[event]).await });
        assert_eq!(settle.await.unwrap().unwrap(), [Settled::Recorded]);
        let told = existing(told.await.unwrap());

        assert_eq!(told.id.row(), row);
        match told.state {
            EventState::InProgress => assert_eq!(told.output, None),
            EventState::Processed => assert_eq!(told.output.as_deref(), Some("7")),
            other => panic!("{other}"),
        }
    }
}

/// The winner commits after the loser's snapshot was taken: nobody can tell the loser who it was,
/// so the transaction has to be run again.
#[tokio::test]
async fn a_duplicate_under_a_stricter_isolation_is_transient() {
    let (_db, store) = installed().await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        let mut loser = store.pool().begin_with(AssertSqlSafe(begin)).await.unwrap();
        loser.execute("SELECT 1").await.unwrap();
        publish(&store, &[keyed(level)]).await;
        let error = store.insert(&mut loser, &[keyed(level)]).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Conflict);
        assert!(error.is_transient());

        let after = store.insert(&mut loser, &[event()]).await.unwrap_err();
        assert!(
            after.to_string().contains("an earlier error has aborted"),
            "{after}"
        );
        loser.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn a_batch_is_one_statement_and_answers_in_input_order() {
    let (_db, store) = installed().await;
    let taken = inserted(&publish(&store, &[keyed("taken")]).await);
    let mut tx = store.begin().await.unwrap();
    let before = tx.cached_statements_size();
    let born = NewEvent {
        lease: Some(BornLease {
            token: LeaseToken::random(),
            duration: MINUTE,
            instance: "here".into(),
        }),
        ..keyed("born")
    };
    let events = [
        keyed("z"),
        event(),
        keyed("a"),
        born.clone(),
        keyed("z"),
        born,
        event(),
    ];
    let told = store.insert(&mut tx, &events).await.unwrap();
    assert_eq!(tx.cached_statements_size(), before + 1);
    let rows: Vec<i64> = told
        .iter()
        .map(|insertion| match insertion {
            Insertion::Inserted(id) | Insertion::Existing(Existing { id, .. }) => id.row(),
        })
        .collect();
    let first = rows[0];
    assert_eq!(rows.map_from(first), [0, 1, 2, 3, 0, 3, 4]);
    let state = |at: usize| existing(vec![told[at].clone()]).state;
    assert_eq!(state(4), EventState::Pending);
    assert_eq!(state(5), EventState::InProgress);

    // With a key that is taken, a second one tells who holds it.
    let told = store
        .insert(&mut tx, &[event(), keyed("taken"), event()])
        .await
        .unwrap();
    assert_eq!(existing(vec![told[1].clone()]).id.row(), taken);
    assert!(matches!(told[2], Insertion::Inserted(_)));
    assert_eq!(tx.cached_statements_size(), before + 2);
    store.commit(tx).await.unwrap();
}

trait MapFrom {
    fn map_from(&self, first: i64) -> Vec<i64>;
}

impl MapFrom for Vec<i64> {
    fn map_from(&self, first: i64) -> Vec<i64> {
        self.iter().map(|row| row - first).collect()
    }
}

#[tokio::test]
async fn a_savepoint_that_is_rolled_back_takes_its_event_and_its_key_along() {
    let (_db, store) = installed().await;
    let mut tx = store.begin().await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    let gone = inserted(&store.insert(&mut savepoint, &[keyed("k")]).await.unwrap());
    savepoint.rollback().await.unwrap();
    let kept = inserted(&store.insert(&mut tx, &[keyed("k")]).await.unwrap());
    store.commit(tx).await.unwrap();

    assert_eq!(store.find(gone).await.unwrap(), None);
    assert_eq!(claim_one(&store).await.id.row(), kept);
}

#[tokio::test]
async fn publishing_does_not_depend_on_the_callers_search_path() {
    let (_db, store) = installed().await;
    run(
        store.pool(),
        "CREATE SCHEMA hostile;
         CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS $$ SELECT '1970-01-01'::timestamptz $$;
         CREATE FUNCTION hostile.later(timestamptz, interval) RETURNS timestamptz LANGUAGE sql
             AS $$ SELECT '1970-01-01'::timestamptz $$;
         CREATE OPERATOR hostile.+ (LEFTARG = timestamptz, RIGHTARG = interval,
             FUNCTION = hostile.later)",
    )
    .await;
    for path in ["''", "hostile, pg_catalog"] {
        let mut tx = store.begin().await.unwrap();
        let set = format!("SET LOCAL search_path = {path}");
        tx.execute(sqlx::raw_sql(AssertSqlSafe(set))).await.unwrap();
        let delayed = |key: &str| NewEvent {
            delay: MINUTE,
            ..keyed(key)
        };
        let told = store
            .insert(&mut tx, &[delayed(path), keyed("both"), event()])
            .await
            .unwrap();
        assert!(matches!(told[0], Insertion::Inserted(_)), "{told:?}");
        store.insert(&mut tx, &[event()]).await.unwrap();
        existing(store.insert(&mut tx, &[keyed("both")]).await.unwrap());
        store.commit(tx).await.unwrap();
    }
    let odd = "SELECT count(*) FROM outbox.outbox_events
         WHERE created_at < now() - interval '1 hour' OR due_at < now()";
    assert_eq!(number(store.pool(), odd).await, 0);
}

/// A plain server does for a pooler here: what is tested is that every call is a transaction of
/// its own that leaves nothing prepared behind.
#[tokio::test]
async fn behind_a_pooler_everything_is_a_transaction_and_nothing_stays_prepared() {
    let db = PgDb::empty().await;
    let store = PgStore::builder(db.pool())
        .behind_transaction_pooler()
        .connections(NonZeroU32::MIN)
        .build()
        .unwrap();
    store.migrate().await.unwrap();
    store.check().await.unwrap();
    assert!(store.listen().await.unwrap().is_none());

    let mut tx = store.begin().await.unwrap();
    store
        .insert(&mut tx, &[keyed("k"), event(), event()])
        .await
        .unwrap();
    existing(store.insert(&mut tx, &[keyed("k")]).await.unwrap());
    assert_eq!(tx.cached_statements_size(), 0);
    store.commit(tx).await.unwrap();

    let claimed = store.claim(&request(10)).await.unwrap();
    assert_eq!(claimed.len(), 3);
    let leases: Vec<_> = claimed.iter().map(Claimed::lease).collect();
    assert_eq!(
        store.renew(&leases, MINUTE).await.unwrap(),
        [Renewal::Renewed; 3]
    );
    assert_eq!(store.verify(&leases).await.unwrap().len(), 3);
    assert_eq!(
        store.release(&leases[2..]).await.unwrap(),
        [Settled::Recorded]
    );
    let settlements = [
        processed(&claimed[0]),
        Settlement {
            lease: leases[1],
            outcome: Outcome::Retry {
                after: MINUTE,
                error: ErrorText::new(&"later"),
            },
        },
    ];
    assert_eq!(
        store.settle(&settlements).await.unwrap(),
        [Settled::Recorded; 2]
    );
    store.notify().await.unwrap();
}

#[tokio::test]
async fn a_batch_with_a_value_the_database_refuses_records_nothing() {
    let (_db, store) = installed().await;
    let kept = NewEvent {
        retention: MINUTE,
        ..event()
    };
    publish(&store, &vec![kept; 3]).await;
    let claimed = store.claim(&request(3)).await.unwrap();
    let mut settlements: Vec<_> = claimed.iter().map(processed).collect();
    settlements[0].outcome = Outcome::Retry {
        after: MINUTE,
        error: ErrorText::new(&"later"),
    };
    settlements[2].outcome = Outcome::Processed {
        output: Some("{broken".to_owned()),
    };
    let error = store.settle(&settlements).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Data);

    let leases: Vec<_> = claimed.iter().map(Claimed::lease).collect();
    assert_eq!(store.verify(&leases).await.unwrap().len(), 3);
    assert_eq!(
        store.settle(&settlements[..2]).await.unwrap(),
        [Settled::Recorded; 2]
    );
}

#[tokio::test]
async fn a_renewal_skips_a_row_that_somebody_has_locked() {
    let (_db, store) = installed().await;
    publish(&store, &vec![event(); 2]).await;
    let claimed = store.claim(&request(2)).await.unwrap();
    let mut leases: Vec<_> = claimed.iter().map(Claimed::lease).collect();
    leases.push(outbox_core::lease::HeldLease {
        row: leases[0].row,
        token: LeaseToken::random(),
    });

    let mut lock = store.begin().await.unwrap();
    let select = "SELECT 1 FROM outbox.outbox_events WHERE id = $1 FOR UPDATE";
    sqlx::query(select)
        .bind(leases[1].row)
        .execute(&mut *lock)
        .await
        .unwrap();
    assert_eq!(
        store.renew(&leases, MINUTE).await.unwrap(),
        [Renewal::Renewed, Renewal::Unknown, Renewal::Lost]
    );
}

#[tokio::test]
async fn a_wake_up_reaches_the_outbox_it_is_meant_for() {
    let (db, store) = installed().await;
    let other = PgStore::builder(db.pool()).table("other").build().unwrap();
    let mut mine = store.listen().await.unwrap().expect("a subscription");
    let mut theirs = other.listen().await.unwrap().expect("a subscription");
    store.notify().await.unwrap();
    mine.next().await.unwrap();
    other.notify().await.unwrap();
    theirs.next().await.unwrap();

    // A connection that is gone is an error, so that the caller looks for what it missed.
    run(
        store.pool(),
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND query LIKE 'LISTEN%'",
    )
    .await;
    let error = mine.next().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    assert!(error.is_transient());
}

/// A handler that holds every connection of the application must not keep its own event from being
/// settled.
#[tokio::test]
async fn the_relays_statements_do_not_need_the_applications_connections() {
    let db = PgDb::empty().await;
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .connect(&db.url())
        .await
        .unwrap();
    let store = PgStore::new(pool.clone());
    store.migrate().await.unwrap();
    publish(&store, &[event()]).await;

    let _all = pool.acquire().await.unwrap();
    let claimed = claim_one(&store).await;
    assert_eq!(
        store.settle(&[processed(&claimed)]).await.unwrap(),
        [Settled::Recorded]
    );
}

#[tokio::test]
async fn a_lock_that_is_not_had_in_time_is_transient_and_the_store_goes_on() {
    let db = PgDb::empty().await;
    let store = PgStore::builder(db.pool())
        .statement_deadline(Duration::from_millis(200))
        .build()
        .unwrap();
    store.migrate().await.unwrap();
    publish(&store, &[event()]).await;
    let claimed = claim_one(&store).await;

    let mut lock = store.begin().await.unwrap();
    lock.execute("LOCK TABLE outbox.outbox_events")
        .await
        .unwrap();
    let error = store.settle(&[processed(&claimed)]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Locked);
    assert!(error.is_transient());
    lock.rollback().await.unwrap();
    assert_eq!(
        store.settle(&[processed(&claimed)]).await.unwrap(),
        [Settled::Recorded]
    );
}

#[test]
fn a_store_can_be_made_outside_of_a_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let pool = runtime.block_on(async { PgPool::connect_lazy("postgres://127.0.0.1").unwrap() });
    let _store = PgStore::new(pool);
}

#[tokio::test]
async fn a_renewed_installation_gives_new_ids_to_old_rows() {
    let (_db, store) = installed().await;
    let row = inserted(&publish(&store, &[event()]).await);
    let before = store.find(row).await.unwrap().unwrap().id;
    let installation = store.renew_installation().await.unwrap();
    let after = store.find(row).await.unwrap().unwrap().id;
    assert_eq!(after.row(), before.row());
    assert_ne!(after.installation(), before.installation());
    assert_eq!(after.installation(), installation);
}

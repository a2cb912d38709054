//! What is particular to the store on SQLite. What every store promises is in `contract`.
//!
//! No test waits for a clock: where time has to pass, the column is moved.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::event::{EventId, Priority};
use outbox_core::lease::LeaseToken;
use outbox_core::outcome::{DeadReason, ErrorText, Outcome};
use outbox_core::store::{
    ClaimRequest, Claimed, EventRecord, EventState, Existing, Insertion, LowWater, NewEvent,
    Settled, Settlement, Store, StoreErrorKind, SweepRequest,
};
use outbox_sqlx::SqliteStore;
use sqlx::{AssertSqlSafe, SqlitePool};

use crate::support::SqliteDb;

const NAME: &str = "order.paid";
const LEASE: Duration = Duration::from_secs(30);

async fn installed(db: &SqliteDb) -> SqliteStore {
    let store = SqliteStore::new(db.pool());
    store.migrate().await.unwrap();
    store
}

fn event() -> NewEvent {
    NewEvent {
        name: NAME,
        version: NonZeroU32::MIN,
        payload: r#"{"cents":1.10}"#.to_owned(),
        headers: None,
        dedup_key: None,
        ordering_key: None,
        priority: Priority::Normal,
        max_attempts: number(5),
        delay: Duration::ZERO,
        retention: Duration::from_secs(3_600),
        key_retention: Duration::from_secs(86_400),
        lease: None,
    }
}

fn keyed(key: &str) -> NewEvent {
    NewEvent {
        dedup_key: Some(key.to_owned()),
        ..event()
    }
}

fn number(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

/// Publishes in a transaction of its own.
async fn publish(store: &SqliteStore, events: &[NewEvent]) -> Vec<Insertion> {
    let mut tx = store.begin().await.unwrap();
    let answers = store.insert(&mut tx, events).await.unwrap();
    store.commit(tx).await.unwrap();
    answers
}

async fn publish_rows(store: &SqliteStore, events: &[NewEvent]) -> Vec<i64> {
    publish(store, events)
        .await
        .into_iter()
        .map(|answer| inserted(&answer).row())
        .collect()
}

async fn publish_one(store: &SqliteStore, event: NewEvent) -> i64 {
    publish_rows(store, &[event]).await[0]
}

#[track_caller]
fn inserted(answer: &Insertion) -> EventId {
    match answer {
        Insertion::Inserted(id) => *id,
        Insertion::Existing(existing) => panic!("a duplicate of {existing:?}"),
    }
}

#[track_caller]
fn existing(answer: &Insertion) -> &Existing {
    match answer {
        Insertion::Existing(existing) => existing,
        Insertion::Inserted(id) => panic!("inserted as {id}"),
    }
}

fn request(limit: u32) -> ClaimRequest<'static> {
    ClaimRequest {
        limit: number(limit),
        reserved: limit.div_ceil(4),
        lease: LEASE,
        token: LeaseToken::random(),
        instance: "relay-a",
        names: &[NAME],
        low_water: LowWater::BEGINNING,
    }
}

async fn claim(store: &SqliteStore, limit: u32) -> Vec<Claimed> {
    store.claim(&request(limit)).await.unwrap()
}

async fn claim_one(store: &SqliteStore) -> Claimed {
    let mut claimed = claim(store, 1).await;
    assert_eq!(claimed.len(), 1, "nothing is due");
    claimed.remove(0)
}

async fn settle(store: &SqliteStore, claimed: &Claimed, outcome: Outcome) -> Settled {
    let settlement = Settlement {
        lease: claimed.lease(),
        outcome,
    };
    store.settle(&[settlement]).await.unwrap()[0]
}

fn processed(output: Option<&str>) -> Outcome {
    Outcome::Processed {
        output: output.map(str::to_owned),
    }
}

fn retry(after: Duration, error: &str) -> Outcome {
    Outcome::Retry {
        after,
        error: ErrorText::new(&error),
    }
}

fn dead(error: &str) -> Outcome {
    Outcome::Dead {
        reason: DeadReason::Permanent,
        error: ErrorText::new(&error),
    }
}

async fn record(store: &SqliteStore, row: i64) -> EventRecord {
    store.find(row).await.unwrap().expect("the event is known")
}

async fn execute(pool: &SqlitePool, sql: impl Into<String>) -> u64 {
    sqlx::query(AssertSqlSafe(sql.into()))
        .execute(pool)
        .await
        .unwrap()
        .rows_affected()
}

async fn count(pool: &SqlitePool, sql: impl Into<String>) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.into()))
        .fetch_one(pool)
        .await
        .unwrap()
}

fn rows(claimed: &[Claimed]) -> Vec<i64> {
    let mut rows: Vec<i64> = claimed.iter().map(|claimed| claimed.id.row()).collect();
    rows.sort_unstable();
    rows
}

// Publishing

#[tokio::test]
async fn what_goes_in_comes_out_to_the_byte() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let odd: String = (1..=0x2fff)
        .filter_map(char::from_u32)
        .chain("\u{feff}\u{10ffff}🦀 e\u{301} \u{2028}".chars())
        .collect();
    let payload = serde_json::json!({ "text": odd, "n": "1.10", "\\": "\"" }).to_string();
    let spaced = " {\"a\" : 1.10,\t\"a\":2}\r\n".to_owned();
    let events = [payload.clone(), spaced.clone()].map(|payload| NewEvent {
        payload,
        headers: Some(r#"{"traceparent":"00-1"}"#.to_owned()),
        ordering_key: Some("o' \"1\"".to_owned()),
        ..event()
    });
    // Together, and each by itself: a single event takes another way into the database.
    let mut ids = publish_rows(&store, &events).await;
    for event in events {
        ids.push(publish_one(&store, event).await);
    }

    let claimed = claim(&store, 4).await;
    for (id, expected) in ids.iter().zip([&payload, &spaced, &payload, &spaced]) {
        let one = claimed.iter().find(|one| one.id.row() == *id).unwrap();
        assert_eq!(&one.payload, expected);
        assert_eq!(one.headers.as_deref(), Some(r#"{"traceparent":"00-1"}"#));
        let record = record(&store, *id).await;
        assert_eq!(&record.payload, expected);
        assert_eq!(record.ordering_key.as_deref(), Some("o' \"1\""));
    }
}

#[tokio::test]
async fn a_number_is_not_given_twice() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let kept_nowhere = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let first = publish_one(&store, kept_nowhere.clone()).await;
    let claimed = claim_one(&store).await;
    settle(&store, &claimed, processed(None)).await;
    assert_eq!(store.find(first).await.unwrap(), None);
    assert!(publish_one(&store, kept_nowhere).await > first);
}

#[tokio::test]
async fn a_rollback_or_a_savepoint_leaves_neither_row_nor_key() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;

    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[keyed("a")]).await.unwrap();
    store.rollback(tx).await.unwrap();

    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[keyed("b")]).await.unwrap();
    sqlx::query("SAVEPOINT inner_one")
        .execute(&mut *tx)
        .await
        .unwrap();
    store.insert(&mut tx, &[keyed("c")]).await.unwrap();
    sqlx::query("ROLLBACK TO inner_one")
        .execute(&mut *tx)
        .await
        .unwrap();
    store.insert(&mut tx, &[keyed("d")]).await.unwrap();
    store.commit(tx).await.unwrap();

    let pool = db.pool();
    let keys: Vec<String> = sqlx::query_scalar("SELECT key FROM outbox_events_keys ORDER BY key")
        .fetch_all(&pool)
        .await
        .unwrap();
    assert_eq!(keys, ["b", "d"]);
    assert_eq!(claim(&store, 10).await.len(), 2);
    // What was undone holds no key.
    publish(&store, &[keyed("a"), keyed("c")])
        .await
        .iter()
        .for_each(|answer| {
            inserted(answer);
        });
}

#[tokio::test]
async fn a_row_and_its_key_are_one_write_even_without_a_transaction() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let mut connection = db.pool().acquire().await.unwrap();
    let first = store.insert(&mut connection, &[keyed("k")]).await.unwrap();
    let second = store.insert(&mut connection, &[keyed("k")]).await.unwrap();
    assert_eq!(existing(&second[0]).id, inserted(&first[0]));
}

// Dedup keys

#[tokio::test]
async fn a_row_written_by_hand_cannot_take_somebody_elses_key() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    publish_one(&store, keyed("k")).await;
    let error = sqlx::query(
        "INSERT INTO outbox_events
            (name, version, priority, payload, dedup_key, max_attempts, created_at, retention,
             key_retention)
         SELECT name, version, priority, payload, dedup_key, max_attempts, created_at, retention,
             key_retention
         FROM outbox_events",
    )
    .execute(&db.pool())
    .await
    .unwrap_err();
    assert!(
        error.to_string().contains("the dedup key is taken"),
        "{error}"
    );
}

#[tokio::test]
async fn a_deferred_transaction_that_read_too_early_is_told_to_run_again() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let mut deferred = db.pool().begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM outbox_events")
        .fetch_one(&mut *deferred)
        .await
        .unwrap();
    publish_one(&store, event()).await;

    let error = store.insert(&mut deferred, &[event()]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict);
    assert!(error.is_transient());
}

#[tokio::test]
async fn the_write_lock_is_waited_for_until_the_deadline() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let impatient = SqliteStore::builder(db.pool())
        .statement_deadline(Duration::from_millis(50))
        .build()
        .unwrap();
    let writer = impatient.begin().await.unwrap();

    let error = impatient.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert!(error.is_transient());

    impatient.rollback(writer).await.unwrap();
    let patient = SqliteStore::new(db.pool());
    publish_one(&patient, event()).await;
    assert_eq!(claim(&patient, 1).await.len(), 1);
}

#[tokio::test]
async fn dropped_calls_leave_no_transaction_behind() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let rows = publish_rows(&store, &vec![event(); 50]).await;
    for n in 0..200_u32 {
        let request = request(1);
        let call = store.claim(&request);
        // Polled a few times, then dropped wherever it has got to.
        let mut call = Box::pin(call);
        for _ in 0..n % 7 {
            let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(call.as_mut().poll(cx)));
            if polled.await.is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    // Every connection still writes, and what it writes stays.
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = store.clone();
        tasks.spawn(async move { publish_one(&store, event()).await });
    }
    let new = tasks.join_all().await;
    assert_eq!(new.iter().collect::<HashSet<_>>().len(), 8);
    for row in rows.into_iter().chain(new) {
        record(&store, row).await;
    }
}

// Claiming

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

// Settling, renewing, giving back

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

// Sweeping and purging

async fn sweep(store: &SqliteStore, after: i64, scan: u32) -> outbox_core::store::SweepChunk {
    let request = SweepRequest {
        after,
        scan: number(scan),
        lease: LEASE,
        token: LeaseToken::random(),
        instance: "sweeper",
        names: &[NAME],
    };
    store.sweep(&request).await.unwrap()
}

#[tokio::test]
async fn every_row_the_constraints_allow_is_the_claims_or_the_sweeps() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    let mut allowed = 0;
    for attempts in 0..=2 {
        for lease in [
            "lease_token = NULL, lease_expires_at = NULL, claimed_by = NULL",
            "lease_token = 't', lease_expires_at = 1, claimed_by = 'a'",
        ] {
            for due in ["NULL", "1"] {
                let row = publish_one(
                    &store,
                    NewEvent {
                        max_attempts: number(2),
                        ..event()
                    },
                )
                .await;
                let set = format!(
                    "UPDATE outbox_events
                    SET attempts = {attempts}, due_at = {due}, {lease} WHERE id = {row}"
                );
                if sqlx::query(AssertSqlSafe(set))
                    .execute(&pool)
                    .await
                    .is_err()
                {
                    claim_one(&store).await;
                    continue;
                }
                allowed += 1;
                let claimed = claim(&store, 10).await.len();
                let swept = sweep(&store, 0, 1_000).await.exhausted.len();
                assert_eq!(
                    claimed + swept,
                    1,
                    "attempts {attempts}, {lease}, due {due}"
                );
            }
        }
    }
    assert_eq!(allowed, 10);
}

#[tokio::test]
async fn a_purge_removes_only_what_is_past_its_retention() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    let ids = publish_rows(
        &store,
        &[
            keyed("old"),
            keyed("young"),
            keyed("dead"),
            keyed("failed"),
            keyed("held"),
        ],
    )
    .await;
    let mut claimed = claim(&store, 5).await;
    claimed.sort_by_key(|claimed| claimed.id);
    settle(&store, &claimed[0], processed(None)).await;
    settle(&store, &claimed[1], processed(None)).await;
    settle(&store, &claimed[2], dead("never")).await;
    settle(&store, &claimed[3], retry(Duration::ZERO, "no")).await;
    assert_eq!(store.purge(number(100)).await.unwrap(), 0);

    // The key has ended and its event's row has not: it waits for the row.
    execute(
        &pool,
        "UPDATE outbox_events_keys SET expires_at = 1 WHERE key = 'old'",
    )
    .await;
    assert_eq!(store.purge(number(100)).await.unwrap(), 0);
    execute(
        &pool,
        format!(
            "UPDATE outbox_events_history SET expires_at = 1 WHERE id = {}",
            ids[0]
        ),
    )
    .await;
    assert_eq!(store.purge(number(1)).await.unwrap(), 1);
    assert_eq!(store.find(ids[0]).await.unwrap(), None);
    assert_eq!(store.purge(number(1)).await.unwrap(), 1);
    assert_eq!(store.purge(number(1)).await.unwrap(), 0);

    for row in &ids[1..] {
        record(&store, *row).await;
    }
    inserted(&publish(&store, &[keyed("old")]).await[0]);
    for key in ["young", "dead", "failed", "held"] {
        existing(&publish(&store, &[keyed(key)]).await[0]);
    }
}

#[tokio::test]
async fn constraints_refuse_mixed_states() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    publish_one(&store, keyed("k")).await;
    for (table, set) in [
        ("outbox_events", "lease_token = 't'"),
        ("outbox_events", "lease_expires_at = 1"),
        ("outbox_events", "claimed_by = 'a'"),
        (
            "outbox_events",
            "lease_token = 't', lease_expires_at = 1, claimed_by = 'a'",
        ),
        ("outbox_events", "attempts = -1"),
        ("outbox_events", "attempts = max_attempts + 1"),
        ("outbox_events", "max_attempts = 0"),
        ("outbox_events", "priority = 4"),
        ("outbox_events", "version = 0"),
        ("outbox_events", "failures = 'x'"),
        ("outbox_events", "failures = '{}'"),
        ("outbox_events", "due_at = 'soon'"),
        ("outbox_events_keys", "expires_at = 1"),
        ("outbox_events_keys", "state = 'processed'"),
        ("outbox_events_keys", "state = 'bored'"),
        ("outbox_events_keys", "state = 'dead_letter', output = '1'"),
    ] {
        let error = sqlx::query(AssertSqlSafe(format!("UPDATE {table} SET {set}")))
            .execute(&pool)
            .await
            .expect_err(set);
        assert!(
            error.to_string().contains("onstraint") || error.to_string().contains("cannot store"),
            "{set}: {error}"
        );
    }
}

// Looking

#[tokio::test]
async fn the_view_tells_the_story_in_words() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    publish(&store, &vec![event(); 6]).await;
    let mut claimed = claim(&store, 5).await;
    claimed.sort_by_key(|claimed| claimed.id);
    settle(&store, &claimed[0], processed(Some("1"))).await;
    settle(&store, &claimed[1], dead("never")).await;
    settle(&store, &claimed[2], retry(LEASE, "no")).await;
    let expired = claimed[3].id.row();
    execute(
        &pool,
        format!("UPDATE outbox_events SET lease_expires_at = 1 WHERE id = {expired}"),
    )
    .await;
    let story: Vec<(String, String)> =
        sqlx::query_as("SELECT status, priority FROM outbox_events_all ORDER BY id")
            .fetch_all(&pool)
            .await
            .unwrap();
    let words: Vec<&str> = story.iter().map(|(status, _)| status.as_str()).collect();
    assert_eq!(
        words,
        [
            "processed",
            "dead_letter",
            "failed",
            "pending",
            "in_progress",
            "pending"
        ]
    );
    assert!(story.iter().all(|(_, priority)| priority == "normal"));

    let readable: (String, String, Option<String>) = sqlx::query_as(
        "SELECT created_utc, settled_utc, last_error FROM outbox_events_all WHERE dead_reason = 'permanent'",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert_eq!(readable.0.len(), "2026-01-31 12:00:00.000".len());
    assert!(readable.1 >= readable.0);
    assert_eq!(readable.2.as_deref(), Some("never"));
}

// Installing

#[tokio::test]
async fn ten_migrations_at_once_install_once() {
    let db = SqliteDb::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..10 {
        let path = db.path().to_owned();
        tasks.spawn(async move {
            // A pool each, as processes have.
            let store = SqliteStore::open(path).await.unwrap();
            let store = SqliteStore::builder(store.pool().clone())
                .table("at_once")
                .build()
                .unwrap();
            store.migrate().await.unwrap();
            store.migrate().await.unwrap();
            store.check().await.unwrap();
            n
        });
    }
    assert_eq!(tasks.join_all().await.len(), 10);
    let pool = db.pool();
    assert_eq!(count(&pool, "SELECT count(*) FROM at_once_schema").await, 1);
    assert_eq!(count(&pool, "SELECT count(*) FROM at_once_all").await, 0);
}

#[tokio::test]
async fn a_schema_that_is_missing_older_or_newer_is_named() {
    let db = SqliteDb::new().await;
    let pool = db.pool();
    let store = SqliteStore::builder(pool.clone())
        .table("fresh")
        .build()
        .unwrap();

    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaMissing);
    assert!(error.to_string().contains("needs version 1"), "{error}");
    let error = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaMissing);

    store.migrate().await.unwrap();
    store.check().await.unwrap();
    for (version, kind) in [
        (0, StoreErrorKind::SchemaOlder),
        (2, StoreErrorKind::SchemaNewer),
    ] {
        execute(
            &pool,
            format!("UPDATE fresh_schema SET version = {version}"),
        )
        .await;
        let error = store.check().await.unwrap_err();
        assert_eq!(error.kind(), kind);
        let text = error.to_string();
        assert!(
            text.contains(&format!("version {version} is installed")),
            "{text}"
        );
        assert!(text.contains("needs version 1"), "{text}");
        assert!(!error.is_transient());
    }
    let error = store.migrate().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaNewer);
}

#[tokio::test]
async fn a_check_leaves_no_trace() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    store.check().await.unwrap();
    store.check().await.unwrap();
    assert_eq!(
        count(&db.pool(), "SELECT count(*) FROM outbox_events_all").await,
        0
    );
    assert_eq!(publish_one(&store, event()).await, 1);
}

#[tokio::test]
async fn a_read_only_database_is_denied() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone().read_only(true);
    let store = SqliteStore::new(SqlitePool::connect_with(options).await.unwrap());
    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
}

#[tokio::test]
async fn several_outboxes_under_odd_names_live_in_one_file() {
    let db = SqliteDb::new().await;
    let names = [
        "outbox_events",
        "billing events",
        "a\"b'; DROP TABLE x; --",
        "größe",
        "{keys}",
        "select",
        "%_?1",
    ];
    for name in names {
        let store = SqliteStore::builder(db.pool()).table(name).build().unwrap();
        store.migrate().await.unwrap();
        store.check().await.unwrap();
        let row = publish_one(&store, keyed("k")).await;
        assert_eq!(row, 1, "{name}");
        let claimed = claim_one(&store).await;
        settle(&store, &claimed, processed(None)).await;
        existing(&publish(&store, &[keyed("k")]).await[0]);
        assert_eq!(record(&store, row).await.state, EventState::Processed);
    }
}

#[tokio::test]
async fn the_printed_sql_installs_what_migrate_would() {
    let db = SqliteDb::new().await;
    let store = SqliteStore::builder(db.pool())
        .table("by_hand")
        .build()
        .unwrap();
    let mut tx = store.begin().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(store.migration_sql()))
        .execute(&mut *tx)
        .await
        .unwrap();
    store.commit(tx).await.unwrap();
    store.check().await.unwrap();
    store.migrate().await.unwrap();
}

#[tokio::test]
async fn two_installations_give_different_ids_and_a_renewed_one_new_ones() {
    let db = SqliteDb::new().await;
    let other = SqliteDb::new().await;
    let store = installed(&db).await;
    let mine = inserted(&publish(&store, &[event()]).await[0]);
    let theirs = inserted(&publish(&installed(&other).await, &[event()]).await[0]);
    assert_ne!(mine.installation(), theirs.installation());

    // Another process has the store open while it is renewed.
    let elsewhere = SqliteStore::open(db.path()).await.unwrap();
    store.renew_installation().await.unwrap();
    let renewed = claim_one(&elsewhere).await.id;
    assert_eq!(renewed.row(), mine.row());
    assert_ne!(renewed.installation(), mine.installation());
}

#[tokio::test]
async fn one_connection_in_memory_is_enough() {
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .connect("sqlite::memory:")
        .await
        .unwrap();
    let store = SqliteStore::builder(pool)
        .statement_deadline(Duration::from_millis(100))
        .build()
        .unwrap();
    store.migrate().await.unwrap();
    let row = publish_one(&store, event()).await;

    // The application holds the connection: the relay waits, and the database is still there.
    let tx = store.begin().await.unwrap();
    let error = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    store.rollback(tx).await.unwrap();
    assert_eq!(claim_one(&store).await.id.row(), row);
}

// Failing

#[tokio::test]
async fn a_batch_that_one_row_makes_fail_records_nothing() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    execute(
        &db.pool(),
        "CREATE TRIGGER picky BEFORE INSERT ON outbox_events_history WHEN NEW.output = 'bad'
        BEGIN SELECT RAISE(ABORT, 'not this one'); END",
    )
    .await;
    publish(&store, &[keyed("a"), keyed("b")]).await;
    let claimed = claim(&store, 2).await;
    let settlements: Vec<Settlement> = claimed
        .iter()
        .zip(["good", "bad"])
        .map(|(claimed, output)| Settlement {
            lease: claimed.lease(),
            outcome: processed(Some(output)),
        })
        .collect();

    let error = store.settle(&settlements).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Data);
    assert_eq!(
        store.settle(&settlements[..1]).await.unwrap(),
        [Settled::Recorded]
    );
    assert_eq!(
        settle(&store, &claimed[1], processed(None)).await,
        Settled::Recorded
    );
}

/// SQLite ends the transaction, and sqlx does not notice.
#[tokio::test]
async fn a_connection_whose_transaction_ended_behind_its_back_is_replaced() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone();
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .connect_with(options)
        .await
        .unwrap();
    let store = SqliteStore::new(pool);
    let spoil = async || {
        let mut tx = store.begin().await.unwrap();
        sqlx::query("UPDATE OR ROLLBACK outbox_events_schema SET one = 2")
            .execute(&mut *tx)
            .await
            .unwrap_err();
        store.commit(tx).await.unwrap_err();
    };

    spoil().await;
    publish_one(&store, event()).await;
    spoil().await;
    let error = store.claim(&request(1)).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    claim_one(&store).await;
}

#[tokio::test]
async fn a_lock_that_is_not_had_in_time_is_transient() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone();
    let hasty = SqlitePool::connect_with(options.busy_timeout(Duration::ZERO))
        .await
        .unwrap();
    let writer = store.begin().await.unwrap();

    let error = SqliteStore::new(hasty).begin().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert!(error.is_transient());
    store.rollback(writer).await.unwrap();
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_is_unreachable() {
    let db = SqliteDb::new().await;
    let nowhere = db.path().with_file_name("missing").join("outbox.db");
    let error = SqliteStore::open(&nowhere).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[tokio::test]
async fn a_path_that_is_no_file_is_refused() {
    for path in ["", ":memory:"] {
        let error = SqliteStore::open(path).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config);
    }
}

#[tokio::test]
async fn settings_outside_their_bounds_are_refused() {
    let db = SqliteDb::new().await;
    for builder in [
        SqliteStore::builder(db.pool()).table(""),
        SqliteStore::builder(db.pool()).table("sqlite_events"),
        SqliteStore::builder(db.pool()).table("a\0b"),
        SqliteStore::builder(db.pool()).table("x".repeat(51)),
        SqliteStore::builder(db.pool()).statement_deadline(Duration::ZERO),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config, "{error}");
    }
}

//! What is particular to the store on SQLite. What every store promises is in `contract`.
//!
//! No test waits for a clock: where time has to pass, the column is moved.
//!
//! ```text
//! install        the schema, the view, and where a database can live
//! publish        bytes, numbers and keys
//! settle         claims and outcomes
//! nested         parts of a transaction, and numbers that are given again
//! retention      the sweep, the purge, and what no row can be
//! dead_letters   what is done to dead letters, and to their keys
//! stats          counts with a bound
//! locks          the write lock, locks of entities, exclusive locks
//! faults         rows, files and connections that fail
//! ```

mod dead_letters;
mod faults;
mod install;
mod locks;
mod nested;
mod publish;
mod retention;
mod settle;
mod stats;

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::cadence::Cadence;
use outbox_core::event::{BehindDead, EventId, Priority};
use outbox_core::lease::LeaseToken;
use outbox_core::outcome::{DeadReason, ErrorText, Outcome};
use outbox_core::store::{
    ClaimRequest, Claimed, EventRecord, EventState, Existing, Insertion, KnownEvent, LowWater,
    NewEvent, Pass, Settled, Settlement, Store, StoreErrorKind, SweepChunk, SweepRequest,
};
use outbox_sqlx::SqliteStore;
use sqlx::{AssertSqlSafe, SqlitePool};

use crate::support::SqliteDb;

const NAME: &str = "order.paid";

/// What claims and sweeps here know.
const KNOWN: KnownEvent = KnownEvent {
    name: NAME,
    handler: None,
    newest_version: NonZeroU32::MIN,
};
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
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Normal,
        max_attempts: number(5),
        delay: Duration::ZERO,
        expires_in: None,
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
        events: &[KNOWN],
        low_water: LowWater::BEGINNING,
        freed: &[],
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

/// The pass that chunks of these tests belong to.
fn pass() -> Pass {
    Pass {
        cadence: Cadence::Sweep,
        statement_limit: Duration::from_secs(5),
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

//! Making sure, at start, that this process can work with the database.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::dead_letter::{DeadLetterFilter, DeadLetterScan};
use outbox_core::event::{BehindDead, EventId, Priority};
use outbox_core::lease::{HeldLease, LeaseToken};
use outbox_core::outcome::{DeadReason, ErrorText, Outcome};
use outbox_core::store::{
    ClaimRequest, EventRef, EventState, Insertion, KnownEvent, LowWater, NewEvent, Settlement,
    Split, SplitPart, StoreError, StoreErrorKind, SweepRequest,
};
use sqlx::{AssertSqlSafe, Executor, PgConnection, SqlSafeStr};
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use super::PgStore;
use super::query::{Query, interval};
use super::renew::holding;
use super::sqlstate::failed;
use super::{cancel, claim, dead_letter, insert, migrate, settle, split, sweep};

const DOING: &str = "check the outbox";

/// The name of the rows that are inserted and rolled back. Nobody else ever sees them.
const NAME: &str = "outbox.check";

/// Compares the schema's version, and takes rows through every statement in a transaction that is
/// rolled back.
///
/// Rows, because row-level security filters without an error: selecting nothing proves nothing.
/// The rows are seen by this transaction alone, and their key is random, so that it neither waits
/// for other processes nor keeps them waiting.
pub(super) async fn check(store: &PgStore) -> Result<(), StoreError> {
    let until = Instant::now() + store.deadline();
    let mut connection = store.acquire(DOING, until).await?;
    let checked = timeout_at(until, check_on(store, connection.get())).await;
    match checked {
        Ok(Ok(())) => {
            connection.keep();
            Ok(())
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, DOING)),
    }
}

async fn check_on(store: &PgStore, connection: &mut PgConnection) -> Result<(), StoreError> {
    let mut tx = store.begin_on(connection).await.map_err(doing)?;
    let found = migrate::installed_version(store, &mut tx).await?;
    tx.rollback().await.map_err(doing)?;
    migrate::refuse_newer(store, found)?;
    match found {
        0 => {
            return Err(migrate::mismatch(
                store,
                StoreErrorKind::SchemaMissing,
                found,
            ));
        }
        ..migrate::VERSION => {
            return Err(migrate::mismatch(store, StoreErrorKind::SchemaOlder, found));
        }
        _ => {}
    }

    if store.keeps_statements() {
        for (_, sql) in store.sql().all() {
            let sql = AssertSqlSafe(std::sync::Arc::clone(sql)).into_sql_str();
            (&mut *connection).prepare(sql).await.map_err(doing)?;
        }
    }

    let mut tx = store.begin_on(connection).await.map_err(doing)?;
    through_every_statement(store, &mut tx).await?;
    tx.rollback().await.map_err(doing)
}

async fn through_every_statement(store: &PgStore, tx: &mut PgConnection) -> Result<(), StoreError> {
    // Processed, by way of a release and a retry.
    let keyed = [event(Some(format!("check-{}", Uuid::new_v4())))];
    let row = publish(store, tx, &keyed).await?;
    expect_state(store, tx, &keyed, EventState::Pending).await?;
    let lease = take(store, tx, row).await?;
    one(
        store,
        tx,
        holding(Query::new(&store.sql().verify), &[lease]),
    )
    .await?;
    let renew = holding(Query::new(&store.sql().renew), &[lease]).bind(interval(LEASE));
    // Its answer has the row twice: as held, and as extended.
    rows(store, tx, renew, 2).await?;
    one(
        store,
        tx,
        holding(Query::new(&store.sql().release), &[lease]),
    )
    .await?;
    let lease = take(store, tx, row).await?;
    let error = ErrorText::new(&"checked");
    let retry = Outcome::Retry {
        after: Duration::ZERO,
        error: error.clone(),
    };
    record(store, tx, lease, retry).await?;
    let lease = take(store, tx, row).await?;
    let output = Some("{}".to_owned());
    record(store, tx, lease, Outcome::Processed { output }).await?;
    expect_state(store, tx, &keyed, EventState::Processed).await?;
    one(store, tx, Query::new(&store.sql().find).bind(row)).await?;

    one(store, tx, Query::new(&store.sql().newest)).await?;

    // Discarded.
    let row = publish(store, tx, &[event(None)]).await?;
    let lease = take(store, tx, row).await?;
    let discarded = Outcome::Discarded {
        error: error.clone(),
    };
    record(store, tx, lease, discarded).await?;

    // Dead, and published with others.
    let row = publish(store, tx, &[event(None), event(None)]).await?;
    let lease = take(store, tx, row).await?;
    let reason = DeadReason::Permanent;
    record(store, tx, lease, Outcome::Dead { reason, error }).await?;
    one(store, tx, Query::new(&store.sql().find).bind(row)).await?;

    // Split among two handlers: one part expires, the other is cancelled.
    let ordered = NewEvent {
        ordering_key: Some(format!("check-{}", Uuid::new_v4())),
        ..event(None)
    };
    let row = publish(store, tx, &[ordered]).await?;
    let lease = take(store, tx, row).await?;
    let part = |handler, held| SplitPart {
        handler,
        max_attempts: None,
        held,
    };
    let whole = Split {
        lease,
        parts: vec![part("first", true), part("second", false)],
    };
    rows(store, tx, split::query(store, &[&whole]), 2).await?;
    record(store, tx, lease, Outcome::Expired).await?;
    let id = EventId::new(store.installation_through(tx).await?, row);
    let cancelled = cancel::cancel(store, tx, &EventRef::Id(id)).await?;
    if cancelled.is_none_or(|found| found.state != EventState::Pending) {
        return Err(hidden());
    }

    // The rest for the rights alone, on no row: it would touch those of other processes.
    let request = request(LeaseToken::random());
    none(
        store,
        tx,
        claim::claim_query(store, &request_for_nothing(&request)),
    )
    .await?;
    none(store, tx, sweep::look(store, i64::MAX, 0)).await?;
    none(store, tx, sweep::cut(store, i64::MAX, i64::MAX)).await?;
    none(
        store,
        tx,
        sweep::take(
            store,
            &SweepRequest {
                after: i64::MAX,
                scan: NonZeroU32::MIN,
                lease: LEASE,
                token: request.token,
                instance: request.instance,
                events: request.events,
            },
            i64::MAX,
        ),
    )
    .await?;
    one(store, tx, Query::new(&store.sql().purge).bind(0_i64)).await?;
    one(store, tx, list_nothing(store)).await?;
    one(
        store,
        tx,
        Query::new(&store.sql().notify).bind(store.channel()),
    )
    .await
}

const LEASE: Duration = Duration::from_secs(60);

fn event(dedup_key: Option<String>) -> NewEvent {
    NewEvent {
        name: NAME,
        version: NonZeroU32::MIN,
        payload: "{}".to_owned(),
        headers: Some("{}".to_owned()),
        dedup_key,
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Normal,
        max_attempts: const { NonZeroU32::new(5).unwrap() },
        delay: Duration::ZERO,
        expires_in: None,
        retention: LEASE,
        key_retention: LEASE,
        lease: None,
    }
}

fn request(token: LeaseToken) -> ClaimRequest<'static> {
    ClaimRequest {
        reserved: 0,
        limit: NonZeroU32::MIN,
        lease: LEASE,
        token,
        instance: "check",
        events: &[KnownEvent {
            name: NAME,
            handler: None,
            newest_version: NonZeroU32::MIN,
        }],
        low_water: LowWater::BEGINNING,
        freed: &[],
    }
}

fn request_for_nothing(request: &ClaimRequest<'static>) -> ClaimRequest<'static> {
    ClaimRequest {
        events: &[],
        ..request.clone()
    }
}

/// A list of dead letters below every number there is: it reads none, and has one row that says so.
fn list_nothing(store: &PgStore) -> Query {
    let scan = DeadLetterScan {
        filter: &DeadLetterFilter::all(),
        beyond: i64::MIN,
        scan: NonZeroU32::MIN,
        limit: NonZeroU32::MIN,
    };
    dead_letter::walk(Query::new(&store.sql().dead_letters), &scan)
}

/// Inserts the events, and answers with the first one's number.
async fn publish(
    store: &PgStore,
    tx: &mut PgConnection,
    events: &[NewEvent],
) -> Result<i64, StoreError> {
    match insert::insert(store, tx, events).await?.first() {
        Some(Insertion::Inserted(id)) => Ok(id.row()),
        _ => Err(hidden()),
    }
}

/// Publishes the events' key again.
async fn expect_state(
    store: &PgStore,
    tx: &mut PgConnection,
    events: &[NewEvent],
    expected: EventState,
) -> Result<(), StoreError> {
    match insert::insert(store, tx, events).await?.first() {
        Some(Insertion::Existing(existing)) if existing.state == expected => Ok(()),
        _ => Err(hidden()),
    }
}

async fn take(store: &PgStore, tx: &mut PgConnection, row: i64) -> Result<HeldLease, StoreError> {
    let token = LeaseToken::random();
    one(store, tx, claim::named_rows(store, &[row], &request(token))).await?;
    Ok(HeldLease { row, token })
}

async fn record(
    store: &PgStore,
    tx: &mut PgConnection,
    lease: HeldLease,
    outcome: Outcome,
) -> Result<(), StoreError> {
    for query in settle::queries(store, &[Settlement { lease, outcome }]) {
        one(store, tx, query).await?;
    }
    Ok(())
}

/// Runs a statement that must answer with one row.
async fn one(store: &PgStore, tx: &mut PgConnection, query: Query) -> Result<(), StoreError> {
    rows(store, tx, query, 1).await
}

async fn rows(
    store: &PgStore,
    tx: &mut PgConnection,
    query: Query,
    expected: usize,
) -> Result<(), StoreError> {
    let rows = query.fetch(tx, store.keeps_statements()).await;
    if rows.map_err(doing)?.len() == expected {
        Ok(())
    } else {
        Err(hidden())
    }
}

/// Runs a statement for the error that it may give.
async fn none(store: &PgStore, tx: &mut PgConnection, query: Query) -> Result<(), StoreError> {
    let rows = query.fetch(tx, store.keeps_statements()).await;
    rows.map_err(doing)?;
    Ok(())
}

fn hidden() -> StoreError {
    StoreError::new(
        StoreErrorKind::Denied,
        "see and change a row of its own: row-level security, or a trigger, keeps it from that",
    )
}

fn doing(error: sqlx::Error) -> StoreError {
    failed(DOING, error)
}

//! Publishing: rows through the caller's connection.
//!
//! Everything here runs with the caller's settings, so functions and operators are named with
//! `pg_catalog` and relations with the outbox's schema: a `search_path` that is empty, or not the
//! caller's friend, changes nothing.

use std::collections::HashMap;

use outbox_core::event::{BehindDead, EventId};
use outbox_core::fingerprint::Fingerprint;
use outbox_core::store::{
    BornLease, EventState, Existing, Insertion, NewEvent, StoreError, StoreErrorKind,
    earlier_in_batch,
};
use sqlx::postgres::PgRow;
use sqlx::postgres::types::PgInterval;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::PgStore;
use super::query::{PgUuid, Query, interval};
use super::row::unreadable;
use super::sqlstate::failed;

const DOING: &str = "publish events";

/// How often a publish looks again at a key that was taken at one moment and gone at the next.
///
/// That happens when the key's retention ends between two statements. Once is rare and twice in a
/// row is a coincidence, so the limit only keeps a fault from looping for ever.
const LOOKS: usize = 5;

/// Inserts one event without a key of either kind: all that a publisher pays for.
///
/// - One statement, no CTE: a round trip costs the publisher four times what the row does.
/// - `clock_timestamp()`, because `now()` is the start of the caller's transaction: a lease counted
///   from there can be over before the caller commits.
/// - The sum with an interval that is NULL is NULL, so one text serves rows with and without a
///   lease, a delay or a deadline, and stays one prepared statement.
pub(super) const INSERT_ONE: &str = "
    INSERT INTO {events} (
        name, version, payload, headers, priority, max_attempts, retention, attempts, lease_token,
        lease_expires_at, claimed_by, due_at, expires_at
    ) VALUES (
        $1, $2, $3::pg_catalog.json, $4::pg_catalog.json, $5, $6, $7, $8, $9,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $10, $11,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $12,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $13
    )
    RETURNING id
";

/// Inserts one event whose dedup key is free, and nothing where it is taken.
///
/// - `ON CONFLICT DO NOTHING` waits for the transaction that holds the key and then decides: a
///   winner that rolls back lets us in, and one that commits is found by `LOOK_UP`. It raises no
///   error, so a duplicate does not abort the caller's transaction.
/// - It names no conflict target, which would ask for the right to read the key's columns.
/// - The key draws the event's number (the column's default), so that both rows are written by one
///   statement.
pub(super) const INSERT_KEYED: &str = "
    WITH taken AS (
        INSERT INTO {keys} (name, key, retention, fingerprint)
        VALUES ($1, $14, $15, $16)
        ON CONFLICT DO NOTHING
        RETURNING event_id
    )
    INSERT INTO {events} (
        id, name, version, payload, headers, priority, max_attempts, retention, attempts,
        lease_token, lease_expires_at, claimed_by, due_at, expires_at, dedup_key
    )
    SELECT
        taken.event_id, $1, $2, $3::pg_catalog.json, $4::pg_catalog.json, $5, $6, $7, $8, $9,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $10, $11,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $12,
        pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) $13, $14
    FROM taken
    RETURNING id
";

/// Inserts any number of events, with and without keys. Answers with the position, from 1, and the
/// number of each event that was inserted.
///
/// - One `unnest` per column: the form with several arguments exists only without `pg_catalog`.
/// - `MATERIALIZED`, so that a number is drawn once per event and in input order.
/// - The keys are sorted before they are taken: two batches with the same keys wait for each other
///   instead of deadlocking.
/// - The answer is read from `input`, because an `INSERT` returns nothing of where its row came
///   from. A statement that writes in a CTE runs it to the end whatever is read of it.
const INSERT_MANY: &str = "
    WITH {locks}input AS MATERIALIZED (
        SELECT pg_catalog.nextval({events_id_seq_literal}::pg_catalog.regclass) AS id, entry.*
        FROM {after_locks}ROWS FROM (
            pg_catalog.unnest($1::pg_catalog.text[]),
            pg_catalog.unnest($2::pg_catalog.int4[]),
            pg_catalog.unnest($3::pg_catalog.text[]),
            pg_catalog.unnest($4::pg_catalog.text[]),
            pg_catalog.unnest($5::pg_catalog.text[]),
            pg_catalog.unnest($6::pg_catalog.int2[]),
            pg_catalog.unnest($7::pg_catalog.int4[]),
            pg_catalog.unnest($8::pg_catalog.interval[]),
            pg_catalog.unnest($9::pg_catalog.int4[]),
            pg_catalog.unnest($10::pg_catalog.uuid[]),
            pg_catalog.unnest($11::pg_catalog.interval[]),
            pg_catalog.unnest($12::pg_catalog.text[]),
            pg_catalog.unnest($13::pg_catalog.interval[]),
            pg_catalog.unnest($14::pg_catalog.text[]),
            pg_catalog.unnest($15::pg_catalog.interval[]),
            pg_catalog.unnest($16::pg_catalog.bytea[]),
            pg_catalog.unnest($17::pg_catalog.interval[]),
            pg_catalog.unnest($18::pg_catalog.bool[])
        ) WITH ORDINALITY AS entry(
            name, version, payload, headers, ordering_key, priority, max_attempts, retention,
            attempts, lease_token, lease, claimed_by, delay, dedup_key, key_retention, fingerprint,
            life, blocks, position
        )
    ),
    taken AS (
        INSERT INTO {keys} (name, key, event_id, retention, fingerprint)
        SELECT name, dedup_key, id, key_retention, fingerprint
        FROM input
        WHERE dedup_key IS NOT NULL
        ORDER BY name COLLATE pg_catalog.\"C\", dedup_key COLLATE pg_catalog.\"C\"
        ON CONFLICT DO NOTHING
        RETURNING event_id
    ),
    free AS MATERIALIZED (
        SELECT *
        FROM input
        WHERE dedup_key IS NULL
        OR id OPERATOR(pg_catalog.=) ANY (SELECT event_id FROM taken)
    ),
    inserted AS (
        INSERT INTO {events} (
            id, name, version, payload, headers, ordering_key, blocks, priority, max_attempts,
            retention, attempts, lease_token, lease_expires_at, claimed_by, due_at, expires_at,
            dedup_key
        )
        SELECT
            id, name, version, payload::pg_catalog.json, headers::pg_catalog.json, ordering_key,
            blocks, priority, max_attempts, retention, attempts, lease_token,
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) lease, claimed_by,
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) delay,
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) life, dedup_key
        FROM free
    )
    SELECT position, id FROM free
";

/// Takes the locks `$20` of the namespace `$19` before a number is drawn, and keeps them until the
/// transaction ends: so the numbers of an ordering key are in the order of its commits.
///
/// - In the order in which they are given, which is sorted: two batches with the same keys wait for
///   each other instead of deadlocking. `unnest` keeps it, and `count` takes one after the other.
/// - `input` is joined to the one row that counts them, so none of its rows is made before that.
/// - `count` of what the function returns, so that it is called.
const LOCKS: &str = "locked AS MATERIALIZED (
        SELECT pg_catalog.count(pg_catalog.pg_advisory_xact_lock($19, lock.id)) AS locks
        FROM pg_catalog.unnest($20::pg_catalog.int4[]) AS lock(id)
    ),
    ";

pub(super) fn many_template() -> String {
    INSERT_MANY
        .replace("{locks}", "")
        .replace("{after_locks}", "")
}

/// For events some of which have an ordering key.
pub(super) fn many_ordered_template() -> String {
    INSERT_MANY
        .replace("{locks}", LOCKS)
        .replace("{after_locks}", "locked CROSS JOIN ")
}

/// Reads who holds the keys: name, key, number, state, output and fingerprint of each.
///
/// - A statement of its own: one that inserts has a snapshot from before it waited for the winner,
///   and cannot see what the winner committed.
/// - One statement over every place an event can be: its row may be on its way from the hot table
///   to the history or the dead letters, and two statements could look at each after it left.
///   `state` is written by the statement that settles the event, so it is right also where the
///   event's own retention is zero.
/// - An event that is in none of them was removed by a person. Nobody will try it again unless a
///   person asks, which is what `dead_letter` says.
pub(super) const LOOK_UP: &str = "
    SELECT
        key.name, key.key, key.event_id,
        CASE
            WHEN key.state IS NOT NULL THEN key.state
            WHEN event.id IS NULL THEN 'dead_letter'
            WHEN event.lease_expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
                THEN 'in_progress'
            WHEN event.lease_token IS NULL AND event.due_at IS NOT NULL
                AND event.attempts OPERATOR(pg_catalog.>) 0 THEN 'failed'
            ELSE 'pending'
        END,
        key.output::pg_catalog.text, key.fingerprint
    FROM ROWS FROM (
        pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[])
    )
        AS wanted(name, key)
    JOIN {keys} AS key
        ON key.name OPERATOR(pg_catalog.=) wanted.name
        AND key.key OPERATOR(pg_catalog.=) wanted.key
    LEFT JOIN {events} AS event ON event.id OPERATOR(pg_catalog.=) key.event_id
";

pub(super) async fn insert(
    store: &PgStore,
    connection: &mut PgConnection,
    events: &[NewEvent],
) -> Result<Vec<Insertion>, StoreError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let installation = store.installation_through(connection).await?;
    let earlier = earlier_in_batch(events);

    let mut found: Vec<Option<Insertion>> = vec![None; events.len()];
    let mut left: Vec<usize> = (0..events.len())
        .filter(|&at| earlier[at].is_none())
        .collect();
    for _ in 0..LOOKS {
        insert_free(store, connection, events, installation, &left, &mut found).await?;
        left.retain(|&at| found[at].is_none());
        if left.is_empty() {
            return Ok(with_duplicates(events, &earlier, found));
        }
        look_up(store, connection, events, installation, &left, &mut found).await?;
        left.retain(|&at| found[at].is_none());
        if left.is_empty() {
            return Ok(with_duplicates(events, &earlier, found));
        }
    }
    Err(StoreError::new(
        StoreErrorKind::Conflict,
        "publish an event whose dedup key keeps coming and going",
    ))
}

/// Inserts those of the events at `left` whose keys are free, and fills in what became of them.
async fn insert_free(
    store: &PgStore,
    connection: &mut PgConnection,
    events: &[NewEvent],
    installation: Uuid,
    left: &[usize],
    found: &mut [Option<Insertion>],
) -> Result<(), StoreError> {
    let persistent = store.keeps_statements();
    if let &[at] = left
        && events[at].ordering_key.is_none()
    {
        let rows = one(store, &events[at])?.fetch(connection, persistent).await;
        for row in rows.map_err(|error| failed(DOING, error))? {
            let id = read(&row, 0)?;
            found[at] = Some(Insertion::Inserted(EventId::new(installation, id)));
        }
        return Ok(());
    }

    let chosen: Vec<&NewEvent> = left.iter().map(|&at| &events[at]).collect();
    let many = many(store, &chosen)?;
    let rows = many.fetch(connection, persistent).await;
    for row in rows.map_err(|error| failed(DOING, error))? {
        let position: i64 = read(&row, 0)?;
        let at = usize::try_from(position - 1)
            .ok()
            .and_then(|position| left.get(position));
        if let Some(&at) = at {
            let id = EventId::new(installation, read(&row, 1)?);
            found[at] = Some(Insertion::Inserted(id));
        }
    }
    Ok(())
}

/// Reads who holds the keys of the events at `left`. A key that nobody holds any more leaves its
/// event unanswered.
async fn look_up(
    store: &PgStore,
    connection: &mut PgConnection,
    events: &[NewEvent],
    installation: Uuid,
    left: &[usize],
    found: &mut [Option<Insertion>],
) -> Result<(), StoreError> {
    let keyed = |at: usize| {
        events[at]
            .dedup_key
            .as_deref()
            .map(|key| (events[at].name, key))
    };
    let (names, keys): (Vec<&str>, Vec<&str>) = left.iter().filter_map(|&at| keyed(at)).unzip();

    let query = Query::new(&store.sql().look_up).bind(names).bind(keys);
    let rows = query.fetch(connection, store.keeps_statements()).await;
    let rows = rows.map_err(|error| failed(DOING, error))?;

    let mut holders = HashMap::new();
    for row in &rows {
        let state: String = read(row, 3)?;
        let existing = Existing {
            id: EventId::new(installation, read(row, 2)?),
            state: EventState::parse(&state)
                .ok_or_else(|| failed(DOING, unreadable("an unknown state")))?,
            output: read(row, 4)?,
            fingerprint: fingerprint(read(row, 5)?),
        };
        holders.insert((read::<String>(row, 0)?, read::<String>(row, 1)?), existing);
    }
    for &at in left {
        if let Some((name, key)) = keyed(at) {
            let holder = holders.get(&(name.to_owned(), key.to_owned()));
            found[at] = holder.cloned().map(Insertion::Existing);
        }
    }
    Ok(())
}

/// Answers for every event, those that repeat a key of their own batch included.
fn with_duplicates(
    events: &[NewEvent],
    earlier: &[Option<usize>],
    found: Vec<Option<Insertion>>,
) -> Vec<Insertion> {
    let mut answers: Vec<Insertion> = Vec::with_capacity(found.len());
    for (at, answer) in found.into_iter().enumerate() {
        let first = earlier[at].unwrap_or(at);
        let answer = answer.unwrap_or_else(|| match &answers[first] {
            Insertion::Existing(existing) => Insertion::Existing(existing.clone()),
            Insertion::Inserted(id) => Insertion::Existing(Existing {
                id: *id,
                state: if events[first].lease.is_some() {
                    EventState::InProgress
                } else {
                    EventState::Pending
                },
                output: None,
                fingerprint: events[first].fingerprint,
            }),
        });
        answers.push(answer);
    }
    answers
}

pub(super) fn one(store: &PgStore, event: &NewEvent) -> Result<Query, StoreError> {
    let sql = match event.dedup_key {
        Some(_) => &store.sql().insert_keyed,
        None => &store.sql().insert_one,
    };
    let query = Query::new(sql)
        .bind(event.name)
        .bind(version(event)?)
        .bind(&event.payload)
        .bind(&event.headers)
        .bind(event.priority.level())
        .bind(max_attempts(event))
        .bind(interval(event.retention))
        .bind(attempts(event))
        .bind(token(event))
        .bind(lease(event))
        .bind(instance(event))
        .bind(delay(event))
        .bind(life(event));
    Ok(match &event.dedup_key {
        Some(key) => query
            .bind(key)
            .bind(interval(event.key_retention))
            .bind(fingerprint_bytes(event)),
        None => query,
    })
}

fn many(store: &PgStore, events: &[&NewEvent]) -> Result<Query, StoreError> {
    let versions: Vec<i32> = events
        .iter()
        .map(|e| version(e))
        .collect::<Result<_, _>>()?;
    let mut locks: Vec<(i32, i32)> = events
        .iter()
        .filter_map(|event| event.ordering_key.as_deref())
        .map(|key| store.order_lock(key))
        .collect();
    locks.sort_unstable();
    locks.dedup();
    let sql = if locks.is_empty() {
        &store.sql().insert_many
    } else {
        &store.sql().insert_many_ordered
    };
    let query = Query::new(sql)
        .bind(column(events, |event| event.name))
        .bind(versions)
        .bind(column(events, |event| event.payload.as_str()))
        .bind(column(events, |event| event.headers.as_deref()))
        .bind(column(events, |event| event.ordering_key.as_deref()))
        .bind(column(events, |event| event.priority.level()))
        .bind(column(events, max_attempts))
        .bind(column(events, |event| interval(event.retention)))
        .bind(column(events, attempts))
        .bind(column(events, token))
        .bind(column(events, lease))
        .bind(column(events, instance))
        .bind(column(events, delay))
        .bind(column(events, |event| event.dedup_key.as_deref()))
        .bind(column(events, |event| interval(event.key_retention)))
        .bind(column(events, fingerprint_bytes))
        .bind(column(events, life))
        .bind(column(events, blocks));
    Ok(match locks.first() {
        Some((namespace, _)) => {
            let ids: Vec<i32> = locks.iter().map(|(_, id)| *id).collect();
            query.bind(*namespace).bind(ids)
        }
        None => query,
    })
}

fn column<'e, T>(events: &[&'e NewEvent], value: impl Fn(&'e NewEvent) -> T) -> Vec<T> {
    events.iter().map(|event| value(event)).collect()
}

fn version(event: &NewEvent) -> Result<i32, StoreError> {
    i32::try_from(event.version.get()).map_err(|error| {
        StoreError::new(StoreErrorKind::Data, "store an event's version").with_source(error)
    })
}

/// Two thousand million attempts are as good as any number above.
fn max_attempts(event: &NewEvent) -> i32 {
    i32::try_from(event.max_attempts.get()).unwrap_or(i32::MAX)
}

fn attempts(event: &NewEvent) -> i32 {
    i32::from(event.lease.is_some())
}

fn token(event: &NewEvent) -> Option<PgUuid> {
    event.lease.as_ref().map(|lease| lease.token.into())
}

fn lease(event: &NewEvent) -> Option<PgInterval> {
    let born: Option<&BornLease> = event.lease.as_ref();
    born.map(|lease| interval(lease.duration))
}

fn instance(event: &NewEvent) -> Option<&str> {
    event.lease.as_ref().map(|lease| &*lease.instance)
}

fn delay(event: &NewEvent) -> Option<PgInterval> {
    (!event.delay.is_zero()).then(|| interval(event.delay))
}

fn life(event: &NewEvent) -> Option<PgInterval> {
    event.expires_in.map(interval)
}

/// A fingerprint that a later release made differently is none for us.
pub(super) fn fingerprint(bytes: Option<Vec<u8>>) -> Option<Fingerprint> {
    bytes.and_then(|bytes| Fingerprint::from_bytes(&bytes))
}

fn fingerprint_bytes(event: &NewEvent) -> Option<Vec<u8>> {
    event
        .fingerprint
        .map(|fingerprint| fingerprint.as_bytes().to_vec())
}

fn blocks(event: &NewEvent) -> bool {
    event.ordering_key.is_some() && event.behind_dead == BehindDead::Block
}

fn read<'r, T>(row: &'r PgRow, index: usize) -> Result<T, StoreError>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(index).map_err(|error| failed(DOING, error))
}

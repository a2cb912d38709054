//! Inserting events through the caller's connection.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use outbox_core::event::{BehindDead, EventId};
use outbox_core::store::{
    EventState, Existing, Insertion, NewEvent, StoreError, StoreErrorKind, earlier_in_batch,
};
use serde_json::{Value, json};
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Row, Sqlite, SqliteConnection};

use super::code::sqlite_error;
use super::row::{event_id, fingerprint, fingerprint_text, micros, token_text, undecodable};
use super::sql::{Statements, safe};

/// Inserts those of the events of `<source>` whose dedup keys are free.
///
/// - `NOT EXISTS` and not `ON CONFLICT`: the key is in another table. SQLite has one writer, and
///   this statement holds its lock from before the look to after the insert, so nobody can take
///   the key in between.
/// - The trigger on the table takes the key in this same statement, so that a caller without a
///   transaction cannot leave one without the other.
/// - `<order>` gives ascending numbers in input order. RETURNING has no order; the caller sorts.
/// - The installation is read here and not remembered: it costs no round trip, and no process goes
///   on with the old one after it was renewed.
const INSERT: &str = "
    INSERT INTO {events} (
        name, version, priority, payload, headers, dedup_key, ordering_key, max_attempts,
        retention, key_retention, due_at,
        attempts, lease_token, lease_expires_at, claimed_by, expires_at, blocks, fingerprint,
        created_at
    )
    SELECT
        <name>, <version>, <priority>, <payload>, <headers>, <dedup_key>, <ordering_key>,
        <max_attempts>, <retention>, <key_retention>,
        CASE WHEN <delay> > 0 THEN {now} + <delay> END,
        <token> IS NOT NULL, <token>, {now} + <lease>, <instance>, {now} + <life>, <blocks>,
        <fingerprint>, {now}
    <source>
    WHERE NOT EXISTS (
        SELECT 1 FROM {keys} AS taken WHERE taken.name = <name> AND taken.key = <dedup_key>
    )
    <order>
    RETURNING id, name, dedup_key, (SELECT uuid FROM {installation}) AS installation
";

/// What a row is made of, in the order in which [`INSERT`] binds it for a single event.
const FIELDS: [&str; 17] = [
    "name",
    "version",
    "priority",
    "payload",
    "headers",
    "dedup_key",
    "ordering_key",
    "max_attempts",
    "retention",
    "key_retention",
    "delay",
    "token",
    "lease",
    "instance",
    "life",
    "blocks",
    "fingerprint",
];

/// Inserts one event of bound values. It is what most publishers do, and costs a third of the same
/// event as JSON.
pub(super) fn insert_one() -> String {
    let fields = (1..).zip(FIELDS);
    fields.fold(
        INSERT.replace("<source>", "").replace("<order>", ""),
        |sql, (nth, field)| sql.replace(&format!("<{field}>"), &format!("?{nth}")),
    )
}

/// Inserts the events of the JSON array `?1`. Bound values would end at 32,766 of them, and every
/// number of events would be another statement.
pub(super) fn insert_many() -> String {
    FIELDS.iter().fold(
        INSERT
            .replace("<source>", "FROM json_each(?1) AS event")
            .replace("<order>", "ORDER BY event.key"),
        |sql, field| {
            sql.replace(
                &format!("<{field}>"),
                &format!("(event.value ->> '{field}')"),
            )
        },
    )
}

/// Reads who holds the keys of the JSON array `?1` of `[name, key]`.
///
/// - What settlement wrote beside the key comes first: it is there even where the event was not
///   kept. The event itself is looked at only while it is not settled.
/// - Not the view: SQLite does not carry a number of each row into its three tables, and reads all
///   of them instead.
/// - A key without an event reads `dead_letter`: somebody deleted the row by hand, and nobody will
///   handle it any more.
pub(super) const EXISTING: &str = "
    SELECT
        wanted.key AS position,
        taken.event_id AS id,
        coalesce(
            taken.state,
            (SELECT {status} FROM {events} WHERE id = taken.event_id),
            'dead_letter'
        ) AS state,
        taken.output,
        taken.fingerprint,
        (SELECT uuid FROM {installation}) AS installation
    FROM json_each(?1) AS wanted
    JOIN {keys} AS taken
        ON taken.name = wanted.value ->> 0 AND taken.key = wanted.value ->> 1
";

/// How often a key that vanished between the two statements is tried again. Inside a transaction
/// none can: the first statement holds the write lock.
const ROUNDS: usize = 5;

pub(super) async fn insert(
    connection: &mut SqliteConnection,
    statements: &Statements,
    events: &[NewEvent],
) -> Result<Vec<Insertion>, StoreError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let failed = |error| sqlite_error("insert events", error);

    let earlier = earlier_in_batch(events);
    let mut answers: Vec<Option<Insertion>> = vec![None; events.len()];
    let mut pending: Vec<usize> = (0..events.len())
        .filter(|&position| earlier[position].is_none())
        .collect();

    for _ in 0..ROUNDS {
        pending = insert_free(connection, statements, events, &pending, &mut answers)
            .await
            .map_err(failed)?;
        if pending.is_empty() {
            break;
        }
        pending = read_existing(connection, statements, events, &pending, &mut answers)
            .await
            .map_err(failed)?;
        if pending.is_empty() {
            break;
        }
    }

    for position in 0..events.len() {
        if let Some(first) = earlier[position] {
            answers[position] = answers[first]
                .as_ref()
                .map(|answer| duplicate_of(answer, &events[first]));
        }
    }
    answers
        .into_iter()
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| {
            StoreError::new(
                StoreErrorKind::Conflict,
                "insert an event whose dedup key others keep taking and freeing",
            )
        })
}

/// Inserts those whose key is free, and answers the positions of the others.
async fn insert_free(
    connection: &mut SqliteConnection,
    statements: &Statements,
    events: &[NewEvent],
    positions: &[usize],
    answers: &mut [Option<Insertion>],
) -> Result<Vec<usize>, sqlx::Error> {
    let query = match positions {
        [one] => bound(&statements.insert_one, &events[*one]),
        many => {
            let events: Vec<Value> = many.iter().map(|&at| event_json(&events[at])).collect();
            sqlx::query(safe(&statements.insert_many)).bind(Value::from(events).to_string())
        }
    };
    let rows = query.fetch_all(connection).await?;

    let mut ids: Vec<EventId> = Vec::with_capacity(rows.len());
    let mut taken: HashSet<(String, String)> = HashSet::new();
    for row in &rows {
        ids.push(event_id(row)?);
        if let Some(key) = row.try_get::<Option<String>, _>("dedup_key")? {
            taken.insert((row.try_get("name")?, key));
        }
    }
    ids.sort_unstable();

    // An event without a key is always inserted, one with a key if its key came back. Both lists
    // are in input order, so they pair off.
    let mut ids = ids.into_iter();
    let mut refused = Vec::new();
    for &position in positions {
        let event = &events[position];
        let inserted = event
            .dedup_key
            .as_ref()
            .is_none_or(|key| taken.contains(&(event.name.to_owned(), key.clone())));
        if !inserted {
            refused.push(position);
            continue;
        }
        let id = ids.next().ok_or(sqlx::Error::RowNotFound)?;
        answers[position] = Some(Insertion::Inserted(id));
    }
    Ok(refused)
}

/// Reads who holds the keys, and answers the positions of those that nobody holds any more.
async fn read_existing(
    connection: &mut SqliteConnection,
    statements: &Statements,
    events: &[NewEvent],
    positions: &[usize],
    answers: &mut [Option<Insertion>],
) -> Result<Vec<usize>, sqlx::Error> {
    let wanted: Vec<Value> = positions
        .iter()
        .map(|&at| json!([events[at].name, events[at].dedup_key]))
        .collect();
    let rows = sqlx::query(safe(&statements.existing))
        .bind(Value::from(wanted).to_string())
        .fetch_all(connection)
        .await?;

    let mut found: HashMap<i64, Existing> = HashMap::with_capacity(rows.len());
    for row in &rows {
        let state: String = row.try_get("state")?;
        let existing = Existing {
            id: event_id(row)?,
            state: EventState::parse(&state)
                .ok_or_else(|| undecodable("state", format!("unknown state `{state}`")))?,
            output: row.try_get("output")?,
            fingerprint: fingerprint(row.try_get("fingerprint")?),
        };
        found.insert(row.try_get("position")?, existing);
    }

    let mut vanished = Vec::new();
    for (nth, &position) in (0_i64..).zip(positions) {
        match found.remove(&nth) {
            Some(existing) => answers[position] = Some(Insertion::Existing(existing)),
            None => vanished.push(position),
        }
    }
    Ok(vanished)
}

/// What a second event of the batch with the same key is told about the first.
fn duplicate_of(answer: &Insertion, first: &NewEvent) -> Insertion {
    match answer {
        Insertion::Existing(existing) => Insertion::Existing(existing.clone()),
        Insertion::Inserted(id) => Insertion::Existing(Existing {
            id: *id,
            state: match first.lease {
                Some(_) => EventState::InProgress,
                None => EventState::Pending,
            },
            output: None,
            fingerprint: first.fingerprint,
        }),
    }
}

/// A single event, its values in the order of [`FIELDS`].
fn bound<'q>(sql: &Arc<str>, event: &'q NewEvent) -> Query<'q, Sqlite, SqliteArguments> {
    let lease = event.lease.as_ref();
    sqlx::query(safe(sql))
        .bind(event.name)
        .bind(event.version.get())
        .bind(event.priority.level())
        .bind(event.payload.as_str())
        .bind(event.headers.as_deref())
        .bind(event.dedup_key.as_deref())
        .bind(event.ordering_key.as_deref())
        .bind(event.max_attempts.get())
        .bind(micros(event.retention))
        .bind(micros(event.key_retention))
        .bind(micros(event.delay))
        .bind(lease.map(|lease| token_text(lease.token)))
        .bind(lease.map(|lease| micros(lease.duration)))
        .bind(lease.map(|lease| &*lease.instance))
        .bind(event.expires_in.map(micros))
        .bind(blocks(event))
        .bind(event.fingerprint.as_ref().map(fingerprint_text))
}

fn blocks(event: &NewEvent) -> bool {
    event.ordering_key.is_some() && event.behind_dead == BehindDead::Block
}

fn event_json(event: &NewEvent) -> Value {
    json!({
        "name": event.name,
        "version": event.version.get(),
        "priority": event.priority.level(),
        "payload": event.payload,
        "headers": event.headers,
        "dedup_key": event.dedup_key,
        "ordering_key": event.ordering_key,
        "max_attempts": event.max_attempts.get(),
        "retention": micros(event.retention),
        "key_retention": micros(event.key_retention),
        "delay": micros(event.delay),
        "token": event.lease.as_ref().map(|lease| token_text(lease.token)),
        "lease": event.lease.as_ref().map(|lease| micros(lease.duration)),
        "instance": event.lease.as_ref().map(|lease| &*lease.instance),
        "life": event.expires_in.map(micros),
        "blocks": u8::from(blocks(event)),
        "fingerprint": event.fingerprint.as_ref().map(fingerprint_text),
    })
}

//! Counting what there is, at a cost that has a bound.

use std::time::Duration;

use outbox_core::event::Priority;
use outbox_core::stats::StoreStats;
use sqlx::{Row, SqliteConnection};

use super::row::text;
use super::sql::{Statements, safe};

/// Counts the first `?1` unsettled events and the first `?1` dead letters, by name and by what is
/// the matter with them, and says how long the longest due one of each name has been due.
///
/// - One statement, so one snapshot: an event that dies meanwhile is counted once.
/// - The limits are inside, before anything is grouped: they bound the work and not the answer.
/// - By number: the oldest, whatever their priority. And only columns that stand before what can be
///   large, whose pages are not read then.
/// - A claim leaves `due_at` as it is, so the lease is asked first.
pub(super) const COUNTS: &str = "
    SELECT
        name, kind, count(*) AS events,
        max(CASE WHEN kind = 'due' THEN {now} - since END) AS due_for
    FROM (
        SELECT
            name,
            CASE
                WHEN lease_expires_at > {now} THEN 'in_progress'
                WHEN due_at > {now} AND attempts > 0 THEN 'retrying'
                WHEN due_at > {now} THEN 'waiting'
                WHEN attempts >= max_attempts THEN 'exhausted'
                ELSE 'due'
            END AS kind,
            coalesce(due_at, created_at) AS since
        FROM (
            SELECT name, lease_expires_at, due_at, created_at, attempts, max_attempts
            FROM {events}
            ORDER BY id
            LIMIT ?1
        )
        UNION ALL
        SELECT name, 'dead', NULL
        FROM (SELECT name FROM {dead} ORDER BY id LIMIT ?1)
    )
    GROUP BY name, kind
";

/// How long the longest due event has been due, among the first `?1` of each level of those that are
/// due at once, and of those that waited.
///
/// For tables that are too large to be counted: what is beyond the counted rows can be due for
/// longer than all of them. Each level is a look of its own, so that it begins at its own front; an
/// event of low priority is the one that waits the longest.
pub(super) fn oldest_due() -> String {
    let look = |condition: &str, order: &str, level: i16| {
        format!(
            "SELECT * FROM (
                SELECT due_at, created_at, lease_expires_at, attempts, max_attempts
                FROM {{events}}
                WHERE {condition} AND priority = {level}
                ORDER BY {order}
                LIMIT ?1
            )"
        )
    };
    let mut looks = Vec::new();
    for priority in Priority::DESCENDING {
        let level = priority.level();
        looks.push(look("due_at IS NULL", "id", level));
        let waited = "due_at IS NOT NULL AND due_at <= {now}";
        looks.push(look(waited, "due_at, id", level));
    }
    format!(
        "SELECT max({{now}} - coalesce(due_at, created_at)) AS due_for
        FROM ({})
        WHERE (lease_expires_at IS NULL OR lease_expires_at <= {{now}})
            AND attempts < max_attempts",
        looks.join(" UNION ALL ")
    )
}

/// How many unsettled events, and how many dead letters, are counted at most.
const COUNTED_MAX: u64 = 50_000;

/// How many events of each level are looked at, beyond what is counted.
const WINDOW: u32 = 1_000;

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<StoreStats, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.counts))
        .bind(i64::try_from(COUNTED_MAX).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let mut stats = StoreStats::default();
    let (mut unsettled, mut dead) = (0, 0);
    for row in &rows {
        let kind: &str = row.try_get("kind")?;
        let events = u64::try_from(row.try_get::<i64, _>("events")?).unwrap_or(0);
        let counts = stats.events.entry(text(row, "name")?).or_default();
        match kind {
            "in_progress" => counts.in_progress += events,
            "retrying" => counts.retrying += events,
            "waiting" => counts.waiting += events,
            "exhausted" => counts.exhausted += events,
            "dead" => counts.dead += events,
            _ => counts.due += events,
        }
        *(if kind == "dead" {
            &mut dead
        } else {
            &mut unsettled
        }) += events;
        stats.oldest_due = stats.oldest_due.max(due_for(row.try_get("due_for")?));
    }
    // At the limit there may be more, or not; nobody looked.
    stats.exact = unsettled < COUNTED_MAX && dead < COUNTED_MAX;
    if !stats.exact {
        let due: Option<i64> = sqlx::query_scalar(safe(&statements.oldest_due))
            .bind(WINDOW)
            .fetch_one(connection)
            .await?;
        stats.oldest_due = stats.oldest_due.max(due_for(due));
    }
    Ok(stats)
}

/// Nothing below zero: a clock that was set back makes an event due before it was published.
fn due_for(micros: Option<i64>) -> Option<Duration> {
    micros.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0)))
}

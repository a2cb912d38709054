//! Removing what is settled and past its retention.

use std::num::NonZeroU32;

use sqlx::SqliteConnection;

use super::sql::{Statements, safe};

/// Removes up to `?1` processed, discarded and cancelled events past their retention, the longest overdue
/// first.
///
/// The history holds nothing that waits, is leased, retries or is dead; no condition is needed to
/// spare those.
pub(super) const HISTORY: &str = "
    DELETE FROM {history}
    WHERE id IN (SELECT id FROM {history} WHERE expires_at <= {now} ORDER BY expires_at LIMIT ?1)
";

/// Removes up to `?1` dedup keys past their end.
///
/// - A key has an end only once its event is processed, discarded or cancelled.
/// - It is kept while a part of its event is unsettled or dead, although the part whose state it tells
///   is settled.
/// - `NOT EXISTS`: where the history is being removed in small bites, a key still outlives its
///   event's row.
pub(super) const KEYS: &str = "
    DELETE FROM {keys}
    WHERE (name, key) IN (
        SELECT taken.name, taken.key
        FROM {keys} AS taken
        WHERE taken.expires_at <= {now}
            AND NOT EXISTS (SELECT 1 FROM {history} AS kept WHERE kept.id = taken.event_id)
            AND NOT EXISTS (SELECT 1 FROM {events} AS part WHERE part.origin = taken.event_id)
            AND NOT EXISTS (SELECT 1 FROM {dead} AS part WHERE part.origin = taken.event_id)
        ORDER BY taken.expires_at
        LIMIT ?1
    )
";

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    limit: NonZeroU32,
) -> Result<u64, sqlx::Error> {
    let limit = i64::from(limit.get());
    let events = sqlx::query(safe(&statements.purge_history))
        .bind(limit)
        .execute(&mut *connection)
        .await?
        .rows_affected();
    let left = limit.saturating_sub_unsigned(events);
    if left == 0 {
        return Ok(events);
    }
    let keys = sqlx::query(safe(&statements.purge_keys))
        .bind(left)
        .execute(&mut *connection)
        .await?
        .rows_affected();
    Ok(events + keys)
}

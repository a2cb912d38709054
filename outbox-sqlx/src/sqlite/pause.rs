//! Pausing events and handlers.

use outbox_core::store::{Pause, PauseRef};
use sqlx::{Row, SqliteConnection};

use super::row::{text, time};
use super::sql::{Statements, safe};

/// Pauses the handler `?2` of the event `?1`, or all of it where that is empty. The first pause
/// stays, with its time.
pub(super) const PAUSE: &str = "
    INSERT INTO {paused} (name, handler, since) VALUES (?1, ?2, {now}) ON CONFLICT DO NOTHING
";

pub(super) const RESUME: &str = "DELETE FROM {paused} WHERE name = ?1 AND handler = ?2";

pub(super) const PAUSED: &str = "SELECT name, handler, since FROM {paused} ORDER BY name, handler";

pub(super) async fn set(
    connection: &mut SqliteConnection,
    statements: &Statements,
    pause: &PauseRef,
    paused: bool,
) -> Result<bool, sqlx::Error> {
    let statement = if paused {
        &statements.pause
    } else {
        &statements.resume
    };
    let changed = sqlx::query(safe(statement))
        .bind(&pause.name)
        .bind(pause.handler.as_deref().unwrap_or_default())
        .execute(connection)
        .await?;
    Ok(changed.rows_affected() > 0)
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<Vec<Pause>, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.paused))
        .fetch_all(connection)
        .await?;
    let pause = |row| {
        let handler = text(row, "handler")?;
        Ok(Pause {
            of: PauseRef {
                name: text(row, "name")?,
                handler: (!handler.is_empty()).then_some(handler),
            },
            since: time(row.try_get("since")?),
        })
    };
    rows.iter().map(pause).collect()
}

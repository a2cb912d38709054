//! Locks of the application: exclusive ones, which are leases in a table, and those of an entity,
//! which are the write lock of the file.

use outbox_core::lease::LeaseToken;
use outbox_core::lock::EXCLUSIVE_LEASE;
use outbox_core::store::{ExclusiveLock, StoreError};
use sqlx::SqliteConnection;

use super::SqliteStore;
use super::row::{micros, token_text};
use super::sql::{Statements, safe};

/// Lets the lock `?1` end `?2` microseconds from now at the latest.
///
/// A lock that ends later was not given by this clock, which has been set back since: it would be
/// nobody's until the clock is there again. Whoever has it has as long as any lock lasts.
pub(super) const CUT: &str = "
    UPDATE {locks}
    SET expires_at = {now} + ?2
    WHERE name = ?1 AND expires_at > {now} + ?2
";

/// Takes the lock `?1` under the token `?3` for the instance `?4`, for `?2` microseconds.
///
/// The last condition is what makes it exclusive: only a lock that has ended is taken over. Where
/// it does not hold, no row is changed.
pub(super) const TAKE: &str = "
    INSERT INTO {locks} AS held (name, token, instance, expires_at)
    VALUES (?1, ?3, ?4, {now} + ?2)
    ON CONFLICT (name) DO UPDATE SET
        token = excluded.token,
        instance = excluded.instance,
        expires_at = excluded.expires_at
    WHERE held.expires_at <= {now}
";

/// Lets the lock `?1` end `?2` microseconds from now, if it still has the token `?3`.
///
/// No condition on the end: while the token is in the row, nobody else had the lock in between.
pub(super) const KEEP: &str = "
    UPDATE {locks}
    SET expires_at = {now} + ?2
    WHERE name = ?1 AND token = ?3
";

/// Frees the lock `?1`, if it still has the token `?2`: the lock of whoever took it over is not
/// this one's to free.
pub(super) const FREE: &str = "DELETE FROM {locks} WHERE name = ?1 AND token = ?2";

/// Takes the write lock of the file and writes nothing: SQLite takes it for the kind of statement,
/// before it looks for rows.
pub(super) const LOCK_ENTITY: &str = "DELETE FROM {locks} WHERE FALSE";

/// A lock that this instance has: a row of the database, and the token in it.
///
/// It lasts 30 seconds, by the database's clock, unless [`keep`](ExclusiveLock::keep) extends it.
/// Dropping it sends nothing to the database: the lock is free when its lease ends.
#[derive(Debug)]
pub struct SqliteExclusive {
    store: SqliteStore,
    name: String,
    token: LeaseToken,
}

impl SqliteExclusive {
    pub(super) async fn take(
        store: &SqliteStore,
        name: &str,
        instance: &str,
    ) -> Result<Option<Self>, StoreError> {
        let token = LeaseToken::random();
        let statements = &store.inner.statements;
        let taken = store
            .write(
                "take an exclusive lock",
                async |connection: &mut SqliteConnection| {
                    take(connection, statements, name, token, instance).await
                },
            )
            .await?;
        Ok(taken.then(|| Self {
            store: store.clone(),
            name: name.to_owned(),
            token,
        }))
    }
}

impl ExclusiveLock for SqliteExclusive {
    async fn keep(&mut self) -> Result<bool, StoreError> {
        let Self { store, name, token } = self;
        let statements = &store.inner.statements;
        store
            .write(
                "keep an exclusive lock",
                async |connection: &mut SqliteConnection| {
                    keep(connection, statements, name, *token).await
                },
            )
            .await
    }

    async fn release(self) -> Result<(), StoreError> {
        let Self { store, name, token } = self;
        let statements = &store.inner.statements;
        store
            .write(
                "release an exclusive lock",
                async |connection: &mut SqliteConnection| {
                    free(connection, statements, &name, token).await
                },
            )
            .await
    }
}

/// Whether the lock was had.
pub(super) async fn take(
    connection: &mut SqliteConnection,
    statements: &Statements,
    name: &str,
    token: LeaseToken,
    instance: &str,
) -> Result<bool, sqlx::Error> {
    let lease = micros(EXCLUSIVE_LEASE);
    sqlx::query(safe(&statements.lock_cut))
        .bind(name)
        .bind(lease)
        .execute(&mut *connection)
        .await?;
    let taken = sqlx::query(safe(&statements.lock_take))
        .bind(name)
        .bind(lease)
        .bind(token_text(token))
        .bind(instance)
        .execute(connection)
        .await?;
    Ok(taken.rows_affected() == 1)
}

/// Whether the lock is still had.
pub(super) async fn keep(
    connection: &mut SqliteConnection,
    statements: &Statements,
    name: &str,
    token: LeaseToken,
) -> Result<bool, sqlx::Error> {
    let kept = sqlx::query(safe(&statements.lock_keep))
        .bind(name)
        .bind(micros(EXCLUSIVE_LEASE))
        .bind(token_text(token))
        .execute(connection)
        .await?;
    Ok(kept.rows_affected() == 1)
}

pub(super) async fn free(
    connection: &mut SqliteConnection,
    statements: &Statements,
    name: &str,
    token: LeaseToken,
) -> Result<(), sqlx::Error> {
    sqlx::query(safe(&statements.lock_free))
        .bind(name)
        .bind(token_text(token))
        .execute(connection)
        .await?;
    Ok(())
}

pub(super) async fn lock_entity(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<(), sqlx::Error> {
    sqlx::query(safe(&statements.lock_entity))
        .execute(connection)
        .await?;
    Ok(())
}

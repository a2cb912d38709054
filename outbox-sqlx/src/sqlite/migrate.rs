//! Installing the outbox's tables, and knowing which release installed them.

use std::sync::Arc;

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::code::sqlite_error;
use super::sql::{Statements, Table, safe};

/// The version of the schema this program works with.
pub(super) const SCHEMA_VERSION: i64 = 1;

/// One script per version, in order. A released one is never changed.
const MIGRATIONS: [&str; 1] = [include_str!("migrations/0001.sql")];

const _: () = assert!(MIGRATIONS.len() == 1 && SCHEMA_VERSION == 1);

/// A table of its own and never `_sqlx_migrations`: sharing that one with an application's
/// migrations breaks either of the two.
const SCHEMA_TABLE: &str = "
CREATE TABLE IF NOT EXISTS {schema} (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    applied_at INTEGER NOT NULL
) STRICT;
";

/// Which version is installed.
pub(super) const VERSION: &str = "SELECT version FROM {schema}";

/// Records that version `?1` is installed.
pub(super) const SET_VERSION: &str = "
    INSERT INTO {schema} (one, version, applied_at)
    VALUES (1, ?1, {now})
    ON CONFLICT (one) DO UPDATE SET version = excluded.version, applied_at = excluded.applied_at
";

/// Draws a new installation, in one statement.
pub(super) const RENEW_INSTALLATION: &str = "
    UPDATE {installation} SET uuid = lower(hex(randomblob(16))) RETURNING uuid
";

/// Brings the schema to [`SCHEMA_VERSION`], inside a transaction that holds the write lock from its
/// beginning: of several processes one does it and the others find it done.
pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    table: &Table,
) -> Result<(), StoreError> {
    let failed = |error| sqlite_error("install the outbox", error);

    let installed = installed_version(connection, statements)
        .await?
        .unwrap_or(0);
    if installed > SCHEMA_VERSION {
        return Err(newer(table, installed));
    }
    if installed == SCHEMA_VERSION {
        return Ok(());
    }
    let script = table.definition(&script_after(installed));
    sqlx::raw_sql(AssertSqlSafe(Arc::<str>::from(script)))
        .execute(&mut *connection)
        .await
        .map_err(failed)?;
    sqlx::query(safe(&statements.set_version))
        .bind(SCHEMA_VERSION)
        .execute(connection)
        .await
        .map_err(failed)?;
    Ok(())
}

/// Everything [`run`] does to an empty database, as text.
pub(super) fn sql(table: &Table) -> String {
    let record = SET_VERSION.replace("?1", &SCHEMA_VERSION.to_string());
    table.definition(&format!("{}{record};\n", script_after(0)))
}

fn script_after(installed: i64) -> String {
    let mut script = SCHEMA_TABLE.to_owned();
    for (version, migration) in (1..).zip(MIGRATIONS) {
        if version > installed {
            script.push('\n');
            script.push_str(migration);
        }
    }
    script
}

/// Compares the installed version with this program's.
pub(super) async fn require_version(
    connection: &mut SqliteConnection,
    statements: &Statements,
    table: &Table,
) -> Result<(), StoreError> {
    match installed_version(connection, statements).await? {
        Some(SCHEMA_VERSION) => Ok(()),
        Some(newer_one) if newer_one > SCHEMA_VERSION => Err(newer(table, newer_one)),
        Some(older) => Err(StoreError::new(
            StoreErrorKind::SchemaOlder,
            format!(
                "use table `{}`: version {older} is installed and this program needs version \
                 {SCHEMA_VERSION}; run `migrate()`",
                table.as_str()
            ),
        )),
        None => Err(StoreError::new(
            StoreErrorKind::SchemaMissing,
            format!(
                "use table `{}`: no version is installed and this program needs version \
                 {SCHEMA_VERSION}; run `migrate()`",
                table.as_str()
            ),
        )),
    }
}

async fn installed_version(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<Option<i64>, StoreError> {
    let answer = sqlx::query(safe(&statements.schema_version))
        .fetch_optional(connection)
        .await
        .and_then(|row| row.map(|row| row.try_get("version")).transpose());
    match answer {
        Ok(version) => Ok(version),
        Err(error) => {
            let error = sqlite_error("read the schema's version", error);
            match error.kind() {
                StoreErrorKind::SchemaMissing => Ok(None),
                _ => Err(error),
            }
        }
    }
}

fn newer(table: &Table, installed: i64) -> StoreError {
    StoreError::new(
        StoreErrorKind::SchemaNewer,
        format!(
            "use table `{}`: version {installed} is installed and this program needs version \
             {SCHEMA_VERSION}",
            table.as_str()
        ),
    )
}

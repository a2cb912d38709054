//! Installing the schema, and bringing it up to this release.
//!
//! The migrator has a version table of its own. One that is shared with the application's
//! migrations breaks either of the two.

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};

use super::BEGIN;
use super::PgStore;
use super::names::Names;
use super::partition::UPKEEP_AT_FIRST;
use super::query::Query;
use super::sqlstate::failed;

const DOING: &str = "migrate";

/// The version this release works with.
pub(super) const VERSION: i32 = 1;

/// What takes a schema from each version to the next. A released one never changes.
const MIGRATIONS: [(i32, &str); 1] = [(1, include_str!("migrations/0001.sql"))];

/// - `search_path`, so that a function of the application cannot stand in for one of PostgreSQL's.
/// - The times bound the wait for another process that migrates, and for a table in use.
const SETTINGS: &str = "
    SET LOCAL search_path = pg_catalog;
    SET LOCAL statement_timeout = '60s';
    SET LOCAL lock_timeout = '60s';
";

/// Says whether the version table exists. By name and not by trying to read it, because an error
/// would abort the transaction.
const TABLE_EXISTS: &str = "
    SELECT EXISTS (
        SELECT FROM pg_catalog.pg_class AS class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
        WHERE namespace.nspname = $1 AND class.relname = $2
    )
";

/// Says whether the schema exists. `CREATE SCHEMA IF NOT EXISTS` asks for the right to create one
/// even where it has nothing to create.
const SCHEMA_EXISTS: &str =
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)";

/// Brings the schema up to this release, in one transaction.
///
/// The lock is taken before the version is read, and ends with the transaction: a process that
/// dies, or a pooled connection that is handed on, cannot keep it.
pub(super) async fn migrate(store: &PgStore) -> Result<(), StoreError> {
    let mut tx = store.pool().begin_with(BEGIN).await.map_err(doing)?;
    tx.execute(SETTINGS).await.map_err(doing)?;
    let (namespace, key) = store.names().migration_lock();
    ask(
        &mut tx,
        Query::new(&"SELECT pg_catalog.pg_advisory_xact_lock($1, $2)".into())
            .bind(namespace)
            .bind(key),
    )
    .await?;

    let found = installed_version(store, &mut tx).await?;
    refuse_newer(store, found)?;
    if found < VERSION {
        let schema = Query::new(&SCHEMA_EXISTS.into()).bind(store.names().schema().as_str());
        if !exists(&mut tx, schema).await? {
            let create = store.names().render("CREATE SCHEMA {schema}");
            run(&mut tx, &create).await?;
        }
        for (_, sql) in MIGRATIONS.iter().filter(|(version, _)| *version > found) {
            run(&mut tx, &store.names().render(sql)).await?;
        }
        if found == 0 {
            let upkeep = store.names().render(UPKEEP_AT_FIRST);
            ask(&mut tx, Query::new(&upkeep)).await?;
        }
    }
    tx.commit().await.map_err(doing)
}

/// What [`migrate`] runs on a database without an outbox.
pub(super) fn migration_sql(names: &Names) -> String {
    let (namespace, key) = names.migration_lock();
    let mut sql = format!(
        "-- The outbox's schema. To be run once, in one transaction.\n\n\
         SELECT pg_catalog.pg_advisory_xact_lock({namespace}, {key});\n\n\
         {};\n",
        names.render("CREATE SCHEMA IF NOT EXISTS {schema}")
    );
    for (version, migration) in MIGRATIONS {
        sql.push_str(&format!("\n-- Version {version}\n\n"));
        sql.push_str(&names.render(migration));
    }
    sql
}

/// The version of the installed schema: 0 where there is none.
pub(super) async fn installed_version(
    store: &PgStore,
    connection: &mut PgConnection,
) -> Result<i32, StoreError> {
    let table = Query::new(&TABLE_EXISTS.into())
        .bind(store.names().schema().as_str())
        .bind(store.names().versions());
    if !exists(connection, table).await? {
        return Ok(0);
    }
    let rows = ask(connection, Query::new(&store.sql().version)).await?;
    let version: Option<i32> = match rows.first() {
        Some(row) => row.try_get(0).map_err(doing)?,
        None => None,
    };
    Ok(version.unwrap_or(0))
}

pub(super) fn refuse_newer(store: &PgStore, found: i32) -> Result<(), StoreError> {
    if found > VERSION {
        return Err(mismatch(store, StoreErrorKind::SchemaNewer, found));
    }
    Ok(())
}

/// An error that names the version found and the one needed.
pub(super) fn mismatch(store: &PgStore, kind: StoreErrorKind, found: i32) -> StoreError {
    let outbox = store.names().render("{events}");
    StoreError::new(
        kind,
        format!("use {outbox}, whose schema has version {found}; this release needs {VERSION}"),
    )
}

async fn exists(connection: &mut PgConnection, query: Query) -> Result<bool, StoreError> {
    let rows = ask(connection, query).await?;
    match rows.first() {
        Some(row) => row.try_get(0).map_err(doing),
        None => Ok(false),
    }
}

/// Never kept prepared: these run once, on the application's connections, perhaps behind a pooler.
async fn ask(
    connection: &mut PgConnection,
    query: Query,
) -> Result<Vec<sqlx::postgres::PgRow>, StoreError> {
    query.fetch(connection, false).await.map_err(doing)
}

async fn run(connection: &mut PgConnection, sql: &std::sync::Arc<str>) -> Result<(), StoreError> {
    let script = sqlx::raw_sql(AssertSqlSafe(std::sync::Arc::clone(sql)));
    connection.execute(script).await.map_err(doing)?;
    Ok(())
}

fn doing(error: sqlx::Error) -> StoreError {
    failed(DOING, error)
}

//! Where an example keeps its data: in a SQLite file, or in a schema of a PostgreSQL database.
//! Nothing is left of either, unless the program is killed: then drop `outbox_example_..` by hand.

use anyhow::{Context, ensure};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor};
use tempfile::TempDir;
use uuid::Uuid;

/// A file with an outbox in it, in a directory that is removed when this value is dropped.
pub(crate) struct SqliteFile {
    pub(crate) store: SqliteStore,
    _directory: TempDir,
}

impl SqliteFile {
    pub(crate) async fn create() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let store = SqliteStore::open(directory.path().join("example.db")).await?;
        store.migrate().await?;
        Ok(Self {
            store,
            _directory: directory,
        })
    }
}

/// A schema with an outbox in it, and nothing else of the database touched.
pub(crate) struct PgSchema {
    pub(crate) store: PgStore,
    name: String,
}

impl PgSchema {
    pub(crate) async fn create(url: &str) -> anyhow::Result<Self> {
        ensure!(
            url.starts_with("postgres"),
            "DATABASE_URL is not a postgres:// URL; unset it to run on SQLite"
        );
        let name = format!("outbox_example_{}", Uuid::new_v4().simple());
        // So that the example's own tables are made in the schema too.
        let options: PgConnectOptions = url.parse().context("read DATABASE_URL")?;
        let options = options.options([("search_path", &name)]);
        // A pool asks again for half a minute, and does not say why nobody answered.
        let answer = options.connect().await.context("connect to DATABASE_URL")?;
        answer.close().await?;
        let pool = PgPool::connect_lazy_with(options);
        let store = PgStore::builder(pool).schema(&name).build()?;
        store.migrate().await?;
        Ok(Self { store, name })
    }

    /// Drops the schema and all that is in it.
    pub(crate) async fn remove(self) -> anyhow::Result<()> {
        let sql = format!("DROP SCHEMA {} CASCADE", self.name);
        self.store.pool().execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }
}

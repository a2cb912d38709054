//! What this program asks the database itself.

use anyhow::Context;
use outbox_core::Store;
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use serde::Deserialize;

/// The statements of this program. They are the same on both databases; sqlx's types are not.
pub(crate) trait Alerts: Store {
    /// Where another process finds the outbox: the file, or the schema.
    async fn place(&self) -> anyhow::Result<String>;

    /// All alerts, as the database tells it.
    async fn rows(&self) -> sqlx::Result<Vec<AlertRow>>;
}

const ROWS: &str = "
    SELECT
        event_id, dedup_key, status, CAST(attempts AS BIGINT) AS attempts, claimed_by,
        dead_reason, last_error, CAST(failures AS TEXT) AS failures
    FROM outbox_events_all
    ORDER BY id
";

/// A row of the view that shows every event.
#[derive(sqlx::FromRow)]
pub(crate) struct AlertRow {
    pub(crate) event_id: String,
    pub(crate) dedup_key: String,
    pub(crate) status: String,
    pub(crate) attempts: i64,
    /// The relay that claimed it last.
    pub(crate) claimed_by: Option<String>,
    pub(crate) dead_reason: Option<String>,
    pub(crate) last_error: Option<String>,
    /// See [`Failure`].
    failures: Option<String>,
}

/// An attempt that failed, as its row keeps it.
#[derive(Deserialize)]
pub(crate) struct Failure {
    pub(crate) attempt: u32,
    pub(crate) instance: String,
    pub(crate) error: String,
}

impl AlertRow {
    /// Whether it is held under a lease that has not ended.
    pub(crate) fn is_claimed_by(&self, relay: &str) -> bool {
        self.status == "in_progress" && self.claimed_by.as_deref() == Some(relay)
    }

    /// The attempts that failed: the last 10.
    pub(crate) fn failures(&self) -> serde_json::Result<Vec<Failure>> {
        serde_json::from_str(self.failures.as_deref().unwrap_or("[]"))
    }
}

impl Alerts for SqliteStore {
    async fn place(&self) -> anyhow::Result<String> {
        let options = self.pool().connect_options();
        let file = options.get_filename().to_str();
        Ok(file
            .context("the path of the file is not UTF-8")?
            .to_owned())
    }

    async fn rows(&self) -> sqlx::Result<Vec<AlertRow>> {
        sqlx::query_as(ROWS).fetch_all(self.pool()).await
    }
}

impl Alerts for PgStore {
    async fn place(&self) -> anyhow::Result<String> {
        let sql = "SELECT CAST(current_schema() AS text)";
        Ok(sqlx::query_scalar(sql).fetch_one(self.pool()).await?)
    }

    async fn rows(&self) -> sqlx::Result<Vec<AlertRow>> {
        sqlx::query_as(ROWS).fetch_all(self.pool()).await
    }
}

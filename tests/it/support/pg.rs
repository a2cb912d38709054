//! A PostgreSQL database of its own for one test.

use outbox_sqlx::PgStore;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, PgConnection, PgPool};

use super::server::Server;

/// A database that exists as long as this value. Dropping it ends every session in it.
///
/// Copied from a template that is prepared once per process, so that a test pays for a copy of
/// some files and not for a migration.
pub(crate) struct PgDb {
    name: String,
    pool: PgPool,
}

impl PgDb {
    /// A database with the outbox installed.
    pub(crate) async fn new() -> Self {
        Self::named(Server::get().create_prepared(prepare_template).await)
    }

    /// A database with nothing in it, for tests of the migration itself.
    pub(crate) async fn empty() -> Self {
        Self::named(Server::get().create().await)
    }

    fn named(name: String) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(5)
            .connect_lazy_with(Server::get().login().database(&name));
        Self { name, pool }
    }

    /// A few connections.
    pub(crate) fn pool(&self) -> PgPool {
        self.pool.clone()
    }

    /// How [`pool`](Self::pool) logs in, for a pool that is to differ.
    pub(crate) fn options(&self) -> PgConnectOptions {
        Server::get().login().database(&self.name)
    }

    /// The same as a URL, for another process.
    pub(crate) fn url(&self) -> String {
        self.options().to_url_lossy().to_string()
    }

    /// The name of the database.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A session of its own in this database: one to hold a lock, or a transaction open.
    pub(crate) async fn session(&self) -> PgConnection {
        self.options()
            .connect()
            .await
            .expect("log in to the test's database")
    }

    /// A session outside this database: one to `ALTER DATABASE` it or to end its sessions.
    pub(crate) async fn admin(&self) -> PgConnection {
        Server::get()
            .login()
            .connect()
            .await
            .expect("log in to the server")
    }
}

impl Drop for PgDb {
    fn drop(&mut self) {
        Server::get().drop_blocking(&self.name);
    }
}

/// Installs the outbox in the database that [`PgDb::new`] copies.
async fn prepare_template(pool: PgPool) {
    PgStore::new(pool)
        .migrate()
        .await
        .expect("migrate the template");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sqlx::AssertSqlSafe;

    use super::*;
    use crate::support::within;

    async fn exists(server: &mut PgConnection, name: &str) -> bool {
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
            .bind(name)
            .fetch_one(server)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn twenty_databases_at_once_do_not_see_each_other() {
        let creating: Vec<_> = (0..20).map(|_| tokio::spawn(PgDb::new())).collect();
        let mut databases = Vec::new();
        for creating in creating {
            databases.push(within(Duration::from_secs(60), creating).await.unwrap());
        }
        for db in &databases {
            let mut session = db.session().await;
            sqlx::query("CREATE TABLE only_here ()")
                .execute(&mut session)
                .await
                .unwrap();
        }
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_dropped_database_even_with_sessions_in_it() {
        let db = PgDb::empty().await;
        let name = db.name().to_owned();
        let mut server = db.admin().await;
        let mut session = db.session().await;
        assert!(exists(&mut server, &name).await);

        drop(db);

        assert!(!exists(&mut server, &name).await);
        let ended = sqlx::query("SELECT 1").execute(&mut session).await;
        assert!(ended.is_err());
    }

    #[tokio::test]
    async fn a_url_leads_to_the_same_database() {
        let db = PgDb::empty().await;
        let other = PgPool::connect(&db.url()).await.unwrap();
        let name: String = sqlx::query_scalar("SELECT current_database()::text")
            .fetch_one(&other)
            .await
            .unwrap();
        assert_eq!(name, db.name());
    }

    #[tokio::test]
    async fn a_database_is_dropped_when_its_test_panics() {
        let (send, receive) = tokio::sync::oneshot::channel();
        let test = tokio::spawn(async move {
            let db = PgDb::empty().await;
            send.send(db.name().to_owned()).unwrap();
            panic!("as a failing test does");
        });
        let name = receive.await.unwrap();
        assert!(test.await.unwrap_err().is_panic());
        let db = PgDb::empty().await;
        assert!(!exists(&mut db.admin().await, &name).await);
    }

    #[tokio::test]
    async fn a_session_outside_can_change_the_database() {
        let db = PgDb::empty().await;
        let sql = format!(
            r#"ALTER DATABASE "{}" SET statement_timeout = '7s'"#,
            db.name()
        );
        sqlx::query(AssertSqlSafe(sql))
            .execute(&mut db.admin().await)
            .await
            .unwrap();
        let limit: String = sqlx::query_scalar("SHOW statement_timeout")
            .fetch_one(&db.pool())
            .await
            .unwrap();
        assert_eq!(limit, "7s");
    }
}

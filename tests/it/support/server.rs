//! The PostgreSQL server of this test process.
//!
//! It is the one at `DATABASE_URL`, or a throwaway of `scripts/postgres` that ends with this
//! process. Either way one login of ours creates and drops the databases of the tests. It lives in
//! a runtime of its own, because each test has its own runtime and takes its connections with it.
//!
//! # Somebody's server
//!
//! Only databases with our prefix are created and dropped; the one that `DATABASE_URL` names is
//! only logged in to. A process has no moment at which to tidy up after the last test, so its
//! template, and all that a killed process left, is dropped by the next run: a database is stale
//! when no session carries its run as `application_name`.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::runtime::Runtime;
use tokio::sync::OnceCell;
use uuid::Uuid;

/// Every database of a test begins with it.
const PREFIX: &str = "outbox_test_";

/// How long a dropped [`PgDb`](super::PgDb) waits for its database to go.
const DROP_LIMIT: Duration = Duration::from_secs(10);

pub(super) struct Server {
    runtime: Runtime,
    admin: PgPool,
    login: PgConnectOptions,
    /// What the names of this process's databases begin with.
    run: String,
    created: AtomicU32,
    template: OnceCell<String>,
    /// Holds the standard input whose end is the end of the throwaway server.
    _throwaway: Option<Child>,
}

impl Server {
    /// The server, started by whoever asks first.
    pub(super) fn get() -> &'static Self {
        static SERVER: OnceLock<Server> = OnceLock::new();
        SERVER.get_or_init(|| {
            // A thread that is in no runtime, because a runtime cannot block on another.
            std::thread::spawn(Self::start)
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn start() -> Self {
        let (url, throwaway) = match std::env::var("DATABASE_URL") {
            Ok(url) if !url.is_empty() => (url, None),
            _ => {
                let (url, script) = start_throwaway();
                (url, Some(script))
            }
        };
        let run = format!("{PREFIX}{}", &Uuid::new_v4().simple().to_string()[..8]);
        let login = PgConnectOptions::from_str(&url).expect("DATABASE_URL is a PostgreSQL URL");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("start a runtime");
        let admin = runtime
            .block_on(
                PgPoolOptions::new()
                    // One session always: it tells other runs that this one is alive.
                    .min_connections(1)
                    .max_connections(4)
                    .idle_timeout(None)
                    .max_lifetime(None)
                    .connect_with(login.clone().application_name(&run)),
            )
            .unwrap_or_else(|error| panic!("no PostgreSQL answers at {url}: {error}"));
        runtime.block_on(drop_stale(&admin));
        Self {
            runtime,
            admin,
            login,
            run,
            created: AtomicU32::new(0),
            template: OnceCell::new(),
            _throwaway: throwaway,
        }
    }

    /// How to log in to the database that administers the others.
    pub(super) fn login(&self) -> PgConnectOptions {
        self.login.clone()
    }

    /// Creates an empty database and returns its name.
    pub(super) async fn create(&'static self) -> String {
        self.create_from("template0").await
    }

    /// Creates a copy of the template, which `prepare` fills when it is first asked for.
    pub(super) async fn create_prepared<F, Fut>(&'static self, prepare: F) -> String
    where
        F: FnOnce(PgPool) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let template = self
            .template
            .get_or_init(|| self.create_template(prepare))
            .await;
        self.create_from(template).await
    }

    async fn create_template<F, Fut>(&'static self, prepare: F) -> String
    where
        F: FnOnce(PgPool) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let name = self.create().await;
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .connect_lazy_with(self.login.clone().database(&name));
        self.run(async move {
            prepare(pool.clone()).await;
            pool.close().await;
        })
        .await;
        // A database that somebody is connected to cannot be copied.
        self.execute(format!(
            r#"ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false"#
        ))
        .await;
        name
    }

    async fn create_from(&'static self, template: &str) -> String {
        let number = self.created.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}_{number}", self.run);
        self.execute(format!(r#"CREATE DATABASE "{name}" TEMPLATE "{template}""#))
            .await;
        name
    }

    /// Drops a database, whoever is connected to it, and waits until it is gone.
    ///
    /// Blocking, because a destructor calls it. The work is done on the server's own runtime.
    pub(super) fn drop_blocking(&'static self, name: &str) {
        let (done, dropped) = std::sync::mpsc::sync_channel(1);
        let sql = drop_sql(name);
        self.runtime.spawn(async move {
            let result = sqlx::query(AssertSqlSafe(sql)).execute(&self.admin).await;
            let _ = done.send(result);
        });
        match dropped.recv_timeout(DROP_LIMIT) {
            Ok(Ok(_)) => {}
            // Not a panic: the test may be failing already, and the next run drops it.
            Ok(Err(error)) => eprintln!("could not drop the database {name}: {error}"),
            Err(_) => eprintln!("the database {name} was not dropped within {DROP_LIMIT:?}"),
        }
    }

    async fn execute(&'static self, sql: String) {
        self.run(async move {
            sqlx::query(AssertSqlSafe(sql.clone()))
                .execute(&self.admin)
                .await
                .unwrap_or_else(|error| panic!("{sql}: {error}"));
        })
        .await;
    }

    /// Runs `work` on the server's own runtime.
    async fn run(&'static self, work: impl Future<Output = ()> + Send + 'static) {
        if let Err(error) = self.runtime.spawn(work).await {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Starts `scripts/postgres`, which ends when its standard input does.
fn start_throwaway() -> (String, Child) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/postgres");
    let mut child = Command::new(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A process group of its own: a Ctrl-C, or a signal to everything that cargo started, must
        // leave the script alive to tidy up.
        .process_group(0)
        .spawn()
        .unwrap_or_else(|error| panic!("start {script}: {error}"));

    let mut url = String::new();
    BufReader::new(child.stdout.take().expect("it is piped"))
        .read_line(&mut url)
        .expect("read the URL of the server");
    if url.is_empty() {
        let output = child.wait_with_output().expect("wait for a script");
        panic!("{}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    (url.trim_end().to_owned(), child)
}

/// Drops what runs that are over have left behind.
async fn drop_stale(admin: &PgPool) {
    let stale: Vec<String> = sqlx::query_scalar(
        "SELECT datname::text FROM pg_database
         WHERE datname ~ '^outbox_test_[0-9a-f]{8}_[0-9]+$'
           AND pg_get_userbyid(datdba) = current_user
           AND NOT EXISTS (
               SELECT FROM pg_stat_activity
               WHERE application_name = substring(datname, '^outbox_test_[0-9a-f]{8}'))",
    )
    .fetch_all(admin)
    .await
    .expect("list the databases of earlier runs");
    for name in stale {
        // Another run that has just started may be dropping the same one.
        let _ = sqlx::query(AssertSqlSafe(drop_sql(&name)))
            .execute(admin)
            .await;
    }
}

fn drop_sql(name: &str) -> String {
    format!(r#"DROP DATABASE IF EXISTS "{name}" WITH (FORCE)"#)
}

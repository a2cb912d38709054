//! The kit: a database per test, processes to kill, a proxy that misbehaves.
//!
//! ```text
//! server.rs     the PostgreSQL server of this test process
//! pg.rs         PgDb: a database of its own for one test
//! sqlite.rs     SqliteDb: the same on a file
//! child.rs      Child: another process, to freeze, stop and kill
//! proxy.rs      Proxy: a connection to PostgreSQL that breaks when told to
//! wire.rs       as much of PostgreSQL's protocol as the proxy reads
//! wait.rs       deadlines, so that a test fails instead of hanging
//! ```
//!
//! Nothing here sleeps to wait for something. What a test waits for is a line of a [`Child`], a
//! signal of the [`Proxy`] or, where only the database knows, a query that
//! [`eventually`](wait::eventually) repeats.

pub(crate) mod child;
pub(crate) mod pg;
pub(crate) mod proxy;
mod server;
pub(crate) mod sqlite;
pub(crate) mod wait;
mod wire;

pub(crate) use child::Child;
pub(crate) use pg::PgDb;
pub(crate) use proxy::Proxy;
pub(crate) use sqlite::SqliteDb;
pub(crate) use wait::{eventually, within};

//! Outbox stores on PostgreSQL and SQLite, through sqlx.

//! A statement with its arguments, as a value.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::lease::LeaseToken;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::{Oid, PgInterval};
use sqlx::postgres::{
    PgArgumentBuffer, PgArguments, PgHasArrayType, PgRow, PgTypeInfo, PgValueFormat, PgValueRef,
};
use sqlx::{Arguments, AssertSqlSafe, Decode, Encode, PgConnection, Postgres, Type};
use uuid::Uuid;

/// One statement of the catalogue and what is bound to it.
///
/// A value, so that the same statement can be sent by itself, in a transaction with others, or
/// inside the check that is rolled back.
pub(super) struct Query {
    sql: Arc<str>,
    arguments: PgArguments,
    refused: Option<BoxDynError>,
}

impl Query {
    pub(super) fn new(sql: &Arc<str>) -> Self {
        Self {
            sql: Arc::clone(sql),
            arguments: PgArguments::default(),
            refused: None,
        }
    }

    /// Binds the next argument. What cannot be encoded is reported when the query is sent.
    pub(super) fn bind<'t, T>(mut self, value: T) -> Self
    where
        T: Encode<'t, Postgres> + Type<Postgres>,
    {
        if let Err(error) = self.arguments.add(value) {
            self.refused.get_or_insert(error);
        }
        self
    }

    /// Sends the statement. `persistent` keeps it prepared on the connection, which must then be
    /// the server's own and not a pooler's.
    pub(super) async fn fetch(
        self,
        connection: &mut PgConnection,
        persistent: bool,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        if let Some(refused) = self.refused {
            return Err(sqlx::Error::Encode(refused));
        }
        sqlx::query_with(AssertSqlSafe(self.sql), self.arguments)
            .persistent(persistent)
            .fetch_all(connection)
            .await
    }
}

/// A span as PostgreSQL takes it. What lies below a microsecond is cut.
///
/// No span given to a store is longer than `DURATION_MAX`, which fits many times over.
pub(super) fn interval(span: Duration) -> PgInterval {
    PgInterval {
        months: 0,
        days: 0,
        microseconds: i64::try_from(span.as_micros()).unwrap_or(i64::MAX),
    }
}

/// A `uuid`. sqlx has this behind a feature, and a library that switches on a feature of sqlx
/// switches it on for the application's own queries.
#[derive(Clone, Copy)]
pub(super) struct PgUuid(pub(super) Uuid);

impl From<LeaseToken> for PgUuid {
    fn from(token: LeaseToken) -> Self {
        Self(token.as_uuid())
    }
}

impl Type<Postgres> for PgUuid {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(2950))
    }

    fn compatible(ty: &PgTypeInfo) -> bool {
        ty.oid() == Some(Oid(2950))
    }
}

impl PgHasArrayType for PgUuid {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(2951))
    }
}

impl Encode<'_, Postgres> for PgUuid {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }
}

impl Decode<'_, Postgres> for PgUuid {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        let uuid = match value.format() {
            PgValueFormat::Binary => Uuid::from_slice(value.as_bytes()?)?,
            PgValueFormat::Text => value.as_str()?.parse()?,
        };
        Ok(Self(uuid))
    }
}

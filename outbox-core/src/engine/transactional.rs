//! Runs of handlers that write through a transaction, which settles their event too.
//!
//! What the handler wrote and that its event is processed commit together or not at all, and only
//! while the lease token is still in the row: a process that has lost its lease loses its writes
//! with it. So whatever happens, the effect in the database happens once.
//!
//! The transaction is the application's kind, on the application's connections, and is open for as
//! long as the handler runs: the one exception to the rule that none is.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::dispatch::{self, Cause, Finding};
use crate::engine::settler;
use crate::engine::{Shared, delivery};
use crate::lease::HeldLease;
use crate::middleware::{self, Succeeded};
use crate::outcome::ErrorText;
use crate::registry::{Entry, ErasedTransactional};
use crate::store::{Claimed, Settled, Settlement, Store, StoreError, StoreErrorKind};

/// Runs the handler, and commits what it wrote with its event's outcome. Answers with what is still
/// to be recorded: a failure, or what a middleware made of one.
pub(super) async fn run<S: Store>(
    shared: &Shared<S>,
    handler: &dyn ErasedTransactional<S::Connection>,
    entry: &Entry,
    claimed: &Claimed,
    interrupt: &CancellationToken,
) -> Option<Finding> {
    let lease = claimed.lease();
    let delivery = match delivery(entry, claimed, interrupt) {
        Ok(delivery) => delivery,
        Err(undecodable) => return Some(undecodable),
    };
    let mut tx = match begin(shared, entry.timeout).await {
        Ok(tx) => tx,
        Err(error) => {
            // Nothing has happened that an attempt could be charged for.
            tracing::warn!(
                event_id = %claimed.id,
                error = %ErrorText::from(&error),
                "no transaction was to be had for a handler; its event goes back"
            );
            give_back(shared, lease);
            return None;
        }
    };
    // The handler's own time begins here, if its lease has any left.
    if !shared.may_begin(lease, entry) {
        roll_back(shared, tx).await;
        return None;
    }
    let succeeded = Succeeded::default();
    let handling = succeeded.watch(handler.run(&claimed.payload, &mut tx, &delivery));
    let handling = middleware::around(shared.registry.middleware(), &delivery, handling);
    match dispatch::run(handling, entry.timeout, &delivery, interrupt).await {
        Some(Finding::Done(output)) if succeeded.get() => {
            commit(shared, tx, lease, output).await;
            None
        }
        finding => {
            roll_back(shared, tx).await;
            finding
        }
    }
}

/// A transaction of the application's pool, which may have none to give for long: others hold its
/// connections, or the server does not answer.
///
/// In a task of its own, because dropping a call to a database half way is not safe.
async fn begin<S: Store>(
    shared: &Shared<S>,
    limit: Duration,
) -> Result<S::Tx<'static>, StoreError> {
    let doing = "begin a handler's transaction";
    let store = shared.store.clone();
    let beginning = shared.handlers.spawn(async move { store.begin().await });
    match tokio::time::timeout(limit, beginning).await {
        Ok(Ok(begun)) => begun,
        Ok(Err(panic)) => Err(StoreError::new(StoreErrorKind::Other, doing).with_source(panic)),
        Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, doing)),
    }
}

fn give_back<S: Store>(shared: &Shared<S>, lease: HeldLease) {
    if let Some(run) = shared.held.end_run(lease) {
        shared.release(lease, run.waiter);
    }
}

async fn commit<S: Store>(
    shared: &Shared<S>,
    tx: S::Tx<'static>,
    lease: HeldLease,
    output: String,
) {
    let Some(run) = shared.held.end_run(lease) else {
        shared.refuse_late_result(lease);
        return roll_back(shared, tx).await;
    };
    let done = Finding::Done(output);
    run.entry.lane.report(&done);
    let about = &run.about;
    let outcome = dispatch::decide(
        done,
        about.attempt,
        about.max_attempts,
        &run.entry.backoff,
        0.0,
    );
    // Nobody watches a run that has ended, and its lease is renewed until its outcome is stored: a
    // connection that never answers would keep the event in progress for ever.
    let limit = shared.settings.lease;
    let recording = record(
        shared,
        tx,
        Settlement {
            lease,
            outcome: outcome.clone(),
        },
    );
    let error = match tokio::time::timeout(limit, recording).await {
        Ok(Ok(Settled::Recorded)) => return settler::recorded(shared, lease, about, &outcome),
        Ok(Ok(Settled::LeaseLost)) => return settler::lost(shared, lease, about),
        Ok(Err(error)) => error,
        Err(_) => StoreError::new(StoreErrorKind::TimedOut, "commit what a handler wrote"),
    };
    // It did not commit, or nobody knows. Recorded under the token: if it did, the row is gone, and
    // nothing is changed.
    shared.settle(lease, run, not_committed(&error));
}

/// Settles the event in the handler's transaction, and commits that if the lease still is ours.
async fn record<S: Store>(
    shared: &Shared<S>,
    mut tx: S::Tx<'static>,
    settlement: Settlement,
) -> Result<Settled, StoreError> {
    match shared.store.settle_through(&mut tx, &[settlement]).await {
        Ok(answers) if answers == [Settled::Recorded] => {
            shared.store.commit(tx).await?;
            Ok(Settled::Recorded)
        }
        Ok(_) => {
            roll_back(shared, tx).await;
            Ok(Settled::LeaseLost)
        }
        Err(error) => {
            roll_back(shared, tx).await;
            Err(error)
        }
    }
}

fn not_committed(error: &StoreError) -> Finding {
    Finding::Failed {
        cause: Cause::Run,
        error: ErrorText::new(&format_args!(
            "what the handler wrote was not committed: {}",
            ErrorText::from(error)
        )),
    }
}

/// Undoes what a handler wrote. That an error comes back matters to nobody: without a commit nothing
/// is kept.
///
/// Waited for no longer than a lease: a connection that never answers must not keep the handler's
/// permit. Then it goes on by itself.
async fn roll_back<S: Store>(shared: &Shared<S>, tx: S::Tx<'static>) {
    let store = shared.store.clone();
    let rolling_back = shared.handlers.spawn(async move {
        if let Err(error) = store.rollback(tx).await {
            tracing::debug!(error = %ErrorText::from(&error), "a handler's transaction was not rolled back");
        }
    });
    let _ = tokio::time::timeout(shared.settings.lease, rolling_back).await;
}

//! Keeps the leases this process holds: extends them, and stops runs that must not go on.
//!
//! It runs on the outbox's own thread, so a handler that blocks a thread of the application costs
//! nobody's lease but its own.

use std::sync::Arc;

use tokio::time::Instant;

use crate::engine::Shared;
use crate::lease::HeldLease;
use crate::outcome::ErrorText;
use crate::store::{Renewal, Store};

/// Extends leases, until the outbox closes.
pub(crate) async fn renew_leases<S: Store>(shared: Arc<Shared<S>>) {
    let lease = shared.settings.lease;
    let mut next_renewal = Instant::now();
    while tick(&shared).await {
        let leases = shared.held.to_renew();
        if Instant::now() >= next_renewal && !leases.is_empty() {
            renew(&shared, &leases).await;
            // A failed renewal is repeated at this pace too, not at every tick.
            next_renewal = Instant::now() + lease / 12;
        }
    }
}

/// Stops runs that must not go on, until the outbox closes.
///
/// Apart from the renewal, which may be waiting for a database that does not answer: that is just
/// when runs have to be stopped.
pub(crate) async fn watch_runs<S: Store>(shared: Arc<Shared<S>>) {
    while tick(&shared).await {
        stop_overdue(&shared);
        stop_distrusted(&shared);
    }
}

/// Waits until something is held and a little longer. `false` once the outbox closes.
async fn tick<S: Store>(shared: &Shared<S>) -> bool {
    let pause = shared.settings.lease_margin();
    tokio::select! {
        () = shared.closing.cancelled() => return false,
        () = shared.held.not_empty() => {}
    }
    tokio::select! {
        () = shared.closing.cancelled() => false,
        () = tokio::time::sleep(pause) => true,
    }
}

async fn renew<S: Store>(shared: &Shared<S>, leases: &[HeldLease]) {
    // Read before the statement is sent, so that a slow answer shortens the trust window and
    // never stretches it.
    let sent_at = Instant::now();
    shared.counters.renewals.one();
    match shared.store.renew(leases, shared.settings.lease).await {
        Ok(answers) => {
            for (lease, answer) in leases.iter().zip(answers) {
                match answer {
                    Renewal::Renewed => {
                        shared.held.extend(*lease, sent_at, shared.settings.lease);
                    }
                    // One that is being settled is gone because it was: the settlement's own answer
                    // tells.
                    Renewal::Lost if shared.held.is_running(*lease) => {
                        lose(shared, *lease, "its lease is somebody else's");
                    }
                    Renewal::Lost => {}
                    // Whoever has locked the row may be settling it for us.
                    Renewal::Unknown => {}
                }
            }
        }
        Err(error) => {
            shared.counters.store_errors.one();
            tracing::warn!(
                leases = leases.len(),
                error = %ErrorText::from(&error),
                "leases could not be renewed"
            );
        }
    }
}

/// Ends runs that block their thread: their timeout could not drop them.
fn stop_overdue<S: Store>(shared: &Shared<S>) {
    for lease in shared.held.overdue() {
        shared.finish_overdue(lease);
    }
}

/// Stops runs whose lease may end, since it could not be renewed, before the next look at it.
fn stop_distrusted<S: Store>(shared: &Shared<S>) {
    for lease in shared.held.distrusted(shared.settings.lease_margin()) {
        lose(
            shared,
            lease,
            "its lease ran out before it could be renewed",
        );
    }
}

fn lose<S: Store>(shared: &Shared<S>, lease: HeldLease, why: &'static str) {
    if shared.held.forget(lease) {
        shared.counters.lease_lost.one();
        tracing::warn!(
            row = lease.row,
            why,
            "the lease of an event was lost; its run is stopped"
        );
    }
}

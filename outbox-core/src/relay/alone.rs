//! Events that are run alone, because they may be what kills the process.
//!
//! A handler that aborts its process, or eats its memory, takes everything with it that ran beside
//! it: each of those events loses an attempt, and after some restarts they would all be dead letters
//! for the fault of one. Nobody can tell which one it was. So an event whose lease has ended without an
//! outcome twice in a row, or has once and has one attempt left, is not run beside others again: the
//! relay waits until it runs nothing, claims one event, and waits for its end. If the process dies
//! then, only the one at fault is charged.
//!
//! Not after the first lease that ended: every deployment that kills a busy process leaves some dozens
//! of those, and they would be run one by one for nothing.
//!
//! What a publishing process dispatches inline goes on meanwhile. It is at its first attempt.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::engine::Shared;
use crate::engine::split::Place;
use crate::relay::RelayParts;
use crate::relay::claim::stoppable;
use crate::store::{Claimed, Store};

/// How much longer than a lease, which no handler's timeout is longer than, to wait for handlers to
/// end. One that blocks its thread may never.
const LONGER: Duration = Duration::from_secs(1);

/// Room for one event. Nothing else is run by the relay until the others are given back.
pub(super) struct Room {
    pub(super) place: Place,
    /// All permits but one. `None` if handlers that block their threads keep some.
    pub(super) others: Option<OwnedSemaphorePermit>,
}

/// Whether it may be what has ended the processes that ran it.
fn is_suspect(claimed: &Claimed) -> bool {
    claimed.lapsed >= 2 || (claimed.lapsed == 1 && claimed.attempt >= claimed.max_attempts)
}

/// Takes the suspects out of what was claimed to be run beside others, and gives them back. Answers
/// which they were.
pub(super) async fn give_back_suspects<S: Store>(
    shared: &Shared<S>,
    claimed: &mut Vec<Claimed>,
) -> Vec<i64> {
    let suspects: Vec<Claimed> = claimed.extract_if(.., |one| is_suspect(one)).collect();
    if suspects.is_empty() {
        return Vec::new();
    }
    tracing::warn!(
        events = suspects.len(),
        "leases of these events ended without an outcome again and again; each is run alone"
    );
    for suspect in &suspects {
        shared.release(suspect.lease(), None);
    }
    // Before the next claim, which could not take them otherwise, and before another event runs that
    // might end the process while they are charged.
    shared.flush().await;
    suspects.iter().map(|suspect| suspect.id.row()).collect()
}

/// How long to wait for a handler, or all of them, to end.
pub(super) fn at_most<S: Store>(shared: &Shared<S>) -> Duration {
    shared.settings.lease + LONGER
}

/// Waits until this relay runs nothing, and takes room for one event. `None` once the relay stops.
pub(super) async fn gather<S: Store>(parts: &RelayParts<S>) -> Option<Room> {
    let all = Arc::clone(&parts.permits).acquire_many_owned(parts.concurrency.get());
    let all = tokio::time::timeout(at_most(&parts.shared), all);
    let (permit, others) = match stoppable(parts, all).await? {
        // Neither semaphore is ever closed, and there is at least one permit.
        Ok(all) => {
            let mut others = all.ok()?;
            (others.split(1)?, Some(others))
        }
        Err(_) => {
            tracing::warn!(
                "a handler blocks its thread, so an event that should run alone runs beside it"
            );
            let permit = Arc::clone(&parts.permits).acquire_owned();
            (stoppable(parts, permit).await?.ok()?, None)
        }
    };
    let slot = Arc::clone(&parts.shared.slots).acquire_owned();
    let slot = stoppable(parts, slot).await?.ok()?;
    Some(Room {
        place: (permit, slot),
        others,
    })
}

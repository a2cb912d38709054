//! From claimed rows to runs: where an event has several handlers, each gets a row of its own before
//! any of them runs.
//!
//! A run of several handlers on one row would have to end as one: a handler that fails would make
//! the others run again, and one that kills the process would do so with each attempt.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::engine::settler::Waiter;
use crate::engine::{Shared, Start};
use crate::event::EventId;
use crate::lane::Room;
use crate::outcome::ErrorText;
use crate::registry::{EventHandlers, HandlerKey};
use crate::store::{Claimed, Split, SplitPart, SplitRow, Store};

/// A permit to run, which bounds the handlers that run at once, and a slot to hold what runs, which
/// bounds what is held.
pub(crate) type Place = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// A row that is about to be split.
struct Splitting {
    claimed: Claimed,
    trusted_until: Instant,
    waiter: Waiter,
    split: Split,
    /// Of the parts that are held.
    places: Vec<Place>,
}

/// Starts the handlers of claimed rows. `more` gives further places, as long as there are any.
///
/// Answers whether parts of rows were left to be claimed, for want of places.
pub(crate) async fn start_all<S: Store>(
    shared: &Arc<Shared<S>>,
    starts: Vec<Start>,
    mut more: impl FnMut() -> Option<Place>,
) -> bool {
    let mut left = false;
    let mut splitting = Vec::new();
    let mut planned = HashMap::new();
    for start in starts {
        match handlers_to_split_for(shared, &start.claimed) {
            Some(handlers) => {
                let (planned, lacking) = plan(start, &handlers, &mut planned, &mut more);
                left |= lacking;
                splitting.push(planned);
            }
            None => shared.start(start),
        }
    }
    if !splitting.is_empty() {
        split(shared, splitting).await;
    }
    if left {
        // The relay of this process takes them as soon as it has room.
        shared.wake.local();
    }
    left
}

/// The handlers of a row that belongs to all of several. An expired one is not worth splitting.
fn handlers_to_split_for<S: Store>(
    shared: &Shared<S>,
    claimed: &Claimed,
) -> Option<Arc<EventHandlers>> {
    if claimed.handler.is_some() || claimed.expired {
        return None;
    }
    let handlers = shared.registry.reading(&claimed.name, claimed.version)?;
    handlers.unnamed().is_none().then(|| Arc::clone(handlers))
}

/// Finds a place for each part whose handler has room, and says whether one was lacking. `planned` is
/// how many of each handler have been found one by then.
fn plan(
    start: Start,
    handlers: &EventHandlers,
    planned: &mut HashMap<HandlerKey, usize>,
    mut more: impl FnMut() -> Option<Place>,
) -> (Splitting, bool) {
    let mut own = Some(start.place);
    let mut places = Vec::new();
    let mut lacking = false;
    let mut parts = Vec::new();
    for entry in handlers.all() {
        let planned = planned.entry(entry.key()).or_default();
        let has_room = match entry.lane.room() {
            Room::Any => true,
            Room::Only(room) => *planned < room,
        };
        let place = has_room.then(|| own.take().or_else(&mut more)).flatten();
        *planned += usize::from(place.is_some());
        lacking |= has_room && place.is_none();
        parts.extend(entry.handler.map(|handler| SplitPart {
            handler,
            max_attempts: entry.max_attempts,
            held: place.is_some(),
        }));
        places.extend(place);
    }
    let lease = start.claimed.lease();
    let splitting = Splitting {
        claimed: start.claimed,
        trusted_until: start.trusted_until,
        waiter: start.waiter,
        split: Split { lease, parts },
        places,
    };
    (splitting, lacking)
}

async fn split<S: Store>(shared: &Arc<Shared<S>>, mut splitting: Vec<Splitting>) {
    // All writers lock rows in this order.
    splitting.sort_unstable_by_key(|splitting| splitting.split.lease);
    let splits: Vec<Split> = splitting.iter().map(|of| of.split.clone()).collect();
    let answers = match shared.store.split(&splits).await {
        Ok(answers) => answers,
        Err(error) => {
            shared.counters.store_errors.one();
            tracing::warn!(
                events = splits.len(),
                error = %ErrorText::from(&error),
                "events could not be split among their handlers; they go back"
            );
            // If they were split all the same, this gives the first part back, and the leases of the
            // others expire.
            for of in splitting {
                shared.release(of.split.lease, of.waiter);
            }
            return;
        }
    };
    for (of, rows) in splitting.into_iter().zip(answers) {
        match rows {
            Some(rows) => start_parts(shared, of, &rows),
            None => {
                shared.counters.lease_lost.one();
                tracing::warn!(
                    event_id = %of.claimed.id,
                    event_name = %of.claimed.name,
                    "the lease of an event was lost before it was split among its handlers"
                );
            }
        }
    }
}

fn start_parts<S: Store>(shared: &Arc<Shared<S>>, of: Splitting, rows: &[SplitRow]) {
    let whole = of.claimed;
    let mut places = of.places.into_iter();
    for (part, row) in of.split.parts.iter().zip(rows).filter(|(_, row)| row.held) {
        let id = EventId::new(whole.id.installation(), row.row);
        let claimed = Claimed {
            id,
            handler: Some(part.handler.to_owned()),
            origin: (id != whole.id).then_some(whole.id.row()),
            max_attempts: row.max_attempts,
            ..whole.clone()
        };
        match places.next() {
            Some(place) => shared.start(Start {
                claimed,
                trusted_until: of.trusted_until,
                place,
                waiter: of.waiter.clone(),
            }),
            // A store that holds more than it was asked to.
            None => shared.release(claimed.lease(), of.waiter.clone()),
        }
    }
}

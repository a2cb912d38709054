//! The sweep: what no claim finds.
//!
//! A lease that ended with no attempt left is not due, so no claim takes it. The sweep makes it a
//! dead letter, whatever its name: that needs no handler. In the same walk it counts events of
//! names nobody here handles, and afterwards it removes what is past its retention.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::engine::settler::{About, Ending};
use crate::lease::LeaseToken;
use crate::outcome::{DeadReason, ErrorText, Outcome};
use crate::relay::RelayParts;
use crate::relay::claim::stoppable;
use crate::store::{LEASE_ENDED, Store, StoreError, SweepRequest};

/// How many rows one chunk looks at: a few milliseconds.
const SCAN: NonZeroU32 = NonZeroU32::new(5_000).expect("not zero");

/// How many settled events and keys one statement removes.
const PURGE: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

/// How many such statements one sweep sends. What is left waits for the next.
const PURGES_MAX: u32 = 1_000;

/// The latest first sweep.
const FIRST_WITHIN: Duration = Duration::from_secs(10);

/// Runs until the relay stops.
pub(crate) async fn run<S: Store>(parts: Arc<RelayParts<S>>) {
    // A random offset, so that the pods of one deployment do not sweep in step.
    let first = std::cmp::min(parts.sweep, FIRST_WITHIN).mul_f64(fastrand::f64());
    let mut next = Instant::now() + first;
    loop {
        if stoppable(&parts, tokio::time::sleep_until(next))
            .await
            .is_none()
        {
            return;
        }
        next = Instant::now() + parts.sweep;
        if let Err(error) = sweep(&parts).await {
            parts.shared.counters.store_errors.one();
            tracing::warn!(error = %ErrorText::from(&error), "a sweep was cut short");
        }
    }
}

async fn sweep<S: Store>(parts: &RelayParts<S>) -> Result<(), StoreError> {
    let shared = &parts.shared;
    let mut unhandled: BTreeMap<String, u64> = BTreeMap::new();
    let mut after = 0;
    loop {
        if stoppable(parts, async {}).await.is_none() {
            return Ok(());
        }
        let Some(_asking) = shared.may_ask() else {
            return Ok(());
        };
        let request = SweepRequest {
            after,
            scan: SCAN,
            lease: shared.settings.lease,
            token: LeaseToken::random(),
            instance: &shared.settings.instance,
            names: shared.registry.names(),
        };
        let chunk = shared.store.sweep(&request).await?;
        let any_exhausted = !chunk.exhausted.is_empty();
        for row in chunk.exhausted {
            // Nothing runs, so nothing is held: were this process to die here, the lease would
            // end and the next sweep find the row again.
            shared.end(Ending::Settle {
                lease: row.lease(),
                about: About::exhausted(&row),
                outcome: Outcome::Dead {
                    reason: DeadReason::LeaseExpired,
                    error: ErrorText::new(&LEASE_ENDED),
                },
                at: Instant::now(),
                waiter: None,
            });
        }
        if any_exhausted {
            // One chunk is under way at a time, whatever there is to bury.
            shared.flush().await;
        }
        for (name, count) in chunk.unhandled {
            *unhandled.entry(name).or_default() += count;
        }
        match chunk.next {
            Some(next) => after = next,
            None => break,
        }
    }
    for (name, waiting) in unhandled {
        tracing::warn!(
            event_name = name,
            waiting,
            "events of a type that has no handler here wait"
        );
    }
    for _ in 0..PURGES_MAX {
        if stoppable(parts, async {}).await.is_none() {
            return Ok(());
        }
        let removed = shared.store.purge(PURGE).await?;
        if removed < u64::from(PURGE.get()) {
            break;
        }
    }
    Ok(())
}

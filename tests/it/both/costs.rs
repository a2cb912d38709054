//! What an event costs in statements, counted.

use std::time::Instant;

use outbox_core::{HandlerError, Store};

use super::{Database, on_both_databases};
use crate::events::{Step, Ticked, scripted, settled};

on_both_databases! {
    the_inline_path_needs_no_claim_and_shares_its_statements
    the_relay_path_shares_one_claim_and_one_settlement
    a_drain_holds_its_rate_from_the_first_event_to_the_last
}

async fn the_inline_path_needs_no_claim_and_shares_its_statements<D: Database>(db: &D) {
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db
        .outbox()
        .on(handler)
        .inline_concurrency(200)
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let events: Vec<Ticked> = (0..200).map(|n| Ticked { n }).collect();
    tx.publish_all(&events).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    let counters = outbox.counters();
    assert_eq!(counters.processed, 200);
    assert_eq!((counters.claims, counters.verifications), (0, 1));
    assert_eq!(counters.releases_and_losses(), 0);
    assert!(counters.settlements <= 8, "{}", counters.settlements);
}

async fn the_relay_path_shares_one_claim_and_one_settlement<D: Database>(db: &D) {
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox().on(handler));
    let outbox = builder.build().unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let events: Vec<Ticked> = (0..200).map(|n| Ticked { n }).collect();
    outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    let relay = outbox
        .relay()
        .concurrency(200)
        .batch(200)
        .start()
        .await
        .unwrap();
    for _ in 0..200 {
        outcomes.recv().await.unwrap();
    }
    drop(relay);
    let counters = outbox.counters();
    assert!(counters.claims <= 4, "{}", counters.claims);
    assert!(counters.settlements <= 8, "{}", counters.settlements);
}

/// The last fifth may take twice as long as the first: the machine is shared, and what wears a
/// claim down takes ten times as long.
async fn a_drain_holds_its_rate_from_the_first_event_to_the_last<D: Database>(db: &D) {
    const EVENTS: usize = 20_000;
    let (builder, mut outcomes) = settled(
        db.outbox()
            .retention(std::time::Duration::ZERO)
            .on(|_: Ticked| async { Ok::<_, HandlerError>(()) }),
    );
    let outbox = builder.build().unwrap();
    for chunk in 0..20 {
        let mut tx = outbox.store().begin().await.unwrap();
        let events: Vec<Ticked> = (0..1_000)
            .map(|n| Ticked {
                n: chunk * 1_000 + n,
            })
            .collect();
        outbox.publish_all(&mut tx, &events).await.unwrap();
        outbox.store().commit(tx).await.unwrap();
    }
    let relay = outbox
        .relay()
        .concurrency(500)
        .batch(500)
        .start()
        .await
        .unwrap();
    // The first event is where the clock starts: connections are open and statements prepared.
    outcomes.recv().await.unwrap();
    let mut fifths = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        // One less than a fifth: one outcome was taken before the clock started.
        for _ in 0..EVENTS / 5 - 1 {
            outcomes.recv().await.unwrap();
        }
        fifths.push(began.elapsed());
    }
    relay
        .shutdown(std::time::Duration::from_secs(20))
        .await
        .unwrap();
    assert_eq!(outbox.counters().processed, EVENTS as u64);
    assert!(fifths[4] < fifths[0] * 2, "{fifths:?}");
}

trait Lost {
    fn releases_and_losses(&self) -> u64;
}

impl Lost for outbox_core::Snapshot {
    fn releases_and_losses(&self) -> u64 {
        self.released + self.lease_lost + self.unrecorded + self.vanished
    }
}

//! What an event costs in statements, counted.

use outbox_core::Store;

use super::{Database, on_both_databases};
use crate::events::{Step, Ticked, scripted, settled};

on_both_databases! {
    the_inline_path_needs_no_claim_and_shares_its_statements
    the_relay_path_shares_one_claim_and_one_settlement
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

trait Lost {
    fn releases_and_losses(&self) -> u64;
}

impl Lost for outbox_core::Snapshot {
    fn releases_and_losses(&self) -> u64 {
        self.released + self.lease_lost + self.unrecorded + self.vanished
    }
}

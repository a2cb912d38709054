//! What an event costs in statements, counted.

use std::time::Duration;

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
    let lost = counters.released + counters.lease_lost + counters.unrecorded + counters.vanished;
    assert_eq!(lost, 0);
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
    // A first pass of the cadences, whose moment is random, may have claimed as well.
    assert!(counters.claims <= 7, "{}", counters.claims);
    assert!(counters.settlements <= 8, "{}", counters.settlements);
}

/// As many statements for the last events as for the first: no more claims than full batches, and
/// none that comes back with a few rows because it gave up looking.
async fn a_drain_holds_its_rate_from_the_first_event_to_the_last<D: Database>(db: &D) {
    const EVENTS: u64 = 20_000;
    const BATCH: u32 = 500;
    let (builder, mut outcomes) = settled(
        db.outbox()
            .retention(Duration::ZERO)
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
        .concurrency(BATCH)
        .batch(BATCH)
        .start()
        .await
        .unwrap();
    let mut claims = Vec::new();
    for _ in 0..4 {
        let before = outbox.counters().claims;
        for _ in 0..EVENTS / 4 {
            outcomes.recv().await.unwrap();
        }
        claims.push(outbox.counters().claims - before);
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(outbox.counters().processed, EVENTS);
    // Ten full batches a quarter at best. A claim waits 2 ms for more permits than a few, so on a
    // busy machine it takes less; one that found its rows by walking would come back with a few.
    assert!(claims.iter().all(|claims| *claims <= 250), "{claims:?}");
}

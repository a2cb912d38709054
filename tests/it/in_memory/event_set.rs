//! An outbox of a closed set: what the compiler does not say.

use std::time::Duration;

use outbox_core::testing::{MemoryConnection, MemoryStore};
use outbox_core::{
    BuildError, DeadLetterFilter, Delivery, EventOf, EventSet, EventState, HandlerError, Outbox,
    OutboxEvents, PublishError, PublishOptions, Store, TransactionalHandler, Uncommitted,
};

use crate::events::{OrderPaid, Ticked};

#[derive(Debug, OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    Ticked(Ticked),
}

fn shop(store: &MemoryStore) -> Outbox<MemoryStore, ShopEvents> {
    Outbox::builder_of::<ShopEvents>(store.clone())
        .on_current_runtime()
        .on(|event: OrderPaid| async move { Ok::<_, HandlerError>(format!("r-{}", event.order)) })
        .max_attempts(1)
        .on(|_: Ticked| async { Err(HandlerError::permanent("as asked")) })
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn every_way_to_publish_a_member_can_be_spawned() {
    let store = MemoryStore::new();
    let shop = shop(&store);
    tokio::spawn(publish_in_every_way(shop.clone()))
        .await
        .unwrap();
    tokio::spawn(publish_for_any_set(shop))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(store.records().len(), 8);
}

async fn publish_in_every_way(shop: Outbox<MemoryStore, ShopEvents>) {
    let options = PublishOptions::new().header("origin", "test");
    let paid = |order| OrderPaid { order };

    let mut tx = shop.begin().await.unwrap();
    tx.publish(&paid(1)).await.unwrap();
    tx.publish_with(&paid(2), &options).await.unwrap();
    tx.publish_all(&[paid(3)]).await.unwrap();
    let handled = tx.dispatch_uncommitted(&paid(4)).await.unwrap();
    assert!(matches!(handled, Uncommitted::Processed(_)));
    let handled = tx
        .dispatch_uncommitted_with(&Ticked { n: 1 }, &Nothing)
        .await;
    assert!(matches!(handled, Ok(Uncommitted::Processed(_))));
    tx.commit().await.unwrap().settled().await;

    let mut tx = shop.store().begin().await.unwrap();
    let published = shop.publish(&mut tx, &paid(5)).await.unwrap();
    shop.publish_with(&mut tx, &paid(6), &options)
        .await
        .unwrap();
    shop.publish_all(&mut tx, &[paid(7)]).await.unwrap();
    shop.store().commit(tx).await.unwrap();
    shop.dispatch(published).unwrap().settled().await;

    assert_eq!(shop.dispatch_directly(&paid(9)).await.unwrap(), "r-9");
}

/// As a library does, which knows one event of the set.
async fn publish_for_any_set<Set>(outbox: Outbox<MemoryStore, Set>) -> Result<(), PublishError>
where
    OrderPaid: EventOf<Set>,
{
    let mut tx = outbox.begin().await?;
    // Known already.
    let again = tx.publish(&OrderPaid { order: 1 }).await?;
    assert!(again.duplicate().is_some());
    tx.rollback().await?;
    Ok(())
}

struct Nothing;

impl TransactionalHandler<MemoryConnection, Ticked> for Nothing {
    async fn handle(
        &self,
        _: Ticked,
        _: &mut MemoryConnection,
        _: &Delivery,
    ) -> Result<(), HandlerError> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_relay_and_the_dead_letters_of_a_set_are_those_of_any_outbox() {
    let store = MemoryStore::new();
    let shop = shop(&store);
    let mut tx = store.begin().await.unwrap();
    let ticked = shop.publish(&mut tx, &Ticked { n: 7 }).await.unwrap();
    store.commit(tx).await.unwrap();

    let relay = shop.relay().start().await.unwrap();
    let dead = |record: &outbox_core::EventRecord| record.state == EventState::DeadLetter;
    while !store.records().iter().any(dead) {
        tokio::time::advance(Duration::from_millis(50)).await;
    }
    let filter = DeadLetterFilter::all();
    let page = shop.dead_letters().list(&filter, None, 10).await.unwrap();
    assert_eq!(page.letters.len(), 1);
    assert_eq!(page.letters[0].id, ticked.event_id());

    let record = shop.find(ticked.event_id()).await.unwrap().unwrap();
    let event = ShopEvents::decode(&record.name, record.version, &record.payload);
    assert!(matches!(event, Ok(ShopEvents::Ticked(Ticked { n: 7 }))));
    relay.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[test]
fn a_second_handler_of_a_member_is_refused_when_the_outbox_is_built() {
    let built = Outbox::builder_of::<ShopEvents>(MemoryStore::new())
        .on(|_: Ticked| async { Ok::<_, HandlerError>(()) })
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .on(|_: Ticked| async { Ok::<_, HandlerError>(()) })
        .build();
    let refused = built.map(drop);
    assert!(
        matches!(
            refused,
            Err(BuildError::DuplicateHandler {
                event: "ticked",
                ..
            })
        ),
        "{refused:?}"
    );
}

//! Publishing lives and dies with the caller's transaction.

use std::time::Duration;

use outbox_core::{
    EventState, HandlerError, Outbox, OutboxEvent, Priority, PublishError, PublishOptions,
    Published, Store,
};
use serde::{Deserialize, Serialize};

use super::{Database, connection, on_both_databases};
use crate::events::{OrderPaid, Ticked, Unhandled};

on_both_databases! {
    p1_an_event_lives_and_dies_with_its_transaction
    p2_a_duplicate_leaves_the_callers_transaction_usable
    p2_a_refused_event_leaves_the_callers_transaction_usable
    p2_a_payload_nested_too_deeply_is_refused_before_it_can_abort_the_transaction
    p3_of_many_concurrent_publishers_of_one_key_one_gets_its_event_in
    p3_nobody_is_told_duplicate_because_of_a_transaction_that_rolled_back
    p3_a_key_outlives_its_event_when_nothing_else_is_kept
    publish_all_answers_in_order_and_tells_duplicates_within_it
    options_reach_the_row_and_the_handler
    a_mistake_in_an_event_is_a_typed_error
}

fn publisher<D: Database>(db: &D) -> Outbox<D::Store> {
    db.outbox().build().unwrap()
}

async fn p1_an_event_lives_and_dies_with_its_transaction<D: Database>(db: &D) {
    let outbox = publisher(db);
    let store = outbox.store();

    let mut tx = store.begin().await.unwrap();
    D::insert_order(connection::<D::Store>(&mut tx), 1)
        .await
        .unwrap();
    let undone = outbox
        .publish(&mut tx, &OrderPaid { order: 1 })
        .await
        .unwrap();
    store.rollback(tx).await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    D::insert_order(&mut tx, 2).await.unwrap();
    let dropped = tx.publish(&OrderPaid { order: 2 }).await.unwrap();
    drop(tx);

    let mut tx = store.begin().await.unwrap();
    D::insert_order(connection::<D::Store>(&mut tx), 3)
        .await
        .unwrap();
    let kept = outbox
        .publish(&mut tx, &OrderPaid { order: 3 })
        .await
        .unwrap();
    store.commit(tx).await.unwrap();

    assert_eq!(db.orders().await, [3]);
    let kept = outbox.find(kept.event_id()).await.unwrap().unwrap();
    assert_eq!(kept.payload, r#"{"order":3}"#);
    // The numbers of what was undone may be given again on SQLite, never those of what was kept.
    for undone in [undone, dropped] {
        let found = outbox.find(undone.event_id()).await.unwrap();
        assert!(found.is_none_or(|record| record.id == kept.id));
    }
    assert_eq!(db.summary().await, [("pending".to_owned(), 1)]);
}

async fn p2_a_duplicate_leaves_the_callers_transaction_usable<D: Database>(db: &D) {
    let outbox = publisher(db);
    let mut tx = outbox.begin().await.unwrap();
    let first = tx
        .publish(&OrderPaid { order: 1 })
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    D::insert_order(&mut tx, 1).await.unwrap();
    let second = tx.publish(&OrderPaid { order: 1 }).await.unwrap();
    D::insert_order(&mut tx, 2).await.unwrap();
    tx.commit().await.unwrap();

    assert_eq!(second.duplicate().unwrap().event_id(), first);
    assert_eq!(second.duplicate().unwrap().state(), EventState::Pending);
    assert_eq!(second.duplicate().unwrap().output().unwrap(), None);
    assert_eq!(db.orders().await, [1, 2]);
}

async fn p2_a_refused_event_leaves_the_callers_transaction_usable<D: Database>(db: &D) {
    let outbox = publisher(db);
    let mut tx = outbox.begin().await.unwrap();
    D::insert_order(&mut tx, 1).await.unwrap();
    let refused = tx
        .publish(&Text {
            text: "a\0b".to_owned(),
        })
        .await
        .unwrap_err();
    assert!(matches!(
        refused,
        PublishError::NulInPayload { event: "text" }
    ));
    assert!(!refused.is_transient());
    D::insert_order(&mut tx, 2).await.unwrap();
    let kept = tx
        .publish(&Text {
            text: "a\\u0000b ✓".to_owned(),
        })
        .await
        .unwrap();
    tx.commit().await.unwrap();

    assert_eq!(db.orders().await, [1, 2]);
    let kept = outbox.find(kept.event_id()).await.unwrap().unwrap();
    let read: Text = serde_json::from_str(&kept.payload).unwrap();
    assert_eq!(read.text, "a\\u0000b ✓");
}

async fn p2_a_payload_nested_too_deeply_is_refused_before_it_can_abort_the_transaction<
    D: Database,
>(
    db: &D,
) {
    let nested =
        |levels| (1..levels).fold(serde_json::json!([]), |inner, _| serde_json::json!([inner]));
    let outbox = publisher(db);
    let mut tx = outbox.begin().await.unwrap();
    let refused = tx.publish(&Json(nested(128))).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the payload of event `json` is nested deeper than 127 levels"
    );
    D::insert_order(&mut tx, 1).await.unwrap();
    let kept = tx.publish(&Json(nested(127))).await.unwrap().event_id();
    tx.commit().await.unwrap();
    let kept = outbox.find(kept).await.unwrap().unwrap();
    assert!(serde_json::from_str::<Json>(&kept.payload).is_ok());
}

async fn p3_of_many_concurrent_publishers_of_one_key_one_gets_its_event_in<D: Database>(db: &D) {
    let mut publishing = Vec::new();
    for order in 0..20 {
        let outbox = publisher(db);
        publishing.push(tokio::spawn(async move {
            let mut tx = outbox.begin().await.unwrap();
            D::insert_order(&mut tx, order).await.unwrap();
            let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
            tx.commit().await.unwrap();
            published
        }));
    }
    let mut inserted = Vec::new();
    let mut duplicates = Vec::new();
    for publishing in publishing {
        match publishing.await.unwrap() {
            Published::Inserted(id) => inserted.push(id),
            Published::Duplicate(duplicate) => duplicates.push(duplicate.event_id()),
            reused @ Published::KeyReused(_) => panic!("{reused:?}"),
        }
    }
    assert_eq!(inserted.len(), 1);
    assert_eq!(duplicates, vec![inserted[0]; 19]);
    assert_eq!(db.orders().await.len(), 20, "no business change was lost");
}

async fn p3_nobody_is_told_duplicate_because_of_a_transaction_that_rolled_back<D: Database>(
    db: &D,
) {
    let mut publishing = Vec::new();
    for n in 0..6 {
        let outbox = publisher(db);
        publishing.push(tokio::spawn(async move {
            let mut tx = outbox.begin().await.unwrap();
            let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
            // All but the last give up, whoever came first.
            if n == 5 {
                tx.commit().await.unwrap();
            } else {
                tx.rollback().await.unwrap();
            }
            (n, published)
        }));
    }
    let mut kept = None;
    for publishing in publishing {
        let (n, published) = publishing.await.unwrap();
        if n == 5 {
            kept = Some(published);
        }
    }
    // It came in, whatever the others were told and did.
    assert!(matches!(kept.unwrap(), Published::Inserted(_)));
    assert_eq!(db.summary().await, [("pending".to_owned(), 1)]);
}

async fn p3_a_key_outlives_its_event_when_nothing_else_is_kept<D: Database>(db: &D) {
    let outbox =
        db.outbox()
            .retention(Duration::ZERO)
            .on(|event: OrderPaid| async move {
                Ok::<_, HandlerError>(format!("receipt-{}", event.order))
            })
            .build()
            .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let first = tx
        .publish(&OrderPaid { order: 1 })
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(outbox.find(first).await.unwrap(), None);

    let mut tx = outbox.begin().await.unwrap();
    let again = tx.publish(&OrderPaid { order: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    let duplicate = again.duplicate().unwrap();
    assert_eq!(duplicate.event_id(), first);
    assert_eq!(duplicate.state(), EventState::Processed);
    assert_eq!(duplicate.output().unwrap().as_deref(), Some("receipt-1"));
}

async fn publish_all_answers_in_order_and_tells_duplicates_within_it<D: Database>(db: &D) {
    let outbox = publisher(db);
    let mut tx = outbox.begin().await.unwrap();
    let taken = tx
        .publish(&OrderPaid { order: 2 })
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let events = [3, 2, 1, 3].map(|order| OrderPaid { order });
    let published = tx.publish_all(&events).await.unwrap();
    tx.commit().await.unwrap();

    let Published::Inserted(third) = &published[0] else {
        panic!("{published:?}")
    };
    assert_eq!(published[1].duplicate().unwrap().event_id(), taken);
    let Published::Inserted(first) = &published[2] else {
        panic!("{published:?}")
    };
    assert!(
        third.row() < first.row(),
        "numbers follow the input's order"
    );
    assert_eq!(published[3].duplicate().unwrap().event_id(), *third);

    let mut tx = outbox.begin().await.unwrap();
    let none: [OrderPaid; 0] = [];
    assert!(tx.publish_all(&none).await.unwrap().is_empty());
}

async fn options_reach_the_row_and_the_handler<D: Database>(db: &D) {
    let outbox = publisher(db);
    let options = PublishOptions::new()
        .delay(Duration::from_secs(3_600))
        .priority(Priority::Critical)
        .dedup_key("mine")
        .header("traceparent", "00-aa-bb-01")
        .header("größe", "\"quoted\" ✓");
    let mut tx = outbox.begin().await.unwrap();
    let id = tx
        .publish_with(&Ticked { n: 1 }, &options)
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap();

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.priority, Priority::Critical);
    assert_eq!(record.dedup_key.as_deref(), Some("mine"));
    assert_eq!(record.state, EventState::Pending);
    let wait = record
        .due_at
        .unwrap()
        .duration_since(record.created_at)
        .unwrap();
    let hour = Duration::from_secs(3_600);
    assert!(wait >= hour - Duration::from_secs(1) && wait <= hour + Duration::from_secs(60));

    // Due at last, on an instance that handles it.
    db.make_due(id.row()).await;
    let (send, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let handler = Reporting { send };
    let relaying = db.outbox().on::<Ticked, _>(handler).build().unwrap();
    let _relay = relaying.relay().start().await.unwrap();
    let delivery = seen.recv().await.unwrap();
    assert_eq!(delivery.headers()["traceparent"], "00-aa-bb-01");
    assert_eq!(delivery.headers()["größe"], "\"quoted\" ✓");
    assert_eq!(delivery.event_id(), id);
    assert_eq!(delivery.first_published_at(), Some(record.created_at));
}

struct Reporting {
    send: tokio::sync::mpsc::UnboundedSender<outbox_core::Delivery>,
}

impl outbox_core::Handler<Ticked> for Reporting {
    async fn handle(
        &self,
        _: Ticked,
        delivery: &outbox_core::Delivery,
    ) -> Result<(), HandlerError> {
        let _ = self.send.send(delivery.clone());
        Ok(())
    }
}

async fn a_mistake_in_an_event_is_a_typed_error<D: Database>(db: &D) {
    let outbox = db.outbox().max_payload_bytes(50).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let long = Text {
        text: "x".repeat(100),
    };
    let refused = tx.publish(&long).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the payload of event `text` has 111 bytes; the limit is 50"
    );
    let refused = tx.publish(&NotJson).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "event `not.json` cannot be written as JSON"
    );

    let empty = PublishOptions::new().dedup_key("");
    let refused = tx.publish_with(&Unhandled, &empty).await.unwrap_err();
    assert_eq!(refused.to_string(), "event `unhandled` has an empty key");
    let nul = PublishOptions::new().header("a", "b\0c");
    let refused = tx.publish_with(&Unhandled, &nul).await.unwrap_err();
    assert!(matches!(refused, PublishError::InvalidHeaders { .. }));
    let never = PublishOptions::new().delay(Duration::MAX);
    let refused = tx.publish_with(&Unhandled, &never).await.unwrap_err();
    assert!(matches!(refused, PublishError::DelayTooLong { .. }));

    // A key over the limit is hashed, not cut: two that share their first 300 bytes differ.
    let long = "k".repeat(300);
    for (key, fresh) in [("a", true), ("b", true), ("a", false)] {
        let options = PublishOptions::new().dedup_key(format!("{long}{key}"));
        let published = tx.publish_with(&Unhandled, &options).await.unwrap();
        assert_eq!(published.duplicate().is_none(), fresh);
    }
    tx.commit().await.unwrap();
}

#[derive(Deserialize, Serialize)]
struct Text {
    text: String,
}

impl OutboxEvent for Text {
    type Output = ();
    const NAME: &'static str = "text";
}

#[derive(Deserialize)]
struct NotJson;

impl Serialize for NotJson {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("on purpose"))
    }
}

impl OutboxEvent for NotJson {
    type Output = ();
    const NAME: &'static str = "not.json";
}

#[derive(Deserialize, Serialize)]
struct Json(serde_json::Value);

impl OutboxEvent for Json {
    type Output = ();
    const NAME: &'static str = "json";
}

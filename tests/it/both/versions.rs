//! Releases that change an event, and meet each other's rows.
//!
//! Each release is a module with the event as it was then. All of them publish `parcel.sent`.

use std::time::Duration;

use outbox_core::store::Store;
use outbox_core::{
    Cadence, DeadReason, Delivery, DirectError, EventId, EventState, Handler, HandlerError, Outbox,
    OutboxEvent, Published, Relay, Uncommitted,
};
use tokio::sync::mpsc;

use super::{Database, on_both_databases};
use crate::events::{publish_for_relays, settled};

on_both_databases! {
    a_backlog_of_old_versions_is_drained_by_the_present_handler
    p12_an_old_process_leaves_later_versions_alone_and_reports_them
    p12_old_and_new_processes_side_by_side_handle_every_event_once
    p12_what_this_process_does_not_read_it_does_not_dispatch_either
    a_step_that_refuses_a_payload_ends_as_a_dead_letter
    a_renamed_event_is_drained_through_its_alias
    a_dedup_key_spans_versions_and_not_names
}

mod first {
    use outbox_core::OutboxEvent;
    use serde::{Deserialize, Serialize};

    #[derive(Clone, Debug, Deserialize, Serialize, OutboxEvent)]
    #[outbox(name = "parcel.sent", dedup_key = "{parcel}")]
    pub(super) struct ParcelSent {
        pub(super) parcel: u64,
        pub(super) kilos: u64,
    }
}

mod second {
    use outbox_core::OutboxEvent;
    use serde::{Deserialize, Serialize};

    #[derive(Clone, Debug, Deserialize, Serialize, OutboxEvent)]
    #[outbox(name = "parcel.sent", dedup_key = "{parcel}")]
    #[outbox(version = 2, upcast(from = super::first::ParcelSent, version = 1))]
    pub(super) struct ParcelSent {
        pub(super) parcel: u64,
        pub(super) grams: u64,
    }

    impl TryFrom<super::first::ParcelSent> for ParcelSent {
        type Error = &'static str;

        fn try_from(sent: super::first::ParcelSent) -> Result<Self, &'static str> {
            let grams = sent
                .kilos
                .checked_mul(1_000)
                .ok_or("no parcel is so heavy")?;
            let parcel = sent.parcel;
            Ok(Self { parcel, grams })
        }
    }
}

mod third {
    use outbox_core::OutboxEvent;
    use serde::{Deserialize, Serialize};

    #[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize, OutboxEvent)]
    #[outbox(name = "parcel.sent", dedup_key = "{parcel}", version = 3)]
    #[outbox(upcast(from = super::first::ParcelSent, version = 1))]
    #[outbox(upcast(from = super::second::ParcelSent, version = 2))]
    pub(super) struct ParcelSent {
        pub(super) parcel: u64,
        pub(super) grams: u64,
        pub(super) express: bool,
    }

    impl From<super::second::ParcelSent> for ParcelSent {
        fn from(sent: super::second::ParcelSent) -> Self {
            Self {
                parcel: sent.parcel,
                grams: sent.grams,
                express: false,
            }
        }
    }
}

mod renamed {
    use outbox_core::OutboxEvent;
    use serde::{Deserialize, Serialize};

    #[derive(Clone, Debug, Deserialize, Serialize, OutboxEvent)]
    #[outbox(name = "parcel.left", alias = "parcel.sent", dedup_key = "{parcel}")]
    pub(super) struct ParcelLeft {
        pub(super) parcel: u64,
        pub(super) kilos: u64,
    }
}

fn of_first(parcel: u64) -> first::ParcelSent {
    first::ParcelSent { parcel, kilos: 2 }
}

fn of_second(parcel: u64) -> second::ParcelSent {
    let grams = 2_500;
    second::ParcelSent { parcel, grams }
}

fn of_third(parcel: u64) -> third::ParcelSent {
    third::ParcelSent {
        parcel,
        grams: 3_000,
        express: true,
    }
}

/// Sends on what it gets, and the version it was published in.
struct Report<E>(mpsc::UnboundedSender<(E, Delivery)>);

impl<E: OutboxEvent<Output = ()>> Handler<E> for Report<E> {
    async fn handle(&self, event: E, delivery: &Delivery) -> Result<(), HandlerError> {
        let _ = self.0.send((event, delivery.clone()));
        Ok(())
    }
}

type Handled<E> = mpsc::UnboundedReceiver<(E, Delivery)>;

/// A process of the release that has `E`.
fn process<D: Database, E: OutboxEvent<Output = ()>>(db: &D) -> (Outbox<D::Store>, Handled<E>) {
    let (report, handled) = mpsc::unbounded_channel();
    let outbox = db.outbox().on::<E, _>(Report(report)).build().unwrap();
    (outbox, handled)
}

/// A relay that looks only when it is told to.
async fn quiet_relay<S: Store>(outbox: &Outbox<S>) -> Relay<S> {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let relay = outbox.relay().cadences_only();
    let relay = relay.sweep_interval(DAY).backstop_interval(DAY);
    relay.maintenance_interval(DAY).start().await.unwrap()
}

async fn state<S: Store>(outbox: &Outbox<S>, id: EventId) -> (EventState, u32) {
    let record = outbox.find(id).await.unwrap().unwrap();
    (record.state, record.attempts)
}

async fn a_backlog_of_old_versions_is_drained_by_the_present_handler<D: Database>(db: &D) {
    let publisher = db.outbox().build().unwrap();
    publish_for_relays(&publisher, &of_first(1)).await;
    publish_for_relays(&publisher, &of_second(2)).await;
    publish_for_relays(&publisher, &of_third(3)).await;

    let (outbox, mut handled) = process::<D, third::ParcelSent>(db);
    let relay = outbox.relay().start().await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (sent, delivery) = handled.recv().await.unwrap();
        assert_eq!(delivery.attempt().get(), 1);
        seen.push((
            sent.parcel,
            delivery.version().get(),
            sent.grams,
            sent.express,
        ));
    }
    seen.sort_unstable();
    let expected = [
        (1, 1, 2_000, false),
        (2, 2, 2_500, false),
        (3, 3, 3_000, true),
    ];
    assert_eq!(seen, expected);
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.summary().await, [("processed".to_owned(), 3)]);
}

async fn p12_an_old_process_leaves_later_versions_alone_and_reports_them<D: Database>(db: &D) {
    let (old, mut handled) = process::<D, second::ParcelSent>(db);
    let ids = [
        publish_for_relays(&old, &of_third(1)).await,
        publish_for_relays(&old, &of_second(2)).await,
        publish_for_relays(&old, &of_third(3)).await,
        publish_for_relays(&old, &of_first(4)).await,
    ];
    let relay = quiet_relay(&old).await;
    let report = relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(report.dispatched, 2);
    assert_eq!(report.unhandled["parcel.sent"], 2);
    assert_eq!(report.later_versions["parcel.sent"].get(), 3);
    let mut seen = Vec::new();
    for _ in 0..2 {
        seen.push(handled.recv().await.unwrap().0.parcel);
    }
    seen.sort_unstable();
    assert_eq!(seen, [2, 4]);

    // Nor does it take them because somebody names them, or at its leisure.
    old.dispatch(ids).unwrap().settled().await;
    relay.pass(Cadence::Backstop).await.unwrap();
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert!(handled.try_recv().is_err());
    for id in [ids[0], ids[2]] {
        assert_eq!(state(&old, id).await, (EventState::Pending, 0));
        let record = old.find(id).await.unwrap().unwrap();
        assert_eq!((record.lease_token, record.claimed_by), (None, None));
        assert_eq!(record.failures, []);
    }
    assert_eq!(old.stats().await.unwrap().unhandled, [""; 0]);

    let (new, mut handled) = process::<D, third::ParcelSent>(db);
    let relay = quiet_relay(&new).await;
    let report = relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(report.dispatched, 2);
    assert!(report.unhandled.is_empty() && report.later_versions.is_empty());
    for _ in 0..2 {
        let (sent, delivery) = handled.recv().await.unwrap();
        assert_eq!(sent, of_third(sent.parcel));
        assert_eq!(delivery.attempt().get(), 1);
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.summary().await, [("processed".to_owned(), 4)]);
}

async fn p12_old_and_new_processes_side_by_side_handle_every_event_once<D: Database>(db: &D) {
    const EACH: u64 = 100;
    let (old, mut by_old) = process::<D, first::ParcelSent>(db);
    let (new, mut by_new) = process::<D, third::ParcelSent>(db);
    let old_relay = old.relay().batch(7).start().await.unwrap();
    let new_relay = new.relay().batch(7).start().await.unwrap();
    for parcel in 0..EACH {
        publish_for_relays(&old, &of_first(parcel)).await;
        publish_for_relays(&new, &of_third(EACH + parcel)).await;
    }
    // And inline, each its own.
    let mut tx = old.begin().await.unwrap();
    tx.publish(&of_first(2 * EACH)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = new.begin().await.unwrap();
    tx.publish(&of_third(2 * EACH + 1)).await.unwrap();
    tx.commit().await.unwrap();

    let mut seen = Vec::new();
    for _ in 0..2 * EACH + 2 {
        let parcel = tokio::select! {
            Some((sent, delivery)) = by_old.recv() => {
                assert_eq!((sent.kilos, delivery.version().get()), (2, 1));
                sent.parcel
            }
            Some((sent, delivery)) = by_new.recv() => {
                let expected = if delivery.version().get() == 1 { 2_000 } else { 3_000 };
                assert_eq!(sent.grams, expected);
                sent.parcel
            }
        };
        seen.push(parcel);
    }
    old_relay.shutdown(Duration::from_secs(20)).await.unwrap();
    new_relay.shutdown(Duration::from_secs(20)).await.unwrap();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..2 * EACH + 2), "each once");
    let processed = i64::try_from(2 * EACH + 2).unwrap();
    assert_eq!(db.summary().await, [("processed".to_owned(), processed)]);
}

/// A process that publishes a later version than it handles, with another type of the same name.
async fn p12_what_this_process_does_not_read_it_does_not_dispatch_either<D: Database>(db: &D) {
    let (outbox, mut handled) = process::<D, first::ParcelSent>(db);
    let mut tx = outbox.begin().await.unwrap();
    let later = tx.publish(&of_third(1)).await.unwrap().event_id();
    let uncommitted = tx.dispatch_uncommitted(&of_third(2)).await.unwrap();
    let Uncommitted::Left(left) = uncommitted else {
        panic!("{uncommitted:?}");
    };
    tx.publish(&of_first(3)).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(handled.recv().await.unwrap().0.parcel, 3);

    let refused = outbox.dispatch_directly(&of_third(4)).await.unwrap_err();
    assert!(matches!(
        refused,
        DirectError::NoHandler {
            event: "parcel.sent"
        }
    ));
    outbox.shutdown(Duration::from_secs(20)).await.unwrap();
    assert!(handled.try_recv().is_err());
    let (new, _) = process::<D, third::ParcelSent>(db);
    for id in [later, left] {
        assert_eq!(state(&new, id).await, (EventState::Pending, 0));
    }
}

async fn a_step_that_refuses_a_payload_ends_as_a_dead_letter<D: Database>(db: &D) {
    let too_heavy = first::ParcelSent {
        parcel: 1,
        kilos: u64::MAX,
    };
    let (report, mut handled) = mpsc::unbounded_channel();
    let builder = db.outbox().on::<third::ParcelSent, _>(Report(report));
    let (builder, mut outcomes) = settled(builder);
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &too_heavy).await;
    let relay = outbox.relay().start().await.unwrap();
    outcomes.recv().await.unwrap();
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.dead_reason, Some(DeadReason::Undecodable));
    assert_eq!(
        record.last_error.as_deref(),
        Some(
            "the payload of version 1 cannot be brought to the current version: \
             no parcel is so heavy"
        )
    );
    assert_eq!(
        record.payload,
        r#"{"parcel":1,"kilos":18446744073709551615}"#
    );
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert!(handled.try_recv().is_err());
}

async fn a_renamed_event_is_drained_through_its_alias<D: Database>(db: &D) {
    let (old, mut by_old) = process::<D, first::ParcelSent>(db);
    let (new, mut by_new) = process::<D, renamed::ParcelLeft>(db);
    let former = publish_for_relays(&old, &of_first(1)).await;
    let present = publish_for_relays(
        &new,
        &renamed::ParcelLeft {
            parcel: 2,
            kilos: 3,
        },
    )
    .await;

    // The old process knows nothing of the new name.
    let relay = quiet_relay(&old).await;
    old.dispatch([present]).unwrap().settled().await;
    assert_eq!(old.stats().await.unwrap().unhandled, ["parcel.left"]);
    assert_eq!(new.stats().await.unwrap().unhandled, [""; 0]);
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert!(by_old.try_recv().is_err());

    let relay = quiet_relay(&new).await;
    let report = relay.pass(Cadence::Sweep).await.unwrap();
    assert_eq!(report.dispatched, 2);
    assert!(report.unhandled.is_empty());
    for _ in 0..2 {
        let (left, delivery) = by_new.recv().await.unwrap();
        assert_eq!(delivery.event_name(), "parcel.left");
        let expected = if delivery.event_id() == former {
            (1, 2)
        } else {
            (2, 3)
        };
        assert_eq!((left.parcel, left.kilos), expected);
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    let record = new.find(former).await.unwrap().unwrap();
    assert_eq!(record.name, "parcel.sent", "as it was published");
    assert_eq!(record.state, EventState::Processed);
}

async fn a_dedup_key_spans_versions_and_not_names<D: Database>(db: &D) {
    let outbox = db.outbox().build().unwrap();
    let first = publish_for_relays(&outbox, &of_first(1)).await;
    let mut tx = outbox.store().begin().await.unwrap();
    let again = outbox.publish(&mut tx, &of_third(1)).await.unwrap();
    let again = again.duplicate().expect("the same key and name");
    assert_eq!(again.event_id(), first);
    let renamed = renamed::ParcelLeft {
        parcel: 1,
        kilos: 2,
    };
    let renamed = outbox.publish(&mut tx, &renamed).await.unwrap();
    assert!(matches!(renamed, Published::Inserted(_)));
    outbox.store().commit(tx).await.unwrap();
}

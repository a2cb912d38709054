//! What is paused waits, and loses nothing by it.

use super::Harness;
use super::steps::*;
use crate::lease::{HeldLease, LeaseToken};
use crate::store::{
    ClaimRequest, EventState, KnownEvent, PauseRef, Settled, Split, SplitPart, Store,
};

const EMAIL: &str = "email";

fn event_of(name: &str) -> PauseRef {
    PauseRef {
        name: name.to_owned(),
        handler: None,
    }
}

fn handler_of(name: &str, handler: &str) -> PauseRef {
    PauseRef {
        handler: Some(handler.to_owned()),
        ..event_of(name)
    }
}

async fn pause<H: Harness>(h: &H, pause: &PauseRef) -> bool {
    h.store().set_paused(pause, true).await.unwrap()
}

async fn resume<H: Harness>(h: &H, pause: &PauseRef) -> bool {
    h.store().set_paused(pause, false).await.unwrap()
}

const OF_EMAIL: KnownEvent = KnownEvent {
    handler: Some(EMAIL),
    ..known(PAID)
};

/// A paused event is claimed by nobody, on any instance, however it is asked for.
pub async fn a_paused_event_is_not_claimed<H: Harness>(h: &H) {
    let rows = publish_all(h, &[event(), delayed()]).await;
    h.make_due(rows[1]).await;
    assert!(pause(h, &event_of(PAID)).await);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    assert_eq!(claim_with_reserve(h, 10, 5).await, NOTHING);
    let by_number = h.store().claim_rows(&rows, &request(10)).await.unwrap();
    assert!(by_number.is_empty());
    let in_pass = h.store().claim_in(pass(), &request(10)).await.unwrap();
    assert!(in_pass.unwrap().is_empty());
    let other = h.another_store().await;
    assert!(other.claim(&request(10)).await.unwrap().is_empty());

    assert!(resume(h, &event_of(PAID)).await);
    assert_eq!(claim_up_to(h, 10).await, rows);
    for row in rows {
        assert_eq!(record(h, row).await.attempts, 1);
    }
}

/// Others go on.
pub async fn other_events_are_claimed<H: Harness>(h: &H) {
    pause(h, &event_of(PAID)).await;
    publish(h, event()).await;
    let shipped = publish(h, named(SHIPPED)).await;
    let both = ClaimRequest {
        events: &[known(PAID), known(SHIPPED)],
        ..request(10)
    };
    assert_eq!(rows(&claim(h, &both).await), [shipped]);
}

/// What runs by then may finish.
pub async fn what_is_held_can_be_renewed_and_settled<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let held = claim_one(h).await.lease();
    pause(h, &event_of(PAID)).await;
    let renewals = h.store().renew(&[held], HOUR).await.unwrap();
    assert_eq!(renewals, [crate::store::Renewal::Renewed]);
    assert_eq!(settle(h, held, processed()).await, Settled::Recorded);
    assert_eq!(record(h, row).await.state, EventState::Processed);
}

/// A row born leased is found blocked before its handler runs, and can be given back uncharged.
pub async fn a_row_born_leased_is_found_blocked<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let row = publish(h, born_leased(token)).await;
    let lease = HeldLease { row, token };
    assert!(!h.store().verify(&[lease]).await.unwrap()[0].blocked);
    pause(h, &event_of(PAID)).await;
    assert!(h.store().verify(&[lease]).await.unwrap()[0].blocked);
    assert_eq!(release(h, lease).await, Settled::Recorded);
    assert_eq!(record(h, row).await.attempts, 0);
}

/// A paused handler's part is not held after a split, and waits; the other parts go on.
pub async fn a_part_of_a_paused_handler_waits<H: Harness>(h: &H) {
    pause(h, &handler_of(PAID, EMAIL)).await;
    let whole = publish(h, event()).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), whole, "it belongs to all of its handlers");
    let part = |handler| SplitPart {
        handler,
        max_attempts: None,
        held: true,
    };
    let split = Split {
        lease: claimed.lease(),
        parts: vec![part("ledger"), part(EMAIL)],
    };
    let answers = h.store().split(&[split]).await.unwrap();
    let rows_of_parts = answers[0].as_ref().unwrap();
    let held: Vec<bool> = rows_of_parts.iter().map(|row| row.held).collect();
    assert_eq!(held, [true, false]);
    let waiting = record(h, rows_of_parts[1].row).await;
    assert_eq!((waiting.state, waiting.attempts), (EventState::Pending, 0));

    let of_email = ClaimRequest {
        events: &[OF_EMAIL],
        ..request(10)
    };
    assert!(claim(h, &of_email).await.is_empty());
    resume(h, &handler_of(PAID, EMAIL)).await;
    assert_eq!(rows(&claim(h, &of_email).await), [rows_of_parts[1].row]);
}

/// A pause of an event is one of all its handlers, and goes without their own.
pub async fn a_paused_event_pauses_its_handlers<H: Harness>(h: &H) {
    publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    let parts = vec![SplitPart {
        handler: EMAIL,
        max_attempts: None,
        held: false,
    }];
    h.store().split(&[Split { lease, parts }]).await.unwrap();
    let of_email = ClaimRequest {
        events: &[OF_EMAIL],
        ..request(10)
    };
    pause(h, &event_of(PAID)).await;
    pause(h, &handler_of(PAID, EMAIL)).await;
    resume(h, &event_of(PAID)).await;
    assert!(
        claim(h, &of_email).await.is_empty(),
        "its own pause is left"
    );
    resume(h, &handler_of(PAID, EMAIL)).await;
    assert_eq!(claim(h, &of_email).await.len(), 1);
}

/// Pausing twice keeps the first, and resuming what is not paused changes nothing.
pub async fn pausing_twice_is_pausing_once<H: Harness>(h: &H) {
    assert!(!resume(h, &event_of(PAID)).await);
    assert!(pause(h, &event_of(PAID)).await);
    let first = h.store().paused().await.unwrap();
    assert!(!pause(h, &event_of(PAID)).await);
    assert_eq!(h.store().paused().await.unwrap(), first);
    assert!(resume(h, &event_of(PAID)).await);
    assert_eq!(h.store().paused().await.unwrap(), []);
}

/// What is paused is listed by name and handler, the event before its handlers.
pub async fn pauses_are_listed<H: Harness>(h: &H) {
    let all = [
        event_of(ALERT),
        event_of(PAID),
        handler_of(PAID, EMAIL),
        handler_of(PAID, "ledger"),
    ];
    for of in all.iter().rev() {
        pause(h, of).await;
    }
    let listed = h.store().paused().await.unwrap();
    let listed: Vec<_> = listed.into_iter().map(|pause| pause.of).collect();
    assert_eq!(listed, all);
}

/// P7, P12: a pause keeps no dead letter from being made of what has no attempt left.
pub async fn a_sweep_looks_at_what_is_paused<H: Harness>(h: &H) {
    let row = publish(h, with_attempts(1)).await;
    claim_one(h).await;
    pause(h, &event_of(PAID)).await;
    h.expire_lease(row).await;
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    assert_eq!(chunk.exhausted.len(), 1);
    assert!(chunk.unhandled.is_empty());
}

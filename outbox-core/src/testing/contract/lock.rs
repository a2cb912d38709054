//! Locks of the application: exclusive ones, and those of an entity.

use super::Harness;
use crate::lock::LockId;
use crate::store::{ExclusiveLock, Store};

/// While one instance has it, another one does not get it, and does not wait.
pub async fn one_instance_has_an_exclusive_lock<H: Harness>(h: &H) {
    let mut held = h
        .store()
        .try_exclusive("report", "a")
        .await
        .unwrap()
        .unwrap();
    let other = h.another_store().await;
    assert!(other.try_exclusive("report", "b").await.unwrap().is_none());
    // Not even the same instance.
    assert!(
        h.store()
            .try_exclusive("report", "a")
            .await
            .unwrap()
            .is_none()
    );
    assert!(held.keep().await.unwrap());
    held.release().await.unwrap();
}

/// The next one gets it as soon as it is released.
pub async fn a_released_exclusive_lock_is_free<H: Harness>(h: &H) {
    let held = h
        .store()
        .try_exclusive("report", "a")
        .await
        .unwrap()
        .unwrap();
    held.release().await.unwrap();
    let other = h.another_store().await;
    let held = other.try_exclusive("report", "b").await.unwrap();
    held.expect("it is free").release().await.unwrap();
}

/// Whoever dropped it has lost it: at once where the database notices, and once its lease has ended
/// where it does not.
pub async fn a_dropped_exclusive_lock_is_free<H: Harness>(h: &H) {
    drop(h.store().try_exclusive("report", "a").await.unwrap());
    h.end_dropped_exclusive("report").await;
    let held = h.store().try_exclusive("report", "b").await.unwrap();
    held.expect("it is free").release().await.unwrap();
}

/// Locks of two names do not know of each other.
pub async fn exclusive_locks_differ_by_name<H: Harness>(h: &H) {
    let report = h
        .store()
        .try_exclusive("report", "a")
        .await
        .unwrap()
        .unwrap();
    let invoices = h
        .store()
        .try_exclusive("invoices", "a")
        .await
        .unwrap()
        .unwrap();
    report.release().await.unwrap();
    invoices.release().await.unwrap();
}

/// A transaction does not wait for itself.
pub async fn an_entity_can_be_locked_twice_in_one_transaction<H: Harness>(h: &H) {
    let store = h.store();
    let mut tx = store.begin().await.unwrap();
    store
        .lock_entity(&mut tx, 7, LockId::from("order 7"))
        .await
        .unwrap();
    store
        .lock_entity(&mut tx, 7, LockId::from("order 7"))
        .await
        .unwrap();
    store
        .lock_entity(&mut tx, 7, LockId::from("order 8"))
        .await
        .unwrap();
    store.commit(tx).await.unwrap();
}

/// The second transaction has the lock when the first one has ended.
pub async fn a_second_transaction_waits_for_a_locked_entity<H: Harness>(h: &H) {
    let store = h.store();
    let mut first = store.begin().await.unwrap();
    store
        .lock_entity(&mut first, 7, LockId::from(1))
        .await
        .unwrap();
    let other = h.another_store().await;
    let waiting = tokio::spawn(async move {
        let mut tx = other.begin().await.unwrap();
        other
            .lock_entity(&mut tx, 7, LockId::from(1))
            .await
            .unwrap();
        other.commit(tx).await.unwrap();
    });
    h.publisher_waits().await;
    assert!(!waiting.is_finished());
    store.commit(first).await.unwrap();
    waiting.await.unwrap();
}

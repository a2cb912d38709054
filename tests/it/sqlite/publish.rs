//! What is published: bytes, numbers and keys.

use super::*;

#[tokio::test]
async fn what_goes_in_comes_out_to_the_byte() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let odd: String = (1..=0x2fff)
        .filter_map(char::from_u32)
        .chain("\u{feff}\u{10ffff}🦀 e\u{301} \u{2028}".chars())
        .collect();
    let payload = serde_json::json!({ "text": odd, "n": "1.10", "\\": "\"" }).to_string();
    let spaced = " {\"a\" : 1.10,\t\"a\":2}\r\n".to_owned();
    let events = [payload.clone(), spaced.clone()].map(|payload| NewEvent {
        payload,
        headers: Some(r#"{"traceparent":"00-1"}"#.to_owned()),
        ordering_key: Some("o' \"1\"".to_owned()),
        ..event()
    });
    // Together, and each by itself: a single event takes another way into the database.
    let mut ids = publish_rows(&store, &events).await;
    for event in events {
        ids.push(publish_one(&store, event).await);
    }

    // They have one ordering key.
    for (id, expected) in ids.iter().zip([&payload, &spaced, &payload, &spaced]) {
        let one = claim_one(&store).await;
        assert_eq!(one.id.row(), *id);
        assert_eq!(&one.payload, expected);
        assert_eq!(one.headers.as_deref(), Some(r#"{"traceparent":"00-1"}"#));
        let record = record(&store, *id).await;
        assert_eq!(&record.payload, expected);
        assert_eq!(record.ordering_key.as_deref(), Some("o' \"1\""));
        settle(&store, &one, processed(None)).await;
    }
}

#[tokio::test]
async fn a_number_is_not_given_twice() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let kept_nowhere = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let first = publish_one(&store, kept_nowhere.clone()).await;
    let claimed = claim_one(&store).await;
    settle(&store, &claimed, processed(None)).await;
    assert_eq!(store.find(first).await.unwrap(), None);
    assert!(publish_one(&store, kept_nowhere).await > first);
}

#[tokio::test]
async fn a_rollback_or_a_savepoint_leaves_neither_row_nor_key() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;

    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[keyed("a")]).await.unwrap();
    store.rollback(tx).await.unwrap();

    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[keyed("b")]).await.unwrap();
    sqlx::query("SAVEPOINT inner_one")
        .execute(&mut *tx)
        .await
        .unwrap();
    store.insert(&mut tx, &[keyed("c")]).await.unwrap();
    sqlx::query("ROLLBACK TO inner_one")
        .execute(&mut *tx)
        .await
        .unwrap();
    store.insert(&mut tx, &[keyed("d")]).await.unwrap();
    store.commit(tx).await.unwrap();

    let pool = db.pool();
    let keys: Vec<String> = sqlx::query_scalar("SELECT key FROM outbox_events_keys ORDER BY key")
        .fetch_all(&pool)
        .await
        .unwrap();
    assert_eq!(keys, ["b", "d"]);
    assert_eq!(claim(&store, 10).await.len(), 2);
    // What was undone holds no key.
    publish(&store, &[keyed("a"), keyed("c")])
        .await
        .iter()
        .for_each(|answer| {
            inserted(answer);
        });
}

#[tokio::test]
async fn a_row_and_its_key_are_one_write_even_without_a_transaction() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let mut connection = db.pool().acquire().await.unwrap();
    let first = store.insert(&mut connection, &[keyed("k")]).await.unwrap();
    let second = store.insert(&mut connection, &[keyed("k")]).await.unwrap();
    assert_eq!(existing(&second[0]).id, inserted(&first[0]));
}

#[tokio::test]
async fn a_row_written_by_hand_cannot_take_somebody_elses_key() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    publish_one(&store, keyed("k")).await;
    let error = sqlx::query(
        "INSERT INTO outbox_events
            (name, version, priority, payload, dedup_key, max_attempts, created_at, retention,
             key_retention)
         SELECT name, version, priority, payload, dedup_key, max_attempts, created_at, retention,
             key_retention
         FROM outbox_events",
    )
    .execute(&db.pool())
    .await
    .unwrap_err();
    assert!(
        error.to_string().contains("the dedup key is taken"),
        "{error}"
    );
}

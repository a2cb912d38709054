//! Sets of events: of one member, of another crate path, of many, of types that arrive in macros, of
//! types that others do not see.

use std::num::NonZeroU32;

use outbox_core::{BuildError, EventOf, EventSet, HandlerError, Outbox, OutboxEvents, Store};

mod facade {
    pub use outbox_core as outbox;
}

mod events {
    use outbox_core::OutboxEvent;
    use serde::{Deserialize, Serialize};

    #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
    pub struct OrderPaid {
        pub order_id: u64,
    }

    #[derive(Serialize, Deserialize, OutboxEvent)]
    pub struct Changed<T>(pub T);

    #[derive(Serialize, Deserialize, OutboxEvent)]
    #[outbox(alias = "order.sent", version = 2, upcast(from = u64, version = 1))]
    pub struct OrderLeft {
        pub order_id: u64,
    }

    impl From<u64> for OrderLeft {
        fn from(order_id: u64) -> Self {
            Self { order_id }
        }
    }
}

use events::{Changed, OrderPaid};

#[derive(OutboxEvents)]
#[outbox(crate = crate::facade::outbox)]
enum One {
    Paid(OrderPaid),
}

/// A member is found by its former names, and by its old versions.
#[derive(OutboxEvents)]
enum Renamed {
    Left(events::OrderLeft),
}

/// The names of what the trait has are free for variants.
#[derive(Debug, OutboxEvents)]
enum Names {
    Unhandled(OrderPaid),
}

mod unseen {
    use outbox_core::{OutboxEvent, OutboxEvents};
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize, OutboxEvent)]
    struct Inner;

    /// The set is seen where its member is not.
    #[allow(private_interfaces)]
    #[derive(OutboxEvents)]
    pub enum Events {
        Inner(Inner),
    }
}

macro_rules! many {
    ($name:ident: $($event:ident)*) => {
        $(
            #[derive(serde::Serialize, serde::Deserialize, outbox_core::OutboxEvent)]
            struct $event;
        )*
        many!(@set $name: $($event $event)*);

        /// Registers them from the last to the first.
        fn handle_all<S: Store>(store: S) -> Result<Outbox<S, $name>, BuildError> {
            many!(@on Outbox::builder_of::<$name>(store); $($event)*).build()
        }
    };
    (@set $name:ident: $($variant:ident $event:ty)*) => {
        #[derive(OutboxEvents)]
        enum $name {
            $($variant($event),)*
        }
    };
    (@on $builder:expr;) => { $builder };
    (@on $builder:expr; $first:ident $($event:ident)*) => {
        many!(@on $builder; $($event)*).on(|_: $first| async { Ok::<_, HandlerError>(()) })
    };
}

many! {
    Many: A B C D E F G H I J K L M N O P Q R S_ T U V W X Y Z
}

/// An event may be in any number of sets.
fn accepted_by_both<E: EventOf<One> + EventOf<Names>>(event: E) -> E {
    event
}

/// A second handler of an event is found when the outbox is built.
fn handle_twice<S: Store>(store: S) -> Result<Outbox<S, One>, BuildError> {
    Outbox::builder_of::<One>(store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
        .build()
}

/// Without a set nothing is asked, and the type of a builder stays what it is.
fn handle_some<S: Store>(store: S) -> Result<Outbox<S>, BuildError> {
    let mut builder = Outbox::builder(store);
    for _ in 0..2 {
        builder = builder.on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) });
    }
    builder
        .on(|_: Changed<u8>| async { Ok::<_, HandlerError>(()) })
        .build()
}

fn main() {
    let One::Paid(paid) = One::from(accepted_by_both(OrderPaid { order_id: 7 }));
    assert_eq!(paid, OrderPaid { order_id: 7 });
    assert_eq!(One::NAMES, ["order.paid"]);
    let decoded = Names::decode("order.paid", NonZeroU32::MIN, r#"{"order_id":7}"#);
    assert!(matches!(decoded, Ok(Names::Unhandled(event)) if event == paid));
    for name in ["order.sent", "order.left"] {
        let decoded = Renamed::decode(name, NonZeroU32::MIN, "7");
        assert!(matches!(decoded, Ok(Renamed::Left(left)) if left.order_id == 7));
    }
    assert_eq!(unseen::Events::NAMES, ["inner"]);
    assert_eq!(Many::NAMES.len(), 26);
    assert_eq!(Many::from(Z).name(), "z");
    assert_eq!(Many::NAMES[18], "s");
}

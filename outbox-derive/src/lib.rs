//! `#[derive(OutboxEvent)]` and `#[derive(OutboxEvents)]`, re-exported by `outbox-core`.
//!
//! One stage per file: `input` and `attr` read, `check` asks what only the whole can answer,
//! `expand` writes the impl, and `fallback` what stands beside an error. `ctxt` carries the errors.
//! `expand::derive` is the whole way in ten lines. `event_set` is the same for a set of events.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::indexing_slicing
)]

mod expand;

mod input;

mod attr;

mod duration;
mod key_template;
mod name;
mod value;

mod chain;
mod check;
mod ctxt;
mod fallback;
mod generics;

mod event_set;

/// Makes a type an event that can be published through an outbox.
///
/// ```
/// use outbox_core::OutboxEvent;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// assert_eq!(OrderPaid::NAME, "order.paid");
/// ```
///
/// The type must be serde's `Serialize` and `Deserialize`, `Send`, `Sync` and free of borrows.
/// Structs of any kind and enums with at least one variant can be events. All variants of an enum
/// are one event, with one name. A union cannot be an event, and neither can an enum without
/// variants.
///
/// # Attributes
///
/// On the type, in one `#[outbox(..)]` or in several:
///
/// | key | value | default | refused |
/// | --- | --- | --- | --- |
/// | `name` | a string: the event name, stored with every row | made from the type's name | empty; anything but `a-z`, `0-9`, `.`, `_`, `-`; over 128 bytes |
/// | `alias` | a string: a [former name](#renaming-an-event), may be repeated | none | as for `name`; the event's own name; the same twice |
/// | `version` | an integer: the [version](#changing-an-event) of the payload's shape | 1 | 0; an earlier version without `upcast` |
/// | `upcast` | `upcast(from = OrderPaidV1, version = 1)`: the type that an earlier version was written as; may be repeated | no earlier version is read | a version that is not before `version`, is before `oldest_version`, or has one already; a type that comes again after another one |
/// | `oldest_version` | an integer: the first version of which there may be rows left | 1 | 0; later than `version` |
/// | `dedup_key` | a [key template](#keys) | no key: nothing is a duplicate | a template that names an unknown field, or is ambiguous |
/// | `dedup_with` | the path of a function from `&Self` to the key | no key | together with `dedup_key` or `dedup` |
/// | `ordering_key` | a [key template](#keys): events with one key are handled one after the other | no key: in no order | as for `dedup_key` |
/// | `ordering_with` | the path of a function from `&Self` to the key | no key | together with `ordering_key` or `ordering` |
/// | `behind_dead` | `"block"`: later events of its ordering key wait while an event of this type is a dead letter; `"skip"`: they go on | `"block"` | another word; without an ordering key |
/// | `priority` | `"low"`, `"normal"`, `"high"` or `"critical"` | `"normal"` | another level |
/// | `max_attempts` | an integer: how often a handler may be started | the publishing outbox's setting | 0 |
/// | `backoff` | `backoff(base = "30s", max = "30m", jitter = 0.2)`, each part optional, with these defaults | the dispatching outbox's setting | a `base` of zero or above `max`; a `jitter` outside 0 to 1 |
/// | `timeout` | a duration: how long one run of the handler may take | the dispatching outbox's setting | zero |
/// | `expires_in` | a duration: how long after its publish the event is worth handling; then it is a dead letter of the reason `expired` | for ever | zero; over 100 years |
/// | `retention` | a duration: how long the row is kept once it is processed; `"0s"` keeps nothing | the publishing outbox's setting | over 100 years |
/// | `output` | a type: what a handler of this event returns | `()` | not a type |
/// | `crate` | the path of `outbox-core`, where it was renamed or re-exported: `::shop_outbox` or `crate::outbox` | `::outbox_core` | a relative path |
///
/// On the fields of a struct:
///
/// | key | value | default | refused |
/// | --- | --- | --- | --- |
/// | `dedup` | none: the field is part of the dedup key | not part of it | together with `dedup_key` or `dedup_with`; on an enum |
/// | `ordering` | none: the field is part of the ordering key | not part of it | together with `ordering_key` or `ordering_with`; on an enum |
///
/// A duration is an integer and one of the units `ms`, `s`, `m`, `h` and `d`, in quotes: `"250ms"`,
/// `"7d"`. The longest is 100 years, `"36500d"`.
///
/// ```
/// use outbox_core::OutboxEvent;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(dedup_key = "{order_id}", ordering_key = "customer:{customer_id}")]
/// #[outbox(priority = "high", max_attempts = 8, timeout = "10s", output = ReceiptId)]
/// struct OrderPaid {
///     order_id: u64,
///     customer_id: u64,
///     cents: i64,
/// }
///
/// #[derive(Serialize, Deserialize)]
/// struct ReceiptId(u64);
/// ```
///
/// # The event name
///
/// Without `name`, the name is made from the type's name, word by word: `OrderPaid` becomes
/// `order.paid`, `HTTPRequestFailed` becomes `http.request.failed`, and a digit stays with the word
/// before it, so that `S3ObjectCreated` becomes `s3.object.created`. A type whose name is not ASCII
/// needs a `name`.
///
/// The name is stored with every row, and rows find their handler by it. **Renaming a type without
/// `name` changes its event name**: rows already written under the old one then wait, unhandled.
/// Pin the old name before renaming the type:
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(name = "order.paid")]
/// struct OrderSettled {
///     order_id: u64,
/// }
/// ```
///
/// # Order
///
/// Events with one ordering key are handled one after the other, in the order in which their
/// transactions commit, by however many processes:
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(ordering_key = "account:{account}")]
/// struct Booked {
///     account: u64,
///     cents: i64,
/// }
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(ordering_key = "sensor:{sensor}", behind_dead = "skip", expires_in = "1h")]
/// struct Measured {
///     sensor: u64,
///     celsius: f64,
/// }
/// ```
///
/// A key is one order over all types that use it, so a prefix keeps the keys of unrelated types
/// apart. A booking that ends as a dead letter stops its account until a person has requeued or
/// discarded it; a measurement does not stop its sensor, and after an hour nobody wants it any
/// more.
///
/// # Renaming an event
///
/// Where the event itself gets another name, `alias` keeps the former one, so that its rows are
/// still handled:
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(alias = "order.paid")]
/// struct OrderSettled {
///     order_id: u64,
/// }
///
/// assert_eq!(OrderSettled::NAME, "order.settled");
/// ```
///
/// A former name shares the versions: a rename does not begin to count anew. An alias may be no name
/// and no alias of another event with a handler in the same outbox, which is not built otherwise.
/// Processes of the release before know nothing of the new name and leave its rows alone.
///
/// **An alias is for rows, not for keys.** A dedup key belongs to the name that it was published
/// under, so the first publish of a key under the new name is not a duplicate, whatever was published
/// under the former one. Where that matters, keep the name and rename the type alone.
///
/// # Changing an event
///
/// What serde reads from old payloads as well, such as one more `Option`, needs nothing. Else
/// `version` goes up by one, the old shape stays behind as a type that serde can read, and `From`
/// or `TryFrom` leads from it to the next one:
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(version = 3)]
/// #[outbox(upcast(from = OrderPaidV1, version = 1), upcast(from = OrderPaidV2, version = 2))]
/// struct OrderPaid {
///     order_id: u64,
///     cents: i64,
///     currency: String,
/// }
///
/// #[derive(Deserialize)]
/// struct OrderPaidV1 {
///     order_id: u64,
///     euros: i64,
/// }
///
/// #[derive(Deserialize)]
/// struct OrderPaidV2 {
///     order_id: u64,
///     cents: i64,
/// }
///
/// impl From<OrderPaidV1> for OrderPaidV2 {
///     fn from(old: OrderPaidV1) -> Self {
///         Self { order_id: old.order_id, cents: old.euros * 100 }
///     }
/// }
///
/// impl From<OrderPaidV2> for OrderPaid {
///     fn from(old: OrderPaidV2) -> Self {
///         Self { order_id: old.order_id, cents: old.cents, currency: "EUR".to_owned() }
///     }
/// }
///
/// let version = std::num::NonZeroU32::MIN;
/// let paid = OrderPaid::decode(version, r#"{"order_id":7,"euros":42}"#)?;
/// assert_eq!((paid.cents, paid.currency.as_str()), (4_200, "EUR"));
/// # Ok::<_, outbox_core::PayloadError>(())
/// ```
///
/// A row of version 1 is read as `OrderPaidV1`, and goes from there through `OrderPaidV2`. The next
/// release adds one type, one step and one `upcast`. Handlers get the present type alone;
/// `Delivery::version` tells what was published. A step that fails, by `TryFrom`, ends as a payload
/// that cannot be decoded does: as a dead letter.
///
/// Where a version has the shape of the one before or of the event itself, it has the same type:
/// `upcast(from = Self, version = 2)`.
///
/// Every version from 1 on needs its type. Once no row of the first ones is left, neither waiting
/// nor as a dead letter that somebody may requeue, `oldest_version` lets their types go. A row that
/// turns up all the same becomes a dead letter with its payload.
///
/// Processes of the release before leave rows of a later version alone, uncharged, and report them at
/// each sweep: old and new may run side by side, in any order of deployment. The version is not part
/// of a dedup key: a key that was published with version 1 is taken for version 3. The `output` has no
/// version; a duplicate's is read as the present type.
///
/// # Keys
///
/// A template is text with fields in braces. `{line.sku}` is a field of a field, `{0}` a field of a
/// tuple struct; `{{` and `}}` are braces. A field is shown with its `Display`, and there is no
/// format spec.
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(dedup_key = "{order}:{line.sku}")]
/// struct LineAdded {
///     order: String,
///     line: Line,
/// }
///
/// #[derive(Serialize, Deserialize)]
/// struct Line {
///     sku: String,
/// }
///
/// let event = |order: &str, sku: &str| LineAdded {
///     order: order.to_owned(),
///     line: Line { sku: sku.to_owned() },
/// };
/// assert_eq!(event("7", "b:c").dedup_key().unwrap(), "7:b:c");
///
/// // What ends a field is escaped in it, so that different fields never give one key.
/// assert_eq!(event("7:b", "c").dedup_key().unwrap(), r"7\:b:c");
/// ```
///
/// `#[outbox(dedup)]` on fields `a` and `b` is the template `{a}:{b}`, in the order of their
/// declaration; adding or moving a marked field changes the key. A field without `Display`, such as
/// an `Option`, needs a function. It returns `String`, `&str` or, where some events have no key,
/// `Option<String>`:
///
/// ```
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(dedup_with = Self::request)]
/// struct RefundAsked {
///     request_id: Option<u64>,
/// }
///
/// impl RefundAsked {
///     fn request(&self) -> Option<String> {
///         self.request_id.map(|id| id.to_string())
///     }
/// }
/// ```
///
/// # The variant of an enum is not part of its keys
///
/// The fields of a template must be in every variant, and two variants whose fields are equal have
/// equal keys: publishing `Cancelled { order_id: 7 }` after `Paid { order_id: 7 }` is then a
/// duplicate. To have the variant in the key, write it in a function and name that in `dedup_with`.
///
/// # Generics
///
/// A type parameter gets the bounds `Send + Sync + 'static`, and serde's `Serialize` and
/// `DeserializeOwned` unless it stands in `PhantomData` alone; a field in a key whose type has a
/// parameter in it gets `Display`. What else is needed goes into the type's where-clause.
///
/// All instantiations have one event name. Two of them in one registry are refused when it is
/// built, so give each its own type as soon as a second is needed.
///
/// # What is generated
///
/// ```ignore
/// const _: () = {
///     const _: () = assert!("order.paid".len() <= EVENT_NAME_MAX, "..");
///     impl OutboxEvent for OrderPaid {
///         type Output = ReceiptId;
///         const NAME: &'static str = "order.paid";
///         const ALIASES: &'static [&'static str] = &["order.settled"];
///         const VERSION: NonZeroU32 = ..;
///         const PRIORITY: Priority = Priority::High;
///         const MAX_ATTEMPTS: Option<NonZeroU32> = Some(..);
///         const TIMEOUT: Option<Duration> = Some(Duration::new(10, 0));
///         fn decode(version: NonZeroU32, payload: &str) -> Result<Self, PayloadError> {
///             match version.get() {
///                 1 => {
///                     let event = read::<OrderPaidV1>(version, payload)?;
///                     let event = upcast::<OrderPaidV1, Self>(version, event)?;
///                     Ok(event)
///                 }
///                 _ => read_own(version, payload),
///             }
///         }
///         fn dedup_key(&self) -> Option<String> {
///             Some(KeyBuilder::new().last_field(&self.order_id).finish())
///         }
///         fn ordering_key(&self) -> Option<String> {
///             Some(KeyBuilder::new().literal("customer:").last_field(&self.customer_id).finish())
///         }
///     }
/// };
/// ```
///
/// Every name in it is written as an absolute path, so nothing has to be in scope. Nothing is
/// registered behind your back, and nothing in it can panic.
///
/// # Compile errors
///
/// All mistakes of one type are reported in one compile, each at the token that is wrong. Beside
/// them stands an impl, so that a use of the type is not reported too. Besides the column *refused*
/// above:
///
/// - ``the trait bound `OrderPaid: serde::Serialize` is not satisfied``: add serde's derives.
/// - ``an outbox event cannot borrow``: the type has a lifetime parameter. A stored event outlives
///   every borrow.
/// - ``unknown field `oder_id` in the key``: the message lists the fields there are.
/// - ``every event would have the same key``: a template without a field.
/// - ``nothing stands between ..``: two fields side by side. `("a", "bc")` and `("ab", "c")` would
///   have one key.
/// - `` `Vec<u64>` doesn't implement `Display` ``: a field in a key has no one way to be shown; use
///   `dedup_with` or `ordering_with`.
/// - ``the event name is too long``: write a shorter `name`.
/// - ``rows of version 2 could not be read``: an `upcast` is missing.
/// - ``no step leads from `OrderPaidV1` to `OrderPaidV2` ``: write the `From` or `TryFrom`.
/// - ``the chain leads back``: in an `upcast`, the type of an older version stands for a newer one,
///   with another type between them.
///
/// ```compile_fail
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(dedup_key = "{oder_id}")] // unknown field `oder_id` in the key
/// struct OrderPaid {
///     order_id: u64,
/// }
/// ```
#[proc_macro_derive(OutboxEvent, attributes(outbox))]
pub fn derive_outbox_event(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    expand::derive(&input).into()
}

/// Makes an enum the closed set of the events that an outbox accepts.
///
/// ```
/// use outbox_core::{EventSet, OutboxEvent, OutboxEvents};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// struct AlertRaised {
///     text: String,
/// }
///
/// #[derive(OutboxEvents)]
/// enum ShopEvents {
///     OrderPaid(OrderPaid),
///     AlertRaised(AlertRaised),
/// }
///
/// assert_eq!(ShopEvents::NAMES, ["order.paid", "alert.raised"]);
/// ```
///
/// An outbox of the set, from `Outbox::builder_of::<ShopEvents>(store)`, publishes these events and
/// no other, and is not built while one of them has no handler. Both are compile errors.
///
/// Each variant holds one event type, in parentheses. Variants may have any names, and the events
/// may come from other crates. The enum has no parameters, and at least one variant; a struct or a
/// union cannot be a set. It needs no other derive, and is never stored itself.
///
/// # Attributes
///
/// On the enum, in `#[outbox(..)]`:
///
/// | key | value | default | refused |
/// | --- | --- | --- | --- |
/// | `crate` | the path of `outbox-core`, where it was renamed or re-exported: `::shop_outbox` or `crate::outbox` | `::outbox_core` | a relative path |
///
/// On variants and their fields there are none: what an event is called, and how it is retried, is
/// written on its own type.
///
/// # Taking an event out of a set
///
/// An event that is no longer published keeps its variant and its handler until the last of its rows
/// is settled: a row whose name has no handler waits.
///
/// # What is generated
///
/// ```ignore
/// const _: () = {
///     const _: () = assert!(!share_a_name(OrderPaid::NAME, .., AlertRaised::NAME, ..), "..");
///
///     impl EventOf<ShopEvents> for OrderPaid { .. }
///     impl From<OrderPaid> for ShopEvents { .. }
///     // .. and both for `AlertRaised`
///
///     // What a builder has to register a handler for.
///     impl SetOf<(OrderPaid, AlertRaised)> for ShopEvents {}
///
///     impl EventSet for ShopEvents {
///         const NAMES: &'static [&'static str] = &[OrderPaid::NAME, AlertRaised::NAME];
///         fn name(&self) -> &'static str { .. }
///         fn decode(name: &str, version: NonZeroU32, payload: &str) -> Result<Self, DecodeError> { .. }
///     }
/// };
/// ```
///
/// Every name in it is written as an absolute path, but for the types of the variants, so nothing
/// else has to be in scope. Nothing in it can panic.
///
/// # Compile errors
///
/// All mistakes of one enum are reported in one compile, each at the token that is wrong.
///
/// - `` `CacheWarm` is not an event of `ShopEvents` ``: it is published, or given a handler, and has
///   no variant.
/// - ``event `AlertRaised` has no handler``: `.build()` comes before its `.on(..)`.
/// - `` `CacheWarm` is not an outbox event ``: a variant holds a type without
///   `#[derive(OutboxEvent)]`.
/// - `` `OrderPaid` is a member of `ShopEvents` already ``: two variants hold one type.
/// - `` `OrderSettled` has a `name` or `alias` of `OrderPaid` ``: rows find their event by its name,
///   so one of them needs another.
/// - `` `Paused` holds no event ``, ``holds more than one field``, ``has named fields``: write
///   `Paused(OrderPaused)`.
///
/// ```compile_fail
/// # use outbox_core::{OutboxEvent, OutboxEvents};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize, OutboxEvent)]
/// # struct OrderPaid;
/// #[derive(OutboxEvents)]
/// enum ShopEvents {
///     Paid(OrderPaid),
///     Settled(OrderPaid), // `OrderPaid` is a member of `ShopEvents` already, as `Paid`
/// }
/// ```
#[proc_macro_derive(OutboxEvents, attributes(outbox))]
pub fn derive_outbox_events(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    event_set::derive(&input).into()
}

#[cfg(test)]
mod tests;

//! The expansion of every input shape, for a reviewer to read; and that every key is documented
//! and tested.

use std::fs;
use std::path::Path;

use proc_macro2::TokenStream;
use syn::DeriveInput;

use crate::attr::{FIELD_KEYS, SET_KEYS, TYPE_KEYS};
use crate::{event_set, expand};

#[track_caller]
fn expanded(derive: fn(&DeriveInput) -> TokenStream, source: &str) -> String {
    let ast = syn::parse_str(source).unwrap();
    let file = syn::parse2(derive(&ast)).unwrap();
    prettyplease::unparse(&file)
}

/// After a change on purpose, `INSTA_UPDATE=always` writes the snapshots anew.
macro_rules! snapshot {
    ($name:ident, $source:literal) => {
        snapshot!($name, expand::derive, $source);
    };
    ($name:ident, $derive:path, $source:literal) => {
        #[test]
        fn $name() {
            let settings = insta::Settings::clone_current();
            settings.bind(|| {
                let expanded = expanded($derive, $source);
                insta::assert_snapshot!(stringify!($name), expanded, $source);
            });
        }
    };
}

snapshot!(a_unit_struct, "struct CacheCleared;");

snapshot!(
    a_struct_with_every_constant,
    r#"
    #[outbox(name = "shop.order-paid", version = 2, oldest_version = 2, priority = "high", max_attempts = 8)]
    #[outbox(backoff(max = "1h"), timeout = "1500ms", retention = "7d", output = Vec<ReceiptId>)]
    #[outbox(expires_in = "1d", ordering_key = "{order_id}", behind_dead = "skip")]
    struct OrderPaid { order_id: u64 }
    "#
);

snapshot!(
    a_struct_with_old_versions_and_former_names,
    r#"
    #[outbox(alias = "order.settled", alias = "paid")]
    #[outbox(version = 4, upcast(from = Self, version = 3))]
    #[outbox(upcast(from = OrderPaidV1, version = 1), upcast(from = old::Paid<u64>, version = 2))]
    struct OrderPaid { order_id: u64 }
    "#
);

snapshot!(
    a_struct_with_templates,
    r#"
    #[outbox(dedup_key = "order:{order_id}:{line.sku}", ordering_key = "{type}!")]
    struct OrderPaid { order_id: u64, line: Line, r#type: String }
    "#
);

snapshot!(
    a_tuple_struct_with_marked_fields,
    "struct OrderPaid(#[outbox(dedup, ordering)] u64, String, #[outbox(dedup)] u8);"
);

snapshot!(
    a_struct_with_key_functions,
    "
    #[outbox(dedup_with = Self::key, ordering_with = crate::keys::customer)]
    struct OrderPaid { order_id: u64 }
    "
);

snapshot!(
    an_enum_with_a_template,
    r#"
    #[outbox(dedup_key = "{0}:{1.sku}:{0}")]
    enum OrderChanged { Paid(u64, Line), Cancelled(u64, Line, String) }
    "#
);

snapshot!(
    a_generic_struct,
    r#"
    #[outbox(dedup_key = "{id}:{of}")]
    struct Changed<T: Clone, K = u64, P = (), const N: usize = 4> where K: Copy {
        id: K,
        of: Id<P>,
        marker: PhantomData<P>,
        after: [T; N],
    }
    "#
);

snapshot!(
    a_deprecated_struct,
    r#"
    #[deprecated]
    struct OrderPaid { order_id: u64 }
    "#
);

snapshot!(
    another_crate_path,
    r#"
    #[outbox(crate = ::shop::outbox, dedup_key = "{id}", backoff(), timeout = "1s")]
    struct Changed<T> { id: T }
    "#
);

snapshot!(
    a_stub_beside_errors,
    r#"
    #[outbox(version = 0, output = ReceiptId, crate = crate::outbox, dedup_key = "{id}")]
    struct Changed<T> { after: T }
    "#
);

snapshot!(
    no_stub_beside_a_borrow,
    "struct OrderPaid<'a> { customer: &'a str }"
);

snapshot!(no_stub_beside_a_union, "union OrderPaid { order_id: u64 }");

snapshot!(
    a_set_of_events,
    event_set::derive,
    "
    enum ShopEvents {
        Paid(OrderPaid),
        Changed(shop::Changed<u64>),
        AlertRaised(AlertRaised),
    }
    "
);

snapshot!(
    a_set_of_one_event,
    event_set::derive,
    "
    #[deprecated]
    #[outbox(crate = crate::outbox)]
    enum ShopEvents { OrderPaid(OrderPaid) }
    "
);

snapshot!(
    a_stub_of_a_set_beside_errors,
    event_set::derive,
    "enum ShopEvents { OrderPaid(OrderPaid), Again(OrderPaid), Paused }"
);

snapshot!(
    no_stub_beside_a_set_with_parameters,
    event_set::derive,
    "enum ShopEvents<'a, T, const N: usize> { OrderPaid(OrderPaid<T>) }"
);

#[test]
fn with_a_crate_path_nothing_else_is_named() {
    let source = r#"
        #[outbox(crate = ::shop, version = 2, alias = "a", priority = "low", max_attempts = 1, backoff())]
        #[outbox(upcast(from = First, version = 1))]
        #[outbox(timeout = "1s", retention = "1s", dedup_key = "{id}:x", ordering_with = key)]
        struct Changed<T> { id: T }
    "#;
    assert!(!expanded(expand::derive, source).contains("outbox_core"));

    let source = "#[outbox(crate = ::shop)] enum ShopEvents { Paid(OrderPaid), Alert(Alert) }";
    assert!(!expanded(event_set::derive, source).contains("outbox_core"));
}

/// What is under `ui/` of the workspace's test crate, if its name ends in `suffix`.
fn ui(folder: &str, suffix: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/ui")
        .join(folder);
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().ends_with(suffix) {
            texts.push(fs::read_to_string(path).unwrap());
        }
    }
    texts
}

#[test]
fn every_key_is_documented_and_both_its_use_and_its_misuse_are_tested() {
    let docs = include_str!("lib.rs");
    let (event, set) = docs.split_once("/// Makes an enum the closed set").unwrap();
    let keys = TYPE_KEYS.iter().chain(&FIELD_KEYS);
    check_keys(keys, event, &ui("pass", ".rs"), &ui("attr", ".stderr"));
    let misused = ui("attr", "_in_a_set.stderr");
    check_keys(SET_KEYS.iter(), set, &ui("pass", "event_set.rs"), &misused);
}

#[track_caller]
fn check_keys<'k>(
    keys: impl Iterator<Item = &'k &'k str>,
    docs: &str,
    passing: &[String],
    failing: &[String],
) {
    for key in keys {
        assert!(docs.contains(&format!("/// | `{key}` | ")), "docs: {key}");

        let used = |line: &str| {
            let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
            line.trim().starts_with("#[outbox(") && words.into_iter().any(|word| word == *key)
        };
        assert!(
            passing.iter().any(|text| text.lines().any(used)),
            "pass: {key}"
        );

        // The message about the key, not the one that lists all of them.
        let blamed = |line: &str| {
            let named = line.contains(&format!("`{key}`"));
            line.starts_with("error: ") && named && !line.contains("; the keys")
        };
        assert!(
            failing.iter().any(|text| text.lines().any(blamed)),
            "fail: {key}"
        );
    }
}

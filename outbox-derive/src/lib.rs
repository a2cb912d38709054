//! `#[derive(OutboxEvent)]`.
#![deny(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unreachable,
    clippy::indexing_slicing
)]

mod attr;
mod check;
mod ctxt;
mod duration;
mod expand;
mod fallback;
mod generics;
mod input;
mod key_template;
mod name;

/// Placeholder.
#[proc_macro_derive(OutboxEvent, attributes(outbox))]
pub fn derive_outbox_event(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    expand::derive(&input).into()
}

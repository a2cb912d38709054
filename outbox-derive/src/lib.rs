//! `#[derive(OutboxEvent)]`.

/// Placeholder.
#[proc_macro_derive(OutboxEvent, attributes(outbox))]
pub fn derive_outbox_event(_: proc_macro::TokenStream) -> proc_macro::TokenStream {
    proc_macro::TokenStream::new()
}

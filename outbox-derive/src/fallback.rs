//! What stands beside an error: an impl, so that one mistake gives one message.
//!
//! Without it every `publish` and every handler of the type would be told that it is no event.

use proc_macro2::TokenStream;
use quote::quote;

use crate::check::Event;
use crate::expand;
use crate::input::Shape;

/// `errors`, and an impl with everything that could be read. It never runs.
pub(crate) fn stub(event: &Event<'_>, errors: &syn::Error) -> TokenStream {
    let errors = errors.to_compile_error();
    // A type that borrows, or a union, which serde refuses too, cannot keep the bounds of the
    // trait: the impl would be a second message about the same mistake.
    let borrows = event.input.generics.lifetimes().next().is_some();
    if borrows || matches!(event.input.shape, Shape::Union) {
        return errors;
    }
    let body = quote! {
        const NAME: &'static ::core::primitive::str = "stub";
    };
    let implementation = expand::impl_block(event, &body);
    quote! {
        #errors
        const _: () = {
            #implementation
        };
    }
}

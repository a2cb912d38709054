//! `#[derive(OutboxEvents)]`: the closed set of events that an enum lists.
//!
//! The same stages as for one event, each shorter: `input` reads and refuses, `expand` writes, both
//! the impls and what stands beside an error.

mod expand;
mod input;

use proc_macro2::TokenStream;
use quote::quote;
use syn::DeriveInput;

use crate::ctxt::Ctxt;

/// The whole derive: what `ast` becomes.
pub(crate) fn derive(ast: &DeriveInput) -> TokenStream {
    let (set, outcome) = Ctxt::collect(|cx| input::Set::read(cx, ast));
    match outcome {
        Ok(()) => expand::implementation(&set),
        Err(errors) => {
            let errors = errors.to_compile_error();
            let stub = expand::stub(&set);
            quote!(#errors #stub)
        }
    }
}

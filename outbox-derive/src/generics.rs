//! The bounds of the generated impl.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens as _, quote, quote_spanned};
use syn::{Ident, Type};

use crate::check::{Event, Key, shown};
use crate::expand;
use crate::input::{Field, Shape};

/// The where-clause: the type's own, and what an `OutboxEvent` needs of its type parameters.
///
/// - A parameter that a field holds must be `Serialize` and `DeserializeOwned`, because serde's
///   derives ask the same of it. One that stands in `PhantomData` alone is not stored.
/// - Every parameter must be `Send`, `Sync` and `'static`, because the event is.
/// - A field in a key must be `Display`, if its type has a parameter in it. Otherwise rustc can
///   tell whether it is, and better without a bound.
pub(crate) fn where_clause(event: &Event<'_>) -> Option<TokenStream> {
    let input = &event.input;
    let private = expand::private(event);
    let fields = all_fields(&input.shape);
    let mut added = Vec::new();
    for param in input.generics.type_params() {
        let param = &param.ident;
        let span = expand::at(param.span());
        added.push(quote_spanned! {span=>
            #param: ::core::marker::Send + ::core::marker::Sync + 'static
        });
        if fields.iter().any(|field| is_stored(field.ty, param)) {
            added.push(quote_spanned! {span=>
                #param: #private::serde::Serialize + #private::serde::de::DeserializeOwned
            });
        }
    }
    for ty in key_types(event, &fields) {
        added.push(quote!(#ty: ::core::fmt::Display));
    }
    let written = input.generics.where_clause.iter();
    let written = written.flat_map(|clause| &clause.predicates);
    let mut predicates = written.map(|p| p.to_token_stream()).chain(added).peekable();
    predicates.peek()?;
    Some(quote!(where #(#predicates,)*))
}

fn all_fields<'e>(shape: &'e Shape<'_>) -> Vec<&'e Field<'e>> {
    match shape {
        Shape::Struct(fields) => fields.iter().collect(),
        Shape::Enum(variants) => variants.iter().flat_map(|(_, fields)| fields).collect(),
        Shape::Union => Vec::new(),
    }
}

fn is_stored(ty: &Type, param: &Ident) -> bool {
    if let Type::Path(path) = ty
        && let Some(last) = path.path.segments.last()
        && last.ident == "PhantomData"
    {
        return false;
    }
    mentions(ty.to_token_stream(), param)
}

fn mentions(tokens: TokenStream, param: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *param,
        TokenTree::Group(group) => mentions(group.stream(), param),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

/// The types with a parameter in them of the fields that keys display, each once.
fn key_types<'e>(event: &Event<'_>, fields: &[&'e Field<'e>]) -> Vec<&'e Type> {
    let mut roots = Vec::new();
    for key in [&event.dedup, &event.ordering].into_iter().flatten() {
        if let Key::Template(template) = key {
            let displayed = template.fields().filter(|path| path.rest.is_empty());
            roots.extend(displayed.map(|path| shown(&path.root)));
        }
    }
    let mut types: Vec<&Type> = Vec::new();
    for field in fields.iter().filter(|f| roots.contains(&shown(&f.member))) {
        let tokens = field.ty.to_token_stream().to_string();
        let mut params = event.input.generics.type_params();
        let generic = params.any(|param| mentions(field.ty.to_token_stream(), &param.ident));
        let known = |ty: &&Type| ty.to_token_stream().to_string() == tokens;
        if generic && !types.iter().any(known) {
            types.push(field.ty);
        }
    }
    types
}

//! From a checked event to its impl.
//!
//! Generated code names `::core` and core's `__private`, and nothing of the scope it lands in.

use std::time::Duration;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens as _, format_ident, quote, quote_spanned};
use syn::spanned::Spanned as _;
use syn::{DeriveInput, ExprPath, Member};

use crate::chain::Upcast;
use crate::check::{self, Event, Key, Name};
use crate::ctxt::Ctxt;
use crate::fallback;
use crate::generics;
use crate::input::{Input, Shape};
use crate::key_template::{FieldPath, Piece, Template};
use crate::value::Number;

/// The whole derive: what `ast` becomes.
pub(crate) fn derive(ast: &DeriveInput) -> TokenStream {
    let (event, outcome) = Ctxt::collect(|cx| {
        let input = Input::read(cx, ast);
        check::check(cx, input)
    });
    match outcome {
        Ok(()) => implementation(&event),
        Err(errors) => fallback::stub(&event, &errors),
    }
}

fn implementation(event: &Event<'_>) -> TokenStream {
    let private = private(event);
    let attrs = &event.input.attrs;

    let names_fit = assert_names_fit(event, &private);
    let name = &event.name.value;
    let aliases = (!event.aliases.is_empty()).then(|| {
        let aliases = &event.aliases;
        quote! {
            const ALIASES: &'static [&'static ::core::primitive::str] = &[#(#aliases),*];
        }
    });
    let version = attrs.version.map(|Number { value: n, .. }| {
        quote! {
            const VERSION: #private::NonZeroU32 = #private::at_least_one(#n);
        }
    });
    let priority = attrs.priority.as_ref().map(|level| {
        quote! {
            const PRIORITY: #private::Priority = #private::Priority::#level;
        }
    });
    let behind_dead = attrs.behind_dead.as_ref().map(|what| {
        quote! {
            const BEHIND_DEAD: #private::BehindDead = #private::BehindDead::#what;
        }
    });
    let max_attempts = attrs.max_attempts.map(|Number { value: n, .. }| {
        quote! {
            const MAX_ATTEMPTS: #private::Option<#private::NonZeroU32> =
                #private::Option::Some(#private::at_least_one(#n));
        }
    });
    let backoff = event.backoff.as_ref().map(|backoff| {
        let base = duration(backoff.base, &private);
        let max = duration(backoff.max, &private);
        let jitter = backoff.jitter;
        quote! {
            const BACKOFF: #private::Option<#private::Backoff> =
                #private::Option::Some(#private::backoff(#base, #max, #jitter));
        }
    });
    let timeout = attrs.timeout.as_ref().map(|timeout| {
        let timeout = duration(timeout.value, &private);
        quote! {
            const TIMEOUT: #private::Option<#private::time::Duration> =
                #private::Option::Some(#timeout);
        }
    });
    let expires_in = attrs.expires_in.as_ref().map(|expires_in| {
        let expires_in = duration(expires_in.value, &private);
        quote! {
            const EXPIRES_IN: #private::Option<#private::time::Duration> =
                #private::Option::Some(#expires_in);
        }
    });
    let retention = attrs.retention.as_ref().map(|retention| {
        let retention = duration(retention.value, &private);
        quote! {
            const RETENTION: #private::Option<#private::time::Duration> =
                #private::Option::Some(#retention);
        }
    });
    let decode = decode(&event.upcasts, &private);
    let dedup_key = key_fn("dedup_key", event.dedup.as_ref(), event, &private);
    let ordering_key = key_fn("ordering_key", event.ordering.as_ref(), event, &private);

    let body = quote! {
        const NAME: &'static ::core::primitive::str = #name;
        #aliases
        #version
        #behind_dead
        #priority
        #max_attempts
        #backoff
        #timeout
        #expires_in
        #retention
        #decode
        #dedup_key
        #ordering_key
    };
    let implementation = impl_block(event, &body);
    quote! {
        const _: () = {
            #names_fit
            #implementation
        };
    }
}

/// `impl OutboxEvent for ..` around `body`. Also the frame of the stub.
pub(crate) fn impl_block(event: &Event<'_>, body: &TokenStream) -> TokenStream {
    let private = private(event);
    let ident = event.input.ident;
    let (impl_generics, ty_generics, _) = event.input.generics.split_for_impl();
    let where_clause = generics::where_clause(event);
    let output = match &event.input.attrs.output {
        Some(output) => quote!(#output),
        None => quote!(()),
    };
    let allow_deprecated = event.input.deprecated.then(|| {
        quote! {
            #[allow(deprecated, reason = "the type is declared here, not used")]
        }
    });
    quote! {
        #allow_deprecated
        #[automatically_derived]
        impl #impl_generics #private::OutboxEvent for #ident #ty_generics #where_clause {
            type Output = #output;
            #body
        }
    }
}

/// The path of core's `__private`.
pub(crate) fn private(event: &Event<'_>) -> TokenStream {
    match &event.input.attrs.krate {
        Some(path) => quote!(#path::__private),
        None => quote!(::outbox_core::__private),
    }
}

/// Where `span` is, but resolved as generated code: messages point at what the user wrote, and
/// lints about paths and style do not take the tokens for the user's.
pub(crate) fn at(span: Span) -> Span {
    Span::call_site().located_at(span)
}

/// The limit is core's, so it is asserted against core's constant and written once.
fn assert_names_fit(event: &Event<'_>, private: &TokenStream) -> TokenStream {
    let fits = |value: &str, span: Span, text: &str| {
        let span = at(span);
        quote_spanned! {span=>
            const _: () = ::core::assert!(#value.len() <= #private::EVENT_NAME_MAX, #text);
        }
    };
    let Name { value, span } = &event.name;
    let name = fits(
        value,
        *span,
        "the event name is too long; write a shorter `name`",
    );
    let aliases = event.aliases.iter().map(|alias| {
        let text = "the alias is too long to have been an event name";
        fits(&alias.value(), alias.span(), text)
    });
    quote! {
        #name
        #(#aliases)*
    }
}

/// Reads each old version as its own type, and takes it from there to the event step by step.
///
/// The types are spanned as they were written: that a step is missing, or that serde cannot read
/// one, is told at the type it begins with.
fn decode(upcasts: &[Upcast], private: &TokenStream) -> Option<TokenStream> {
    let arms = (0..upcasts.len()).map(|at| {
        let links = upcasts.get(at..).unwrap_or_default();
        arm_of_version(links, private)
    });
    (!upcasts.is_empty()).then(|| {
        quote! {
            #[allow(deprecated, reason = "old versions are read here, not written")]
            fn decode(
                version: #private::NonZeroU32,
                payload: &::core::primitive::str,
            ) -> #private::Result<Self, #private::PayloadError> {
                match version.get() {
                    #(#arms)*
                    _ => #private::read_own(version, payload),
                }
            }
        }
    })
}

/// `1u32 => { .. }`, for the first of `links` and all steps from there.
fn arm_of_version(links: &[Upcast], private: &TokenStream) -> Option<TokenStream> {
    let first = links.first()?;
    let (number, ty) = (first.version.value, &first.from);
    let read = quote_spanned!(at(ty.span())=> #private::read::<#ty>(version, payload)?);
    let nexts = links.iter().skip(1).map(|link| link.from.to_token_stream());
    let nexts = nexts.chain([quote!(Self)]);
    let steps = links.iter().zip(nexts).map(|(link, next)| {
        let ty = &link.from;
        let step = quote_spanned!(at(ty.span())=> #private::upcast::<#ty, #next>(version, event)?);
        quote!(let event = #step;)
    });
    Some(quote! {
        #number => {
            let event = #read;
            #(#steps)*
            #private::Result::Ok(event)
        }
    })
}

/// A duration as a constant. `Duration::new` overflows only where the nanoseconds carry.
fn duration(duration: Duration, private: &TokenStream) -> TokenStream {
    let seconds = duration.as_secs();
    let nanos = duration.subsec_nanos();
    quote!(#private::time::Duration::new(#seconds, #nanos))
}

fn key_fn(
    method: &str,
    key: Option<&Key>,
    event: &Event<'_>,
    private: &TokenStream,
) -> Option<TokenStream> {
    let body = match key? {
        Key::Function(function) => call(function, private),
        Key::Template(template) => match &event.input.shape {
            Shape::Struct(_) => {
                let key = build(template, private, of_self);
                quote!(#private::Option::Some(#key))
            }
            Shape::Enum(variants) => {
                let arms = variants
                    .iter()
                    .map(|(variant, _)| arm(variant, template, private));
                quote! {
                    match self {
                        #(#arms)*
                    }
                }
            }
            Shape::Union => return None,
        },
    };
    let method = format_ident!("{method}");
    Some(quote! {
        fn #method(&self) -> #private::Option<#private::String> {
            #body
        }
    })
}

/// `dedup_with = path`: `IntoKey::into_key(path(self))`.
fn call(function: &ExprPath, private: &TokenStream) -> TokenStream {
    let span = function
        .path
        .segments
        .first()
        .map_or_else(Span::call_site, |s| s.ident.span());
    let call = quote_spanned!(at(span)=> #function(self));
    quote!(#private::IntoKey::into_key(#call))
}

/// `Self::Paid { order_id: __key_order_id, .. } => Some(..)`.
///
/// A pattern with braces fits tuple variants too: `Self::Paid { 0: __key_0, .. }`.
fn arm(variant: &Ident, template: &Template, private: &TokenStream) -> TokenStream {
    // A pattern may bind a field once, however often the template shows it.
    let mut roots: Vec<&Member> = Vec::new();
    for path in template.fields() {
        if !roots.contains(&&path.root) {
            roots.push(&path.root);
        }
    }
    let bindings = roots.iter().map(|root| {
        let binding = binding(root, template.span);
        quote!(#root: #binding)
    });
    let key = build(template, private, of_binding);
    quote! {
        Self::#variant { #(#bindings,)* .. } => #private::Option::Some(#key),
    }
}

/// The chain of `KeyBuilder` calls. `value` gives a field as `&T`.
fn build(
    template: &Template,
    private: &TokenStream,
    value: impl Fn(&FieldPath) -> TokenStream,
) -> TokenStream {
    let mut pieces = template.pieces.iter().peekable();
    let mut calls = TokenStream::new();
    while let Some(piece) = pieces.next() {
        calls.extend(match piece {
            Piece::Text(text) => quote!(.literal(#text)),
            Piece::Field(path) => {
                let value = value(path);
                // A field is escaped against the first character of what ends it.
                match pieces.peek() {
                    Some(Piece::Text(text)) => {
                        let delimiter = text.chars().next();
                        quote!(.field_before(#value, #delimiter))
                    }
                    _ => quote!(.last_field(#value)),
                }
            }
        });
    }
    quote!(#private::KeyBuilder::new() #calls .finish())
}

fn of_self(path: &FieldPath) -> TokenStream {
    let FieldPath { root, rest, span } = path;
    quote_spanned!(at(*span)=> &self.#root #(.#rest)*)
}

fn of_binding(path: &FieldPath) -> TokenStream {
    let FieldPath { root, rest, span } = path;
    let binding = binding(root, *span);
    if rest.is_empty() {
        quote!(#binding)
    } else {
        quote_spanned!(at(*span)=> &#binding #(.#rest)*)
    }
}

/// The variable that a pattern binds the field to.
fn binding(root: &Member, span: Span) -> Ident {
    Ident::new(&format!("__key_{}", check::shown(root)), at(span))
}

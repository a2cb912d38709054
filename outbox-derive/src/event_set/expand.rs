//! From a set to its impls.
//!
//! Generated code names `::core`, core's `__private` and the types of the variants, and nothing
//! else of the scope it lands in.

use proc_macro2::{Ident, TokenStream};
use quote::{quote, quote_spanned};
use syn::Type;
use syn::spanned::Spanned as _;

use crate::event_set::input::{Member, Set};
use crate::expand::at;

pub(crate) fn implementation(set: &Set<'_>) -> TokenStream {
    let private = private(set);
    let members = &set.members;

    let names_differ = members
        .iter()
        .enumerate()
        .filter_map(|(at, member)| assert_other_name(member, members.get(..at)?, &private));
    // Binds the event, so that a set whose values nobody uses is not told of unread fields.
    let arms = members.iter().map(|Member { variant, ty }| {
        let name = name(ty, &private);
        quote!(Self::#variant(_event) => #name,)
    });
    let cases = members.iter().map(|Member { variant, ty }| {
        let (known, aliases) = (name(ty, &private), aliases(ty, &private));
        let span = at(ty.span());
        let decode = quote_spanned!(span=> <#ty as #private::OutboxEvent>::decode);
        quote! {
            if #private::has_name(name, #known, #aliases) {
                return #private::decoded(#known, #decode(version, payload)).map(Self::#variant);
            }
        }
    });
    let methods = Methods {
        name: quote! {
            match self {
                #(#arms)*
            }
        },
        decode: quote! {
            #(#cases)*
            #private::Result::Err(#private::unknown_name(name))
        },
        into: |variant| quote!(Self::#variant(event)),
    };
    let impls = impls(set, &private, &methods);
    block(&quote! {
        #(#names_differ)*
        #impls
    })
}

/// What stands beside an error: the impls, so that one mistake gives one message. They never run.
///
/// Nothing for an enum with parameters, which they would have to name.
pub(crate) fn stub(set: &Set<'_>) -> Option<TokenStream> {
    if set.is_generic {
        return None;
    }
    let methods = Methods {
        name: quote!(::core::unreachable!()),
        decode: quote! {
            let _ = (name, version, payload);
            ::core::unreachable!()
        },
        into: |_| {
            quote! {
                let _ = event;
                ::core::unreachable!()
            }
        },
    };
    let impls = impls(set, &private(set), &methods);
    Some(block(&impls))
}

/// A member may be deprecated; the warning is for the enum, where it is used.
fn block(items: &TokenStream) -> TokenStream {
    quote! {
        #[allow(deprecated, reason = "the members are listed elsewhere")]
        const _: () = {
            #items
        };
    }
}

/// The bodies in which the stub differs.
struct Methods {
    name: TokenStream,
    decode: TokenStream,
    into: fn(&Ident) -> TokenStream,
}

fn impls(set: &Set<'_>, private: &TokenStream, methods: &Methods) -> TokenStream {
    let ident = set.ident;
    let of_members = set.members.iter().enumerate().map(|(at, member)| {
        let place = place(at, set.members.len(), private);
        let event_of = event_of(ident, member, &place, private);
        let into = (methods.into)(member.variant);
        let ty = member.ty;
        quote! {
            #[automatically_derived]
            #event_of

            #[automatically_derived]
            impl ::core::convert::From<#ty> for #ident {
                fn from(event: #ty) -> Self {
                    #into
                }
            }
        }
    });
    let set_of = set_of(set, private);
    let event_set = event_set(set, private, methods);
    quote! {
        #(#of_members)*

        #[automatically_derived]
        #set_of

        #[automatically_derived]
        #event_set
    }
}

/// Spanned on the member's type, so that one which is no event is told so there.
fn event_of(
    set: &Ident,
    member: &Member<'_>,
    place: &TokenStream,
    private: &TokenStream,
) -> TokenStream {
    let ty = member.ty;
    let span = at(ty.span());
    quote_spanned! {span=>
        impl #private::EventOf<#set> for #ty {
            type Place = #place;
        }
    }
}

/// `impl SetOf<(First, Second)> for Set`.
fn set_of(set: &Set<'_>, private: &TokenStream) -> TokenStream {
    let ident = set.ident;
    let types = set.members.iter().map(|Member { ty, .. }| quote!(#ty));
    let members = tree(&types.collect::<Vec<_>>());
    quote!(impl #private::SetOf<#members> for #ident {})
}

fn event_set(set: &Set<'_>, private: &TokenStream, methods: &Methods) -> TokenStream {
    let ident = set.ident;
    let unhandled = tree(&vec![quote!(#private::NoHandler); set.members.len()]);
    let names = set.members.iter().map(|member| name(member.ty, private));
    let Methods { name, decode, .. } = methods;
    quote! {
        impl #private::EventSet for #ident {
            type Unhandled = #unhandled;

            const NAMES: &'static [&'static ::core::primitive::str] = &[#(#names),*];

            fn name(&self) -> &'static ::core::primitive::str {
                #name
            }

            fn decode(
                name: &::core::primitive::str,
                version: #private::NonZeroU32,
                payload: &::core::primitive::str,
            ) -> #private::Result<Self, #private::DecodeError> {
                #decode
            }
        }
    }
}

fn private(set: &Set<'_>) -> TokenStream {
    match &set.krate {
        Some(path) => quote!(#path::__private),
        None => quote!(::outbox_core::__private),
    }
}

fn name(ty: &Type, private: &TokenStream) -> TokenStream {
    let span = at(ty.span());
    quote_spanned!(span=> <#ty as #private::OutboxEvent>::NAME)
}

fn aliases(ty: &Type, private: &TokenStream) -> TokenStream {
    let span = at(ty.span());
    quote_spanned!(span=> <#ty as #private::OutboxEvent>::ALIASES)
}

/// Rows find their member by its name, present or former, so no two may have the same.
fn assert_other_name(
    member: &Member<'_>,
    before: &[Member<'_>],
    private: &TokenStream,
) -> Option<TokenStream> {
    let name_of = |ty| {
        let (name, aliases) = (name(ty, private), aliases(ty, private));
        quote!((#name, #aliases))
    };
    let this = name_of(member.ty);
    let span = at(member.ty.span());
    let asserts = before.iter().map(|other| {
        let text = format!(
            "`{}` has a `name` or `alias` of `{}`; an event name belongs to one event",
            member.shown(),
            other.shown()
        );
        let other = name_of(other.ty);
        quote_spanned!(span=> ::core::assert!(!#private::share_a_name(#other, #this), #text);)
    });
    (!before.is_empty()).then(|| {
        quote! {
            const _: () = {
                #(#asserts)*
            };
        }
    })
}

/// The leaves in a tree of pairs, the halves of equal size or the first one larger by one. No leaf
/// makes `()`.
fn tree(leaves: &[TokenStream]) -> TokenStream {
    match leaves {
        [] => quote!(()),
        [one] => one.clone(),
        _ => {
            let (left, right) = leaves.split_at(leaves.len().div_ceil(2));
            let (left, right) = (tree(left), tree(right));
            quote!((#left, #right))
        }
    }
}

/// The way to leaf `at` of a tree with `len` leaves.
fn place(at: usize, len: usize, private: &TokenStream) -> TokenStream {
    let half = len.div_ceil(2);
    if len <= 1 {
        quote!(#private::Here)
    } else if at < half {
        let rest = place(at, half, private);
        quote!(#private::Left<#rest>)
    } else {
        let rest = place(at - half, len - half, private);
        quote!(#private::Right<#rest>)
    }
}

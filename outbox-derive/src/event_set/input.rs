//! The derived enum: its members and its attribute. Refuses what cannot be a set.

use proc_macro2::Span;
use quote::ToTokens as _;
use syn::spanned::Spanned as _;
use syn::{Data, DeriveInput, Fields, GenericParam, Ident, Path, Type, Variant};

use crate::attr::{self, SetAttrs};
use crate::ctxt::Ctxt;

/// An enum with `#[derive(OutboxEvents)]`.
///
/// Beside an error it holds the members that could be read, which is enough for the stub.
pub(crate) struct Set<'a> {
    pub(crate) ident: &'a Ident,
    pub(crate) krate: Option<Path>,
    pub(crate) members: Vec<Member<'a>>,
    /// Whether it has a parameter, which is refused. No stub fits it then.
    pub(crate) is_generic: bool,
}

/// A variant and the event it holds.
pub(crate) struct Member<'a> {
    pub(crate) variant: &'a Ident,
    pub(crate) ty: &'a Type,
}

impl Member<'_> {
    /// The type as messages show it.
    pub(crate) fn shown(&self) -> String {
        shown(self.ty)
    }
}

impl<'a> Set<'a> {
    pub(crate) fn read(cx: &mut Ctxt, ast: &'a DeriveInput) -> Self {
        let attrs = SetAttrs::read(cx, &ast.attrs);
        let params = ast.generics.params.iter();
        for param in params.clone() {
            cx.push(syn::Error::new(
                name_of(param),
                "a set of events has no parameters: it lists types, each with one event name; \
                 remove this one, and name its argument in the variants",
            ));
        }
        Self {
            ident: &ast.ident,
            krate: attrs.krate,
            members: members(cx, ast),
            is_generic: params.len() > 0,
        }
    }
}

fn name_of(param: &GenericParam) -> Span {
    match param {
        GenericParam::Lifetime(param) => param.lifetime.span(),
        GenericParam::Type(param) => param.ident.span(),
        GenericParam::Const(param) => param.ident.span(),
    }
}

fn members<'a>(cx: &mut Ctxt, ast: &'a DeriveInput) -> Vec<Member<'a>> {
    let ident = &ast.ident;
    let data = match &ast.data {
        Data::Enum(data) => data,
        Data::Struct(data) => {
            refuse_shape(cx, data.struct_token.span, "struct");
            return Vec::new();
        }
        Data::Union(data) => {
            refuse_shape(cx, data.union_token.span, "union");
            return Vec::new();
        }
    };
    if data.variants.is_empty() {
        let text =
            format!("`{ident}` has no variants, so its outbox could publish nothing; add one");
        cx.push(syn::Error::new(ident.span(), text));
    }
    let mut members: Vec<Member<'a>> = Vec::new();
    for variant in &data.variants {
        let Some(ty) = event(cx, variant) else {
            continue;
        };
        match members.iter().find(|known| known.shown() == shown(ty)) {
            Some(first) => cx.push(syn::Error::new(
                ty.span(),
                format!(
                    "`{}` is a member of `{ident}` already, as `{}`; keep one of them",
                    shown(ty),
                    first.variant
                ),
            )),
            None => members.push(Member {
                variant: &variant.ident,
                ty,
            }),
        }
    }
    members
}

fn refuse_shape(cx: &mut Ctxt, keyword: Span, shape: &str) {
    let text = format!("a {shape} cannot be a set of events; use an enum with a variant for each");
    cx.push(syn::Error::new(keyword, text));
}

/// The one field of a variant.
fn event<'a>(cx: &mut Ctxt, variant: &'a Variant) -> Option<&'a Type> {
    attr::refuse(
        cx,
        &variant.attrs,
        "a member has no settings in a set; write them on its own type, or `crate` on the enum",
    );
    for field in &variant.fields {
        attr::refuse(
            cx,
            &field.attrs,
            "a member has no settings in a set; write them on its own type, or `crate` on the enum",
        );
    }
    let ident = &variant.ident;
    let problem = match &variant.fields {
        Fields::Unnamed(fields) => {
            let mut types = fields.unnamed.iter().map(|field| &field.ty);
            match (types.next(), types.next()) {
                (Some(one), None) => return Some(one),
                (None, _) => "holds no event",
                (Some(_), Some(_)) => "holds more than one field",
            }
        }
        Fields::Named(_) => "has named fields",
        Fields::Unit => "holds no event",
    };
    let text =
        format!("`{ident}` {problem}; write `{ident}(SomeEvent)`, with the type of one event");
    cx.push(syn::Error::new(ident.span(), text));
    None
}

/// A type's tokens, without the invisible groups of `macro_rules!`.
fn shown(mut ty: &Type) -> String {
    while let Type::Group(group) = ty {
        ty = &group.elem;
    }
    ty.to_token_stream().to_string().replace(' ', "")
}

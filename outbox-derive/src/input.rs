//! The derived type: its shape and all of its attributes. Refuses what cannot be an event.

use proc_macro2::Span;
use syn::{
    Attribute, Data, DataEnum, DeriveInput, Fields, Generics, Ident, Index, Member, Type, Variant,
};

use crate::attr::{self, FieldAttrs, TypeAttrs};
use crate::ctxt::Ctxt;

/// A type with `#[derive(OutboxEvent)]`.
pub(crate) struct Input<'a> {
    pub(crate) ident: &'a Ident,
    pub(crate) generics: &'a Generics,
    pub(crate) attrs: TypeAttrs,
    pub(crate) shape: Shape<'a>,
    /// Whether the type, or anything in it, is deprecated. Generated code uses it all the same,
    /// and the warning belongs to those who wrote a use themselves.
    pub(crate) deprecated: bool,
}

pub(crate) enum Shape<'a> {
    Struct(Vec<Field<'a>>),
    Enum(Vec<(&'a Ident, Vec<Field<'a>>)>),
    /// Refused, with an error pushed. No more is asked of it.
    Union,
}

pub(crate) struct Field<'a> {
    pub(crate) member: Member,
    pub(crate) ty: &'a Type,
    pub(crate) attrs: FieldAttrs,
}

impl<'a> Input<'a> {
    pub(crate) fn read(cx: &mut Ctxt, ast: &'a DeriveInput) -> Self {
        let attrs = TypeAttrs::read(cx, &ast.attrs);
        for param in ast.generics.lifetimes() {
            cx.push(syn::Error::new(
                param.lifetime.span(),
                format!(
                    "an outbox event cannot borrow: it is stored, and handled when `{}` has long \
                     ended; use owned fields, such as `String` for `&str`",
                    param.lifetime
                ),
            ));
        }
        Self {
            ident: &ast.ident,
            generics: &ast.generics,
            attrs,
            shape: Shape::read(cx, ast),
            deprecated: is_deprecated(ast),
        }
    }
}

impl<'a> Shape<'a> {
    fn read(cx: &mut Ctxt, ast: &'a DeriveInput) -> Self {
        match &ast.data {
            Data::Struct(data) => Self::Struct(fields(cx, &data.fields)),
            Data::Enum(data) => {
                if data.variants.is_empty() {
                    let ident = &ast.ident;
                    let text = format!(
                        "`{ident}` has no variants, so no such event can ever be published; add one"
                    );
                    cx.push(syn::Error::new(ident.span(), text));
                }
                Self::Enum(variants(cx, data))
            }
            Data::Union(data) => {
                cx.push(syn::Error::new(
                    data.union_token.span,
                    "a union cannot be an outbox event; use a struct or an enum",
                ));
                Self::Union
            }
        }
    }
}

fn variants<'a>(cx: &mut Ctxt, data: &'a DataEnum) -> Vec<(&'a Ident, Vec<Field<'a>>)> {
    let read = |variant: &'a Variant| {
        attr::refuse(
            cx,
            &variant.attrs,
            "`outbox` belongs on the enum, not on a variant: all variants are one event",
        );
        (&variant.ident, fields(cx, &variant.fields))
    };
    data.variants.iter().map(read).collect()
}

fn fields<'a>(cx: &mut Ctxt, fields: &'a Fields) -> Vec<Field<'a>> {
    (0_u32..)
        .zip(fields)
        .map(|(index, field)| Field {
            member: match &field.ident {
                Some(ident) => Member::Named(ident.clone()),
                None => Member::Unnamed(Index {
                    index,
                    span: Span::call_site(),
                }),
            },
            ty: &field.ty,
            attrs: FieldAttrs::read(cx, &field.attrs),
        })
        .collect()
}

fn is_deprecated(ast: &DeriveInput) -> bool {
    let marked = |attrs: &[Attribute]| attrs.iter().any(|a| a.path().is_ident("deprecated"));
    let in_fields = |fields: &Fields| fields.iter().any(|field| marked(&field.attrs));
    marked(&ast.attrs)
        || match &ast.data {
            Data::Struct(data) => in_fields(&data.fields),
            Data::Enum(data) => data
                .variants
                .iter()
                .any(|variant| marked(&variant.attrs) || in_fields(&variant.fields)),
            Data::Union(_) => false,
        }
}

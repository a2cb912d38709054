//! Rules between attributes, and between attributes and fields.

use std::time::Duration;

use proc_macro2::Span;
use syn::ext::IdentExt as _;
use syn::{ExprPath, LitStr, Member};

use crate::attr::{self, FieldAttrs, KeySource};
use crate::chain::{self, Upcast};
use crate::ctxt::Ctxt;
use crate::input::{Field, Input, Shape};
use crate::key_template::{FieldPath, Template};
use crate::name;

/// An event as it is generated: every name in it exists, every value is in its bounds.
///
/// Beside an error it holds what could be made of the rest, which is enough for the stub.
pub(crate) struct Event<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) name: Name,
    pub(crate) aliases: Vec<LitStr>,
    /// The types of old versions, in their order.
    pub(crate) upcasts: Vec<Upcast>,
    pub(crate) dedup: Option<Key>,
    pub(crate) ordering: Option<Key>,
    pub(crate) backoff: Option<Backoff>,
}

pub(crate) struct Name {
    pub(crate) value: String,
    /// The literal, or the type whose name it was made from.
    pub(crate) span: Span,
}

pub(crate) enum Key {
    Template(Template),
    Function(ExprPath),
}

pub(crate) struct Backoff {
    pub(crate) base: Duration,
    pub(crate) max: Duration,
    pub(crate) jitter: f64,
}

/// Checks `input` and puts in what is generated or left to a default.
pub(crate) fn check<'a>(cx: &mut Ctxt, mut input: Input<'a>) -> Event<'a> {
    let name = event_name(cx, &input);
    let aliases = aliases(cx, &mut input, &name.value);
    let upcasts = chain::check(cx, &mut input);
    let dedup = input.attrs.dedup.take();
    let ordering = input.attrs.ordering.take();
    behind_dead_has_a_key(cx, &input);
    Event {
        name,
        aliases,
        upcasts,
        dedup: key(cx, &input, dedup, Kind::Dedup),
        ordering: key(cx, &input, ordering, Kind::Ordering),
        backoff: backoff(cx, &input),
        input,
    }
}

fn event_name(cx: &mut Ctxt, input: &Input<'_>) -> Name {
    let (value, span) = match &input.attrs.name {
        Some(literal) => (literal.value(), literal.span()),
        // A `name` that was refused must not be followed by a second message about the type's.
        None if input.attrs.seen.contains("name") => (String::new(), input.ident.span()),
        None => {
            let made = cx.ok(name::of_type(input.ident));
            (made.unwrap_or_default(), input.ident.span())
        }
    };
    Name { value, span }
}

fn aliases(cx: &mut Ctxt, input: &mut Input<'_>, name: &str) -> Vec<LitStr> {
    let aliases = std::mem::take(&mut input.attrs.aliases);
    let mut before = Vec::new();
    for alias in &aliases {
        let value = alias.value();
        if value == name {
            let text = format!("`{value}` is the event's own name; an alias is a former one");
            cx.push(syn::Error::new(alias.span(), text));
        } else if before.contains(&value) {
            let text = format!("duplicate alias `{value}`; keep one of them");
            cx.push(syn::Error::new(alias.span(), text));
        }
        before.push(value);
    }
    aliases
}

#[derive(Clone, Copy)]
enum Kind {
    Dedup,
    Ordering,
}

impl Kind {
    /// The key on a field, and those on the type that exclude it.
    fn keys(self) -> (&'static str, [&'static str; 2]) {
        match self {
            Self::Dedup => ("dedup", ["dedup_key", "dedup_with"]),
            Self::Ordering => ("ordering", ["ordering_key", "ordering_with"]),
        }
    }

    fn mark(self, attrs: &FieldAttrs) -> Option<Span> {
        match self {
            Self::Dedup => attrs.dedup,
            Self::Ordering => attrs.ordering,
        }
    }
}

fn key(cx: &mut Ctxt, input: &Input<'_>, source: Option<KeySource>, kind: Kind) -> Option<Key> {
    let marked = marked_fields(cx, &input.shape, kind);
    let (on_field, on_type) = kind.keys();
    let written = on_type
        .into_iter()
        .find(|key| input.attrs.seen.contains(key));
    if let (Some(marked), Some(written)) = (&marked, written) {
        cx.push(attr::excluded(marked.span, on_field, written));
        return None;
    }
    match source {
        Some(KeySource::Function(function)) => Some(Key::Function(function)),
        Some(KeySource::Template(template)) => {
            for path in template.fields() {
                let found = field_exists(input, path, kind);
                cx.ok(found);
            }
            Some(Key::Template(template))
        }
        None => marked.map(Key::Template),
    }
}

/// Without an ordering key nothing is behind anything.
fn behind_dead_has_a_key(cx: &mut Ctxt, input: &Input<'_>) {
    let (_, on_type) = Kind::Ordering.keys();
    let is_written = on_type
        .into_iter()
        .any(|key| input.attrs.seen.contains(key));
    let is_marked = match &input.shape {
        Shape::Struct(fields) => fields.iter().any(|field| field.attrs.ordering.is_some()),
        // A mark on a field of an enum is an error of its own.
        Shape::Enum(_) | Shape::Union => false,
    };
    if let Some(span) = input.attrs.behind_dead_at
        && !is_written
        && !is_marked
    {
        let text = "`behind_dead` says nothing without an ordering key; add \
                    `ordering_key = \"{field}\"`, or remove it";
        cx.push(syn::Error::new(span, text));
    }
}

/// The fields that carry `dedup` or `ordering`.
fn marked_fields(cx: &mut Ctxt, shape: &Shape<'_>, kind: Kind) -> Option<Template> {
    match shape {
        Shape::Struct(fields) => {
            let marked = fields
                .iter()
                .filter_map(|field| Some((field.member.clone(), kind.mark(&field.attrs)?)));
            Template::of_fields(marked.collect())
        }
        Shape::Enum(variants) => {
            let (on_field, [template, function]) = kind.keys();
            let fields = variants.iter().flat_map(|(_, fields)| fields);
            for mark in fields.filter_map(|field| kind.mark(&field.attrs)) {
                cx.push(syn::Error::new(
                    mark,
                    format!(
                        "`{on_field}` on a field needs a struct, because a key must come from \
                         every variant; on the enum, write `{template} = \"{{field}}\"` or \
                         `{function} = path`"
                    ),
                ));
            }
            None
        }
        Shape::Union => None,
    }
}

/// Checks that the event, in every variant, has the field that `path` begins with.
fn field_exists(input: &Input<'_>, path: &FieldPath, kind: Kind) -> syn::Result<()> {
    let wanted = shown(&path.root);
    let has = |fields: &[Field<'_>]| fields.iter().any(|field| shown(&field.member) == wanted);
    let ident = input.ident;
    match &input.shape {
        Shape::Struct(fields) if !has(fields) => Err(syn::Error::new(
            path.span,
            format!(
                "unknown field `{wanted}` in the key; `{ident}` has {}",
                list(fields)
            ),
        )),
        Shape::Enum(variants) => match variants.iter().find(|(_, fields)| !has(fields)) {
            Some((variant, fields)) => {
                let (_, [_, function]) = kind.keys();
                Err(syn::Error::new(
                    path.span,
                    format!(
                        "variant `{ident}::{variant}` has no field `{wanted}` for the key; it has \
                         {}. Name a field that every variant has, or use `{function} = path`",
                        list(fields)
                    ),
                ))
            }
            None => Ok(()),
        },
        Shape::Struct(_) | Shape::Union => Ok(()),
    }
}

fn list(fields: &[Field<'_>]) -> String {
    if fields.is_empty() {
        return "no fields".to_owned();
    }
    let names: Vec<_> = fields
        .iter()
        .map(|field| format!("`{}`", shown(&field.member)))
        .collect();
    names.join(", ")
}

/// A field as a template names it: without `r#`.
pub(crate) fn shown(member: &Member) -> String {
    match member {
        Member::Named(ident) => ident.unraw().to_string(),
        Member::Unnamed(index) => index.index.to_string(),
    }
}

fn backoff(cx: &mut Ctxt, input: &Input<'_>) -> Option<Backoff> {
    let attr = input.attrs.backoff.as_ref()?;
    let refused = |part, read: bool| !read && attr.seen.contains(part);
    if refused("base", attr.base.is_some()) || refused("max", attr.max.is_some()) {
        // A default in its place could be refused too, for a mistake already reported.
        return None;
    }
    let base = attr.base.as_ref().map_or(DEFAULT_BASE, |base| base.value);
    let max = attr.max.as_ref().map_or(DEFAULT_MAX, |max| max.value);
    if base > max {
        let problem = match (&attr.base, &attr.max) {
            (Some(base), Some(max)) => Some((
                base.span,
                format!(
                    "`base` (`{0}`) is longer than `max` (`{1}`); write a `max` of at least `{0}`",
                    base.text, max.text
                ),
            )),
            (Some(base), None) => Some((
                base.span,
                format!(
                    "`base` (`{}`) is longer than `max`, which is `30m` unless written; write \
                     `max` too",
                    base.text
                ),
            )),
            (None, Some(max)) => Some((
                max.span,
                format!(
                    "`max` (`{}`) is shorter than `base`, which is `30s` unless written; write \
                     `base` too",
                    max.text
                ),
            )),
            (None, None) => None,
        };
        if let Some((span, text)) = problem {
            cx.push(syn::Error::new(span, text));
        }
    }
    let jitter = attr.jitter.unwrap_or(DEFAULT_JITTER);
    Some(Backoff { base, max, jitter })
}

// Core's `Backoff::DEFAULT`, part by part. `tests/derive.rs` compares the two.
const DEFAULT_BASE: Duration = Duration::from_secs(30);
const DEFAULT_MAX: Duration = Duration::from_secs(30 * 60);
const DEFAULT_JITTER: f64 = 0.2;

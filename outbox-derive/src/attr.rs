//! `#[outbox(..)]`: from tokens to settings, each checked as far as it can be alone.

use proc_macro2::{Ident, Span, TokenTree};
use syn::meta::ParseNestedMeta;
use syn::parse::{ParseStream, Parser as _};
use syn::spanned::Spanned as _;
use syn::{Attribute, ExprPath, Lit, LitStr, Meta, Path, Token, Type, parenthesized, token};

use crate::ctxt::Ctxt;
use crate::duration::DurationLit;
use crate::key_template::Template;
use crate::name;

/// The keys of a type's attribute, in the order in which they are documented.
pub(crate) const TYPE_KEYS: [&str; 13] = [
    "name",
    "version",
    "dedup_key",
    "dedup_with",
    "ordering_key",
    "ordering_with",
    "priority",
    "max_attempts",
    "backoff",
    "timeout",
    "retention",
    "output",
    "crate",
];

/// The keys of a field's attribute.
pub(crate) const FIELD_KEYS: [&str; 2] = ["dedup", "ordering"];

/// What stands in the attributes of the type. `None` is "not written" or "written wrongly".
#[derive(Default)]
pub(crate) struct TypeAttrs {
    pub(crate) name: Option<LitStr>,
    pub(crate) version: Option<u32>,
    pub(crate) dedup: Option<KeySource>,
    pub(crate) ordering: Option<KeySource>,
    pub(crate) priority: Option<Ident>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) backoff: Option<BackoffAttr>,
    pub(crate) timeout: Option<DurationLit>,
    pub(crate) retention: Option<DurationLit>,
    pub(crate) output: Option<Type>,
    pub(crate) krate: Option<Path>,
    /// Every key seen, also those whose value was wrong.
    pub(crate) seen: Keys,
}

/// Where a key comes from, if the type's attribute says so.
pub(crate) enum KeySource {
    Template(Template),
    Function(ExprPath),
}

/// `backoff(..)`. Core's defaults stand in for what is left out.
#[derive(Default)]
pub(crate) struct BackoffAttr {
    pub(crate) base: Option<DurationLit>,
    pub(crate) max: Option<DurationLit>,
    pub(crate) jitter: Option<f64>,
}

/// What stands in the attributes of a field: where `dedup` and `ordering` are, if they are.
#[derive(Default)]
pub(crate) struct FieldAttrs {
    pub(crate) dedup: Option<Span>,
    pub(crate) ordering: Option<Span>,
}

impl TypeAttrs {
    pub(crate) fn read(cx: &mut Ctxt, attrs: &[Attribute]) -> Self {
        let mut read = Self::default();
        for_each_key(cx, attrs, |cx, key, input| read.key(cx, key, input));
        read
    }

    fn key(&mut self, cx: &mut Ctxt, key: &Ident, input: ParseStream<'_>) -> syn::Result<()> {
        let name = key.to_string();
        if FIELD_KEYS.contains(&name.as_str()) {
            return Err(syn::Error::new(
                key.span(),
                format!(
                    "`{name}` belongs on a field; on the type, write `{name}_key = \"{{field}}\"`"
                ),
            ));
        }
        if !TYPE_KEYS.contains(&name.as_str()) {
            return Err(unknown(key, "the keys", &TYPE_KEYS));
        }
        self.seen.add(key)?;
        match name.as_str() {
            "name" => {
                let literal = string(key, input, "such as `\"order.paid\"`")?;
                name::check(&literal)?;
                self.name = Some(literal);
            }
            "version" => self.version = Some(positive(key, input)?),
            "dedup_key" | "ordering_key" => {
                let literal = string(key, input, "such as `\"{id}\"`")?;
                self.set_key_source(key, KeySource::Template(Template::parse(&literal)?))?;
            }
            "dedup_with" | "ordering_with" => {
                let function = function(key, input)?;
                self.set_key_source(key, KeySource::Function(function))?;
            }
            "priority" => self.priority = Some(priority(key, input)?),
            "max_attempts" => self.max_attempts = Some(positive(key, input)?),
            "backoff" => self.backoff = Some(BackoffAttr::read(cx, key, input)?),
            "timeout" => self.timeout = Some(positive_duration(key, input)?),
            "retention" => self.retention = Some(duration(key, input)?),
            "output" => self.output = Some(output(key, input)?),
            _ => self.krate = Some(crate_path(key, input)?),
        }
        Ok(())
    }

    fn set_key_source(&mut self, key: &Ident, source: KeySource) -> syn::Result<()> {
        let (slot, one, other) = if key == "dedup_key" || key == "dedup_with" {
            (&mut self.dedup, "dedup_key", "dedup_with")
        } else {
            (&mut self.ordering, "ordering_key", "ordering_with")
        };
        let other = if key == one { other } else { one };
        if self.seen.contains(other) {
            return Err(excluded(key.span(), &key.to_string(), other));
        }
        *slot = Some(source);
        Ok(())
    }
}

impl FieldAttrs {
    pub(crate) fn read(cx: &mut Ctxt, attrs: &[Attribute]) -> Self {
        let mut read = Self::default();
        let mut seen = Keys::default();
        for_each_key(cx, attrs, |_, key, input| {
            if TYPE_KEYS.iter().any(|type_key| key == type_key) {
                let known = FIELD_KEYS.join("`, `");
                let text = format!("`{key}` belongs on the type; {KEYS_ON_A_FIELD} are `{known}`");
                return Err(syn::Error::new(key.span(), text));
            }
            if !FIELD_KEYS.iter().any(|field_key| key == field_key) {
                return Err(unknown(key, KEYS_ON_A_FIELD, &FIELD_KEYS));
            }
            seen.add(key)?;
            if !input.is_empty() && !input.peek(Token![,]) {
                let text = format!("`{key}` takes no value; write `#[outbox({key})]`");
                return Err(syn::Error::new(input.span(), text));
            }
            if key == "dedup" {
                read.dedup = Some(key.span());
            } else {
                read.ordering = Some(key.span());
            }
            Ok(())
        });
        read
    }
}

/// Refuses `#[outbox(..)]` where none may stand.
pub(crate) fn refuse(cx: &mut Ctxt, attrs: &[Attribute], text: &str) {
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("outbox")) {
        cx.push(syn::Error::new(attr.path().span(), text));
    }
}

/// The error for two settings of which only one may be there.
pub(crate) fn excluded(span: Span, key: &str, other: &str) -> syn::Error {
    let text = format!("`{key}` and `{other}` exclude one another; keep one of them");
    syn::Error::new(span, text)
}

impl BackoffAttr {
    fn read(cx: &mut Ctxt, key: &Ident, input: ParseStream<'_>) -> syn::Result<Self> {
        if !input.peek(token::Paren) {
            return Err(syn::Error::new(
                key.span(),
                "`backoff` takes its parts in parentheses: \
                 `backoff(base = \"30s\", max = \"30m\", jitter = 0.2)`",
            ));
        }
        let parts;
        parenthesized!(parts in input);
        let mut read = Self::default();
        let mut seen = Keys::default();
        let parse = |meta: ParseNestedMeta<'_>| {
            recover(cx, &meta, |_, part, input| {
                if !BACKOFF_PARTS.iter().any(|known| part == known) {
                    return Err(unknown(part, "the keys in `backoff`", &BACKOFF_PARTS));
                }
                seen.add(part)?;
                if part == "base" {
                    read.base = Some(positive_duration(part, input)?);
                } else if part == "max" {
                    read.max = Some(positive_duration(part, input)?);
                } else {
                    read.jitter = Some(jitter(part, input)?);
                }
                Ok(())
            })
        };
        syn::meta::parser(parse).parse2(parts.parse()?)?;
        Ok(read)
    }
}

const KEYS_ON_A_FIELD: &str = "the keys on a field";
const BACKOFF_PARTS: [&str; 3] = ["base", "max", "jitter"];

/// Calls `read` for every key in every `#[outbox(..)]` of `attrs`.
fn for_each_key(
    cx: &mut Ctxt,
    attrs: &[Attribute],
    mut read: impl FnMut(&mut Ctxt, &Ident, ParseStream<'_>) -> syn::Result<()>,
) {
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("outbox")) {
        let problem = match &attr.meta {
            Meta::List(list) => match list.tokens.clone().into_iter().next() {
                Some(TokenTree::Literal(literal)) => Some((
                    literal.span(),
                    "expected a key before this value, such as `name = \"order.paid\"`",
                )),
                Some(_) => None,
                None => Some((
                    attr.path().span(),
                    "an empty `#[outbox()]` says nothing; write a key in it, or remove it",
                )),
            },
            _ => Some((
                attr.path().span(),
                "`outbox` takes its keys in parentheses: `#[outbox(name = \"order.paid\")]`",
            )),
        };
        if let Some((span, text)) = problem {
            cx.push(syn::Error::new(span, text));
            continue;
        }
        let parsed = attr.parse_nested_meta(|meta| recover(cx, &meta, &mut read));
        cx.ok(parsed);
    }
}

/// Reads one key. After a mistake, goes on behind the next comma.
fn recover(
    cx: &mut Ctxt,
    meta: &ParseNestedMeta<'_>,
    mut read: impl FnMut(&mut Ctxt, &Ident, ParseStream<'_>) -> syn::Result<()>,
) -> syn::Result<()> {
    let result = match meta.path.get_ident() {
        Some(key) => read(cx, key, meta.input),
        None => Err(syn::Error::new(
            meta.path.span(),
            "a key is a single word, such as `name`",
        )),
    };
    if let Err(error) = result {
        cx.push(error);
        while !meta.input.is_empty() && !meta.input.peek(Token![,]) {
            meta.input.parse::<TokenTree>()?;
        }
    }
    Ok(())
}

/// The keys written so far.
#[derive(Default)]
pub(crate) struct Keys(Vec<String>);

impl Keys {
    pub(crate) fn contains(&self, key: &str) -> bool {
        self.0.iter().any(|seen| seen == key)
    }

    fn add(&mut self, key: &Ident) -> syn::Result<()> {
        let name = key.to_string();
        if self.contains(&name) {
            let text = format!("duplicate `{name}`; keep one of them");
            return Err(syn::Error::new(key.span(), text));
        }
        self.0.push(name);
        Ok(())
    }
}

fn unknown(key: &Ident, whose: &str, known: &[&str]) -> syn::Error {
    let known = known.join("`, `");
    let text = format!("unknown key `{key}`; {whose} are `{known}`");
    syn::Error::new(key.span(), text)
}

/// The error for a value that is missing or of the wrong kind.
fn wrong_value(span: Span, key: &Ident, expected: &str) -> syn::Error {
    syn::Error::new(span, format!("`{key}` must be {expected}"))
}

/// Reads the `=` before a value.
fn equals(key: &Ident, input: ParseStream<'_>, expected: &str) -> syn::Result<()> {
    let equals = input.parse::<Token![=]>();
    if equals.is_err() || input.is_empty() || input.peek(Token![,]) {
        return Err(wrong_value(key.span(), key, expected));
    }
    Ok(())
}

fn literal(key: &Ident, input: ParseStream<'_>, expected: &str) -> syn::Result<Lit> {
    equals(key, input, expected)?;
    let span = input.span();
    input.parse().map_err(|_| wrong_value(span, key, expected))
}

fn string(key: &Ident, input: ParseStream<'_>, example: &str) -> syn::Result<LitStr> {
    let expected = format!("a string literal, {example}");
    match literal(key, input, &expected)? {
        Lit::Str(literal) => Ok(literal),
        other => Err(wrong_value(other.span(), key, &expected)),
    }
}

fn positive(key: &Ident, input: ParseStream<'_>) -> syn::Result<u32> {
    let expected = "an integer from 1 to 4294967295, without quotes";
    let literal = literal(key, input, expected)?;
    match &literal {
        Lit::Int(int) => int.base10_parse().ok().filter(|&n: &u32| n > 0),
        _ => None,
    }
    .ok_or_else(|| wrong_value(literal.span(), key, expected))
}

fn jitter(key: &Ident, input: ParseStream<'_>) -> syn::Result<f64> {
    let expected = "a number from 0 to 1, such as `0.2`";
    let literal = literal(key, input, expected)?;
    let number = match &literal {
        Lit::Float(float) => float.base10_parse().ok(),
        Lit::Int(int) => int.base10_parse().ok(),
        _ => None,
    };
    number
        .filter(|number| (0.0..=1.0).contains(number))
        .ok_or_else(|| wrong_value(literal.span(), key, expected))
}

fn duration(key: &Ident, input: ParseStream<'_>) -> syn::Result<DurationLit> {
    let expected = "a duration in quotes, such as `\"30s\"`";
    match literal(key, input, expected)? {
        Lit::Str(literal) => DurationLit::parse(&literal),
        other => Err(wrong_value(other.span(), key, expected)),
    }
}

fn positive_duration(key: &Ident, input: ParseStream<'_>) -> syn::Result<DurationLit> {
    let duration = duration(key, input)?;
    if duration.value.is_zero() {
        return Err(wrong_value(duration.span, key, "longer than zero"));
    }
    Ok(duration)
}

fn priority(key: &Ident, input: ParseStream<'_>) -> syn::Result<Ident> {
    let expected = "one of `\"low\"`, `\"normal\"`, `\"high\"` and `\"critical\"`";
    let literal = literal(key, input, expected)?;
    let variant = match &literal {
        Lit::Str(level) => match level.value().as_str() {
            "low" => Some("Low"),
            "normal" => Some("Normal"),
            "high" => Some("High"),
            "critical" => Some("Critical"),
            _ => None,
        },
        _ => None,
    };
    variant
        .map(|variant| Ident::new(variant, Span::call_site()))
        .ok_or_else(|| wrong_value(literal.span(), key, expected))
}

fn function(key: &Ident, input: ParseStream<'_>) -> syn::Result<ExprPath> {
    let expected = "the path of a function, without quotes, such as `Self::key`";
    equals(key, input, expected)?;
    let span = input.span();
    input.parse().map_err(|_| wrong_value(span, key, expected))
}

fn output(key: &Ident, input: ParseStream<'_>) -> syn::Result<Type> {
    let expected = "a type, without quotes, such as `ReceiptId`";
    equals(key, input, expected)?;
    let span = input.span();
    input.parse().map_err(|_| wrong_value(span, key, expected))
}

fn crate_path(key: &Ident, input: ParseStream<'_>) -> syn::Result<Path> {
    let expected = "a path, without quotes, such as `::outbox_core`";
    equals(key, input, expected)?;
    let span = input.span();
    let path = input
        .call(Path::parse_mod_style)
        .map_err(|_| wrong_value(span, key, expected))?;
    let first = path.segments.first().map(|segment| &segment.ident);
    let from_root = first.is_some_and(|first| first == "crate" || first == "$crate");
    if path.leading_colon.is_some() || from_root {
        return Ok(path);
    }
    let segments = path
        .segments
        .iter()
        .map(|segment| segment.ident.to_string());
    let written = segments.collect::<Vec<_>>().join("::");
    let instead = if first.is_some_and(|first| first == "self" || first == "super") {
        "begin it at `crate::`".to_owned()
    } else {
        format!("write `::{written}` for a crate, or `crate::{written}` for a module of this one")
    };
    let text = format!("`crate` must be an absolute path, not `{written}`; {instead}");
    Err(syn::Error::new(span, text))
}

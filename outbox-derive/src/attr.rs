//! `#[outbox(..)]`: from tokens to settings. Which keys there are, where they may stand, and that
//! each stands there once. `value` reads what is behind the `=`.

use proc_macro2::{Ident, Span, TokenTree};
use syn::meta::ParseNestedMeta;
use syn::parse::{ParseStream, Parser as _};
use syn::spanned::Spanned as _;
use syn::{Attribute, ExprPath, LitStr, Meta, Path, Token, Type, parenthesized, token};

use crate::chain::Upcast;
use crate::ctxt::Ctxt;
use crate::duration::DurationLit;
use crate::key_template::Template;
use crate::value::Number;
use crate::{name, value};

/// The keys of a type's attribute, in the order in which they are documented.
pub(crate) const TYPE_KEYS: [&str; 18] = [
    "name",
    "alias",
    "version",
    "upcast",
    "oldest_version",
    "dedup_key",
    "dedup_with",
    "ordering_key",
    "ordering_with",
    "behind_dead",
    "priority",
    "max_attempts",
    "backoff",
    "timeout",
    "expires_in",
    "retention",
    "output",
    "crate",
];

/// The keys of a field's attribute.
pub(crate) const FIELD_KEYS: [&str; 2] = ["dedup", "ordering"];

/// The keys of a set's attribute.
pub(crate) const SET_KEYS: [&str; 1] = ["crate"];

/// What stands in the attributes of the type. `None` is "not written" or "written wrongly".
#[derive(Default)]
pub(crate) struct TypeAttrs {
    pub(crate) name: Option<LitStr>,
    pub(crate) aliases: Vec<LitStr>,
    pub(crate) version: Option<Number>,
    pub(crate) upcasts: Vec<Upcast>,
    /// Whether there was one more, whose value was wrong.
    pub(crate) upcast_refused: bool,
    pub(crate) oldest_version: Option<Number>,
    pub(crate) dedup: Option<KeySource>,
    pub(crate) ordering: Option<KeySource>,
    pub(crate) behind_dead: Option<Ident>,
    /// Where that is written.
    pub(crate) behind_dead_at: Option<Span>,
    pub(crate) priority: Option<Ident>,
    pub(crate) max_attempts: Option<Number>,
    pub(crate) backoff: Option<BackoffAttr>,
    pub(crate) timeout: Option<DurationLit>,
    pub(crate) expires_in: Option<DurationLit>,
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
    /// Every part seen, also those whose value was wrong.
    pub(crate) seen: Keys,
}

/// What stands in the attributes of a field: where `dedup` and `ordering` are, if they are.
#[derive(Default)]
pub(crate) struct FieldAttrs {
    pub(crate) dedup: Option<Span>,
    pub(crate) ordering: Option<Span>,
}

/// What stands in the attributes of a set.
#[derive(Default)]
pub(crate) struct SetAttrs {
    pub(crate) krate: Option<Path>,
}

impl TypeAttrs {
    pub(crate) fn read(cx: &mut Ctxt, attrs: &[Attribute]) -> Self {
        let mut read = Self::default();
        for_each_key(cx, attrs, OF_AN_EVENT, |cx, key, input| {
            read.key(cx, key, input)
        });
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
        let added = self.seen.add(key);
        if !REPEATED.contains(&name.as_str()) {
            added?;
        }
        match name.as_str() {
            "name" => {
                let literal = value::string(key, input, "such as `\"order.paid\"`")?;
                name::check(&literal)?;
                self.name = Some(literal);
            }
            "alias" => {
                let literal = value::string(key, input, "such as `\"order.settled\"`")?;
                name::check(&literal)?;
                self.aliases.push(literal);
            }
            "version" => self.version = Some(value::positive(key, input)?),
            "upcast" => {
                let read = Upcast::read(cx, key, input);
                self.upcast_refused |= !matches!(read, Ok(Some(_)));
                self.upcasts.extend(read?);
            }
            "oldest_version" => self.oldest_version = Some(value::positive(key, input)?),
            "dedup_key" | "ordering_key" => {
                let literal = value::string(key, input, "such as `\"{id}\"`")?;
                self.set_key_source(key, KeySource::Template(Template::parse(&literal)?))?;
            }
            "dedup_with" | "ordering_with" => {
                let function = value::function(key, input)?;
                self.set_key_source(key, KeySource::Function(function))?;
            }
            "behind_dead" => {
                self.behind_dead = Some(value::behind_dead(key, input)?);
                self.behind_dead_at = Some(key.span());
            }
            "priority" => self.priority = Some(value::priority(key, input)?),
            "max_attempts" => self.max_attempts = Some(value::positive(key, input)?),
            "backoff" => self.backoff = Some(BackoffAttr::read(cx, key, input)?),
            "timeout" => self.timeout = Some(value::positive_duration(key, input)?),
            "expires_in" => self.expires_in = Some(value::positive_duration(key, input)?),
            "retention" => self.retention = Some(value::duration(key, input)?),
            "output" => self.output = Some(value::ty(key, input, "ReceiptId")?),
            _ => self.krate = Some(value::crate_path(key, input)?),
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
        for_each_key(cx, attrs, OF_AN_EVENT, |_, key, input| {
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

impl SetAttrs {
    pub(crate) fn read(cx: &mut Ctxt, attrs: &[Attribute]) -> Self {
        let mut read = Self::default();
        let mut seen = Keys::default();
        for_each_key(cx, attrs, OF_A_SET, |_, key, input| {
            if !SET_KEYS.iter().any(|set_key| key == set_key) {
                return Err(unknown(key, "the keys on a set", &SET_KEYS));
            }
            seen.add(key)?;
            read.krate = Some(value::crate_path(key, input)?);
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
        let parse = |meta: ParseNestedMeta<'_>| {
            recover(cx, &meta, |_, part, input| {
                if !BACKOFF_PARTS.iter().any(|known| part == known) {
                    return Err(unknown(part, "the keys in `backoff`", &BACKOFF_PARTS));
                }
                read.seen.add(part)?;
                if part == "base" {
                    read.base = Some(value::positive_duration(part, input)?);
                } else if part == "max" {
                    read.max = Some(value::positive_duration(part, input)?);
                } else {
                    read.jitter = Some(value::jitter(part, input)?);
                }
                Ok(())
            })
        };
        syn::meta::parser(parse).parse2(parts.parse()?)?;
        Ok(read)
    }
}

/// Calls `read` for every key in every `#[outbox(..)]` of `attrs`. `example` is one for messages.
fn for_each_key(
    cx: &mut Ctxt,
    attrs: &[Attribute],
    example: &str,
    mut read: impl FnMut(&mut Ctxt, &Ident, ParseStream<'_>) -> syn::Result<()>,
) {
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("outbox")) {
        let problem = match &attr.meta {
            Meta::List(list) => match list.tokens.clone().into_iter().next() {
                Some(TokenTree::Literal(literal)) => Some((
                    literal.span(),
                    format!("expected a key before this value, such as `{example}`"),
                )),
                Some(_) => None,
                None => Some((
                    attr.path().span(),
                    "an empty `#[outbox()]` says nothing; write a key in it, or remove it"
                        .to_owned(),
                )),
            },
            _ => Some((
                attr.path().span(),
                format!("`outbox` takes its keys in parentheses: `#[outbox({example})]`"),
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
pub(crate) fn recover(
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

    pub(crate) fn add(&mut self, key: &Ident) -> syn::Result<()> {
        let name = key.to_string();
        if self.contains(&name) {
            let text = format!("duplicate `{name}`; keep one of them");
            return Err(syn::Error::new(key.span(), text));
        }
        self.0.push(name);
        Ok(())
    }
}

pub(crate) fn unknown(key: &Ident, whose: &str, known: &[&str]) -> syn::Error {
    let known = known.join("`, `");
    let text = format!("unknown key `{key}`; {whose} are `{known}`");
    syn::Error::new(key.span(), text)
}

const OF_AN_EVENT: &str = "name = \"order.paid\"";
const OF_A_SET: &str = "crate = ::outbox_core";

/// The keys of a type that may stand there more than once.
const REPEATED: [&str; 2] = ["alias", "upcast"];

const KEYS_ON_A_FIELD: &str = "the keys on a field";
const BACKOFF_PARTS: [&str; 3] = ["base", "max", "jitter"];

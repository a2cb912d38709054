//! From the types of old versions to the event: `version`, `upcast(..)` and `oldest_version`.
//!
//! A row of an old version is read as that version's type and then taken from one version to the
//! next. So a chain has no choices to make: each version from the oldest on has one type, and the
//! event is the last. What is left out is found here, in numbers; that the steps exist is for
//! rustc, in `expand`.

use proc_macro2::Ident;
use quote::ToTokens as _;
use syn::meta::ParseNestedMeta;
use syn::parse::{ParseStream, Parser as _};
use syn::spanned::Spanned as _;
use syn::{Type, parenthesized, token};

use crate::attr::{self, Keys};
use crate::ctxt::Ctxt;
use crate::input::Input;
use crate::value::{self, Number};

/// The type that rows of one old version are read as.
pub(crate) struct Upcast {
    pub(crate) from: Type,
    pub(crate) version: Number,
}

impl Upcast {
    /// `None` if a part of it was refused, which has been said then.
    pub(crate) fn read(
        cx: &mut Ctxt,
        key: &Ident,
        input: ParseStream<'_>,
    ) -> syn::Result<Option<Self>> {
        let incomplete = || syn::Error::new(key.span(), TAKES);
        if !input.peek(token::Paren) {
            return Err(incomplete());
        }
        let parts;
        parenthesized!(parts in input);
        let (mut from, mut version) = (None, None);
        let mut seen = Keys::default();
        let mut refused = false;
        let mut part = |part: &Ident, input: ParseStream<'_>| {
            if !PARTS.iter().any(|known| part == known) {
                return Err(attr::unknown(part, "the keys in `upcast`", &PARTS));
            }
            seen.add(part)?;
            if part == "from" {
                from = Some(value::ty(part, input, "OrderPaidV1")?);
            } else {
                version = Some(value::positive(part, input)?);
            }
            Ok(())
        };
        let parse = |meta: ParseNestedMeta<'_>| {
            attr::recover(cx, &meta, |_, key, input| {
                part(key, input).inspect_err(|_| refused = true)
            })
        };
        syn::meta::parser(parse).parse2(parts.parse()?)?;
        match (from, version) {
            _ if refused => Ok(None),
            (Some(from), Some(version)) => Ok(Some(Self { from, version })),
            _ => Err(incomplete()),
        }
    }
}

/// Checks the chain, and puts its links in the order of their versions.
pub(crate) fn check(cx: &mut Ctxt, input: &mut Input<'_>) -> Vec<Upcast> {
    let mut links = std::mem::take(&mut input.attrs.upcasts);
    let refused = |key, read: bool| input.attrs.seen.contains(key) && !read;
    if refused("version", input.attrs.version.is_some()) {
        // What is left cannot be judged without it.
        return links;
    }
    let own = input.attrs.version.as_ref().map_or(1, |own| own.value);
    let oldest = input.attrs.oldest_version.as_ref();
    let oldest = oldest.map_or(1, |oldest| oldest.value);
    links.sort_by_key(|link| link.version.value);
    let mut sound = oldest_is_not_later(cx, input, own);
    sound &= each_leads_on(cx, input, &links, oldest, own);
    sound &= none_leads_back(cx, input.ident, &links);
    let whole = !input.attrs.upcast_refused
        && !refused("oldest_version", input.attrs.oldest_version.is_some());
    if sound && whole {
        none_is_missing(cx, input, &links, oldest, own);
    }
    links
}

fn oldest_is_not_later(cx: &mut Ctxt, input: &Input<'_>, own: u32) -> bool {
    let later = input.attrs.oldest_version.as_ref();
    let Some(later) = later.filter(|oldest| oldest.value > own) else {
        return true;
    };
    let text = format!(
        "`oldest_version` cannot be later than the type's own version, which is {}",
        shown_own(input, own)
    );
    cx.push(syn::Error::new(later.span, text));
    false
}

/// Each link is of a version of its own, between the oldest and the type's own.
fn each_leads_on(
    cx: &mut Ctxt,
    input: &Input<'_>,
    links: &[Upcast],
    oldest: u32,
    own: u32,
) -> bool {
    let mut sound = true;
    let mut before = None;
    for link in links {
        let Number { value, span } = link.version;
        let text = if value >= own {
            format!(
                "an upcast is from a version before the type's own, which is {}",
                shown_own(input, own)
            )
        } else if value < oldest {
            format!("version {value} is before `oldest_version`; remove this upcast, or lower that")
        } else if before == Some(value) {
            format!("version {value} has an upcast already; keep one of them")
        } else {
            before = Some(value);
            continue;
        };
        cx.push(syn::Error::new(span, text));
        sound = false;
    }
    sound
}

/// A type may stand for several versions in a row. If it came again after another one, a newer shape
/// would have to become an older one.
fn none_leads_back(cx: &mut Ctxt, event: &Ident, links: &[Upcast]) -> bool {
    let mut sound = true;
    for (at, link) in links.iter().enumerate() {
        let this = shape(&link.from, event);
        let later = links.iter().skip(at + 1);
        // The event itself is the last of all.
        let mut later = later
            .map(|link| shape(&link.from, event))
            .chain(["Self".to_owned()]);
        let changes = later.next().is_some_and(|next| next != this);
        if changes && later.any(|later| later == this) {
            let text = format!(
                "the chain leads back: the type of version {} comes again after another one; give \
                 that version a type of its own",
                link.version.value
            );
            cx.push(syn::Error::new(link.from.span(), text));
            sound = false;
        }
    }
    sound
}

/// A type as it is compared. The event's own name means `Self`.
fn shape(ty: &Type, event: &Ident) -> String {
    match ty {
        Type::Path(path) if path.path.is_ident(event) => "Self".to_owned(),
        _ => ty.to_token_stream().to_string(),
    }
}

fn none_is_missing(cx: &mut Ctxt, input: &Input<'_>, links: &[Upcast], oldest: u32, own: u32) {
    let mut missing = Vec::new();
    let mut expected = oldest;
    for link in links {
        let version = link.version.value;
        if expected < version {
            missing.push((expected, version - 1));
        }
        expected = version + 1;
    }
    if expected < own {
        missing.push((expected, own - 1));
    }
    let (Some((_, last)), Some(version)) = (missing.last(), &input.attrs.version) else {
        return;
    };
    let ranges: Vec<String> = missing
        .iter()
        .map(|(from, to)| match to - from {
            0 => from.to_string(),
            _ => format!("{from} to {to}"),
        })
        .collect();
    let (versions, upcast) = match missing.as_slice() {
        [(from, to)] if from == to => ("version", format!("`upcast(from = .., version = {from})`")),
        _ => (
            "versions",
            "an `upcast(from = .., version = ..)` for each".to_owned(),
        ),
    };
    let text = format!(
        "rows of {versions} {} could not be read; write {upcast}, or `oldest_version = {}` if none \
         are left",
        ranges.join(", "),
        last + 1
    );
    cx.push(syn::Error::new(version.span, text));
}

fn shown_own(input: &Input<'_>, own: u32) -> String {
    match input.attrs.version {
        Some(_) => own.to_string(),
        None => format!("{own} unless `version` says more"),
    }
}

const TAKES: &str = "`upcast` takes the type that an old version was written as, and that version: \
                     `upcast(from = OrderPaidV1, version = 1)`";

const PARTS: [&str; 2] = ["from", "version"];

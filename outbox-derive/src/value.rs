//! The value of one key: after `=`, of the right kind and in its bounds.
//!
//! Every message names the key and says what it takes. It points at the value, or at the key where
//! there is none.

use proc_macro2::{Ident, Span};
use syn::parse::ParseStream;
use syn::{ExprPath, Lit, LitStr, Path, Token, Type};

use crate::duration::DurationLit;

pub(crate) fn string(key: &Ident, input: ParseStream<'_>, example: &str) -> syn::Result<LitStr> {
    let expected = format!("a string literal, {example}");
    match literal(key, input, &expected)? {
        Lit::Str(literal) => Ok(literal),
        other => Err(wrong_value(other.span(), key, &expected)),
    }
}

/// An integer, and where it stands.
#[derive(Clone, Copy)]
pub(crate) struct Number {
    pub(crate) value: u32,
    pub(crate) span: Span,
}

pub(crate) fn positive(key: &Ident, input: ParseStream<'_>) -> syn::Result<Number> {
    let expected = "an integer from 1 to 4294967295, without quotes";
    let literal = literal(key, input, expected)?;
    match &literal {
        Lit::Int(int) => int.base10_parse().ok().filter(|&n: &u32| n > 0),
        _ => None,
    }
    .map(|value| Number {
        value,
        span: literal.span(),
    })
    .ok_or_else(|| wrong_value(literal.span(), key, expected))
}

pub(crate) fn jitter(key: &Ident, input: ParseStream<'_>) -> syn::Result<f64> {
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

pub(crate) fn duration(key: &Ident, input: ParseStream<'_>) -> syn::Result<DurationLit> {
    let expected = "a duration in quotes, such as `\"30s\"`";
    match literal(key, input, expected)? {
        Lit::Str(literal) => DurationLit::parse(&literal),
        other => Err(wrong_value(other.span(), key, expected)),
    }
}

pub(crate) fn positive_duration(key: &Ident, input: ParseStream<'_>) -> syn::Result<DurationLit> {
    let duration = duration(key, input)?;
    if duration.value.is_zero() {
        return Err(wrong_value(duration.span, key, "longer than zero"));
    }
    Ok(duration)
}

pub(crate) fn priority(key: &Ident, input: ParseStream<'_>) -> syn::Result<Ident> {
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

pub(crate) fn behind_dead(key: &Ident, input: ParseStream<'_>) -> syn::Result<Ident> {
    let expected = "`\"block\"` or `\"skip\"`";
    let literal = literal(key, input, expected)?;
    let variant = match &literal {
        Lit::Str(word) => match word.value().as_str() {
            "block" => Some("Block"),
            "skip" => Some("Skip"),
            _ => None,
        },
        _ => None,
    };
    variant
        .map(|variant| Ident::new(variant, Span::call_site()))
        .ok_or_else(|| wrong_value(literal.span(), key, expected))
}

pub(crate) fn function(key: &Ident, input: ParseStream<'_>) -> syn::Result<ExprPath> {
    let expected = "the path of a function, without quotes, such as `Self::key`";
    equals(key, input, expected)?;
    let span = input.span();
    input.parse().map_err(|_| wrong_value(span, key, expected))
}

pub(crate) fn ty(key: &Ident, input: ParseStream<'_>, example: &str) -> syn::Result<Type> {
    let expected = format!("a type, without quotes, such as `{example}`");
    equals(key, input, &expected)?;
    let span = input.span();
    input.parse().map_err(|_| wrong_value(span, key, &expected))
}

pub(crate) fn crate_path(key: &Ident, input: ParseStream<'_>) -> syn::Result<Path> {
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

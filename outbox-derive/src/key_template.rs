//! Key templates: `"{order_id}:{line.sku}"`, from a literal to pieces.
//!
//! Whether the fields exist is not known here; `check` asks that.

use proc_macro2::{Ident, Span};
use syn::ext::IdentExt as _;
use syn::parse::Parser as _;
use syn::{Index, LitStr, Member};

/// A key as fields and the text between them. No two fields are next to each other.
pub(crate) struct Template {
    pub(crate) pieces: Vec<Piece>,
    /// Where a message about the template points: the whole literal, because a span inside it is
    /// not to be had on stable.
    pub(crate) span: Span,
}

pub(crate) enum Piece {
    Text(String),
    Field(FieldPath),
}

/// A field of the event, or a field of that: `line.sku`.
pub(crate) struct FieldPath {
    pub(crate) root: Member,
    pub(crate) rest: Vec<Member>,
    /// Where a field that cannot be displayed is reported: the template, or the `dedup` or
    /// `ordering` that stands on the field.
    pub(crate) span: Span,
}

impl Template {
    /// Reads a template literal.
    pub(crate) fn parse(literal: &LitStr) -> syn::Result<Self> {
        let span = literal.span();
        match parse(&literal.value(), span) {
            Ok(pieces) => Ok(Self { pieces, span }),
            Err(problem) => Err(syn::Error::new(span, problem)),
        }
    }

    /// The template of marked fields, in their order: `{a}:{b}`.
    pub(crate) fn of_fields(fields: Vec<(Member, Span)>) -> Option<Self> {
        let (_, first) = fields.first()?;
        let span = *first;
        let mut pieces = Vec::new();
        for (root, span) in fields {
            if !pieces.is_empty() {
                pieces.push(Piece::Text(":".to_owned()));
            }
            let rest = Vec::new();
            pieces.push(Piece::Field(FieldPath { root, rest, span }));
        }
        Some(Self { pieces, span })
    }

    pub(crate) fn fields(&self) -> impl Iterator<Item = &FieldPath> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Field(path) => Some(path),
            Piece::Text(_) => None,
        })
    }
}

fn parse(template: &str, span: Span) -> Result<Vec<Piece>, String> {
    let pieces = split(template, span)?;
    if pieces.is_empty() {
        return Err("a key template cannot be empty; write one such as `{id}`".to_owned());
    }
    if !pieces.iter().any(|piece| matches!(piece, Piece::Field(_))) {
        return Err(
            "every event would have the same key; name a field in braces, such as `{id}`"
                .to_owned(),
        );
    }
    Ok(pieces)
}

fn split(template: &str, span: Span) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut rest = template;
    while let Some(at) = rest.find(['{', '}', '\\']) {
        let (before, found) = rest.split_at(at);
        text.push_str(before);
        if let Some(after) = found.strip_prefix("{{") {
            text.push('{');
            rest = after;
        } else if let Some(after) = found.strip_prefix("}}") {
            text.push('}');
            rest = after;
        } else if let Some(after) = found.strip_prefix('{') {
            let Some((path, after)) = after.split_once('}') else {
                return Err("unclosed `{` in the key; write `{{` for a brace".to_owned());
            };
            if !text.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut text)));
            } else if let Some(Piece::Field(_)) = pieces.last() {
                return Err(format!(
                    "nothing stands between `{{{path}}}` and the field before it, so two different \
                     events could have one key; put text between them: `:{{{path}}}`"
                ));
            }
            pieces.push(Piece::Field(field_path(path, span)?));
            rest = after;
        } else if found.starts_with('}') {
            return Err("unmatched `}` in the key; write `}}` for a brace".to_owned());
        } else {
            return Err(
                "a key cannot contain a backslash of its own, because it marks where a field \
                 holds the text that ends it; use another character"
                    .to_owned(),
            );
        }
    }
    text.push_str(rest);
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    Ok(pieces)
}

fn field_path(path: &str, span: Span) -> Result<FieldPath, String> {
    if path.is_empty() {
        return Err("`{}` names no field; write one, such as `{id}`".to_owned());
    }
    if let Some((field, _)) = path.split_once(':') {
        return Err(format!(
            "`{{{path}}}` has a format spec; a key is made with `Display` alone, so that it does \
             not change with the formatting; write `{{{field}}}`"
        ));
    }
    let mut members = path.split('.').map(|segment| member(segment, span));
    match (members.next().flatten(), members.collect()) {
        (Some(root), Some(rest)) => Ok(FieldPath { root, rest, span }),
        _ => Err(format!(
            "`{{{path}}}` is not a field; write `{{field}}`, `{{field.sub}}` or `{{0}}`"
        )),
    }
}

/// Turns `order_id`, `type` or `0` into what may stand behind a dot in Rust.
fn member(segment: &str, span: Span) -> Option<Member> {
    if segment.starts_with(|c: char| c.is_ascii_digit()) {
        let index: u32 = segment.parse().ok()?;
        // `00` names no field, and rustc would only say so inside generated code.
        return (index.to_string() == segment).then_some(Member::Unnamed(Index { index, span }));
    }
    let ident = Ident::parse_any.parse_str(segment).ok()?;
    if ident != segment || ident.unraw() != ident {
        return None;
    }
    // syn does not know `gen`, a keyword since edition 2024.
    if segment != "gen" && syn::parse_str::<Ident>(segment).is_ok() {
        return Some(Member::Named(Ident::new(segment, span)));
    }
    // These four have no raw form.
    (!matches!(segment, "self" | "Self" | "super" | "crate" | "_"))
        .then(|| Member::Named(Ident::new_raw(segment, span)))
}

#[cfg(test)]
mod tests {
    use quote::ToTokens as _;

    use super::*;

    /// Writes the pieces one by one: text in quotes, fields as Rust would name them.
    fn shown(template: &str) -> Result<String, String> {
        let pieces = parse(template, Span::call_site())?;
        let shown = pieces.iter().map(|piece| match piece {
            Piece::Text(text) => format!("{text:?}"),
            Piece::Field(path) => std::iter::once(&path.root)
                .chain(&path.rest)
                .map(|member| member.to_token_stream().to_string())
                .collect::<Vec<_>>()
                .join("."),
        });
        Ok(shown.collect::<Vec<_>>().join(" "))
    }

    #[track_caller]
    fn check(template: &str, expected: &str) {
        assert_eq!(shown(template).as_deref(), Ok(expected), "{template:?}");
    }

    #[track_caller]
    fn check_refused(template: &str, problem: &str) {
        let error = shown(template).unwrap_err();
        assert!(error.contains(problem), "{template:?}: {error}");
    }

    #[test]
    fn a_template_is_fields_and_the_text_between_them() {
        check("{id}", "id");
        check("{a}:{b}", r#"a ":" b"#);
        check("order:{id}!", r#""order:" id "!""#);
        check("{line.sku}", "line.sku");
        check("{0}-{line.0.b}", r#"0 "-" line.0.b"#);
        check("{größe}", "größe");
    }

    #[test]
    fn a_keyword_names_the_raw_field() {
        check("{type}", "r#type");
        check("{line.match}", "line.r#match");
        check("{gen}", "r#gen");
    }

    #[test]
    fn doubled_braces_are_braces() {
        check("{{{id}}}", r#""{" id "}""#);
        check("{a}}}{{{b}", r#"a "}{" b"#);
    }

    #[test]
    fn unclear_templates_are_refused() {
        check_refused("", "cannot be empty");
        check_refused("order", "the same key");
        check_refused("{{id}}", "the same key");
        check_refused("{a}{b}", "nothing stands between");
        check_refused("{}", "names no field");
        check_refused(r"{a}\{b}", "backslash");
        check_refused("{a", "unclosed");
        check_refused("a}{b}", "unmatched");
        check_refused("{a:?}", "format spec");
        check_refused("{a:>8}", "format spec");
    }

    #[test]
    fn only_a_field_may_stand_in_braces() {
        for template in [
            "{ a }",
            "{a.}",
            "{.a}",
            "{a b}",
            "{f()}",
            "{00}",
            "{-1}",
            "{r#type}",
            "{self}",
            "{_}",
            "{a.self}",
            "{a{b}",
            "{'a}",
            "{\"a\"}",
            "{4294967296}",
            "{/**/a}",
            "{a//}",
            "{a\n}",
        ] {
            check_refused(template, "is not a field");
        }
    }
}

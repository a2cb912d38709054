//! Event names: the one made from the type's name, and the alphabet of the one written out.
//!
//! How long a name may be is known to core alone: the expansion asserts it against core's constant.

use proc_macro2::Ident;
use syn::LitStr;
use syn::ext::IdentExt as _;

/// Checks a name written as `name = "..."`.
pub(crate) fn check(literal: &LitStr) -> syn::Result<()> {
    let name = literal.value();
    if name.is_empty() {
        let text = "an event name cannot be empty; write one such as `order.paid`";
        return Err(syn::Error::new(literal.span(), text));
    }
    let allowed = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-');
    match name.chars().find(|&c| !allowed(c)) {
        None => Ok(()),
        Some(wrong) => Err(syn::Error::new(
            literal.span(),
            format!(
                "event name `{}` contains `{}`; use only `a-z`, `0-9`, `.`, `_` and `-`",
                name.escape_debug(),
                wrong.escape_debug()
            ),
        )),
    }
}

/// Makes the event name of a type that has no `name = "..."`.
pub(crate) fn of_type(ident: &Ident) -> syn::Result<String> {
    let type_name = ident.unraw().to_string();
    let problem = if type_name.is_ascii() {
        let name = words(&type_name).join(".");
        if !name.is_empty() {
            return Ok(name);
        }
        "has no letter to make an event name from"
    } else {
        "is not ASCII, so no event name can be made from it"
    };
    let text = format!("`{type_name}` {problem}; add `#[outbox(name = \"...\")]`");
    Err(syn::Error::new(ident.span(), text))
}

/// Splits a type's name into lower-case words.
///
/// A word begins at an upper-case letter after a lower-case letter or a digit, at the last letter
/// of a run of upper-case ones that a lower-case letter follows (`HTTPRequest`), and after `_`.
/// A digit stays with the word before it.
fn words(type_name: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut previous = '_';
    let mut rest = type_name.chars().peekable();
    while let Some(c) = rest.next() {
        let next_is_lower = rest.peek().is_some_and(char::is_ascii_lowercase);
        let begins = c.is_ascii_uppercase() && (!previous.is_ascii_uppercase() || next_is_lower);
        if (begins || c == '_') && !word.is_empty() {
            words.push(std::mem::take(&mut word));
        }
        if c != '_' {
            word.push(c.to_ascii_lowercase());
        }
        previous = c;
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;

    use super::*;

    #[track_caller]
    fn check_type(type_name: &str, expected: &str) {
        let ident: Ident = syn::parse_str(type_name).unwrap();
        assert_eq!(of_type(&ident).unwrap(), expected);
    }

    #[test]
    fn a_name_is_made_word_by_word() {
        check_type("OrderPaid", "order.paid");
        check_type("Order", "order");
        check_type("HTTPRequestFailed", "http.request.failed");
        check_type("RequestOverHTTP", "request.over.http");
        check_type("HTTP", "http");
        check_type("order_paid", "order.paid");
        check_type("_Order__Paid_", "order.paid");
        check_type("r#Order", "order");
        check_type("r#try", "try");
    }

    #[test]
    fn a_digit_stays_with_the_word_before_it() {
        check_type("OrderPaid2", "order.paid2");
        check_type("Order2Paid", "order2.paid");
        check_type("S3ObjectCreated", "s3.object.created");
        check_type("OAuth2TokenIssued", "o.auth2.token.issued");
        check_type("SHA256Checked", "sha256.checked");
    }

    #[test]
    fn a_type_name_without_ascii_letters_makes_no_name() {
        assert!(of_type(&Ident::new("Zahlung\u{e4}", Span::call_site())).is_err());
        assert!(of_type(&Ident::new("__", Span::call_site())).is_err());
    }

    #[track_caller]
    fn check_literal(name: &str, accepted: bool) {
        let literal = LitStr::new(name, Span::call_site());
        assert_eq!(check(&literal).is_ok(), accepted, "{name:?}");
    }

    #[test]
    fn a_written_name_keeps_to_the_alphabet() {
        check_literal("order.paid", true);
        check_literal("a-b_c.9", true);
        check_literal("", false);
        check_literal("Order.Paid", false);
        check_literal("order paid", false);
        check_literal("gr\u{f6}\u{df}e", false);
    }
}

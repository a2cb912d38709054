//! Collecting mistakes, so that one compile shows all of them.

/// The mistakes found so far in one type.
///
/// A stage that finds one pushes it, puts something harmless in the place of what was wrong and
/// goes on. A `Ctxt` exists only inside [`Ctxt::collect`], which hands out what was pushed: there
/// is no way to forget to look.
pub(crate) struct Ctxt {
    errors: Option<syn::Error>,
}

impl Ctxt {
    /// Runs `work` and returns what it made beside every mistake it pushed.
    pub(crate) fn collect<T>(work: impl FnOnce(&mut Self) -> T) -> (T, syn::Result<()>) {
        let mut cx = Self { errors: None };
        let made = work(&mut cx);
        (made, cx.errors.map_or(Ok(()), Err))
    }

    pub(crate) fn push(&mut self, error: syn::Error) {
        match &mut self.errors {
            Some(errors) => errors.combine(error),
            None => self.errors = Some(error),
        }
    }

    /// Unwraps `result`, pushing what is wrong with it.
    pub(crate) fn ok<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|error| self.push(error)).ok()
    }
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;

    use super::*;

    #[test]
    fn every_mistake_is_handed_out() {
        let (made, outcome) = Ctxt::collect(|cx| {
            cx.push(syn::Error::new(Span::call_site(), "first"));
            cx.push(syn::Error::new(Span::call_site(), "second"));
            7
        });
        assert_eq!(made, 7);
        let errors = outcome.unwrap_err().into_iter();
        let texts: Vec<_> = errors.map(|error| error.to_string()).collect();
        assert_eq!(texts, ["first", "second"]);
    }

    #[test]
    fn nothing_pushed_is_no_error() {
        assert!(Ctxt::collect(|_| ()).1.is_ok());
    }
}

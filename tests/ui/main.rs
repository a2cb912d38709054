//! `#[derive(OutboxEvent)]`, as a user's compiler sees it.
//!
//! - `attr/`: mistakes in `#[outbox(..)]`, told in our words.
//! - `bound/`: mistakes that rustc finds in what was generated, told in its words, which is why the
//!   toolchain is pinned.
//! - `pass/`: what has to compile, and what it does.
//!
//! After a message was changed on purpose, `TRYBUILD=overwrite` writes the `.stderr` files anew.

#[test]
fn mistakes_are_reported_where_they_are_and_everything_else_compiles() {
    // One `TestCases`, because all of its files are built by one run of cargo.
    let cases = trybuild::TestCases::new();
    cases.compile_fail("attr/*.rs");
    cases.compile_fail("bound/*.rs");
    cases.pass("pass/*.rs");
}

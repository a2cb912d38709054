//! Which members of a closed set have a handler already: known to the compiler alone.
//!
//! A builder carries a type that says it: for each member [`NoHandler`] or [`HasHandler`], the
//! leaves of a tree of pairs. A tree, because the compiler gives up at a nesting of 128, which a
//! list reaches with as many members. `EventOf::Place` is a member's way from the root. The derive
//! knows it, so that nothing is searched for, and a second handler of an event changes nothing.
//! [`AnyEvent`] keeps no book: its type is `()`, before and after.
//!
//! The types of the members stand in no associated type but in a parameter of [`SetOf`], because a
//! set may be more public than its members.

use std::marker::PhantomData;

use crate::event_set::AnyEvent;

/// A set of these members, in the tree that a builder keeps of them. [`AnyEvent`] has no list.
pub trait SetOf<Members> {}

impl SetOf<()> for AnyEvent {}

/// What a builder has registered, when it is a handler for each of `Members`.
#[diagnostic::on_unimplemented(
    message = "event `{Members}` has no handler",
    label = "event `{Members}` has no handler",
    note = "each event of a closed set needs one: register it with `.on(..)` before `.build()`"
)]
pub trait HandlersOf<Members> {}

#[diagnostic::do_not_recommend]
impl HandlersOf<()> for () {}

impl<A, B, MembersA, MembersB> HandlersOf<(MembersA, MembersB)> for (A, B)
where
    A: HandlersOf<MembersA>,
    B: HandlersOf<MembersB>,
{
}

#[diagnostic::do_not_recommend]
impl<E> HandlersOf<E> for HasHandler {}

/// The leaf of a member without a handler.
#[derive(Debug)]
pub struct NoHandler;

/// The leaf of a member with one.
#[derive(Debug)]
pub struct HasHandler;

/// The end of a way.
#[derive(Debug)]
pub struct Here;

/// A way through the first of a pair.
#[derive(Debug)]
pub struct Left<Place>(PhantomData<Place>);

/// A way through the second of a pair.
#[derive(Debug)]
pub struct Right<Place>(PhantomData<Place>);

/// Notes the handler of the member at `Place`.
pub trait Register<Place> {
    /// What is known then.
    type Registered;
}

impl Register<Here> for () {
    type Registered = ();
}

impl Register<Here> for NoHandler {
    type Registered = HasHandler;
}

impl Register<Here> for HasHandler {
    type Registered = HasHandler;
}

impl<Place, A: Register<Place>, B> Register<Left<Place>> for (A, B) {
    type Registered = (A::Registered, B);
}

impl<Place, A, B: Register<Place>> Register<Right<Place>> for (A, B) {
    type Registered = (A, B::Registered);
}
